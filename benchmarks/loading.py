"""What loading from the cache costs beside training.

2,000 patches (1, 32, 32) as int16 in a cache on disk, as `scripts/prepare.py data=luna16` makes it,
and one client that maps all of them, batches of 32. An epoch of loading draws the order, gathers
the rows from the mapped file and scales them to [-1, 1]; an epoch of training also runs forward,
backward and the optimizer's step of a DenseNet-BC of growth 6 on every batch. With ``--layers 16``
that is the network of pFedNet's LUNA16 experiment; the default of 4 layers per block is smaller and
so the harder comparison.

Method: CPU time of the process, one thread. Epochs of loading alone and of loading with training
alternate; the share is loading over both. As a floor, the same loop over the same patches as float
tensors in memory is timed, too.

Run with ``python benchmarks/loading.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medfed.datamodules.cache.building import build
from medfed.datamodules.cache.store import Item, Recipe, Store
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.ct_patches import to_unit
from medfed.datamodules.on_demand import ArrayRows
from medfed.models.networks.densenet import densenet_bc

WINDOW = (-1000, 400)
BATCH, SCANS = 32, 20


def read(seed: int, patches: int, size: int) -> Mapping[str, NDArray[Any]]:
    """One scan's patches: noise, as only their number and size count here."""
    rng = np.random.default_rng(seed)
    image = rng.integers(*WINDOW, (patches, 1, size, size), dtype=np.int16)
    return {"image": image, "label": rng.integers(0, 2, patches)}


def make(folder: Path, patches: int, size: int) -> Store:
    items = tuple(Item(f"scan_{i}", (), (), (i, patches // SCANS, size)) for i in range(SCANS))
    return build(Recipe("loading", {"size": size}, items, read), folder, workers=1, quiet=True)


def client(store: Store, mapped: bool) -> ClientData:
    """One client with all rows, mapped from the cache or as tensors."""
    labels = torch.from_numpy(np.array(store.array("label")))
    one = torch.ones(1, dtype=torch.bool)
    convert = partial(to_unit, window=WINDOW, present=one.numpy())
    images: ArrayRows | Tensor = ArrayRows(
        store.path("image"), np.arange(len(labels), dtype=np.int64), convert
    )
    if not mapped:
        images = images.take(torch.arange(len(labels)))
    block = {"image": images, "label": labels, "case": torch.zeros_like(labels)}
    return ClientData("client", block, {}, one, labels.bincount().float(), {}, BATCH)


def load(data: ClientData, seed: int) -> float:
    """CPU seconds of an epoch of loading."""
    begin = time.process_time()
    for _ in data.train_batches(seed):
        pass
    return time.process_time() - begin


def train(data: ClientData, seed: int, network: torch.nn.Module) -> float:
    """CPU seconds of an epoch of loading and training."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    begin = time.process_time()
    for batch in data.train_batches(seed):
        optimizer.zero_grad()
        F.cross_entropy(network(batch["image"]), batch["label"]).backward()
        optimizer.step()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=2000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4, help="in each of three blocks")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = densenet_bc(2, 1, 2, block_config=[args.layers] * 3)
    with tempfile.TemporaryDirectory() as folder:
        store = make(Path(folder), args.patches, args.size)
        mapped, memory = client(store, True), client(store, False)
        seeds = range(args.epochs)
        first = [next(iter(data.train_batches(0)))["image"] for data in (mapped, memory)]
        if not torch.equal(*first):
            raise AssertionError("The cache gives other batches than memory.")
        times = [(load(mapped, s), load(memory, s), train(mapped, s, network)) for s in seeds]
    loading, floor, training = (statistics.median(t) for t in zip(*times, strict=True))
    shares = sorted(a / c for a, _, c in times)
    batches = -(-args.patches // BATCH)
    print(f"{args.patches} patches, {batches} batches of {BATCH}, {args.epochs} epochs")
    print(f"us per batch: mapped {1e6 * loading / batches:.0f}, memory {1e6 * floor / batches:.0f}")
    print(f"ms per batch with training: {1e3 * training / batches:.2f}")
    print(
        f"share of loading: median {100 * statistics.median(shares):.2f} %, "
        f"range {100 * shares[0]:.2f} to {100 * shares[-1]:.2f} %"
    )


if __name__ == "__main__":
    main()
