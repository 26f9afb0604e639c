"""What training batches cost beside the training on them.

Three loaders, each beside the network that is trained on what it loads:

- ``cache``: 2,000 CT patches (1, 32, 32), as int16 in a cache on disk, as `medfed prepare
  data=luna16` makes it, gathered from the mapped file and scaled to [-1, 1], batches of 32; a
  DenseNet-BC of growth 6 with ``--layers`` in each of three blocks (16 in pFedNet's experiment; the
  default of 4 is smaller and so the harder comparison);
- ``2-D`` and ``3-D``: patches (4, 64, 64), batches of 16, and (4, 48, 48, 48), batches of 2, cut
  anew in every epoch out of volumes in memory; MONAI's U-Net with 16 to 128 channels and two
  residual units, nnU-Net's first levels being twice as wide. Beside them the recipes of
  ``configs/augment``, their seeding anew for every batch included.

Method: CPU time of the process, one thread. For each recipe, epochs of loading alone alternate with
epochs of loading and training, and a share is loading over both, the median of the epochs.

Run with ``python benchmarks/loading.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.networks.nets import UNet
from numpy.typing import NDArray
from torch import Tensor, nn

from medfed.config.compose import build as built
from medfed.config.compose import load as composed
from medfed.datamodules.cache.store import Item, Recipe, Store, build
from medfed.datamodules.client_data import ArrayRows, Block, ClientData
from medfed.datamodules.patches import FreshPatches, volume_of
from medfed.models.networks.densenet import densenet_bc
from medfed.standalone.ct_patches import to_unit

WINDOW = (-1000, 400)
BATCH, SCANS = 32, 20
RECIPES = ("none", "light", "nnunet")
BUDGETS = {"none": (2, 2), "light": (12, 12), "nnunet": (35, 20)}  # percent, in 2-D and 3-D
Loss = Callable[[Tensor, Tensor], Tensor]


def read(seed: int, patches: int, size: int) -> Mapping[str, NDArray[Any]]:
    """One scan's patches: noise, as only their number and size count here."""
    rng = np.random.default_rng(seed)
    image = rng.integers(*WINDOW, (patches, 1, size, size), dtype=np.int16)
    return {"image": image, "label": rng.integers(0, 2, patches)}


def make(folder: Path, patches: int, size: int) -> Store:
    items = tuple(Item(f"scan_{i}", (), (), (i, patches // SCANS, size)) for i in range(SCANS))
    return build(Recipe("loading", {"size": size}, items, read), folder, workers=1, quiet=True)


def mapped(store: Store) -> ClientData:
    """One client with all rows, mapped from the cache."""
    labels = torch.from_numpy(np.array(store.array("label")))
    one = torch.ones(1, dtype=torch.bool)
    convert = partial(to_unit, window=WINDOW, present=one.numpy())
    images = ArrayRows(store.path("image"), np.arange(len(labels), dtype=np.int64), convert)
    block: Block = {"image": images, "label": labels, "case": torch.zeros_like(labels)}
    return ClientData("client", block, {}, one, labels.bincount().float(), {}, BATCH)


def volumes(dims: int, recipe: str, patches: int) -> ClientData:
    """One client with three noisy heads in air, of which patches are cut."""
    size, shape = ((64, 64, 1), (160, 192, 40)) if dims == 2 else ((48, 48, 48), (96, 112, 80))
    generator = torch.Generator().manual_seed(0)
    axes = torch.meshgrid(*[torch.linspace(-1, 1, n) for n in shape], indexing="ij")
    radius = sum((a**2 for a in axes), torch.zeros(shape)).sqrt()
    label = (radius < 0.4)[None].to(torch.uint8)
    heads = []
    for _ in range(3):
        image = torch.randn(4, *shape, generator=generator) * (radius < 0.9)
        heads.append([volume_of(image, label, radius < 0.9, np.random.default_rng(0))])
    fresh = FreshPatches(heads, patches, 0.25, size, 1 if dims == 2 else None)
    train, four = fresh.block(0), torch.ones(4, dtype=torch.bool)
    counts, batch = torch.ones(2), 16 if dims == 2 else 2
    augmentation = built(composed([f"augment={recipe}"]).augment)
    augment = augmentation.build(size[:dims], (0, 1, 2), True) if augmentation.alters else None
    return ClientData("client", train, {}, four, counts, {}, batch, augment=augment, fresh=fresh)


def load(data: ClientData, seed: int, batches: int) -> float:
    """CPU seconds of loading some batches."""
    begin = time.process_time()
    for _ in islice(data.train_batches(seed), batches):
        pass
    return time.process_time() - begin


def train(data: ClientData, seed: int, batches: int, network: nn.Module, loss: Loss) -> float:
    """CPU seconds of loading and training."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    begin = time.process_time()
    for batch in islice(data.train_batches(seed), batches):
        optimizer.zero_grad()
        loss(network(batch["image"]), batch["label"]).backward()
        optimizer.step()
    return time.process_time() - begin


def measure(name: str, data: ClientData, network: nn.Module, loss: Loss, epochs: int) -> float:
    """Prints and returns the share of loading, in percent."""
    batches = -(-data.num_samples // data.batch_size)
    load(data, 0, batches)
    pairs = [
        (load(data, s, batches), train(data, s, batches, network, loss)) for s in range(epochs)
    ]
    shares = sorted(100 * a / b for a, b in pairs)
    loading, both = (1e3 * statistics.median(t) / batches for t in zip(*pairs, strict=True))
    print(
        f"{name:12} {loading:8.2f} ms of {both:8.2f} ms per batch, share of loading: median "
        f"{statistics.median(shares):.2f} %, {shares[0]:.2f} to {shares[-1]:.2f} %",
        flush=True,
    )
    return statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--patches", type=int, default=2000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4, help="in each of three blocks")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--per-head", type=int, default=32, help="patches of each of three heads")
    parser.add_argument("--dims", type=int, nargs="*", default=[2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network: nn.Module = densenet_bc(2, 1, 2, block_config=[args.layers] * 3)
    with tempfile.TemporaryDirectory() as folder:
        data = mapped(make(Path(folder), args.patches, args.size))
        measure("cache", data, network, F.cross_entropy, args.epochs)
    for dims in args.dims:
        network = UNet(dims, 4, 1, (16, 32, 64, 128), (2, 2, 2), num_res_units=2)
        per_head = args.per_head if dims == 2 else max(args.per_head // 4, 1)
        for recipe in RECIPES:
            data = volumes(dims, recipe, per_head)
            name = f"{dims}-D {recipe}"
            share = measure(name, data, network, F.binary_cross_entropy_with_logits, args.epochs)
            budget = BUDGETS[recipe][dims - 2]
            print(f"{'':12} budget {budget} %: {'kept' if share <= budget else 'exceeded'}")


if __name__ == "__main__":
    main()
