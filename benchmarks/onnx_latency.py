"""Latency of ONNX files with packed weights beside the same in single precision, once loaded.

Both files hold the same weights (2 bits by default), so that both compute the same numbers; this is
checked. ONNX Runtime loads the packed file in one pass ("direct"), and in two as
``scripts/predict.py`` does it ("folded": first the weights are decoded, then the plain network is
loaded). Blocks of runs in one thread alternate, in CPU time of this process. Also printed: the CPU
time of loading, the bytes of both files, and the entropy bound of the weights (dense entries and
centres as they are, each index at the entropy of its tensor).

Run with ``python benchmarks/onnx_latency.py``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medfed.config.compose import load
from medfed.delivery.bundle.onnx_file import OnnxNetwork, save_onnx
from medfed.delivery.bundle.weights import entropy_bound
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.federation.split import float_entries
from medfed.records.tasks import build_task

SEGMENTS = ["in_channels=4", "out_channels=1", "regions=[whole]"]
CLASSES = ["in_channels=1", "out_channels=2"]
MODELS = {
    "basic_unet": (SEGMENTS, (4, 64, 64)),
    "unet": (SEGMENTS, (4, 64, 64)),
    "densenet_bc": (CLASSES, (1, 32, 32)),
    "densenet121": (CLASSES, (1, 64, 64)),
}


def cpu_time(network: OnnxNetwork, image: Tensor, runs: int) -> float:
    """Returns CPU milliseconds per run."""
    began = time.process_time()
    for _ in range(runs):
        network(image)
    return 1e3 * (time.process_time() - began) / runs


def write(name: str, bits: int, folder: Path) -> tuple[Path, Path, int]:
    """Writes the packed file and the plain one; returns them, and the entropy bound in bytes."""
    overrides, shape = MODELS[name]
    config = load([f"model={name}", "spatial_dims=2", *overrides])
    network = build_task(config.model, None, config.seed).network.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # like vectors would be stored once
        for tensor in float_entries(network).values():
            if tensor.ndim == 1:
                tensor.add_(0.1 * torch.rand(tensor.shape, generator=generator))
    weights = {n: t.detach().clone() for n, t in float_entries(network).items()}
    books = quantise(weights, choose_bits(network, bits))
    network.load_state_dict({n: b.dense() for n, b in books.items()}, strict=False)
    packed, plain = folder / f"{name}_packed.onnx", folder / f"{name}_plain.onnx"
    save_onnx(packed, network, books, shape)
    save_onnx(plain, network, {}, shape)
    dense = {n: t for n, t in weights.items() if n not in books}
    return packed, plain, entropy_bound(dense, books)


def load_time(path: Path, fold: bool = False) -> tuple[OnnxNetwork, float]:
    """Returns a loaded file, and the CPU milliseconds that loading took."""
    began = time.process_time()
    network = OnnxNetwork(path, fold=fold)
    return network, 1e3 * (time.process_time() - began)


def measure(name: str, bits: int, blocks: int, runs: int, folder: Path) -> None:
    """Prints one line of the table."""
    packed_file, plain_file, bound = write(name, bits, folder)
    load_time(plain_file)  # the first of a process initialises the runtime
    loaded = [load_time(plain_file), load_time(packed_file), load_time(packed_file, fold=True)]
    image = torch.randn(1, *MODELS[name][1], generator=torch.Generator().manual_seed(1))
    for network, _ in loaded[1:]:
        torch.testing.assert_close(network(image), loaded[0][0](image), rtol=0, atol=1e-5)
    times = alternate([network for network, _ in loaded], image, blocks, runs)
    sizes = [p.stat().st_size for p in (plain_file, packed_file)]
    print(
        f"{name:12}{np.median(times[:, 0]):8.3f}",
        *(quartiles(times[:, i] / times[:, 0]) for i in (1, 2)),
        *(f"{ms:7.1f}" for _, ms in loaded),
        *(f"{size / 1e6:8.3f}" for size in (*sizes, bound)),
        f"{sizes[0] / sizes[1]:8.2f}",
        flush=True,
    )


def alternate(networks: list[OnnxNetwork], image: Tensor, blocks: int, runs: int) -> np.ndarray:
    """Returns CPU milliseconds, (blocks, networks); every other block in the opposite order."""
    times = np.empty((blocks, len(networks)))
    for block in range(blocks):
        for i in list(range(len(networks)))[:: 1 if block % 2 else -1]:
            times[block, i] = cpu_time(networks[i], image, runs)
    return times


def quartiles(ratios: np.ndarray) -> str:
    """Median, and in brackets the quartiles."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{f'{middle:.3f} ({low:.3f} to {high:.3f})':>24}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--runs", type=int, default=25, help="per block and file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("CPU ms per image, ratio of packed to fp32 (quartiles); CPU ms to load; MB on disk")
    print(
        f"{'network':12}{'fp32':>8} {'direct':>24} {'folded':>24} {'fp32':>7} {'direct':>7} "
        f"{'folded':>7} {'fp32':>8} {'packed':>8} {'bound':>8} {'smaller':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.networks:
            measure(name, args.bits, args.blocks, args.runs, Path(folder))


if __name__ == "__main__":
    main()
