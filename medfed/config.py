"""Configuration: composed by Hydra, checked before anything runs, explained in one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medfed.config_checks import check_types
from medfed.errors import (
    CheckpointError,
    ConfigError,
    MedfedError,
    NonFiniteError,
    did_you_mean,
)
from medfed.overrides import GROUPS, hydra_spelling

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"

# Sections that a value must not replace; a group's options are chosen by group=OPTION.
SECTIONS = (
    *("local", "cohort", "evaluation", "checkpoint", "codec", "codec.up", "codec.down"),
    *("channel", "channel.up", "channel.down", "channel.up.cer", "channel.down.cer"),
    *("data", "partition", "model", "optimizer", "scheduler", "algorithm", "trainer", "logger"),
    *("partition.assignment", "partition.assignment.assignment"),
)
# ${either:a,b} is a where it is set and b where it is null.
OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Prints a user's error as one sentence on stderr and exits with status 1.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead. Of the errors that stop all ranks alike, the
    first rank speaks for all.
    """
    try:
        yield
    except MedfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        first = os.environ.get("LOCAL_RANK", "0") == os.environ.get("NODE_RANK", "0") == "0"
        if first or not isinstance(error, NonFiniteError | CheckpointError):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def load(overrides: Sequence[str] = (), name: str = "train") -> DictConfig:
    """Composes a configuration from the project's ``configs`` folder.

    Args:
        overrides: Hydra overrides such as ``algorithm=fedavg``.
        name: The primary config.

    Raises:
        ConfigError: If a key, an option of a group or a value is unknown; the known ones are named.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            config: DictConfig = compose(name, overrides=hydra_spelling(overrides))
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
        What was composed: the first values of a sweep, then each further value; empty where the
        command line only asks for help.

    Raises:
        ConfigError: See :func:`load`.
    """
    overrides = hydra_spelling([a for a in arguments if not a.startswith("-")])
    if any(a.startswith("--") and a != "--multirun" for a in arguments) or "-h" in arguments:
        return []
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"The command line cannot be read: {first_line(error)}") from error
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
            further.append(load([*single[:i], changed, *single[i + 1 :]], name))
    config = load(single, name)
    resume = OmegaConf.select(config, "resume")
    # Checked here, because Hydra would make the folder.
    if resume is not None and not (Path(str(resume)) / "config.yaml").is_file():
        raise CheckpointError(
            f"resume={resume} is no run folder (it has no config.yaml); name the folder that the "
            "interrupted run printed."
        )
    return [config, *further]


def build(node: Any, **kwargs: Any) -> Any:
    """Instantiates a config node; an error of its constructor comes out as it was raised.

    Args:
        node: A node with ``_target_``.
        kwargs: Further arguments of the constructor.

    Raises:
        ConfigError: If the constructor does not accept the arguments.

    Example:
        >>> node = {"_target_": "medfed.federation.cohort.Cohort", "fraction": "half"}
        >>> build(OmegaConf.create({"cohort": node}).cohort)
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: cohort.fraction must be a number, not 'half'.
    """
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{node!r} stands where the configuration needs a section.")
    check_types(node)
    try:
        return instantiate(node, **kwargs)
    except InstantiationException as error:
        cause: BaseException = error
        while not isinstance(cause, MedfedError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, MedfedError):
            raise cause from error
        place = node._get_full_key(None) or str(node.get("_target_"))
        raise ConfigError(f"{place} cannot be used as it is: {first_line(cause)}") from error


def quote_folders(arguments: Sequence[str], key: str) -> list[str]:
    """Quotes the folders of one override, because those of sweeps have ``=`` in their names.

    Args:
        arguments: The command line without the program.
        key: The override, ``key=DIR`` or ``key=[DIR,DIR]``.

    Example:
        >>> quote_folders(["run=a/0_seed=1", "split=val"], "run")
        ['run="a/0_seed=1"', 'split=val']
        >>> quote_folders(["runs=[a=1,b]"], "runs")
        ['runs=["a=1","b"]']
    """
    quoted = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == key and "=" in value and not {"'", '"'} & set(value):
            if value.startswith("[") and value.endswith("]"):
                value = "[" + ",".join(f'"{v.strip()}"' for v in value[1:-1].split(",")) + "]"
            else:
                value = f'"{value}"'
        quoted.append(f"{name}={value}" if "=" in argument else argument)
    return quoted


def changed_keys(old: DictConfig, new: DictConfig, ignore: Sequence[str] = ()) -> list[str]:
    """Names the leaves in which two configurations differ.

    Args:
        old: One configuration.
        new: The other.
        ignore: Top-level keys that may differ.

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
        if flat_old.get(key) != flat_new.get(key)
    ]


def first_line(error: BaseException) -> str:
    r"""Returns the first line of an error's message.

    Example:
        >>> first_line(ValueError("one\ntwo"))
        'one'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
                config = load(rest, name)
                node = OmegaConf.select(config, parent) if parent else config
                while parent and not isinstance(node, DictConfig):
                    parent, _, leaf = parent.rpartition(".")
                    node = OmegaConf.select(config, parent) if parent else config
            except ConfigError:
                break
            known = [str(k) for k in node if not str(k).startswith("_")]
            if leaf in known:
                inner = ", ".join(f"{key}.{k}" for k in node[leaf])
                return f"{key!r} is no group; set {inner}, such as {key}.up=fp32."
            where = f"{parent} has" if parent else "the top level has"
            return f"Unknown key {key!r}{did_you_mean(leaf, known)}; {where} {', '.join(known)}."
    return f"The configuration cannot be composed: {first_line(error)}"
