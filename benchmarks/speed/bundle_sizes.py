"""What a bundle's weights take on disk, beside single precision.

The weights of each network, as they are at the start of a run (the size of bit planes does not
depend on the values), are quantised by k-means per layer, all but the first and the last layer, and
written as a bundle's ``models/model.pt``. Beside it stands a plain PyTorch file of the same
entries in single precision.

Run with ``python benchmarks/speed/bundle_sizes.py``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from medfed.config.compose import load
from medfed.delivery.bundle.weights import load_weights, save_weights
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.federation.split import float_entries
from medfed.records.tasks import build_task

MODELS = {
    "basic_unet": ["in_channels=4", "out_channels=1", "regions=[whole]"],
    "unet": ["in_channels=4", "out_channels=1", "regions=[whole]"],
    "densenet_bc": ["in_channels=1", "out_channels=2"],
    "densenet121": ["in_channels=1", "out_channels=2"],
}


def measure(name: str, bits: int, folder: Path) -> None:
    """Prints one line of the table."""
    config = load([f"model={name}", "spatial_dims=2", *MODELS[name]])
    network = build_task(config.model, None, config.seed).network
    weights = {n: t.detach() for n, t in float_entries(network).items()}
    began = time.perf_counter()
    books = quantise(weights, choose_bits(network, bits))
    clustered = time.perf_counter()
    dense = {n: t for n, t in weights.items() if n not in books}
    save_weights(folder / "model.pt", dense, books)
    load_weights(folder / "model.pt")
    torch.save(weights, folder / "fp32.pt")
    plain, packed = ((folder / f).stat().st_size for f in ("fp32.pt", "model.pt"))
    share = sum(b.indices.numel() for b in books.values()) / sum(
        t.numel() for t in weights.values()
    )
    print(
        f"{name:12}{bits:5}{plain / 1e6:9.3f}{packed / 1e6:9.3f}"
        f"{plain / packed:8.2f}{100 * share:8.1f}{clustered - began:9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=[1, 2, 3, 4])
    args = parser.parse_args()
    print("MB on disk and ratio to fp32; share of entries that are quantised; seconds of k-means")
    print(
        f"{'network':12}{'bits':>5}{'fp32':>9}{'bundle':>9}{'ratio':>8}{'share':>8}{'k-means':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.networks:
            for bits in args.bits:
                measure(name, bits, Path(folder))


if __name__ == "__main__":
    main()
