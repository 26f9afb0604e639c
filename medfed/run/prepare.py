"""``medfed prepare``: makes the cache before training and shows the clients."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

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
from medfed.config.compose import CONFIG_DIR, build
from medfed.config.description import RunDescription
from medfed.config.spelling import key_of
from medfed.datamodules.augmentation import augmented
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.cache.store import Store
from medfed.datamodules.cache.volumes import CachedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.patches import painted
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

    (config, task), algorithm = task_for(config, data), build(config.algorithm)
    split = algorithm.split(task.network, task.personal, config.buffers)
    wide_console().print(split_tree(task.network, split, algorithm.title))


def show(data: FederatedDataModule, folder: Path, kind: str = "png") -> Path:
    """Prints what every client would get, and writes the record, the table and the pictures."""
    cohort = cohort_record(data)
    print_cohort(cohort, lines=len(cohort.clients))
    with writing(folder, "set folder to another folder"):
        sheets = {"patches": contact_sheet(data), "augmentation": augmentation_sheet(data)}
        figures = {name: sheet for name, sheet in sheets.items() if sheet is not None}
        save_figures(folder / Places.pictures_folder, figures, kind)
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
    parts = blocks(network, frozenset(split.personal))
    whole, personal = sum(b.parameters for b in parts), sum(b.personal for b in parts)
    tree = Tree(
        f"{type(network).__name__} under {method}: {whole:,} parameters, {whole - personal:,} "
        f"shared, {personal:,} personal {_percent(personal, whole)}"
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
        branch = tree.add(f"{block.name}: {block.parameters:,} {share}, {kind}")
        if mixed or len(parts) == 1:
            inner = blocks(network, personal, block.name)
            _grow(branch, network, inner, personal, whole)


def _percent(part: int, whole: int) -> str:
    return f"({brief(100 * part / max(1, whole))} %)"


Pixels = NDArray[np.float32]
Sample = tuple[Pixels, Pixels]
Scale = tuple[float, float]
Extent = tuple[float, float, float, float]

# Okabe and Ito's colours, which people with colour-vision deficiency can distinguish.
_CLASSES = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2", "#F0E442", "#000000")
_TILES = 12  # in a row, about
_STEP = 1.1  # from tile to tile, of which 1 is the picture
_GROUP = 0.3  # more between samples of several channels
_ROWS, _CHOICE = 5, 16  # clients whose augmentation is drawn, and samples that one is chosen from
_COLOUR = ("red", "green", "blue")


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
    strips = 1 if data.channel_names == _COLOUR else data.in_channels
    count = max(2, _TILES // strips)
    samples = [_draw_samples(client, count, data.seed) for client in clients]
    lefts = [n * _pitch(strips) + c * _STEP for n in range(count) for c in range(strips)]
    names = list(data.channel_names) * count if strips > 1 else []
    ticks = [x + 0.5 for x in lefts][: len(names)]
    return _sheet(data, clients, samples, [[*range(strips)]] * len(clients), ticks, names)


def augmentation_sheet(data: FederatedDataModule) -> Figure | None:
    """Draws a training sample of each of the first clients and augmented versions of it.

    Of several channels it shows the first that the client has. Returns None without augmentation.
    """
    clients = [c for c in list(data.clients.values())[:_ROWS] if c.augment is not None]
    if not clients or len(clients[0].train["image"].shape) < 4:
        return None
    samples = [_draw_augmented(client, data.seed) for client in clients]
    first = [[int(client.channels.int().argmax())] for client in clients]
    ticks = [0.5, (_TILES + 1) / 2 * _STEP]
    return _sheet(data, clients, samples, first, ticks, ["original", "augmented"])


def _sheet(
    data: FederatedDataModule,
    clients: Sequence[ClientData],
    rows: Sequence[Sequence[Sample]],
    channels: Sequence[Sequence[int]],
    ticks: Sequence[float],
    names: Sequence[str],
) -> Figure:
    """Draws a row of samples per client, each as a strip of some channels, with names on top."""
    photographs = data.channel_names == _COLOUR
    scales = _scales([np.stack([image for image, _ in samples]) for samples in rows])
    count, strips = len(rows[0]), len(channels[0])
    figure, axes = _empty([client.id for client in clients], count, strips)
    for row, (client, samples, strip) in enumerate(zip(clients, rows, channels, strict=True)):
        present = client.channels.numpy()
        for n, (image, label) in enumerate(samples):
            left = n * _pitch(strips)
            if photographs:
                picture = np.clip([_unit(c, s) for c, s in zip(image, scales, strict=True)], 0, 1)
                picture[~present] = 0
                axes.imshow(picture.transpose(1, 2, 0), extent=_extent(left, row, image[0]))
            for k, c in enumerate(strip):
                if not photographs:
                    _tile(axes, image[c], scales[c], left + k * _STEP, row, bool(present[c]))
                if label.ndim == 3 and (photographs or present[c]):
                    _contours(axes, label, left + k * _STEP, row)
            if label.ndim == 0:
                extent = _extent(left, row, image[0])
                _frame(axes, int(label), data.class_names, extent, (strips - 1) * _STEP)
    axes.set(xlim=(-0.05, count * _pitch(strips) - 0.05 - _GROUP * (strips > 1)))
    axes.set(ylim=(len(clients) * _STEP, -0.08))
    axes.set_yticks(
        [row * _STEP + 0.5 for row in range(len(clients))], [caption(c.id) for c in clients]
    )
    axes.set_xticks(ticks, names)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=7 if strips > 1 else 9, pad=1)
    axes.spines[:].set_visible(False)
    _legend(figure, data)
    return figure


def _draw_augmented(client: ClientData, seed: int) -> list[Sample]:
    """A sample, chosen among those with most of the regions, and augmented versions of it."""
    assert client.augment is not None
    order = numpy_rng(seed, "augmentation sheet", client.id).permutation(client.num_samples)
    batch = client.samples(torch.from_numpy(order[:_CHOICE]))
    labelled = (batch["label"].reshape(len(batch["label"]), -1) > 0).sum(dim=1)
    chosen = int(labelled.argmax()) if batch["label"].ndim > 2 else 0
    image, label = (batch[key][chosen : chosen + 1].cpu() for key in ("image", "label"))
    images, labels = (x.expand(_TILES - 1, *x.shape[1:]) for x in (image, label))
    key = derive_seed(seed, "augmentation sheet", client.id)
    new, moved = augmented(client.augment, images, labels, key)
    new = new * client.channels.view(-1, *[1] * (new.ndim - 2))
    return _flat([(image[0], label[0]), *zip(new, moved, strict=True)])


def _pitch(strips: int) -> float:
    """From sample to sample."""
    return strips * _STEP + _GROUP * (strips > 1)


def _draw_samples(client: ClientData, count: int, seed: int) -> list[Sample]:
    """Images (C, h, w), and labels: classes () or regions (R, h, w)."""
    order = numpy_rng(seed, "contact sheet", client.id).permutation(client.num_samples)[:count]
    batch = client.samples(torch.from_numpy(order))
    return _flat(zip(batch["image"].cpu(), batch["label"].cpu(), strict=True))


def _flat(samples: Iterable[tuple[Tensor, Tensor]]) -> list[Sample]:
    """One slice of each volume; volumes with regions are in RAS and turned so that front is up."""
    flat = []
    for image, label in samples:
        if boxes := label.ndim == 2:
            label = painted(label, image.shape[1:])
        regions = label.ndim > 1
        if image.ndim == 4:
            depth = image.shape[-1] // 2
            if regions and label.any():
                depth = slice_with_most(label.permute(3, 0, 1, 2))
            image, label = image[..., depth], label[..., depth] if regions else label
        if regions and not boxes:  # which are in LPS
            image, label = torch.rot90(image, 1, (-2, -1)), torch.rot90(label, 1, (-2, -1))
        flat.append((image.numpy(), label.numpy()))
    return flat


def _scales(images: Sequence[Pixels]) -> list[Scale]:
    """The values for black and white of every channel: [-1, 1] if fixed, else percentiles."""
    pooled = np.concatenate(images).swapaxes(0, 1)
    if np.abs(pooled).max() <= 1 + 1e-5:
        return [(-1.0, 1.0)] * len(pooled)
    scales = []
    for channel in pooled:
        inside = channel[channel != 0]
        low, high = np.percentile(inside, (1, 99)) if len(inside) else (0.0, 0.0)
        scales.append((float(low), float(max(high, low + 1e-6))))
    return scales


def _unit(channel: Pixels, scale: Scale) -> Pixels:
    low, high = scale
    return (channel - low) / (high - low)


def _extent(left: float, row: int, picture: Pixels) -> Extent:
    """The extent of a picture: in a unit square whose longer side it fills, rows downwards."""
    height, width = (side / max(picture.shape[:2]) for side in picture.shape[:2])
    x, y = left + (1 - width) / 2, row * _STEP + (1 - height) / 2
    return x, x + width, y + height, y


def _tile(axes: Axes, image: Pixels, scale: Scale, left: float, row: int, present: bool) -> None:
    if not present:
        corner = (left + 0.02, row * _STEP + 0.02)
        axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, ec="0.6", lw=0.8, ls=":"))
        return
    low, high = scale
    if scale != (-1.0, 1.0):  # z-scored: exact zeros are background
        image = np.where(image == 0, low, image)
    extent = _extent(left, row, image)
    axes.imshow(image, cmap="gray", vmin=low, vmax=high, extent=extent, interpolation="nearest")


def _contours(axes: Axes, label: Pixels, left: float, row: int) -> None:
    x0, x1, y1, y0 = _extent(left, row, label[0])
    height, width = label.shape[1:]
    x = x0 + (np.arange(width) + 0.5) * (x1 - x0) / width
    y = y0 + (np.arange(height) + 0.5) * (y1 - y0) / height
    for region, colour in zip(label, region_colours(len(label)), strict=True):
        if region.min() < 0.5 < region.max():
            axes.contour(x, y, region, levels=[0.5], colors=[colour], linewidths=0.9)


def _frame(axes: Axes, label: int, names: Sequence[str], extent: Extent, more: float) -> None:
    """A frame in the colour of the class around a tile and the `more` to its right."""
    x0, x1, y1, y0 = extent
    colour = class_colours(len(names))[label]
    axes.add_patch(Rectangle((x0, y0), x1 - x0 + more, y1 - y0, fill=False, ec=colour, lw=2.2))
    if len(names) > len(_CLASSES):  # too many for colours alone
        box = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.8}
        axes.text(x0 + 0.07, y0 + 0.1, names[label][:8], size=7, va="top", bbox=box)


def _empty(names: Sequence[str], count: int, strips: int) -> tuple[Figure, Axes]:
    inch = 0.62 if len(names) > 8 else 0.8
    beside = 0.5 + 0.085 * max(map(len, names))
    size = (count * _pitch(strips) * inch + beside, len(names) * _STEP * inch + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(aspect="equal", anchor="E")
    return figure, axes


def _legend(figure: Figure, data: FederatedDataModule) -> None:
    """Legend of classes or regions, unless there are too many for colours."""
    regions = next(iter(data.clients.values())).train["label"].shape
    many = len(data.class_names) > len(_CLASSES)
    if many and len(regions) == 1:
        return
    palette = region_colours if len(regions) > 1 else class_colours
    lines = [
        Line2D([], [], color=colour, lw=2.5, label=caption(name))
        for colour, name in zip(palette(len(data.class_names)), data.class_names, strict=True)
    ]
    legend_below(figure, lines, 9)
