"""Checks a composed configuration before any constructor or library gets its values.

The accepted arguments of constructors are read from their source. Nothing is imported, so an error
appears fast. The files of a package lead to ``torch.optim.SGD``; the fields of dataclasses, or
``__init__`` of other classes, give the arguments, including inherited ones. An annotation other
than plain types is not checked here; the constructor itself checks the value.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableSequence
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from medfed.common.checks import check_known
from medfed.common.errors import CheckpointError, ConfigError, DataError, did_you_mean, first_line
from medfed.common.files import refuse_special
from medfed.common.processes import Launched, launched
from medfed.common.schemas import fit
from medfed.config.paths import is_path_key
from medfed.config.sections import select, walk

_KINDS: dict[str, frozenset[type]] = {
    **{kind.__name__: frozenset({kind}) for kind in (int, float, bool, str)},
    "ExistingPath": frozenset({str}),  # of medfed.common.files: plain text to type checkers
    "Tensor": frozenset(),  # no value of a configuration is one
    # Some take pairs for a map; one name for a list would be read letter by letter.
    "Mapping": frozenset({dict, MutableSequence}),  # type: ignore[type-abstract]
    "Sequence": frozenset({list}),
}


_WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    list: "a list",
    dict: "a map",
}


class Accepts(NamedTuple):
    """The values that an argument accepts.

    Attributes:
        kinds: The accepted plain types.
        existing: Whether text must name an existing file or folder.
    """

    kinds: frozenset[type]
    existing: bool = False


def check_types(source: Mapping[str, Any], paths: bool = False, place: str = "") -> None:
    """Compares plain values with the annotations of the constructors that will receive them.

    Args:
        source: A section as it is written; the arguments next to each ``_target_``, at any depth,
            are checked.
        paths: Whether to check that files and folders exist, too.
        place: The key of the section.

    Raises:
        ConfigError: If a value has another type; the error names the key.
        DataError: If a value names a file or folder that must exist but does not.

    Example:
        >>> node = {"_target_": "medfed.federation.algorithm.Cohort", "fraction": "half"}
        >>> check_types({"cohort": node})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: cohort.fraction must be a number, not 'half'.
    """
    hints = accepted(str(source["_target_"])) if "_target_" in source else {}
    for key, value in source.items():
        where = f"{place}.{key}" if place else str(key)
        if isinstance(value, str) and "${" in value:
            continue  # checked where it is defined
        hint = hints.get(str(key))
        if isinstance(value, Mapping) and (hint is None or "_target_" in value):
            check_types(value, paths, where)
        elif hint is not None:
            if not _is_any_of(value, hint.kinds):
                words = " or ".join(word for kind, word in _WORDS.items() if kind in hint.kinds)
                listed = list in hint.kinds and int not in hint.kinds and type(value) is str
                named = f"; write {where}=[{value}]" * listed
                raise ConfigError(f"{where} must be {words}, not {value!r}{named}.")
            if paths and hint.existing and isinstance(value, str):
                check_exists(where, value)


def check_path(key: str, value: str) -> None:
    """Checks that a path is one, and of a file or folder if something is there.

    Raises:
        ConfigError: If it is empty, very deep or not in UTF-8, which PyTorch's files need.
        DataError: See :func:`medfed.common.files.refuse_special`.
    """
    if not value:
        raise ConfigError(f"{key} names no file or folder; write {key}=PATH, or leave it out.")
    if (deep := value.count("/")) > DEEPEST_PATH:
        raise ConfigError(f"{key} names {deep} folders within each other; name a shorter path.")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{key}={value} is not in UTF-8; rename it.")
    refuse_special(Path(value).expanduser(), f"{key}={value}")


def check_paths(values: Mapping[str, Any]) -> None:
    """Checks all paths of a configuration; see :func:`check_path`."""
    for key, value in walk(values):
        if isinstance(value, str) and is_path_key(re.sub(r"\[\d+\]$", "", key)):
            check_path(key, value)


def check_exists(key: str, value: str) -> None:
    """Checks that a user's file or folder exists.

    Raises:
        DataError: If it does not exist.

    Example:
        >>> check_exists("data.path", "/no/such/folder")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.DataError: /no/such/folder does not exist; set data.path to a \
file or folder that is there.
    """
    path = Path(value).expanduser()
    if not os.path.exists(path):
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"{value} does not exist{did_you_mean(path.name, beside)}; set {key} to a file or "
            "folder that is there."
        )


def _is_any_of(value: object, kinds: frozenset[type]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, tuple(kinds)) or (isinstance(value, int) and float in kinds)


def accepted(target: str) -> dict[str, Accepts]:
    """Returns the plain types that the arguments of a constructor or function accept.

    Args:
        target: The dotted name of the constructor or function.

    Example:
        >>> accepted("medfed.federation.algorithm.Cohort")["fraction"].kinds == {float}
        True
        >>> accepted("no.such.thing")
        {}
    """
    module, _, name = target.rpartition(".")
    definition = _definition(module, name)
    if definition is None:
        return {}
    arguments = {}
    for name, annotation in _arguments(*definition):
        if (accepts := _accepts(annotation)) is not None:
            arguments[name] = accepts
    return arguments


def _accepts(annotation: ast.expr | None) -> Accepts | None:
    """Reads an annotation; ``None`` if it names anything but plain types."""
    match annotation:
        case ast.Constant(value=str(text)):
            return _accepts(ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            return Accepts(frozenset({NoneType}))
        case ast.Name(id=name) | ast.Attribute(attr=name):
            kinds = _KINDS.get(name)
            return None if kinds is None else Accepts(kinds, name == "ExistingPath")
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            sides = [left, right]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=sides)):
            pass
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inside):
            sides = [inside, ast.Constant(None)]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inside, *_])):
            return _accepts(inside)
        case ast.Subscript(value=ast.Name(id="Mapping" | "Sequence" as name)):
            return Accepts(_KINDS[name])
        case _:
            return None
    known = [side for each in sides if (side := _accepts(each)) is not None]
    if len(known) < len(sides):
        return None
    kinds = frozenset[type]().union(*(side.kinds for side in known))
    return Accepts(kinds, any(side.existing for side in known))


class _Module(NamedTuple):
    """A source file with its definitions and imports."""

    name: str
    definitions: dict[str, ast.ClassDef | ast.FunctionDef]
    imports: dict[str, tuple[str, str]]


Definition = tuple[_Module, ast.ClassDef | ast.FunctionDef]


def _definition(module: str, name: str) -> Definition | None:
    """Finds a class or function, also if its module only re-exports it."""
    for _ in range(8):
        source = _read(module)
        if source is None:
            return None
        if name in source.definitions:
            return source, source.definitions[name]
        if name not in source.imports:
            return None
        module, name = source.imports[name]
    return None


def _arguments(
    source: _Module, node: ast.ClassDef | ast.FunctionDef
) -> Iterator[tuple[str, ast.expr | None]]:
    """Yields arguments with their annotations; those of base classes come first."""
    body = [node] if isinstance(node, ast.FunctionDef) else node.body
    functions = [n for n in body if isinstance(n, ast.FunctionDef)]
    constructor = next((n for n in functions if n is node or n.name == "__init__"), None)
    if isinstance(node, ast.ClassDef) and (constructor is None or constructor.args.kwarg):
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base  # a generic class
            module, name = source.name, getattr(base, "id", "")
            if isinstance(base, ast.Attribute):  # base.Dealt, of an imported module
                module = ".".join(source.imports.get(ast.unparse(base.value), ()))
                name = base.attr
            if inner := _definition(module, name):
                yield from _arguments(*inner)
    if constructor is not None:
        of = constructor.args
        yield from ((a.arg, a.annotation) for a in (*of.posonlyargs, *of.args, *of.kwonlyargs))
    elif any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        for field in body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, field.annotation


@lru_cache(maxsize=256)
def _read(module: str) -> _Module | None:
    path = module_file(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    definitions, imports = {}, dict[str, tuple[str, str]]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(origin, package)
            imports |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return _Module(module, definitions, imports)


def module_file(module: str) -> Path | None:
    """Returns the file of a module without importing it: only its package is looked up.

    Example:
        >>> module_file("medfed.config.check").name, module_file("medfed.config").name
        ('check.py', '__init__.py')
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    if not rest:
        return origin
    base = origin.parent.joinpath(*rest)
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((p for p in candidates if p.is_file()), None)


# Keys outside of any constructor: the smallest whole number, and whether null is allowed.
WHOLE_NUMBERS = {
    "rounds": (1, False),
    "seed": (0, False),
    "threads": (1, False),
    "workers": (1, True),
    "evaluation.every": (1, False),
    "evaluation.patience": (1, True),
    "checkpoint.keep": (1, False),
    "checkpoint.every": (1, False),
    "onboard_steps": (1, False),
    "finetune_steps": (0, False),
}
# The largest values; with larger ones a machine breaks down without an error. They do not depend on
# this machine's cores: the bits of a run depend on its threads, so any machine must accept them.
LARGEST = {"rounds": 10**6, "threads": 256, "workers": 64}
# In bytes: what file systems take, with room for the files in a run folder.
LONGEST_NAME, LONGEST_PATH = 255, 3000
DEEPEST_PATH = 200  # folders within each other
OURS = "medfed.federation.lightning.strategy.ClientSharding"
PICTURES = ("png", "pdf", "svg", "none")
_RULES = r"None|youden|\{'(sensitivity|specificity)': (0\.\d+|1(\.0)?)\}"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "32", "bf16", "16", "64")


def check_missing(source: Mapping[str, Any]) -> None:
    """Checks that every key has a value.

    Args:
        source: A configuration as it is written.

    Raises:
        ConfigError: If a value is missing; the error names the key.

    Example:
        >>> check_missing({"data": {"path": "???"}})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: data.path has no value yet; set it by data.path=VALUE.
    """
    if missing := next((key for key, value in walk(source) if value == "???"), None):
        where = source.get("source") if missing == "data.path" else None
        where = f" ({where})" if where else ""
        raise ConfigError(f"{missing} has no value yet; set it by {missing}=VALUE{where}.")


def check_values(values: Mapping[str, Any]) -> None:
    """Checks numbers, folders and devices, which no constructor checks.

    Args:
        values: A configuration without interpolations.

    Raises:
        ConfigError: If a number is not whole or out of range, a list of clients is no list, or
            Lightning would refuse a value late or silently change it.
        CheckpointError: If ``runs`` is no folder.

    Example:
        >>> check_values({"rounds": 0})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: rounds must be a whole number of at least 1, not 0.
    """
    for key, (least, optional) in WHOLE_NUMBERS.items():
        value = select(values, key, least)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{key} must be a whole number of at least {least}{' or null' * optional}, "
                f"not {value}."
            )
        if value > (most := LARGEST.get(key, value)):
            raise ConfigError(f"{key} must be a whole number of at most {most}, not {value}.")
    _check_names(values)
    check_known("pictures.format", select(values, "pictures.format", "png"), PICTURES)
    keep_out = values.get("keep_out", [])
    if not isinstance(keep_out, list):
        raise ConfigError(f"keep_out must be a list of clients; write keep_out=[{keep_out}].")
    check_folders(values)
    check_runtime(values)


def check_keys(values: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Checks the keys of a command that no constructor takes.

    Args:
        values: The configuration.
        kind: The keys with their types and limits; others are left alone.

    Raises:
        ConfigError: If a value does not fit; the error names the key.

    Example:
        >>> from typing import Annotated
        >>> Keys = msgspec.defstruct("Keys", [("least", Annotated[int, msgspec.Meta(ge=1)], 20)])
        >>> check_keys({"least": 0}, Keys)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: least must be a whole number of at least 1, not 0.
    """
    for key in (key for key in kind.__struct_fields__ if key in values):
        try:
            fit({key: values[key]}, kind)
        except ValueError as error:
            why = re.sub(r"^.*: expected |, got .*", "", first_line(error))
            for theirs, ours in _IN_WORDS.items():
                why = why.replace(theirs, ours)
            shown = str(values[key]).replace("'", "")
            raise ConfigError(f"{key} must be {why}, not {shown}.") from error


# How msgspec names what it expects.
_IN_WORDS = {
    "array of length >= 1": "a list with at least one entry",
    "int >= ": "a whole number of at least ",
    "float > ": "a number above ",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
}


def _check_names(values: Mapping[str, Any]) -> None:
    """Checks that the run's name stays below ``outputs``, and that its folder is one."""
    name, folder = values.get("name", "run"), values.get("folder", ".")
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
    check_paths(values)


def check_folders(values: Mapping[str, Any]) -> None:
    """Checks that folders of runs and of initial weights exist, before Hydra makes a folder.

    Raises:
        CheckpointError: If a folder does not; the error names the key.

    Example:
        >>> check_folders({"runs": "/no/such/folder"})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.CheckpointError: runs=/no/such/folder is no folder; name one that \
holds finished runs.
    """
    start = select(values, "init.weights")
    if start is None and select(values, "init.adopt"):
        raise ConfigError(
            "init.weights has no value yet, but init.adopt needs its network or data; set it by "
            "init.weights=BUNDLE or RUN_FOLDER."
        )
    if start is not None and values.get("resume") is None:  # a resumed run has a copy of its start
        check_exists("init.weights", str(start))
    runs = values.get("runs", ["."])
    names = list(runs) if isinstance(runs, list) else [runs]
    if not names or None in names:
        raise CheckpointError("runs names no folder; name one that holds finished runs.")
    for name in names:
        if not os.path.isdir(Path(str(name)).expanduser()):
            raise CheckpointError(f"runs={name} is no folder; name one that holds finished runs.")


def check_runtime(values: Mapping[str, Any]) -> None:
    """Checks values that Lightning would refuse late or silently change.

    Raises:
        ConfigError: If the precision, the devices or the rounds of evaluation cannot be used.
    """
    if "trainer" in values:
        check_devices(values["trainer"])
    precision = str(select(values, "trainer.precision", PRECISIONS[0]))
    if precision not in PRECISIONS:
        raise ConfigError(
            f"trainer.precision={precision} is not supported, as weights stay in single or double "
            f"precision; choose {', '.join(PRECISIONS[:4])}."
        )
    if precision.startswith("16") and select(values, "trainer.accelerator") == "cpu":
        raise ConfigError(
            f"trainer.precision={precision} is for GPUs; choose bf16-mixed on the CPU, or "
            "trainer=gpu."
        )
    every, rounds = select(values, "evaluation.every", 0), values.get("rounds", 0)
    if every > rounds:
        raise ConfigError(
            f"evaluation.every={every} is more than rounds={rounds}, so validation could select no "
            f"round; set evaluation.every to at most {rounds}."
        )
    absent = select(values, "cohort.absent") or ()
    for absence in absent:
        number = absence[0] if isinstance(absence, list) and absence else absence
        if isinstance(number, int) and number >= rounds > 0:
            raise ConfigError(
                f"cohort.absent names round {number}, but the last of rounds={rounds} is "
                f"{rounds - 1}, as they are counted from 0."
            )
    rule, method = (select(values, f"evaluation.{n}") for n in ("operating_point", "calibration"))
    if not re.fullmatch(_RULES, str(rule)):
        raise ConfigError(
            f"evaluation.operating_point={rule} is unknown; write youden, null, "
            "{sensitivity: 0.9} or {specificity: 0.9}."
        )
    if method is not None:
        check_known("evaluation.calibration", method, ("temperature", "platt"))


def check_gpu(accelerator: str) -> None:
    """Refuses a GPU where there is not even a driver, before any library is loaded.

    Raises:
        ConfigError: If a GPU is asked for and Linux has no driver of one.
    """
    if accelerator not in ("gpu", "cuda") or sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if not Path("/dev/kfd").exists():  # AMD's
            raise no_gpu(accelerator) from None


def no_gpu(accelerator: str) -> ConfigError:
    """Says that there is no GPU."""
    way = "choose trainer=cpu or trainer=ddp."
    return ConfigError(f"trainer.accelerator={accelerator} finds no GPU on this machine; {way}")


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Checks that medfed's strategy assigns the clients to the devices.

    Args:
        trainer: The section of a composed configuration.

    Raises:
        ConfigError: If the strategy or the number of devices or machines is wrong.

    Example:
        >>> check_devices({"devices": 2, "strategy": "ddp"})
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: trainer.strategy=ddp could mix the gradients of \
clients; leave it at auto, which assigns the clients to the devices.
    """
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


def check_machines(trainer: Mapping[str, Any], started: Launched | None = None) -> None:
    """Checks that the launcher has started as many processes as the run needs.

    Args:
        trainer: The section of a composed configuration.
        started: The launcher; ``None``: taken from the environment.

    Raises:
        ConfigError: If the numbers differ, or nothing starts the processes of other machines.

    Example:
        >>> two = Launched("torchrun", rank=0, ranks=4, machines=2)
        >>> check_machines({"devices": 2, "num_nodes": 2}, two)
        >>> check_machines({"devices": 4}, two)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: torchrun has started 4 processes on 2 machines, but \
the run takes trainer.devices=4 trainer.num_nodes=1; set trainer.devices=2 trainer.num_nodes=2.
    """
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices", 1)
    if type(nodes) is not int or nodes < 1:
        raise ConfigError(
            f"trainer.num_nodes={nodes} cannot be used; give the number of machines, at least 1."
        )
    started = started or launched()
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
    return int(select(trainer, "strategy.ranks_per_device", 1))


def several(trainer: Mapping[str, Any]) -> bool:
    """Returns whether a run may use more than one process.

    Args:
        trainer: The section of a checked configuration.

    Example:
        >>> several({"devices": "auto"})
        True
    """
    devices = trainer.get("devices", 1)
    if trainer.get("num_nodes", 1) != 1 or _sharing(trainer) != 1:
        return True
    return devices != 1 and not (isinstance(devices, list) and len(devices) == 1)
