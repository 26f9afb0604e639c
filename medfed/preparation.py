"""What ``scripts/prepare.py`` does, ahead of training: the cache, and a look at the clients."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from medfed.config import CONFIG_DIR, build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache import Cached, Store
from medfed.errors import ConfigError, DataError
from medfed.reports.cohort_report import print_clients, summarise_clients, to_csv
from medfed.reports.pictures import save_figures
from medfed.run_folder import write_json, write_text

_log = logging.getLogger(__name__)
NOT_FOR_TRAINING = ("workers", "show", "folder")
# Whose experiment fits data that have none of their own.
LIKE = {
    "brats_folder": "brats",
    "brats_challenge": "brats",
    "breast_cancer": "clinical",
    "csv": "clinical",
    "image_folder": "medmnist",
}


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
        saved = show(data, Path(config.folder))
        _log.info("Clients and pictures: %s", saved.parent)
        _log.info("These clients again: %s", train_command(overrides, saved))
    else:
        _log.info("Train on them: %s", train_command(overrides))
    return data


def show(data: FederatedDataModule, folder: Path) -> Path:
    """Prints what every client would get, and writes the record, the table and the pictures.

    Args:
        data: A data module that is set up.
        folder: Where to: ``splits.json``, ``clients.csv`` and ``pictures``.

    Returns:
        The record, which ``partition=saved`` takes.

    Raises:
        DataError: If the folder cannot be written.
    """
    from medfed.reports.cohort_pictures import draw_cohort  # late: draws, and imports, for a while

    clients = summarise_clients(data)
    print_clients(clients, data.class_names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = draw_cohort(data, clients)
        write_text(folder / "clients.csv", to_csv(clients, data.class_names))
        save_figures(folder / "pictures", figures)
        write_json(folder / "splits.json", data.splits())
    except OSError as error:
        for partial in folder.rglob("*.partial"):
            partial.unlink()
        raise DataError(
            f"Cannot write {folder} ({error.strerror}); make room, or set folder to another place."
        ) from error
    return folder / "splits.json"


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


def train_command(overrides: Sequence[str], saved: Path | None = None) -> str:
    """Names the command that trains on the prepared data.

    Args:
        overrides: What was typed to prepare them.
        saved: A record of clients to take, instead of making them anew by a partition.

    Returns:
        A command for the shell, with an experiment that fits the data.

    Example:
        >>> train_command(["data=brats", "data.path=/data/brats", "workers=2"])
        'python scripts/train.py experiment=brats_pfednet data=brats data.path=/data/brats'
        >>> train_command(["data=digits", "partition=shards"], Path("a/splits.json"))
        'python scripts/train.py experiment=digits_pfednet data=digits partition=saved \
partition.file=a/splits.json'
    """
    kept = [o for o in overrides if _key(o) not in NOT_FOR_TRAINING]
    if saved is not None:
        kept = [o for o in kept if _key(o).split(".")[0].split("@")[0] != "partition"]
        kept += ["partition=saved", f"partition.file={saved}"]
    name = next((o.removeprefix("data=") for o in kept if o.startswith("data=")), "luna16")
    experiment = CONFIG_DIR / "experiment" / f"{LIKE.get(name, name)}_pfednet.yaml"
    chosen = [f"experiment={experiment.stem}"] if experiment.is_file() else []
    return shlex.join(["python", "scripts/train.py", *chosen, *kept])


def _key(override: str) -> str:
    return override.lstrip("+~").split("=")[0]
