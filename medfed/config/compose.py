"""Configuration: composed by Hydra, checked before anything runs, explained in one sentence.

Losses and metrics of a user's own, as a configuration writes them and as they are built.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import _locate
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from medfed.common.errors import ConfigError, MedfedError, did_you_mean, first_line
from medfed.config.allowed import CONFIG_DIR as CONFIG_DIR
from medfed.config.allowed import check_targets
from medfed.config.check import check, check_types
from medfed.config.spelling import GROUPS, spelled

OWN_METRIC = "medfed.models.meters.OwnMetric"


def with_own_parts(node: DictConfig) -> DictConfig:
    """Returns a model's section as it is built.

    A metric is written ``name: {_target_: ..., direction: max}``, and the direction is no argument
    of its class. A function is handed over rather than called.

    Args:
        node: A section; without ``loss`` and ``metrics`` it comes back as it is.

    Example:
        >>> metric = {"_target_": "monai.metrics.MeanIoU", "direction": "max"}
        >>> built = with_own_parts(DictConfig({"metrics": {"mine": metric}}))
        >>> built.metrics.mine.direction, dict(built.metrics.mine.metric)
        ('max', {'_target_': 'monai.metrics.MeanIoU'})
    """
    loss, metrics = (node.get(key) for key in ("loss", "metrics"))
    if not isinstance(loss, DictConfig) and not isinstance(metrics, DictConfig):
        return node
    node = copy.deepcopy(node)
    with open_dict(node):
        if isinstance(loss, DictConfig):
            _hand_over(node.loss)
        for name, written in (metrics or {}).items():
            if not isinstance(written, DictConfig) or "_target_" not in written:
                continue
            inner = node.metrics[name]
            said = {key: inner.pop(key, None) for key in ("direction", "worst")}
            _hand_over(inner)
            node.metrics[name] = {"_target_": OWN_METRIC, "metric": inner, **said}
    return node


def _hand_over(part: DictConfig) -> None:
    if "_target_" in part and "_partial_" not in part:
        part._partial_ = inspect.isfunction(_locate(part._target_))
        if not part._partial_:
            del part["_partial_"]


# Sections that a value must not replace; a group's options are chosen by group=OPTION.
SECTIONS = (
    *("init", "local", "cohort", "evaluation", "checkpoint", "codec", "codec.up", "codec.down"),
    *("channel", "channel.up", "channel.down", "channel.up.cer", "channel.down.cer"),
    *(
        "data",
        "partition",
        "augment",
        "model",
        "optimizer",
        "scheduler",
        "algorithm",
        "trainer",
        "logger",
    ),
    *("partition.assignment", "partition.assignment.assignment"),
)
_LISTED = 20  # keys that an error lists
# ${either:a,b} is a where it is set and b where it is null.
OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)


def load(overrides: Sequence[str] = (), name: str = "train") -> DictConfig:
    """Composes a configuration from the project's ``configs`` folder, and from plugins' folders.

    Args:
        overrides: Overrides as people write them, such as ``algorithm=fedavg`` or
            ``plugins=FOLDER``.
        name: The primary config.

    Raises:
        ConfigError: If a key, an option of a group or a value is unknown; the known ones are named.
    """
    return _composed(spelled(overrides), name)


def _composed(overrides: Sequence[str], name: str) -> DictConfig:
    _check_kept(overrides)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            config: DictConfig = compose(name, overrides=list(overrides))
        except MissingConfigException as error:
            raise ConfigError(_explain_option(error)) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain_key(error, overrides, name)) from error
    _check_sections(config)
    return config


def check_overrides(arguments: Sequence[str], name: str = "train") -> list[DictConfig]:
    """Checks the command line before Hydra takes over, so that a mistake is one sentence.

    Args:
        arguments: The command line without the program.
        name: The primary config.

    Returns:
        What was composed; see :func:`compositions`.

    Raises:
        ConfigError: See :func:`load`; also if a value is of another type, missing or out of range.
        DataError: If a file or folder that must be there is not.
    """
    found = compositions(arguments, name)
    for config in found:
        check(config)
    return found


def compositions(arguments: Sequence[str], name: str = "train") -> list[DictConfig]:
    """Composes what a command line asks for.

    Args:
        arguments: The command line without the program.
        name: The primary config.

    Returns:
        The first values of a sweep, then each further value.

    Raises:
        ConfigError: See :func:`load`.
    """
    overrides = spelled([a for a in arguments if not a.startswith("-")])
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"The command line cannot be read: {first_line(error)}.") from error
    single = [
        f"{o.get_key_element()}={next(iter(o.sweep_string_iterator()))}"
        if o.is_sweep_override()
        else str(o.input_line)
        for o in parsed
    ]
    further = []
    for i, override in enumerate(parsed):
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        for value in values[1:]:
            changed = f"{override.get_key_element()}={value}"
            further.append(_composed([*single[:i], changed, *single[i + 1 :]], name))
    return [_composed(single, name), *further]


def build(node: Any, **kwargs: Any) -> Any:
    """Instantiates a config node; an error of its constructor comes out as it was raised.

    Args:
        node: A node with ``_target_``.
        kwargs: Further arguments of the constructor.

    Raises:
        ConfigError: If something else is named than a configuration may build (see
            :mod:`medfed.config.allowed`), or the constructor does not accept the arguments.

    Example:
        >>> node = {"_target_": "medfed.federation.algorithm.Cohort", "fraction": "half"}
        >>> build(OmegaConf.create({"cohort": node}).cohort)
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: cohort.fraction must be a number, not 'half'.
    """
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{node!r} stands where the configuration needs a section.")
    place = node._get_full_key(None)
    check_targets(resolved(node), place, found=True)
    check_types(node)
    try:
        return instantiate(with_own_parts(node), **kwargs)
    except InstantiationException as error:
        cause: BaseException = error
        while not isinstance(cause, MedfedError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, MedfedError):
            raise cause from error
        what = place or str(node.get("_target_"))
        raise ConfigError(f"{what} cannot be used as it is: {first_line(cause)}.") from error


def resolved(node: DictConfig) -> Any:
    """Returns a node as it will be built, every interpolation replaced.

    Raises:
        ConfigError: If an interpolation has no value, or is another interpolation.

    Example:
        >>> resolved(OmegaConf.create({"a": 1, "b": "${a}"}))
        {'a': 1, 'b': 1}
    """
    place = node._get_full_key(None)
    try:
        plain = OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{place} cannot be resolved: {first_line(error)}.") from error
    if "${" in repr(plain):  # Hydra would resolve once more what has been looked at
        raise ConfigError(f"{place} holds an interpolation of an interpolation; write its value.")
    return plain


def changed_keys(old: DictConfig, new: DictConfig, ignore: Sequence[str] = ()) -> list[str]:
    """Names the leaves in which two configurations differ.

    Args:
        old: One configuration.
        new: The other.
        ignore: Top-level keys that may differ, and leaves such as ``data.workers``.

    Example:
        >>> a = OmegaConf.create({"seed": 0, "local": {"steps": 1}, "resume": None})
        >>> b = OmegaConf.create({"seed": 0, "local": {"steps": 2}, "resume": "x"})
        >>> changed_keys(a, b, ignore=["resume"])
        ['local.steps: 1 -> 2']
    """
    flat_old, flat_new = _leaves(old, ignore), _leaves(new, ignore)
    return [
        f"{key}: {flat_old.get(key)} -> {flat_new.get(key)}"
        for key in sorted({*flat_old, *flat_new})
        if key not in ignore and flat_old.get(key) != flat_new.get(key)
    ]


def _leaves(config: DictConfig, ignore: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{path}.{key}" if path else str(key))
        else:
            found[path] = node

    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    walk({k: v for k, v in resolved.items() if k not in ignore}, "")
    return found


def _check_sections(config: DictConfig) -> None:
    """Refuses ``cohort=all``, which Hydra takes for a value in place of a section."""
    for section in SECTIONS:
        value = OmegaConf.select(config, section)
        if value is not None and not isinstance(value, DictConfig):
            root = section.partition(".")[0]
            group = section if section in (root, *GROUPS) else f"{root}@{section}"
            is_group = (CONFIG_DIR / root).is_dir()
            how = f"choose an option by {group}=OPTION" if is_group else "set one of its keys"
            raise ConfigError(f"{section}={value} would replace a whole section; {how}.")


def _check_kept(overrides: Sequence[str]) -> None:
    """Refuses ``~data`` and ``data=null``: no command runs without its sections."""
    for override in overrides:
        key, _, value = override.partition("=")
        section = key.removeprefix("~")
        is_group = (CONFIG_DIR / section).is_dir()
        if section in SECTIONS and (key != section or (value == "null" and is_group)):
            how = f"choose an option by {section}=OPTION" if is_group else "set one of its keys"
            raise ConfigError(f"{override} would leave out a whole section; {how}.")


def _explain_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = sorted(error.options or [])
    if not known:
        groups = sorted(p.name for p in CONFIG_DIR.iterdir() if p.is_dir())
        return f"Unknown group {group!r}{did_you_mean(group, groups)}; the groups are {groups}."
    return (
        f"Unknown {group} {option!r}{did_you_mean(option, known)}; "
        f"choose one of {', '.join(known)}."
    )


def _explain_key(error: Exception, overrides: Sequence[str], name: str) -> str:
    """Names the override that does not fit, and the keys that its place has."""
    for override in overrides:
        key = override.split("=")[0].lstrip("+~")
        if "=" not in override:
            return f"{override!r} is no override; write key=value."
        if f"'{key}'" in str(error) or f"{key!r}" in str(error):
            rest = [o for o in overrides if o is not override]
            key = key.rpartition("@")[2]  # group@place: the place is what there is none of
            parent, _, leaf = key.rpartition(".")
            try:
                config = _composed(rest, name)
                node = OmegaConf.select(config, parent) if parent else config
                while parent and not isinstance(node, DictConfig):
                    parent, _, leaf = parent.rpartition(".")
                    node = OmegaConf.select(config, parent) if parent else config
            except ConfigError:
                break
            known = [str(k) for k in node if not str(k).startswith("_")]
            if leaf in known:
                inner = ", ".join(f"{key}.{k}" for k in node[leaf])
                example = f", such as {key}.up=fp32" if leaf == "codec" else ""
                return f"{key!r} is no group; set {inner}{example}."
            where = f"{parent} has" if parent else "the top level has"
            more = f" and {len(known) - _LISTED} more" * (len(known) > _LISTED)
            listed = f"{', '.join(known[:_LISTED])}{more}"
            return f"Unknown key {key!r}{did_you_mean(leaf, known)}; {where} {listed}."
    return f"The configuration cannot be composed: {first_line(error)}."
