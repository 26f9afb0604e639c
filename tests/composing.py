"""Hydra composes thousands of configurations here, so most of each is remembered.

What overrides choose (options of groups) is composed by Hydra once and copied; what they set is
then set in the copy. Whatever is not that simple, and each mistake, goes to Hydra itself.
"""

from __future__ import annotations

import functools
import os
import pickle

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from medfed.config import compose as composer

_bases: dict[tuple[object, ...], bytes] = {}


def remembered(
    config_name: str, overrides: list[str], return_hydra_config: bool = True
) -> DictConfig:
    """Returns what Hydra's ``compose`` returns."""
    texts = [text.replace("'", "") for text in overrides]
    if not return_hydra_config or any("plugins" in t or "searchpath" in t for t in texts):
        return compose(config_name, overrides, return_hydra_config=return_hydra_config)
    choosing = [text for text in overrides if not _sets(text)]
    key = (config_name, tuple(choosing), _state())
    if key not in _bases:
        base = compose(config_name, choosing, return_hydra_config=True)
        _bases[key] = pickle.dumps(base)
    config: DictConfig = pickle.loads(_bases[key])
    try:
        for text in overrides:
            if (override := _sets(text)) is not None:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException:
        return compose(config_name, overrides, return_hydra_config=True)
    with open_dict(config.hydra):
        task = [text for text in overrides if not text.lstrip("+~").startswith("hydra.")]
        form = config.hydra.job.config.override_dirname
        told = [t for t in task if t.partition("=")[0] not in form.exclude_keys]
        config.hydra.overrides.hydra = [text for text in overrides if text not in task]
        config.hydra.overrides.task = task
        config.hydra.job.override_dirname = form.item_sep.join(sorted(told)).replace(
            "=", form.kv_sep
        )
        config.hydra.runtime.cwd = os.getcwd()
    return config


@functools.cache
def _sets(text: str) -> Override | None:
    """The override, if it sets a value of a key that exists in any case; None: Hydra's affair."""
    (override,) = OverridesParser.create().parse_overrides([text])
    key = override.key_or_group
    chooses = override.package is not None or "/" in key or key in _groups()
    if chooses or override.type is None or override.type.name != "CHANGE":
        return None
    return None if override.is_sweep_override() else override


@functools.cache
def _groups() -> frozenset[str]:
    folders = (path for path in composer.CONFIG_DIR.glob("**/") if path != composer.CONFIG_DIR)
    return frozenset(str(path.relative_to(composer.CONFIG_DIR)) for path in folders)


def _state() -> tuple[object, ...]:
    """When any of the shipped files changed."""
    files = [path.stat().st_mtime_ns for path in composer.CONFIG_DIR.glob("**/*.yaml")]
    return str(composer.CONFIG_DIR), len(files), max(files)


def install() -> None:
    """Has medfed compose with the memory."""
    composer.compose = remembered
