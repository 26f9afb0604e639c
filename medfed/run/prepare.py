"""``medfed prepare``: makes the cache before training and shows the clients.

With a model, it also prints which parts of the network are shared and which are personal.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.tree import Tree
from torch import nn

from medfed.common.console import size, wide_console
from medfed.common.figures import save_figures
from medfed.common.files import write_json, write_text, writing
from medfed.config.compose import CONFIG_DIR, build
from medfed.config.description import RunDescription
from medfed.config.spelling import key_of
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.store import Store
from medfed.datamodules.cache.volumes import CachedDataModule
from medfed.federation.split import Block, ParameterSplit, blocks
from medfed.records.places import Places, refuse_full
from medfed.run.overview.table import cohort_record, print_cohort, to_csv

_log = logging.getLogger(__name__)
NOT_FOR_TRAINING = ("workers", "show", "folder")
# Data without an experiment, and the data whose experiment fits them.
LIKE = {
    "brats_folder": "brats",
    "brats_challenge": "brats",
    "breast_cancer": "clinical",
    "csv": "clinical",
    "datalist": "organs",
    "image_folder": "medmnist",
    "image_table": "medmnist",
    "nnunet": "organs",
}


def prepare(config: RunDescription) -> FederatedDataModule:
    """Makes the cache of the configured data, or completes and verifies an existing one.

    Args:
        config: The composed ``configs/prepare.yaml``.

    Returns:
        The data module; it is set up only if ``show`` is true.

    Raises:
        MedfedError: If a value, a source or the cache's folder cannot be used, or the output folder
            is not empty.
    """
    overrides, shows = config.overrides or (), bool(config.values.show)
    if shows:
        refuse_full(Path(config.folder), otherwise=" by folder=FOLDER")
    data: FederatedDataModule = build(config.data)
    data.prepare_data()
    _log.info("%s", data.description)
    if isinstance(data, CachedDataModule):
        began = time.monotonic()
        store = data.build_cache(config.values.workers)
        _log.info("%s", report(store, data.class_names, time.monotonic() - began))
    else:
        _log.info("These data need no preparation: training reads the files directly.")
    if shows:
        data.setup()
        roots = {key_of(o).split(".")[0].split("@")[0] for o in overrides}
        if roots & {"model", "experiment", "algorithm", "canonical"}:
            show_split(config, data)
        saved = show(data, Path(config.folder), config.pictures)
        _log.info("Wrote the clients and pictures to %s", saved.parent)
        _log.info("To train on these clients: %s", train_command(overrides, saved))
    else:
        _log.info("To train on these data: %s", train_command(overrides))
    return data


def show_split(config: RunDescription, data: FederatedDataModule) -> None:
    """Prints which parts of the configured model are shared and which are personal.

    Args:
        config: The composed ``configs/prepare.yaml``.
        data: A data module that is set up.

    Raises:
        ConfigError: If the model fits neither data nor method.
    """
    from medfed.run.assembly import task_for  # imported here, as the rest needs no network

    (config, task), algorithm = task_for(config, data), build(config.algorithm)
    split = algorithm.split(task.network, task.personal, config.buffers)
    wide_console().print(split_tree(task.network, split, type(algorithm).__name__))


def show(data: FederatedDataModule, folder: Path, kind: str = "png") -> Path:
    """Prints what every client would get, and writes the record, the table and the pictures.

    Args:
        data: A data module, after `setup`.
        folder: Gets ``splits.json``, ``cohort.json``, ``clients.csv`` and ``pictures``.
        kind: The format of pictures; see :func:`medfed.common.figures.save_figures`.

    Returns:
        The record, which ``partition=saved`` takes.

    Raises:
        DataError: If the folder cannot be written.
    """
    # Imported here, as it takes a while.
    from medfed.run.overview.pictures import augmentation_sheet, contact_sheet

    cohort = cohort_record(data)
    print_cohort(cohort, lines=len(cohort.clients))
    with writing(folder, "set folder to another folder"):
        sheets = {"patches": contact_sheet(data), "augmentation": augmentation_sheet(data)}
        figures = {name: sheet for name, sheet in sheets.items() if sheet is not None}
        write_text(folder / "clients.csv", to_csv(cohort))
        save_figures(folder / Places.pictures_folder, figures, kind)
        write_json(folder / Places.cohort_json, cohort.record())
        write_json(folder / Places.splits_json, data.splits())
    return folder / Places.splits_json


def report(store: Store, class_names: Sequence[str], seconds: float) -> str:
    """Says in a few lines what a cache holds, and how long it took.

    Args:
        store: The cache.
        class_names: Names of the classes.
        seconds: How long it took to make or verify the cache.

    Returns:
        The lines.
    """
    entries = store.entries
    source = sum(count for entry in entries for _, count, _ in entry.sources)
    lines = [f"Cache: {store.folder}", f"Items: {len(entries)}"]
    if store.recipe.joined and "label" in entries[0].fields:
        counts = np.bincount(store.array("label"), minlength=len(class_names)).tolist()
        parts = [f"{count:,} {name}" for name, count in zip(class_names, counts, strict=True)]
        lines.append(f"Samples: {sum(counts):,} ({', '.join(parts)})")
    lines.append(f"Size: {size(store.num_bytes)}, from sources of {size(source)}")
    if store.new:
        rate = f"{len(entries) / seconds:.1f} items/s, {size(round(source / seconds))}/s of sources"
        lines.append(f"Made in {seconds:.1f} s ({rate})")
    else:
        lines.append(f"It existed already; verified in {seconds:.1f} s")
    lines.append(f"Checksum: {store.checksum}")
    return "\n".join(lines)


def train_command(overrides: Sequence[str], saved: Path | None = None) -> str:
    """Names the command that trains on the prepared data.

    Args:
        overrides: The overrides of the command that prepared them.
        saved: A record of clients to use instead of a new partition.

    Returns:
        A command for the shell, with an experiment that fits the data.

    Example:
        >>> train_command(["data=brats", "data.path=/data/brats", "workers=2"])
        'medfed train experiment=brats_pfednet data=brats data.path=/data/brats'
        >>> train_command(["data=digits", "partition=shards"], Path("a/splits.json"))
        'medfed train experiment=digits_pfednet data=digits partition=saved \
partition.file=a/splits.json'
    """
    kept = [o for o in overrides if key_of(o) not in NOT_FOR_TRAINING]
    if saved is not None:
        kept = [o for o in kept if key_of(o).split(".")[0].split("@")[0] != "partition"]
        kept += ["partition=saved", f"partition.file={saved}"]
    if any(key_of(o) == "experiment" for o in kept):
        return shlex.join(["medfed", "train", *kept])
    name = next((o.removeprefix("data=") for o in kept if o.startswith("data=")), "brats")
    experiment = CONFIG_DIR / "experiment" / f"{LIKE.get(name, name)}_pfednet.yaml"
    chosen = [f"experiment={experiment.stem}"] if experiment.is_file() else []
    return shlex.join(["medfed", "train", *chosen, *kept])


def split_tree(network: nn.Module, split: ParameterSplit, method: str) -> Tree:
    """Draws the blocks of a network; a block that is partly personal shows its inner blocks.

    Args:
        network: The model.
        split: The network's shared and personal parts.
        method: The method that divides it, such as ``PFedNet``.

    Example:
        >>> from rich import print
        >>> net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 1))
        >>> print(split_tree(net, ParameterSplit.of(net, ["1.*"]), "FedPer"))
        Sequential under FedPer: 100 parameters, 90 shared, 10 personal (10 %)
        ├── 0: 90 (90 %), shared
        └── 1: 10 (10 %), personal
    """
    parts = blocks(network, frozenset(split.personal))
    whole, kept = sum(b.parameters for b in parts), sum(b.personal for b in parts)
    tree = Tree(
        f"{type(network).__name__} under {method}: {whole:,} parameters, {whole - kept:,} shared, "
        f"{kept:,} personal {_percent(kept, whole)}"
    )
    _grow(tree, network, parts, frozenset(split.personal), whole)
    return tree


def _grow(
    tree: Tree, network: nn.Module, parts: list[Block], personal: frozenset[str], whole: int
) -> None:
    for block in parts:
        mixed = 0 < block.personal < block.parameters
        kind = "personal" if block.personal else "shared"
        kind = f"{block.personal:,} of them personal" if mixed else kind
        share = _percent(block.parameters, whole)
        branch = tree.add(f"{escape(block.name)}: {block.parameters:,} {share}, {kind}")
        if mixed or len(parts) == 1:
            inner = blocks(network, personal, block.name)
            _grow(branch, network, inner, personal, whole)


def _percent(part: int, whole: int) -> str:
    return f"({100 * part / max(1, whole):.2g} %)"
