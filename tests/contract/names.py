"""What the contract is tested on: what ships, and what is in plugin folders.

    pytest tests/contract tests/federation/wire/codecs tests/datamodules --plugins FOLDER -k NAME

A plugin folder is what ``plugins=FOLDER`` takes: modules, and yamls under ``configs/algorithm``,
``configs/codec``, ``configs/data`` and ``configs/partition``. The folders travel in an environment
variable, so that test workers and ranks know them, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from medfed.config import compose
from medfed.config.spelling import with_plugins

PLUGINS = "MEDFED_TEST_PLUGINS"
EVERY_METHOD = "MEDFED_TEST_EVERY_METHOD"


def algorithm_yamls() -> dict[str, Path]:
    """Name to file of every method."""
    return _yamls("algorithm")


def codec_yamls() -> dict[str, Path]:
    """Name to file of every codec."""
    return _yamls("codec")


def partition_yamls() -> list[Path]:
    """The configurations of partitions."""
    return list(_yamls("partition").values())


def data_yamls() -> list[Path]:
    """The configurations of data."""
    return list(_yamls("data").values())


def experiment_yamls() -> dict[str, Path]:
    """Name to file of every experiment."""
    return _yamls("experiment")


def model_yamls() -> dict[str, Path]:
    """Name to file of every model."""
    return _yamls("model")


def load_algorithm(name: str, rounds: int) -> DictConfig:
    """The section of a method as its yaml has it, in a run of so many rounds.

    Composed once for all methods, as Hydra takes a tenth of a second: what it would do, but for
    yamls that have defaults of their own.
    """
    own = OmegaConf.load(algorithm_yamls()[name])
    if "defaults" in own:
        return load([f"algorithm={name}", f"rounds={rounds}"]).algorithm
    config = load([f"rounds={rounds}"])
    with open_dict(config):
        config.algorithm = own
    return config.algorithm


def load(overrides: Sequence[str]) -> DictConfig:
    """Composes a configuration with the plugin folders' yamls at hand; each once."""
    return _load(tuple(overrides)).copy()


@functools.cache
def _load(overrides: tuple[str, ...]) -> DictConfig:
    return compose.load([f"plugins=[{','.join(_folders())}]", *overrides])


def _folders() -> list[str]:
    return [folder for folder in os.environ.get(PLUGINS, "").split(os.pathsep) if folder]


def _yamls(group: str) -> dict[str, Path]:
    found = {p.stem: p for p in sorted((compose.CONFIG_DIR / group).glob("*.yaml"))}
    for folder in _folders():
        with_plugins([f"plugins=[{folder}]"])
        root = Path(folder, "configs") if Path(folder, "configs").is_dir() else Path(folder)
        found |= {p.stem: p for p in sorted((root / group).glob("*.yaml"))}
    return found
