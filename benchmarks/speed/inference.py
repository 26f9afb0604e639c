"""What a bundle's forms cost: bytes on disk, and CPU time of a prediction.

Networks of the experiments as PyTorch computes them; the same with weights of 2 bits (k-means), as
in a bundle with ``bits=2``; the ONNX file; and the ONNX file of 8-bit integers (``onnx=int8``, 32
images for the ranges). Two bits save bytes and no time: each weight is looked up as the model is
loaded, and computed with in single precision. "Off" is the largest difference of a logit from
PyTorch's, as a share of the largest logit, at random weights with statistics of random images;
``medfed export`` says what it does to a trained model.

    python benchmarks/speed/inference.py

One thread; the forms alternate, and times are medians of CPU time per batch of 4 images.
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

from medfed.delivery.bundle.onnx_file import OnnxNetwork, save_int8, save_onnx
from medfed.delivery.bundle.weights import save_weights, with_codebooks
from medfed.delivery.export.client_model import choose_bits, quantise
from medfed.federation.split import float_entries
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet

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
        save_weights(dense, state, {})
        save_weights(packed, {n: t for n, t in state.items() if n not in books}, books)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| network | PyTorch: kB | ms | 2 bits: kB | ms | ONNX: kB | ms | int8: kB | ms | off |")
    for name in given.networks:
        print("| " + " | ".join(row(name, given.repeats)) + " |", flush=True)


if __name__ == "__main__":
    main()
