"""What ``scripts/prepare.py`` does: the cache of a data set, made once, ahead of training."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence

import numpy as np
from omegaconf import DictConfig, OmegaConf

from medfed.config import CONFIG_DIR, build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache import Cached, Store
from medfed.errors import ConfigError

_log = logging.getLogger(__name__)
NOT_FOR_TRAINING = ("workers", "show", "folder")


def prepare(config: DictConfig, overrides: Sequence[str] = ()) -> FederatedDataModule:
    """Makes the cache of the configured data, or completes or verifies the one that is there.

    Args:
        config: The composed ``configs/prepare.yaml``.
        overrides: What was typed, for the command to train with the same data.

    Returns:
        The data module; it has been set up only if ``show`` asks for the clients.

    Raises:
        MedfedError: If a value, a source or the cache's folder cannot be used.
    """
    check(config)
    data: FederatedDataModule = build(config.data)
    data.prepare_data()
    _log.info("%s", data.description)
    if isinstance(data, Cached):
        began = time.monotonic()
        store = data.build_cache(config.workers)
        _log.info("%s", report(store, data.class_names, time.monotonic() - began))
    else:
        _log.info("These data need no preparation: training reads them as they are.")
    if config.show:
        data.setup()
    _log.info("Train on them: %s", train_command(overrides))
    return data


def check(config: DictConfig) -> None:
    """Checks that nothing is left open, and the numbers that no constructor checks.

    Args:
        config: The composed ``configs/prepare.yaml``.

    Raises:
        ConfigError: Naming the key.

    Example:
        >>> check(OmegaConf.create({"seed": 0, "workers": 0, "data": {"path": None}}))
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: workers must be a whole number of at least 1 or null, not 0.
    """
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ConfigError(f"{missing[0]} has no value yet; set it by {missing[0]}=VALUE.")
    for key, least in (("seed", 0), ("workers", 1)):
        value = config[key]
        if key == "workers" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            optional = " or null" * (key == "workers")
            raise ConfigError(
                f"{key} must be a whole number of at least {least}{optional}, not {value}."
            )


def report(store: Store, class_names: Sequence[str], seconds: float) -> str:
    """Says in a few lines what a cache holds, and what it took.

    Args:
        store: The cache.
        class_names: Names of the classes.
        seconds: What making, or verifying, it took.

    Returns:
        The lines.
    """
    entries = store.manifest.entries
    source = sum(size for entry in entries for _, size, _ in entry.sources)
    lines = [f"Cache: {store.folder}", f"Items: {len(entries)}"]
    if store.manifest.joined and "label" in entries[0].fields:
        counts = np.bincount(store.array("label"), minlength=len(class_names)).tolist()
        parts = [f"{count:,} {name}" for name, count in zip(class_names, counts, strict=True)]
        lines.append(f"Samples: {sum(counts):,} ({', '.join(parts)})")
    lines.append(f"Size: {megabytes(store.num_bytes)}, from sources of {megabytes(source)}")
    if store.new:
        rate = f"{len(entries) / seconds:.1f} items/s, {megabytes(source / seconds)}/s of sources"
        lines.append(f"Made in {seconds:.1f} s ({rate})")
    else:
        lines.append(f"It was there; verified in {seconds:.1f} s")
    lines.append(f"Checksum: {store.manifest.checksum}")
    return "\n".join(lines)


def megabytes(count: float) -> str:
    """Writes a number of bytes.

    Args:
        count: Bytes.

    Returns:
        Text in MB (10^6 bytes).

    Example:
        >>> megabytes(1_500_000)
        '1.5 MB'
    """
    return f"{count / 1e6:,.1f} MB"


def train_command(overrides: Sequence[str]) -> str:
    """Names the command that trains on the prepared data.

    Args:
        overrides: What was typed to prepare them.

    Returns:
        A command for the shell, with the data's own experiment where there is one.

    Example:
        >>> train_command(["data=brats", "data.path=/data/brats", "workers=2"])
        'python scripts/train.py experiment=brats_pfednet data=brats data.path=/data/brats'
    """
    kept = [o for o in overrides if o.lstrip("+~").split("=")[0] not in NOT_FOR_TRAINING]
    name = next((o.removeprefix("data=") for o in kept if o.startswith("data=")), "luna16")
    experiment = CONFIG_DIR / "experiment" / f"{name}_pfednet.yaml"
    chosen = [f"experiment={experiment.stem}"] if experiment.is_file() else []
    return shlex.join(["python", "scripts/train.py", *chosen, *kept])
