"""What a bundle's forms cost: bytes on disk, and CPU time of a prediction.

    python benchmarks/speed/bundles.py

First the networks of the experiments as PyTorch computes them; the same with weights of 2 bits
(k-means), as in a bundle with ``bits=2``; the ONNX file; and the ONNX file of 8-bit integers
(``onnx=int8``, 32 images for the ranges). Two bits save bytes and no time: each weight is looked up
as the model is loaded, and computed with in single precision. "Off" is the largest difference of a
logit from PyTorch's, as a share of the largest logit, at random weights with statistics of random
images; ``medfed export`` says what it does to a trained model. One thread; the forms alternate, and
times are medians of CPU time per batch of 4 images.

Then the size of ``models/model.pt`` by bits, beside a plain PyTorch file of the same entries, at
the start of a run (bit planes have one size for all values); the first and last layer stay.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from monai.networks.nets import BasicUNet
from torch import Tensor, nn

from medfed.config.compose import load
from medfed.delivery.bundle.onnx_file import OnnxNetwork, save_int8, save_onnx
from medfed.delivery.bundle.weights import load_weights, save_packed, with_codebooks
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.federation.split import float_entries
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet
from medfed.records.tasks import build_task

LEVELS = (8, 16, 32, 64, 128)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small_cnn": (lambda: SmallCNN(2, 1, 2), (1, 28, 28)),
    "densenet_bc": (lambda: densenet_bc(2, 1, 2), (1, 32, 32)),
    "unet_2d": (
        lambda: unet(2, 4, 3, channels=LEVELS, strides=[2] * 4, num_res_units=1),
        (4, 64, 64),
    ),
    "basic_unet": (lambda: BasicUNet(2, 4, 3, features=(16, 16, 32, 64, 128, 16)), (4, 64, 64)),
}


def row(name: str, repeats: int) -> list[str]:
    """Measures one network."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, images = make().train(), torch.randn(4, *shape)
    with torch.no_grad():
        for _ in range(20):  # running statistics
            network(torch.randn(8, *shape))
    network.eval()
    state = {n: t.detach() for n, t in float_entries(network).items()}
    books = quantise(state, choose_bits(network, 2, None))
    with tempfile.TemporaryDirectory() as folder:
        dense, packed = Path(folder, "dense.pt"), Path(folder, "packed.pt")
        onnx, integers = Path(folder, "model.onnx"), Path(folder, "int8.onnx")
        save_packed(dense, state, {})
        save_packed(packed, {n: t for n, t in state.items() if n not in books}, books)
        save_onnx(onnx, network, shape)
        integers.write_bytes(onnx.read_bytes())
        save_int8(integers, torch.randn(32, *shape))
        two_bits = make().eval()
        two_bits.load_state_dict(network.state_dict() | with_codebooks(state, books))
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            "PyTorch": network,
            "2 bits": two_bits,
            "ONNX": OnnxNetwork(onnx),
            "int8": OnnxNetwork(integers),
        }
        files = dict(zip(forms, (dense, packed, onnx, integers), strict=True))
        sizes = {form: path.stat().st_size / 1000 for form, path in files.items()}
    took: dict[str, list[float]] = {form: [] for form in forms}
    with torch.no_grad():
        for _ in range(repeats + 3):
            for form, compute in forms.items():
                begin = time.process_time()
                compute(images)
                took[form].append(1000 * (time.process_time() - begin))
        plain = network(images)
        off = float((forms["int8"](images) - plain).abs().max() / plain.abs().max())
    times = {form: statistics.median(each[3:]) for form, each in took.items()}
    cells = [f"{sizes[form]:.0f} | {times[form]:.2f}" for form in forms]
    return [name, *cells, f"{off:.2f}"]


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
    save_packed(folder / "model.pt", dense, books)
    load_weights(folder / "model.pt")
    torch.save(weights, folder / "fp32.pt")
    plain, packed = ((folder / f).stat().st_size for f in ("fp32.pt", "model.pt"))
    share = sum(b.indices.numel() for b in books.values()) / sum(
        t.numel() for t in weights.values()
    )
    print(
        f"{name:12}{bits:5}{plain / 1e6:9.3f}{packed / 1e6:9.3f}"
        f"{plain / packed:8.2f}{100 * share:8.1f}{clustered - began:8.2f}"
    )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=[1, 2, 3, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| network | PyTorch: kB | ms | 2 bits: kB | ms | ONNX: kB | ms | int8: kB | ms | off |")
    for name in args.networks:
        print("| " + " | ".join(row(name, args.repeats)) + " |", flush=True)
    print("MB on disk and ratio to fp32; share of entries that are quantised; seconds of k-means")
    heads = ("ratio", "share", "k-means")
    print(f"{'model':12} bits     fp32   bundle" + "".join(f"{head:>8}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for bits in args.bits:
                measure(name, bits, Path(folder))


if __name__ == "__main__":
    main()
