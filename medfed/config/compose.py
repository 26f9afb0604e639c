"""Composes configurations with Hydra and builds sections; each error is one sentence.

It also converts a user's losses and metrics from the form in a configuration to the form to build.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra._internal.utils import _locate
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import configure_log
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from medfed.config.allowed import CONFIG_DIR as CONFIG_DIR
from medfed.config.allowed import check_targets, plugin_yaml
from medfed.config.check import check_path, check_types
from medfed.config.description import RunDescription, as_yaml, describe, resolved, written
from medfed.config.sections import Section, leaves, walk
from medfed.config.spelling import GROUPS, as_text, key_of, to_hydra_overrides, with_plugins
from medfed.standalone.errors import ConfigError, MedfedError, did_you_mean, few, first_line

CUSTOM_METRIC = "medfed.models.meters.CustomMetric"


def with_custom_parts(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a model's section in the form to build.

    A metric is written ``name: {_target_: ..., direction: max}``, but the direction is no argument
    of its class. A function is passed on, not called.

    Example:
        >>> metric = {"_target_": "monai.metrics.MeanIoU", "direction": "max"}
        >>> built = with_custom_parts({"metrics": {"mine": metric}})["metrics"]["mine"]
        >>> built["direction"], built["metric"]
        ('max', {'_target_': 'monai.metrics.MeanIoU'})
    """
    loss, metrics = node.get("loss"), node.get("metrics")
    if isinstance(loss, dict):
        node = {**node, "loss": _handed_over(loss)}
    if isinstance(metrics, dict):
        node = {**node, "metrics": {name: _metric(metric) for name, metric in metrics.items()}}
    return node


def _metric(written: Any) -> Any:
    if not isinstance(written, dict) or "_target_" not in written:
        return written
    direction = {key: written.get(key) for key in ("direction", "worst")}
    inner = {key: value for key, value in written.items() if key not in direction}
    return {"_target_": CUSTOM_METRIC, "metric": _handed_over(inner), **direction}


def _handed_over(part: dict[str, Any]) -> dict[str, Any]:
    is_called = "_target_" in part and "_partial_" not in part
    if is_called and inspect.isfunction(_locate(part["_target_"])):
        return {**part, "_partial_": True}
    return part


# Sections that a value must not replace; group=OPTION chooses an option of a group.
SECTIONS = (
    *("init", "local", "cohort", "evaluation", "checkpoint", "codec", "codec.up", "codec.down"),
    *("channel", "channel.up", "channel.down", "channel.up.cer", "channel.down.cer"),
    *("data", "partition", "partition.assignment", "partition.assignment.assignment", "augment"),
    *("model", "optimizer", "scheduler", "algorithm", "trainer", "logger", "privacy", "pictures"),
    *("tuned", "by_method"),
)
_BUILDING = ("_convert_", "_partial_", "_recursive_", "_args_")
_FIXED = ("evaluation", "checkpoint", "pictures")  # sections of which no class names the keys
_LISTED = 20  # largest number of keys that an error lists


def load(overrides: Sequence[str] = (), name: str = "train") -> DictConfig:
    """Composes a configuration from the project's ``configs`` folder and plugin folders.

    Args:
        overrides: Overrides as on the command line, such as ``algorithm=fedavg`` or
            ``plugins=FOLDER``.
        name: The primary config.

    Raises:
        ConfigError: If a key, an option of a group or a value is unknown; the error names the known
            ones.
    """
    config = _composed(to_hydra_overrides(overrides), name).config
    with open_dict(config), read_write(config):
        for key in ("hydra", "on_other_data"):
            config.pop(key, None)
        if "${hydra:" in str(_plain(config).get("folder")):
            config.folder = "."  # Hydra sets one when it runs a command
    return config


def described(
    overrides: Sequence[str] = (), name: str = "train", /, **values: Any
) -> RunDescription:
    """Composes and describes a run; see :func:`load` and :func:`~.description.describe`."""
    return describe({**written(load(overrides, name)), **values})


@dataclass(frozen=True)
class Composition:
    """The composed configuration of a command line."""

    config: DictConfig  # the configuration, including Hydra's section
    sweep: str = ""  # the first override that has several values; empty: none

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides on the command line."""
        return as_typed(self.config.hydra.overrides.task)

    def source(self) -> dict[str, Any]:
        """Returns the configuration as it is written; ``folder`` is the folder of the run."""
        try:
            with in_folder(self.config):
                return source_of(self.config)
        except OmegaConfBaseException as error:
            raise ConfigError(f"hydra.run.dir cannot be resolved: {first_line(error)}.") from error

    def yaml(self, part: str, resolve: bool) -> str:
        """Returns what ``--cfg`` asks for: ``job``, which is what runs, ``hydra`` or ``all``."""
        with in_folder(self.config):
            whole = source_of(self.config) if part == "job" else _plain(self.config)
            plain = resolved(whole) if resolve else whole
        return as_yaml({"hydra": plain["hydra"]} if part == "hydra" else plain)

    def run(self, task: Callable[[DictConfig], Any]) -> None:
        """Calls a task with Hydra's log and values."""
        with in_folder(self.config):
            configure_log(self.config.hydra.job_logging, self.config.hydra.verbose)
            task(self.config)


@contextmanager
def in_folder(config: DictConfig, above: str = "", key: str = "hydra.run.dir") -> Iterator[None]:
    """Gives ``${hydra:...}`` the values of a configuration, and names the folder of its run."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    hydra.set_config(config)
    try:
        folder = os.path.abspath(os.path.join(above, str(OmegaConf.select(config, key))))
        check_path(key, folder)
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = folder
        hydra.set_config(config)
        yield
    finally:
        hydra.cfg = before


def as_typed(overrides: ListConfig) -> tuple[str, ...]:
    """Returns overrides as they were typed: an interpolation in them is not replaced."""
    return tuple(map(str, _plain(overrides)))


def _plain(config: Any) -> Any:
    return OmegaConf.to_container(config)


def _composed(overrides: Sequence[str], name: str) -> Composition:
    _check_kept(overrides)
    overrides = _refusing_new(overrides, name)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), job_name=name, version_base="1.3"):
        try:
            config = _compose(for_other_data(overrides, lambda o: _compose(o, name)), name)
        except MissingConfigException as error:
            raise ConfigError(_explain_option(error)) from error
        except yaml.MarkedYAMLError as error:
            if (at := error.problem_mark) is None:
                raise
            place = f"{at.name}, line {at.line + 1}"
            raise ConfigError(f"{place}: {error.problem}; mend the file there.") from error
        except ValueError as error:  # an option of a group that is a number
            raise ConfigError(_explain_number(error, overrides)) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain_key(error, overrides, name)) from error
    _check_sections(config)
    _check_needed(overrides, config)
    _check_read(config, name)
    if more := of_the_method(config, overrides):
        return _composed([*overrides, *more], name)
    return Composition(config)


def _compose(overrides: Sequence[str], name: str) -> DictConfig:
    config: DictConfig = compose(name, overrides=list(overrides), return_hydra_config=True)
    return config


def with_other_data(overrides: Sequence[str]) -> list[str]:
    """Adds what an experiment sets for data that are not its own; what the user has set wins.

    An experiment's partition is the protocol of a paper, made for its cohort. It may leave out
    patients or channels. On other data a user must ask for it. Its settings of augmentation,
    patches and spacing are alike. If its data always come from a path, they are its own.

    Example:
        >>> with_other_data(["experiment=brats_pfednet", "data.path=/data/msd"])[2:]
        ['partition=auto', 'partition.protocol=channel_missing', 'augment=light', \
'data.patches=fresh']
        >>> with_other_data(["experiment=heart_pfednet", "data.path=/data/heart"])
        ['experiment=heart_pfednet', 'data.path=/data/heart']
        >>> with_other_data(["experiment=brats_pfednet", "seed=0"])
        ['experiment=brats_pfednet', 'seed=0']
    """
    return for_other_data(overrides, lambda chosen: _composed(chosen, "train").config)


def for_other_data(
    overrides: Sequence[str], composing: Callable[[Sequence[str]], Any]
) -> list[str]:
    """See :func:`with_other_data`; ``composing`` composes a configuration of a few overrides."""
    typed = {key_of(o): o.partition("=")[2] for o in overrides}
    file = plugin_yaml("experiment", typed.get("experiment", ""))
    if file and (those := _set_in(file)):
        below = [*those, *(o for o in overrides if key_of(o) != "experiment")]
        return [*overrides, *for_other_data(below, composing)[len(below) :]]
    path = typed.get("data.path", "null") != "null"
    if "experiment" not in typed or not (path or "data" in typed):
        return list(overrides)
    basis = [o for o in overrides if key_of(o) in ("experiment", "plugins")]
    alone = composing(with_plugins(basis))
    data = alone.hydra.runtime.choices.data
    generated = _plain(alone.data).get("path") is None
    if (chosen := typed.get("data", data)) == data:
        is_other = path and generated
    else:  # a plugin's may have a path of its own
        file = CONFIG_DIR / "data" / f"{chosen}.yaml"
        is_other = path or not file.is_file() or OmegaConf.is_missing(OmegaConf.load(file), "path")
    if any(re.match(r"partition(?!\.num_clients$)(?=$|[.@])", key) for key in typed):
        typed["partition"] = typed["partition.protocol"] = ""
    more = [o for o in alone.on_other_data if not {key_of(o), f"data.{key_of(o)}"} & typed.keys()]
    return [*overrides, *(more if is_other else ())]


def _set_in(experiment: Path) -> list[str]:
    """Returns what a plugin's experiment sets upon another one, as overrides.

    Nothing where it has no other one below it, or says itself what holds for other data.
    """
    with experiment.open(encoding="utf-8") as opened:
        content: Any = yaml.safe_load(opened) or {}
    chosen = [d for d in content.pop("defaults", ()) if d != "_self_"]
    bases = [f"experiment={d}" for d in chosen if isinstance(d, str)]
    if not bases or "on_other_data" in content:
        return []
    groups = {k: v for d in chosen if isinstance(d, dict) for k, v in d.items()}
    whole = {key.rpartition("/")[2]: value for key, value in groups.items()} | leaves(content)
    return [*bases, *(f"{key}={as_text(value)}" for key, value in whole.items())]


def of_the_method(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """What an experiment sets for the chosen method alone, but for what the user has set."""
    method = config.hydra.runtime.choices.get("algorithm")
    of_method = (_plain(config).get("by_method") or {}).get(method) or ()
    typed = {o.partition("=")[0].lstrip("+") for o in overrides}
    return [o for o in of_method if o.partition("=")[0] not in typed]


def source_of(config: DictConfig) -> dict[str, Any]:
    """Returns a configuration as it is written, with the folder of Hydra's run."""
    source: dict[str, Any] = _plain(config)
    for key in ("hydra", "on_other_data"):  # they say how to compose, not what to run
        source.pop(key, None)
    if "folder" in source and not OmegaConf.is_missing(config, "folder"):
        source["folder"] = config.folder
    return source


def parse(overrides: Sequence[str], what: str) -> list[Override]:
    """Parses overrides in Hydra's spelling."""
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
        return parsed
    except (HydraException, RecursionError) as error:
        raise ConfigError(f"{what} cannot be read: {first_line(error)}.") from error


def compose_all(overrides: Sequence[str], name: str = "train") -> list[Composition]:
    """Composes the configurations of a command line in Hydra's spelling.

    Args:
        overrides: See :func:`~.spelling.to_hydra_overrides`.
        name: The primary config.

    Returns:
        One configuration with the first values of a sweep, then one for each further value.

    Raises:
        ConfigError: See :func:`load`.
    """
    if name not in ("train", "deploy", "evaluate"):  # they make a folder only if all is well
        places = {"look": "folder", "study": "folder", "prepare": "folder", "predict": "output"}
        place = f"{places.get(name, 'out')}="
        overrides = [re.sub(r"^hydra\.run\.dir=", place, o) for o in overrides]
    for override in overrides:
        key, assigns, _ = override.partition("=")
        if not key.startswith("~") and not (assigns and key.lstrip("+")):
            raise ConfigError(f"{override!r} is no override; write key=value.")
    parsed = parse(overrides, "The command line")
    values = [values_of(o) for o in parsed]
    single = [each[0] for each in values]
    lines = [single]
    for i, each in enumerate(values):
        lines += [[*single[:i], value, *single[i + 1 :]] for value in each[1:]]
    sweeps = [o for o in parsed if o.is_sweep_override()]
    sweep = str(sweeps[0].input_line) if sweeps else ""
    made = [replace(_composed(each, name), sweep=sweep) for each in lines]
    for each, one in zip(lines, made, strict=True):
        _check_experiment(each, one.config)
    return made


def values_of(override: Override) -> list[str]:
    """Returns an override once for each value that it sweeps over."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    try:
        values = list(override.sweep_string_iterator())
    except HydraException as error:  # interval() and glob()
        raise ConfigError(
            f"{override.input_line} names no values; write them, as in seed=0,1 or seed=range(3)."
        ) from error
    if not values:
        raise ConfigError(f"{override.input_line} has no value; write one.")
    return [f"{override.get_key_element()}={value}" for value in values]


def build(node: Any, **kwargs: Any) -> Any:
    """Instantiates a section; medfed's errors in its constructor are raised unchanged.

    Args:
        node: A section with ``_target_``, from a description or from Hydra.
        kwargs: Further arguments of the constructor.

    Raises:
        ConfigError: If the section names something that a configuration may not build (see
            :mod:`medfed.config.allowed`), or the constructor does not accept the arguments.

    Example:
        >>> node = {"_target_": "medfed.federation.algorithm.Cohort", "fraction": "half"}
        >>> build(Section(node, "cohort"))
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: cohort.fraction must be a number, not 'half'.
    """
    if isinstance(node, DictConfig):
        node = Section(resolved(node), node._get_full_key(None))
    if not isinstance(node, Section):
        raise ConfigError(f"{node!r} stands where the configuration needs a section.")
    if not node.checked:
        check_targets(node, node.place, exists=True)
    values = with_custom_parts(node)
    check_types(node.targets)
    try:
        made = instantiate(values, **kwargs)
    except InstantiationException as error:
        cause: BaseException = error
        while not isinstance(cause, MedfedError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, MedfedError):
            raise cause from error
        what = node.place or str(node.get("_target_"))
        raise ConfigError(f"{what} cannot be used as it is: {first_line(cause)}.") from error
    if made and (base := _BASES.get(node.place)) and not isinstance(made, get_class(base)):
        raise ConfigError(f"{node.place} is a {type(made).__name__}, which is no {base}.")
    return made


def part_of(config: RunDescription, name: str) -> Any:
    """Builds a section of a run that holds no state, once while its values stay the same."""
    section = getattr(config, name)
    if name not in config.built or config.built[name][0] != section:
        config.built[name] = section, build(section)
    return config.built[name][1]


# What sections must be, also those of plugins.
_BASES = {
    "algorithm": "medfed.federation.algorithm.Algorithm",
    "aggregation": "medfed.federation.aggregation.Aggregation",
    "data": "medfed.datamodules.base.FederatedDataModule",
    "logger": "pytorch_lightning.loggers.Logger",
    "model": "medfed.models.task.TaskModule",
}


def class_of(section: Section) -> Any:
    """Returns the class of which a checked section is an instance."""
    return get_class(section["_target_"])


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], ignore: Sequence[str] = ()
) -> list[str]:
    """Names the leaves in which two configurations differ.

    `ignore`: top-level keys, or leaves such as ``data.workers``, that may differ.

    Example:
        >>> a = {"seed": 0, "local": {"steps": 1}, "resume": None}
        >>> b = {"seed": 0, "local": {"steps": 2}, "resume": "x"}
        >>> changed_keys(a, b, ignore=["resume"])
        ['local.steps: 1 -> 2']
    """
    flat_old, flat_new = leaves(old), leaves(new)
    return [
        f"{key}: {flat_old.get(key)} -> {flat_new.get(key)}"
        for key in sorted({*flat_old, *flat_new})
        if not {key, key.partition(".")[0]} & {*ignore} and flat_old.get(key) != flat_new.get(key)
    ]


def _check_sections(config: DictConfig) -> None:
    """Refuses ``cohort=all``, with which Hydra would replace a section by a value."""
    for section in SECTIONS:
        value = OmegaConf.select(config, section, throw_on_resolution_failure=False)
        if value is not None and not isinstance(value, DictConfig):
            root = section.partition(".")[0]
            group = section if section in (root, *GROUPS) else f"{root}@{section}"
            is_group = (CONFIG_DIR / root).is_dir()
            how = f"choose an option by {group}=OPTION" if is_group else "set one of its keys"
            raise ConfigError(f"{section}={value} would replace a whole section; {how}.")


# Keys that have a meaning only with another one, as they are typed.
_NEEDS = {
    **dict.fromkeys(("init.part", "init.client", "init.strict"), "init.weights"),
    **dict.fromkeys(("init.rename", "init.spread"), "init.weights"),
    **dict.fromkeys(("k", "onboard_steps"), "onboard"),
    **dict.fromkeys(("bands", "patients", "least"), "by"),
    **{f"channel.{way}.cer.relative": f"channel.{way}.cer.gamma" for way in ("up", "down")},
    "channel.range": "channel.secure",
}


def _check_needed(overrides: Sequence[str], config: DictConfig) -> None:
    """Refuses a key that would change nothing, as the key that it belongs to is not set."""
    keys = [override.partition("=")[0].lstrip("+") for override in overrides]
    last = [key for key in keys if key in ("local.epochs", "local.steps")][-1:]
    if last == ["local.epochs"] and (steps := config.local.steps) is not None:
        raise ConfigError(
            f"{last[0]} changes nothing beside local.steps={steps}; set that to null."
        )
    for key in keys:
        needed = _NEEDS.get(key, "")
        parent, _, leaf = needed.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        if needed and leaf in node and node[leaf] in (None, 0):
            raise ConfigError(f"{key} changes nothing without {needed}; set {needed}, too.")
        if key.partition(".")[0] == "augment" and "augment" not in config.get("data", key):
            raise ConfigError(
                f"{key} changes nothing with data={config.hydra.runtime.choices.data}, which takes "
                "no augmentation; leave it out."
            )


@cache
def _shipped(name: str) -> Any:
    return _plain(_composed([], name).config)


def _check_read(config: DictConfig, name: str) -> None:
    """Refuses a key of a plugin's yaml that nothing reads, such as ``round: 5``."""
    if not config.get("plugins"):
        return
    known = _shipped(name)
    read = re.findall(r"\$\{([\w.]+)", repr(_plain(config)))
    for section in ("", *_FIXED):
        there, usual = (config, known) if not section else (config.get(section), known.get(section))
        for key in map(str, there or ()):
            whole = f"{section}.{key}".lstrip(".")
            if key not in (usual or ()) and not any(f"{r}.".startswith(f"{whole}.") for r in read):
                if key == "experiment":
                    where = "the yaml of an experiment begins with the line # @package _global_"
                    raise ConfigError(f"In this place nothing reads an experiment; {where}.")
                hint = did_you_mean(key, [*map(str, usual or ())])
                raise ConfigError(f"Unknown key {whole!r}{hint} in a yaml of plugins.")


def _check_experiment(overrides: Sequence[str], config: DictConfig) -> None:
    """Refuses an experiment whose settings are for data of another kind than those chosen."""
    choices, typed = config.hydra.runtime.choices, {key_of(o): o for o in overrides}
    file = CONFIG_DIR / "data" / f"{choices.get('data')}.yaml"
    if not {"experiment", "data"} <= typed.keys() or not file.is_file():
        return
    has, known = _plain(config.data), _plain(OmegaConf.load(file))
    extra = [f"data.{key}" for key in has if key not in known]
    reader, usual = has.get("reader"), known.get("reader") or {}
    if isinstance(reader, dict) and usual.get("_target_") == reader.get("_target_"):
        extra += [f"data.reader.{key}" for key in reader if key not in usual]
    if extra := [key for key in extra if key not in typed]:
        raise ConfigError(
            f"{typed['experiment']} sets {few(extra, 4)}, which data={choices.data} does not have: "
            "it is for data of another kind. medfed init writes an experiment for yours."
        )


def _check_kept(overrides: Sequence[str]) -> None:
    """Refuses ``~data``, ``data=null`` and ``data=[a,b]``: no command runs without its sections."""
    for override in overrides:
        key, _, value = override.partition("=")
        section, left_out = key.lstrip("+~"), key.startswith("~")
        is_group = bool(section) and (CONFIG_DIR / section).is_dir()
        if is_group and value.startswith("["):
            raise ConfigError(
                f"{override} names a list; choose one option, or -m "
                f"{section}={value.strip('[]')} for a run of each."
            )
        if section in SECTIONS and (left_out or (value == "null" and is_group)):
            how = f"choose an option by {section}=OPTION" if is_group else "set one of its keys"
            raise ConfigError(f"{override} would leave out a whole section; {how}.")
        if left_out and not any(o.lstrip("+").startswith(f"{section}=") for o in overrides):
            raise ConfigError(f"{override} would leave out a key; set it by {section}=VALUE.")
        if (leaf := section.rpartition(".")[2]) in _BUILDING:
            raise ConfigError(f"{section} says how medfed builds a part; leave {leaf} as it is.")
        if key in ("hydra.run.dir", "hydra.sweep.dir") and value.strip("'\" ") in ("", "null"):
            raise ConfigError(f"{key} names no folder; write {key}=FOLDER.")
        group = section.partition("@")[0]
        outside = re.search(r"(^|[\s,'\"])/|(^|[/\s,'\"])\.\.?(/|$)", value)
        if group and outside and (CONFIG_DIR / group).is_dir():
            raise ConfigError(f"{override} names no option; choose one by {group}=NAME.")


def _refusing_new(overrides: Sequence[str], name: str) -> Sequence[str]:
    """Takes the plus sign from what would be new at the top level, so that Hydra refuses it."""
    keys = {o: o.partition("=")[0].rpartition("@")[2] for o in overrides if o.startswith("+")}
    roots = {o: key.lstrip("+").partition(".")[0] for o, key in keys.items()}
    placed = {o for o in keys if "@" in o.partition("=")[0]}  # a group at a place of its own
    fixed = {o for o, root in roots.items() if root in _FIXED}
    is_section = {root: root in SECTIONS or (CONFIG_DIR / root).is_dir() for root in roots.values()}
    added = placed | fixed | {o for o, root in roots.items() if not is_section[root]}
    if not added:
        return overrides
    there = _composed([o for o in overrides if o not in added], name).config
    new = fixed | {o for o in added if roots[o] not in list(there)}
    new |= {o for o in placed if OmegaConf.select(there, keys[o].lstrip("+")) is None}
    return [o.lstrip("+") if o in new else o for o in overrides]


def _explain_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = sorted(error.options or [])
    if not known:
        groups = sorted(p.name for p in CONFIG_DIR.iterdir() if p.is_dir())
        return f"Unknown group {group!r}{did_you_mean(group, groups)}; the groups are {groups}."
    root = group.partition("/")[0]
    yours = f" (one of yours: plugins=FOLDER, which has it as configs/{root}/NAME.yaml)"
    hint = did_you_mean(option, known) or yours
    return f"Unknown {group} {option!r}{hint}; choose one of {', '.join(known)}."


def _explain_number(error: Exception, overrides: Sequence[str]) -> str:
    for override in parse(overrides, "The command line"):
        group = override.key_or_group
        if (CONFIG_DIR / group).is_dir() and isinstance(override.value(), int | float):
            return f"{override.input_line} is no option; choose one by {group}=NAME."
    return f"The configuration cannot be composed: {first_line(error)}."


def _explain_key(error: Exception, overrides: Sequence[str], name: str) -> str:
    """Names the wrong override and the keys of its section."""
    header = "; its first line must be # @package _global_" * ("@experiment." in str(error))
    unknown = f"The configuration cannot be composed: {first_line(error)}{header}."
    for override in overrides:
        key, named = override.partition("=")[0].lstrip("+~"), override in str(error)
        if not (named or f"'{key}'" in str(error)):
            continue
        try:
            config = _composed([o for o in overrides if o is not override], name).config
        except ConfigError as another:  # of the rest of the line
            return str(another)
        place = key.rpartition("@")[2]  # group@place: it is the place that does not exist
        node = OmegaConf.select(config, place)
        if named and key not in SECTIONS and isinstance(node, DictConfig) and node:
            example = ", ".join(f"{k}: {v}" for k, v in _plain(node).items())
            return f"{key} is a map; write {key}='{{{example}}}'."
        if f"'{key}'" in str(error):
            return _without_key(config, place)
    return unknown


def _without_key(config: DictConfig, key: str) -> str:
    """Says what a configuration has instead of a key, or in its place."""
    above = key.split(".")[:-1]
    sections = (".".join(above[:n]) for n in range(len(above), 0, -1))
    parent = next((s for s in sections if isinstance(OmegaConf.select(config, s), DictConfig)), "")
    node = OmegaConf.select(config, parent) if parent else config
    leaf = key.removeprefix(f"{parent}.").partition(".")[0]
    known = [str(k) for k in node if not str(k).startswith("_") and k != "hydra"]
    if leaf in known and not isinstance(node[leaf], DictConfig):
        place = f"{parent}.{leaf}".lstrip(".")
        if inside := key.removeprefix(place).lstrip("."):
            whole = f"{place}='{{{inside}: VALUE}}'"
            return f"{place} has no keys yet; set it as a whole, as in {whole}."
        return f"{key} is there already; set it by {key}=VALUE, without the plus sign."
    if leaf in known:
        inner = ", ".join(f"{key}.{k}" for k in node[leaf])
        example = f", such as {key}.up=fp32" if leaf == "codec" else ""
        return f"{key!r} is no group; set {inner}{example}."
    deeper = [k for k, _ in walk(_plain(config)) if not parent and k.endswith(f".{leaf}")]
    deeper.sort(key=lambda key: key.startswith(("tuned.", "by_method.")))  # seldom meant
    hint = did_you_mean(deeper[0], deeper) if deeper else did_you_mean(leaf, known)
    where = f"{parent} has" if parent else "the top level has"
    return f"Unknown key {key!r}{hint}; {where} {few(known, _LISTED) or 'no keys'}."
