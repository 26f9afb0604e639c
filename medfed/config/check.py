"""Checks a composed configuration before any large library gets its values.

Values next to a ``_target_`` are compared with the annotations of what it names, which must be
imported for that. So only what the user has set is compared at once, and all else when its section
is built.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hydra._internal.utils import _locate
from msgspec import Meta

from medfed.common.processes import launched
from medfed.config.allowed import CONFIG_DIR
from medfed.config.sections import listed, targets, walk
from medfed.config.spelling import EXISTING, is_path_key, key_of
from medfed.standalone.checks import check_known, check_limits
from medfed.standalone.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MachineError,
    did_you_mean,
)
from medfed.standalone.files import refuse_special

# How msgspec names what it expects, and the limits of it.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "null": "null",
    "array": "a list",
    "object": "a map",
}
_LIMITS = {
    "of length >= 1": "with at least one entry",
    ">=": "of at least",
    "<=": "of at most",
    ">": "above",
}
_MISFIT = re.compile(
    r"Expected `([\w |]+)`([^,]*?)(?:, got `?([\w.]+)`?)?(?: - at `\$((?:\[[\d.]+\])+)`)?"
)


def check_types(
    parts: Iterable[tuple[str, Mapping[str, Any]]], keys: Collection[str] = ("",)
) -> None:
    """Compares plain values with the annotations of the constructors that will receive them.

    `parts`: see :func:`~.sections.targets`. Only the arguments at, above or below `keys` are
    checked, so nothing else is imported; an empty key means all.
    """
    limited: list[tuple[str, Any, Any]] = []
    for target, node in parts:
        arguments = {target.replace("_target_", name): name for name in node if name[0] != "_"}
        for key, name in arguments.items():
            if any(not k or f"{key}.".startswith(f"{k}.") or k.startswith(f"{key}.") for k in keys):
                hint = _annotations(str(node["_target_"])).get(name, Any)
                if _has_limits(key, node[name], hint):
                    limited.append((key, node[name], hint))
    if limited:
        check_limits(limited)


def check_chosen(source: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Compares what the user has set with the constructors that take it.

    With plugins, whose yamls may set anything, all values are compared.
    """
    keys = [key_of(override) for override in overrides]
    # What chooses an option sets no value, and a path is text.
    groups = [k for k in keys if (CONFIG_DIR / k.partition("@")[0]).is_dir()]
    values = [k for k in keys if k not in groups and not is_path_key(k)]
    check_types(targets(source), [""] if source.get("plugins") and values else values)


def _has_limits(key: str, value: Any, hint: Any) -> bool:
    """Refuses a value of another type; says whether the annotation limits it further."""
    sides = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_part = isinstance(value, Mapping) and "_target_" in value
    if is_part and _kinds(hint) <= {int, float, bool, str, NoneType}:
        raise ConfigError(
            f"{key} takes a plain value, and {value['_target_']} is a part to build; write the "
            "value."
        )
    if re.search(r"_target_|\$\{", repr(value)):
        return False
    names = [name for side in sides if get_origin(side) is Literal for name in get_args(side)]
    # No value of a configuration is a tensor.
    plain = tuple(side for side in sides if getattr(side, "__name__", "") != "Tensor")
    try:
        msgspec.convert(value, Union[plain])  # noqa: UP007
    except msgspec.ValidationError as error:
        if names and ("Invalid enum" in str(error) or len(sides) == 1 + (NoneType in sides)):
            names += [True, False] * (bool in sides) + [None] * (NoneType in sides)
            check_known(key, value, names)
        elif misfit := _MISFIT.fullmatch(str(error)):
            _refuse(key, value, *misfit.groups(""))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key}={value} is not in UTF-8; type it again.") from error
    except TypeError:  # a union of what msgspec cannot tell apart
        return False
    return get_origin(hint) is Annotated  # msgspec has compared other annotations as a whole


def _kinds(hint: Any) -> set[Any]:
    """The types that an annotation allows.

    Example:
        >>> _kinds(Annotated[int | None, Meta(ge=1)]) == {int, NoneType}
        True
    """
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    sides = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return {hint}.union(*map(_kinds, sides)) - ({hint} if sides else set())


def _refuse(key: str, value: Any, expected: str, limit: str, got: str, place: str) -> None:
    """Says in a sentence what msgspec says, unless only the constructor can judge the value."""
    kinds = expected.split(" | ")
    # Some take pairs for a map, and a map of sections has sentences of its own.
    other = "object" in kinds and (got == "array" or "..." in place)
    if other or not {*kinds, got or "null"} <= _WORDS.keys():
        return
    write = f"; write {key}=[{value}]" if "array" in kinds and (got, place) == ("str", "") else ""
    if "..." in place:
        key = f"each value in {key}"
    else:
        for index in re.findall(r"\d+", place):
            value = value[int(index)]
        key += place
    what = " or ".join(_WORDS[kind] for kind in kinds)
    for theirs, ours in _LIMITS.items():
        limit = limit.replace(theirs, ours)
    raise ConfigError(f"{key} must be {what}{limit}, not {value!r}{write * ('int' not in kinds)}.")


@cache
def _annotations(target: str) -> dict[str, Any]:
    """Returns the annotations of a callable's arguments, as far as they resolve.

    Those of base classes count where the constructor hands on further arguments.
    """
    try:
        thing = _locate(target)
    except Exception:  # whoever builds it says why
        return {}
    hints: dict[str, Any] = {}
    for each in thing.__mro__ if inspect.isclass(thing) else (thing,):
        call = vars(each).get("__init__") if inspect.isclass(each) else each
        if not inspect.isfunction(call):
            continue
        holder = each if "__dataclass_params__" in vars(each) else call
        named = dict.fromkeys(inspect.signature(call).parameters, Any)
        with suppress(Exception):  # a name that exists for type checkers alone
            named |= get_type_hints(holder, include_extras=True)
        hints = named | hints
        if holder is call and not inspect.getfullargspec(inspect.unwrap(call)).varkw:
            break
    return hints


def check_path(key: str, value: str) -> None:
    """Checks that a path is one, and of a file or folder if something is there."""
    if not value:
        raise ConfigError(f"{key} names no file or folder; write {key}=PATH, or leave it out.")
    if (deep := value.count("/")) > DEEPEST_PATH:
        raise ConfigError(f"{key} names {deep} folders within each other; name a shorter path.")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{key}={value} is not in UTF-8; rename it.")
    refuse_special(Path(value).expanduser(), f"{key}={value}")


def check_paths(every: Mapping[str, Any]) -> None:
    """Checks all paths of a configuration, of which `every` has each key; see `check_path`."""
    for key, value in every.items():
        if isinstance(value, str) and is_path_key(re.sub(r"\[\d+\]$", "", key)):
            check_path(key, value)


def check_exists(key: str, value: str) -> None:
    """Checks that a user's file or folder exists."""
    path = Path(value).expanduser()
    if not os.path.exists(path):
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"{value} does not exist{did_you_mean(path.name, beside)}; set {key} to a file or "
            "folder that is there."
        )


def _whole(least: int, most: int | None = None) -> Any:
    return Annotated[int, Meta(ge=least, le=most)]


COUNT = Annotated[int, Meta(ge=1)]
_NAMES = Annotated[list[str | int | float], Meta(min_length=1)] | str | int | float
# Keys outside of any constructor. Of the largest values, larger ones would break down a machine
# without an error. They do not depend on this machine's cores: the bits of a run depend on its
# threads, so any machine must accept them.
KEYS: dict[str, Any] = {
    "rounds": _whole(1, 10**6),
    "seed": _whole(0),
    "threads": _whole(1, 256),
    "workers": _whole(1, 64) | None,
    "buffers": Literal["averaged", "local", "frozen"],
    "keep_out": list,
    "progress": bool,
    "evaluation.every": COUNT,
    "evaluation.patience": COUNT | None,
    "evaluation.coverage": Annotated[float, Meta(ge=0.5, lt=1)] | None,
    "evaluation.normalization": Literal["reestimated", "kept"],
    "evaluation.contributions": bool,
    "channel.range": float,  # FixedPoint knows its limits
    "evaluation.calibration": Literal["shift", "temperature", "platt"] | None,
    "checkpoint.keep": COUNT,
    "checkpoint.every": COUNT,
    "pictures.format": Literal["png", "pdf", "svg", "none"],
    **dict.fromkeys(("in_channels", "out_channels", "spatial_dims"), COUNT | None),
    **dict.fromkeys(("exclusive", "millimetres"), bool | None),
    "regions": list[str] | None,
    "outcome_scale": list[float] | None,
    "patch_size": list[int] | None,
    "model.selection": Annotated[list[str], Meta(min_length=1)] | None,
    "onboard_steps": COUNT,
    "finetune_steps": _whole(0),
    # Of single commands.
    "split": Literal["test", "val", "train"],
    "client": _NAMES,
    "subsets": Annotated[list[str], Meta(min_length=1)] | str | None,
    "bundle": Annotated[list[str], Meta(min_length=1)] | str,
    "k": Annotated[list[COUNT], Meta(min_length=1)] | COUNT,
    "across": bool,
    "bands": list[float] | None,
    "least": _whole(0),
    "of": Annotated[list[str], Meta(min_length=1)] | str | None,
    "shadows": _whole(4) | None,
    "minutes": Annotated[float, Meta(gt=0)],
    "tolerance": Annotated[float, Meta(ge=0)],
    "without": Literal["each", "sets"] | None,
    "show": bool,
    "suite": _NAMES,
    **dict.fromkeys(("methods", "variants"), _NAMES | None),
    "arms": _NAMES | bool | None,
    "size": Literal["smoke", "small", "full"],
    "report_only": bool,
    "figures": bool,
    "target": Annotated[float, Meta(gt=0)] | None,
    **dict.fromkeys(("cut", "renew"), bool),
    "port": _whole(1, 65535),
    **dict.fromkeys(("terms.quorum", "terms.timeout", "terms.hello", "terms.patience"), float),
    "folds": _whole(2, 1000),  # with more, no pilot would end
    "repeats": _whole(1, 1000),
    "pilot_rounds": _whole(1, 10**6) | None,
}
# In bytes: what file systems take, with room for the files in a run folder.
LONGEST_NAME, LONGEST_PATH = 255, 3000
DEEPEST_PATH = 200  # folders within each other
OURS = "medfed.federation.lightning.strategy.ClientSharding"
_RULES = r"None|youden|\{'(sensitivity|specificity)': (0\.\d+|1(\.0)?)\}"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "32", "bf16", "16", "64")


def check_missing(source: Mapping[str, Any]) -> None:
    """Checks that every key has a value."""
    if missing := next((key for key, value in walk(source) if value == "???"), None):
        where = source.get("source") if missing == "data.path" else None
        where = f" ({where})" if where else ""
        raise ConfigError(f"{missing} has no value yet; set it by {missing}=VALUE{where}.")


def check_keys(every: Mapping[str, Any]) -> None:
    """Compares the values of keys that no constructor takes with :data:`KEYS`."""
    present = [(key, every[key], hint) for key, hint in KEYS.items() if key in every]
    check_limits([each for each in present if _has_limits(*each)])


def check_values(values: Mapping[str, Any]) -> None:
    """Checks numbers, folders and devices, which no constructor checks."""
    every = dict(walk(values))
    check_keys(every)
    _check_names(every)
    check_folders(every)
    check_runtime(every)


def _check_names(every: Mapping[str, Any]) -> None:
    """Checks that the run's name stays below ``outputs``, and that its folder is one."""
    name, folder = every.get("name", "run"), every.get("folder", ".")
    path = Path(name) if isinstance(name, str) else Path("..")
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ConfigError(f"name must be a word for the experiment, such as brats, not {name!r}.")
    if not isinstance(folder, str) or not folder.strip():
        raise ConfigError(f"folder must be the path of a folder, not {folder!r}.")
    longest = max(map(len, map(os.fsencode, Path(folder).parts)), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(folder)) > LONGEST_PATH:
        raise ConfigError(
            f"The run folder {folder[:40]}… has a name of {longest} bytes in a path of "
            f"{len(os.fsencode(folder))}; set a shorter name, or hydra.run.dir=FOLDER."
        )
    check_paths(every)


def check_folders(every: Mapping[str, Any]) -> None:
    """Checks that data and folders of runs and of weights exist, before Hydra makes a folder."""
    start = every.get("init.weights")
    if start is None and every.get("init.adopt"):
        raise ConfigError(
            "init.weights has no value yet, but init.adopt needs its network or data; set it by "
            "init.weights=BUNDLE or RUN_FOLDER."
        )
    if start is not None and every.get("resume") is None:  # a resumed run has a copy of its start
        check_exists("init.weights", str(start))
    for key in EXISTING:
        place, ours = every.get(key), str(every.get(f"{key.split('.')[0]}._target_"))
        if isinstance(place, str) and ours.startswith("medfed."):  # a plugin's may be any text
            check_exists(key, place)
    names = listed(every.get("runs", ["."]))
    if not names or None in names:
        raise CheckpointError("runs names no folder; name one that holds finished runs.")
    for name in names:
        if not os.path.isdir(Path(str(name)).expanduser()):
            raise CheckpointError(f"runs={name} is no folder; name one that holds finished runs.")


def check_runtime(every: Mapping[str, Any]) -> None:
    """Checks values that Lightning would refuse late or silently change."""
    if "trainer" in every:
        check_devices(every["trainer"])
    precision = str(every.get("trainer.precision", PRECISIONS[0]))
    if precision not in PRECISIONS:
        raise ConfigError(
            f"trainer.precision={precision} is not supported, as weights stay in single or double "
            f"precision; choose {', '.join(PRECISIONS[:4])}."
        )
    if precision.startswith("16") and every.get("trainer.accelerator") == "cpu":
        raise ConfigError(
            f"trainer.precision={precision} is for GPUs; choose bf16-mixed on the CPU, or "
            "trainer=gpu."
        )
    interval, rounds = every.get("evaluation.every", 0), every.get("rounds", 0)
    if interval > rounds:
        raise ConfigError(
            f"evaluation.every={interval} is more than rounds={rounds}, so validation could select "
            f"no round; set evaluation.every to at most {rounds}."
        )
    absent = every.get("cohort.absent") or []
    if not isinstance(absent, list):
        raise ConfigError(f"cohort.absent must be a list, not {absent}; write [{absent}].")
    for absence in absent:
        number = absence[0] if isinstance(absence, list) and absence else absence
        if isinstance(number, int) and number >= rounds > 0:
            raise ConfigError(
                f"cohort.absent names round {number}, but the last of rounds={rounds} is "
                f"{rounds - 1}, as they are counted from 0."
            )
    rule = every.get("evaluation.operating_point")
    if not re.fullmatch(_RULES, str(rule)):
        raise ConfigError(
            f"evaluation.operating_point={rule} is unknown; write youden, null, "
            "{sensitivity: 0.9} or {specificity: 0.9}."
        )


def check_gpu(accelerator: str) -> None:
    """Refuses a GPU where there is not even a driver, before any library is loaded."""
    if accelerator not in ("gpu", "cuda") or sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not Path("/dev/kfd").exists():  # AMD's
            raise no_gpu(accelerator) from None


def no_gpu(accelerator: str) -> ConfigError:
    """Says that there is no GPU."""
    way = "choose trainer=cpu or trainer=ddp, or another machine."
    return MachineError(f"trainer.accelerator={accelerator} finds no GPU on this machine; {way}")


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Checks that medfed's strategy assigns the clients to the devices."""
    strategy, devices = trainer.get("strategy", "auto"), trainer.get("devices", 1)
    target = strategy.get("_target_") if isinstance(strategy, Mapping) else strategy
    if target not in ("auto", OURS):
        raise ConfigError(
            f"trainer.strategy={target} could mix the gradients of clients; leave it at auto, "
            "which assigns the clients to the devices."
        )
    check_machines(trainer)
    named = isinstance(devices, list)
    numbers = list(devices) if named else [devices]
    whole = all(type(n) is int and n >= (0 if named else 1) for n in numbers)
    if whole and numbers and len(set(numbers)) == len(numbers):
        if not (named and trainer.get("accelerator") == "cpu"):
            return
    elif devices in ("auto", -1) and trainer.get("accelerator") != "cpu":
        return
    raise ConfigError(
        f"trainer.devices={devices} cannot be used; give a number of at least 1, or on GPUs auto "
        "for all, or a list such as [0,1]."
    )


def check_machines(trainer: Mapping[str, Any]) -> None:
    """Checks that the launcher has started as many processes as the run needs."""
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices", 1)
    if type(nodes) is not int or nodes < 1:
        raise ConfigError(
            f"trainer.num_nodes={nodes} cannot be used; give the number of machines, at least 1."
        )
    started = launched()
    if started is not None and (started.by == "torchrun" or several(trainer)):
        count = len(devices) if isinstance(devices, list) else devices
        count = count * _sharing(trainer) if type(count) is int else count
        if nodes != started.machines or (type(count) is int and count != started.devices):
            raise ConfigError(
                f"{started.by} has started {started.ranks} processes on {started.machines} "
                f"machines, but the run takes trainer.devices={devices} trainer.num_nodes={nodes}; "
                f"set trainer.devices={started.devices} trainer.num_nodes={started.machines}."
            )
    elif nodes > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"trainer.num_nodes={nodes} needs the run to be started on every machine: by "
            "torchrun, by srun, or by you with MASTER_ADDR, MASTER_PORT and NODE_RANK set there."
        )


def _sharing(trainer: Mapping[str, Any]) -> int:
    """Returns the number of ranks that share a device."""
    strategy = trainer.get("strategy")
    return int(strategy.get("ranks_per_device", 1)) if isinstance(strategy, Mapping) else 1


def several(trainer: Mapping[str, Any]) -> bool:
    """Returns whether a run may use more than one process."""
    devices = trainer.get("devices", 1)
    if trainer.get("num_nodes", 1) != 1 or _sharing(trainer) != 1:
        return True
    return devices != 1 and not (isinstance(devices, list) and len(devices) == 1)
