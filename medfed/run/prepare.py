"""``medfed prepare``: makes the cache before training and shows the clients."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from rich.tree import Tree
from torch import Tensor, nn

from medfed.common.console import brief, caption, size, wide_console
from medfed.common.figures import colours, legend_below, save_figures
from medfed.common.seeding import derive_seed, numpy_rng
from medfed.config.compose import CONFIG_DIR, build, part_of
from medfed.config.description import RunDescription
from medfed.config.spelling import key_of
from medfed.datamodules.augmentation import augmented
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.store import Store
from medfed.datamodules.cache.volumes import CachedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.federation.split import Block, ParameterSplit, blocks
from medfed.models.contours import region_colours
from medfed.models.segmentation_meter import slice_with_most
from medfed.records.places import Places, refuse_full
from medfed.run.cohort import cohort_record, print_cohort
from medfed.standalone.files import write_json, writing

_log = logging.getLogger(__name__)
NOT_FOR_TRAINING = ("workers", "show", "folder")
# Data without an experiment, and the data whose experiment fits them.
LIKE = {
    **dict.fromkeys(("brats_folder", "brats_challenge"), "brats"),
    **dict.fromkeys(("breast_cancer", "csv"), "clinical"),
    **dict.fromkeys(("datalist", "nnunet"), "organs"),
    **dict.fromkeys(("image_folder", "image_table"), "medmnist"),
}


def prepare(config: RunDescription) -> FederatedDataModule:
    """Makes the cache of the configured data, or completes and verifies an existing one."""
    overrides, shows = config.overrides or (), bool(config.values.show)
    if shows:
        refuse_full(Path(config.folder), otherwise=" by folder=FOLDER")
    data: FederatedDataModule = build(config.data)
    data.prepare_data()
    _log.info("%s", data.description)
    if isinstance(data, CachedDataModule):
        began = time.monotonic()
        store = data.build_cache(config.values.workers)
        for line in report(store, data.class_names, time.monotonic() - began):
            _log.info("%s", line)
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
    """Prints which parts of the configured model are shared and which are personal."""
    from medfed.run.assembly import task_for  # imported here, as the rest needs no network

    (config, task), algorithm = task_for(config, data), part_of(config, "algorithm")
    split = algorithm.split(task.network, task.personal, config.buffers)
    wide_console().print(split_tree(task.network, split, algorithm.title))


def show(data: FederatedDataModule, folder: Path, kind: str = "png") -> Path:
    """Prints what every client would get, and writes the record, the table and the pictures."""
    cohort = cohort_record(data)
    print_cohort(cohort, lines=len(cohort.clients))
    with writing(folder, "set folder to another folder"):
        sheets = {"patches": contact_sheet(data), "augmentation": augmentation_sheet(data)}
        save_figures(folder / Places.pictures_folder, sheets, kind)
        write_json(folder / Places.cohort_json, cohort.record())
        write_json(folder / Places.splits_json, data.splits())
    return folder / Places.splits_json


def report(store: Store, class_names: Sequence[str], seconds: float) -> list[str]:
    """Says in a few lines what a cache holds, and how long it took."""
    entries, how = store.entries, "Made" if store.new else "It existed already; verified"
    source = sum(count for entry in entries for _, count, _ in entry.sources)
    lines = [f"Cache: {store.folder}", f"Items: {len(entries)}"]
    if store.recipe.joined and "label" in entries[0].fields:
        counts = np.bincount(store.array("label"), minlength=len(class_names)).tolist()
        parts = [f"{count:,} {name}" for name, count in zip(class_names, counts, strict=True)]
        lines.append(f"Samples: {sum(counts):,} ({', '.join(parts)})")
    size_of = f"Size: {size(store.num_bytes)}, from sources of {size(source)}"
    return [*lines, size_of, f"{how} in {seconds:.1f} s", f"Checksum: {store.checksum}"]


def train_command(overrides: Sequence[str], saved: Path | None = None) -> str:
    """Names the command that trains on the prepared data.

    Example:
        >>> train_command(["data=brats", "data.path=/data/brats", "workers=2"])
        'medfed train experiment=brats_pfednet data=brats data.path=/data/brats'
        >>> train_command(["data=digits", "partition=shards"], Path("a/splits.json"))
        'medfed train experiment=digits_pfednet data=digits partition=saved partition.file=a/splits.json'
    """  # noqa: E501
    keys = [o for o in overrides if key_of(o) not in NOT_FOR_TRAINING]
    if saved is not None:
        keys = [o for o in keys if key_of(o).split(".")[0].split("@")[0] != "partition"]
        keys += ["partition=saved", f"partition.file={saved}"]
    if any(key_of(o) == "experiment" for o in keys):
        return shlex.join(["medfed", "train", *keys])
    name = next((o.removeprefix("data=") for o in keys if o.startswith("data=")), "brats")
    experiment = CONFIG_DIR / "experiment" / f"{LIKE.get(name, name)}_pfednet.yaml"
    chosen = [f"experiment={experiment.stem}"] if experiment.is_file() else []
    return shlex.join(["medfed", "train", *chosen, *keys])


def split_tree(network: nn.Module, split: ParameterSplit, method: str) -> Tree:
    """Draws the blocks of a network; a block that is partly personal shows its inner blocks.

    Example:
        >>> from rich import print
        >>> net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 1))
        >>> print(split_tree(net, ParameterSplit.of(net, ["1.*"]), "FedPer"))
        Sequential under FedPer: 100 parameters, 90 shared, 10 personal (10 %)
        ├── 0: 90 (90 %), shared
        └── 1: 10 (10 %), personal
    """
    names = frozenset(split.personal)
    parts = blocks(network, names)
    whole, personal = sum(b.parameters for b in parts), sum(b.personal for b in parts)

    def percent(count: int) -> str:
        return f"({brief(100 * count / max(1, whole))} %)"

    def grow(tree: Tree, parts: Sequence[Block]) -> None:
        for block in parts:
            mixed = 0 < block.personal < block.parameters
            kind = "personal" if block.personal else "shared"
            kind = f"{block.personal:,} of them personal" if mixed else kind
            share = percent(block.parameters)
            branch = tree.add(f"{block.name}: {block.parameters:,} {share}, {kind}")
            if mixed or len(parts) == 1:
                grow(branch, blocks(network, names, block.name))

    tree = Tree(
        f"{type(network).__name__} under {method}: {whole:,} parameters, {whole - personal:,} "
        f"shared, {personal:,} personal {percent(personal)}"
    )
    grow(tree, parts)
    return tree


Pixels = NDArray[np.float32]
Sample = tuple[Pixels, Pixels]
Pair = tuple[float, float]
Strip = tuple[ClientData, list[Sample], list[int]]
"""A client, some of its samples, and which channels of them are drawn."""

# Okabe and Ito's colours, which people with colour-vision deficiency can distinguish.
_CLASSES = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2", "#F0E442", "#000000")
_TILES = 12  # in a row, about
_STEP = 1.1  # from tile to tile, of which 1 is the longer side of the picture
_GROUP = 0.3  # more between samples of several channels
_ROWS, _CHOICE = 5, 16  # clients whose augmentation is drawn, and samples that one is chosen from
_COLOUR = ("red", "green", "blue")
_GREY: dict[str, Any] = {"cmap": "gray", "interpolation": "nearest"}


class_colours = partial(colours, few=_CLASSES)
"""Returns a colour per class: Okabe and Ito's colours, or a colour scale for many classes."""


def contact_sheet(data: FederatedDataModule) -> Figure | None:
    """Draws a row of training samples per client: the same samples for the same seed.

    A sample is a strip of its channels, empty where the client lacks one; a photograph is one tile.
    A coloured frame shows the class; contours show the regions. A volume is shown by its axial
    slice with most of the regions, or its middle one. Returns None if the samples are no images.
    """
    clients = list(data.clients.values())
    if len(clients[0].train["image"].shape) < 4:
        return None
    strip = [*range(1 if data.channel_names == _COLOUR else data.in_channels)]
    count = max(2, _TILES // len(strip))
    rows: list[Strip] = []
    for client in clients:
        order = numpy_rng(data.seed, "contact sheet", client.id).permutation(client.num_samples)
        batch = client.samples(torch.from_numpy(order[:count]))
        samples = map(_flat, batch["image"].cpu(), batch["label"].cpu())
        rows.append((client, list(samples), strip))
    count = max(len(samples) for _, samples, _ in rows)  # some clients have few samples
    names = list(data.channel_names) * count if len(strip) > 1 else []
    return _sheet(data, rows, dict(enumerate(names)))


def augmentation_sheet(data: FederatedDataModule) -> Figure | None:
    """Draws a training sample of each of the first clients and augmented versions of it.

    The sample is one of those with most of the regions. Of several channels it shows the first that
    the client has. Returns None without augmentation.
    """
    clients = list(data.clients.values())[:_ROWS]
    rows: list[Strip] = []
    for client in clients if len(clients[0].train["image"].shape) >= 4 else ():
        if client.augment is None:
            continue
        key = data.seed, "augmentation sheet", client.id
        order = numpy_rng(*key).permutation(client.num_samples)
        batch = client.samples(torch.from_numpy(order[:_CHOICE]))
        labelled = (batch["label"].reshape(len(batch["label"]), -1) > 0).sum(dim=1)
        chosen = int(labelled.argmax()) if batch["label"].ndim > 2 else 0
        image, label = (batch[name][[chosen] * _TILES].cpu() for name in ("image", "label"))
        new, moved = augmented(client.augment, image[1:], label[1:], derive_seed(*key))
        image[1:], label[1:] = new * client.channels.view(-1, *[1] * (new.ndim - 2)), moved
        first = int(client.channels.int().argmax())
        rows.append((client, list(map(_flat, image, label)), [first]))
    return _sheet(data, rows, {0: "original", _TILES // 2: "augmented"}) if rows else None


def _flat(image: Tensor, label: Tensor) -> Sample:
    """A slice (C, h, w), and its class () or regions (R, h, w); of a volume in RAS, front up."""
    if boxes := label.ndim == 2:
        label = _painted(label, image.shape[1:])
    regions = label.ndim > 1
    if image.ndim == 4:
        depth = image.shape[-1] // 2
        if regions and label.any():
            depth = slice_with_most(label.permute(3, 0, 1, 2))
        image, label = image[..., depth], label[..., depth] if regions else label
    if regions and not boxes:  # which are in LPS
        image, label = torch.rot90(image, 1, (-2, -1)), torch.rot90(label, 1, (-2, -1))
    return image.numpy(), label.numpy()


def _sheet(data: FederatedDataModule, rows: Sequence[Strip], names: Mapping[int, str]) -> Figure:
    """Draws the rows; `names` are written above the tiles of these numbers."""
    images = np.array([image for _, samples, _ in rows for image, _ in samples])
    photographs, strips = data.channel_names == _COLOUR, len(rows[0][2])
    count = max(len(samples) for _, samples, _ in rows)
    if not (fixed := np.abs(images).max() <= 1 + 1e-5):
        ends = np.transpose([_percentiles(channel) for channel in images.swapaxes(0, 1)])
    low, high = np.full((2, images.shape[1]), [[-1.0], [1.0]]) if fixed else ends
    height, width = (side / max(images.shape[-2:]) for side in images.shape[-2:])
    pitch, inch = strips * _STEP + _GROUP * (strips > 1), 0.62 if len(rows) > 8 else 0.8
    beside = 0.5 + 0.085 * max(len(client.id) for client, _, _ in rows)
    size = count * pitch * inch + beside, len(rows) * _STEP * inch + 0.9
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for row, (client, samples, strip) in enumerate(rows):
        present, top = client.channels.numpy(), row * _STEP + (1 - height) / 2
        for n, (image, label) in enumerate(samples):
            if not (fixed or photographs):  # z-scored: exact zeros are background
                image = np.where(image == 0, low[:, None, None], image)
            first = n * pitch + (1 - width) / 2
            for k, channel in enumerate(strip):
                left = first + k * _STEP
                extent = left, left + width, top + height, top
                if photographs:
                    picture = np.clip((image.T - low) / (high - low), 0, 1) * present
                    axes.imshow(picture.transpose(1, 0, 2), extent=extent)
                elif present[channel]:
                    scale = {"vmin": low[channel], "vmax": high[channel]}
                    axes.imshow(image[channel], extent=extent, **scale, **_GREY)
                else:
                    corner = n * pitch + k * _STEP + 0.02, row * _STEP + 0.02
                    empty = Rectangle(corner, 0.96, 0.96, fill=False, ec="0.6", lw=0.8, ls=":")
                    axes.add_patch(empty)
                    continue
                if label.ndim == 3:
                    _contours(axes, label, extent)
            if label.ndim == 0:
                sides = width + (strips - 1) * _STEP, height
                _frame(axes, int(label), data.class_names, (first, top), sides)
    axes.set(xlim=(-0.05, count * pitch - 0.05 - _GROUP * (strips > 1)))
    axes.set(ylim=(len(rows) * _STEP, -0.08), aspect="equal", anchor="E")
    heights = [row * _STEP + 0.5 for row in range(len(rows))]
    axes.set_yticks(heights, [caption(client.id) for client, _, _ in rows])
    places = [n // strips * pitch + n % strips * _STEP + 0.5 for n in names]
    axes.set_xticks(places, [*names.values()])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=7 if strips > 1 else 9, pad=1)
    axes.spines[:].set_visible(False)
    _legend(figure, data)
    return figure


def _percentiles(channel: Pixels) -> tuple[float, float]:
    """The values for black and white, of what is not background."""
    inside = channel[channel != 0]
    low, high = np.percentile(inside, (1, 99)) if len(inside) else (0.0, 0.0)
    return low, max(high, low + 1e-6)


def _contours(axes: Axes, label: Pixels, extent: tuple[float, float, float, float]) -> None:
    (left, right, bottom, top), (height, width) = extent, label.shape[1:]
    x = left + (np.arange(width) + 0.5) * (right - left) / width
    y = top + (np.arange(height) + 0.5) * (bottom - top) / height
    for region, colour in zip(label, region_colours(len(label)), strict=True):
        if region.min() < 0.5 < region.max():
            axes.contour(x, y, region, levels=[0.5], colors=[colour], linewidths=0.9)


def _frame(axes: Axes, label: int, names: Sequence[str], corner: Pair, sides: Pair) -> None:
    """A frame in the colour of the class around a sample."""
    colour = class_colours(len(names))[label]
    axes.add_patch(Rectangle(corner, *sides, fill=False, ec=colour, lw=2.2))
    if len(names) > len(_CLASSES):  # too many for colours alone
        box = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.8}
        place = corner[0] + 0.07, corner[1] + 0.1
        axes.text(*place, names[label][:8], size=7, va="top", bbox=box)


def _legend(figure: Figure, data: FederatedDataModule) -> None:
    """Legend of classes or regions, unless there are too many for colours."""
    regions = len(next(iter(data.clients.values())).train["label"].shape) > 1
    if not regions and len(data.class_names) > len(_CLASSES):
        return
    palette = (region_colours if regions else class_colours)(len(data.class_names))
    lines = [
        Line2D([], [], color=colour, lw=2.5, label=caption(name))
        for colour, name in zip(palette, data.class_names, strict=True)
    ]
    legend_below(figure, lines, 9)


def _painted(boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Paints boxes (M, 6 or more) of a volume as a region, for pictures: (1, h, w, d) uint8.

    Example:
        >>> _painted(torch.tensor([[0.0, 1.0, 0.0, 1.0, 3.0, 1.0]]), (1, 4, 1)).flatten().tolist()
        [0, 1, 1, 0]
    """
    region = torch.zeros(1, *size, dtype=torch.uint8)
    for a, b, c, d, e, f in boxes[:, :6].round().int().clamp(min=0).tolist():
        region[0, a:d, b:e, c:f] = 1
    return region
