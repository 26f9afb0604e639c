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

from medfed.errors import ConfigError, MedfedError, did_you_mean

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"

# ${either:a,b} is a where it is set and b where it is null.
OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Prints a user's error as one sentence on stderr and exits with status 1.

    ``HYDRA_FULL_ERROR=1`` shows the traceback instead.
    """
    try:
        yield
    except MedfedError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
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
            return compose(name, overrides=list(overrides))
        except MissingConfigException as error:
            raise ConfigError(_explain_option(error)) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain_key(error, overrides, name)) from error


def check_overrides(arguments: Sequence[str], name: str = "train") -> None:
    """Checks the command line before Hydra takes over, so that a mistake is one sentence.

    Args:
        arguments: The command line without the program.
        name: The primary config.

    Raises:
        ConfigError: See :func:`load`.
    """
    overrides = [a for a in arguments if not a.startswith("-")]
    if any(a.startswith("--") and a != "--multirun" for a in arguments) or "-h" in arguments:
        return
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
    for i, override in enumerate(parsed):
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        for value in values[1:]:
            load([*single[:i], f"{override.get_key_element()}={value}", *single[i + 1 :]], name)
    load(single, name)


def build(node: Any, **kwargs: Any) -> Any:
    """Instantiates a config node; an error of its constructor comes out as it was raised.

    Args:
        node: A node with ``_target_``.
        kwargs: Further arguments of the constructor.

    Raises:
        ConfigError: If the constructor does not accept the arguments.
    """
    try:
        return instantiate(node, **kwargs)
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, MedfedError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from error
        raise ConfigError(f"{node.get('_target_')}: {first_line(error)}") from error


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
    """Returns the first line of an error's message.

    Example:
        >>> first_line(ValueError("one\\ntwo"))
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
            where = f"{parent} has" if parent else "the top level has"
            return f"Unknown key {key!r}{did_you_mean(leaf, known)}; {where} {', '.join(known)}."
    return f"The configuration cannot be composed: {first_line(error)}"
