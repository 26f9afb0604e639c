"""Bytes and time of every codec on vectors of 7 million elements.

Four vectors: Gaussian noise; a gradient of DenseNet-121 (one batch of 8 random images; its 7
million parameters have very unlike scales); and both after CER, the exact fused lasso with gamma
equal to the mean magnitude, which leaves them piecewise constant. Codecs are those of
``configs/codec`` with their defaults. Beside them: a copy of the bytes in memory (memcpy), and the
fp32 bytes through Zstandard, level 3, which loses nothing. It also follows one codec, whose bytes
an entropy coder shortens.

Bits per element are lengths of the byte strings, headers included. Encode plus decode is timed in
CPU time next to ``torch.topk(|v|, d/100)``, alternating, and the ratio is the quotient of the
medians. For STC, bits per sent element are compared with the entropy of random positions,
H(p)/p + 1. Run with ``python benchmarks/speed/codecs.py``; ``--elements 1000`` is a quick look.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from monai.networks.nets import DenseNet121
from omegaconf import OmegaConf
from torch import Tensor

from medfed.config.compose import CONFIG_DIR, build
from medfed.federation.wire.channel import compress, decompress
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.stc import STC
from medfed.functional.prox import fused_lasso

RATES = (0.1, 0.01, 0.001)


class Coder(NamedTuple):
    """How a vector becomes bytes, by a random generator, and a vector again, of a length."""

    encode: Callable[..., bytes]
    decode: Callable[[bytes, int], Tensor]


MEMCPY = Coder(
    lambda vector, rng: vector.numpy().tobytes(),
    lambda data, length: torch.frombuffer(bytearray(data), dtype=torch.float32),
)


def then_zstd(codec: Any) -> Coder:
    """Returns a codec whose bytes also pass Zstandard, as ``channel.up.zstd=3`` does."""
    return Coder(
        lambda vector, rng: compress(codec.encode(vector, rng), 3),
        lambda data, length: codec.decode(decompress(data, 1024 + 16 * length), length),
    )


ZSTD = Coder(
    lambda vector, rng: compress(Dense().encode(vector), 3),
    lambda data, length: Dense().decode(decompress(data, 1024 + 16 * length), length),
)


def codecs() -> dict[str, Any]:
    """Every configured codec by its name, after what they are compared with."""
    files = sorted((CONFIG_DIR / "codec").glob("*.yaml"))
    nodes: dict[str, Any] = {f.stem: OmegaConf.create({"node": OmegaConf.load(f)}) for f in files}
    built = {name: build(node.node) for name, node in nodes.items()}
    name = "runlength_codebook"
    return {"memcpy": MEMCPY, "zstd": ZSTD, **built, f"{name}+zstd": then_zstd(built[name])}


def gradient() -> Tensor:
    """The gradient of DenseNet-121 in one vector."""
    torch.manual_seed(0)
    network = DenseNet121(2, 1, 2)
    loss = F.cross_entropy(network(torch.randn(8, 1, 64, 64)), torch.arange(8) % 2)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def vectors(elements: int) -> dict[str, Tensor]:
    """The four vectors, the gradient cut to ``elements`` if it is longer."""
    noise = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    rough = {"Gaussian": noise, "gradient": gradient()[:elements].clone()}
    fused = {f"{k}, CER": fused_lasso(v, float(v.abs().mean())) for k, v in rough.items()}
    return {**rough, **fused}


def cpu_time(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def measure(codec: Any, vector: Tensor, repeats: int) -> tuple[float, float, float, float]:
    """Bits per element; median ns per element of encode, of decode, and of torch.topk."""
    d, magnitudes = vector.numel(), vector.abs()
    data = codec.encode(vector, np.random.default_rng(0))
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        encode, data = cpu_time(lambda: codec.encode(vector, np.random.default_rng(0)))
        decode, _ = cpu_time(partial(codec.decode, data, d))
        floor, _ = cpu_time(lambda: torch.topk(magnitudes, math.ceil(d / 100)))
        times.append((encode, decode, floor))
    encode, decode, floor = (1e9 * statistics.median(t) / d for t in zip(*times, strict=True))
    return 8 * len(data) / d, encode, decode, floor


def report_times(data: dict[str, Tensor], names: Iterable[str], repeats: int) -> None:
    for name in names:
        vector = data[name]
        print(f"\n{name}, d = {vector.numel()}; ns per element")
        print(f"{'codec':>23} {'bits/element':>13} {'encode':>7} {'decode':>7} {'/ topk':>7}")
        for label, codec in codecs().items():
            bits, encode, decode, floor = measure(codec, vector, repeats)
            ratio = (encode + decode) / floor
            print(
                f"{label:>23} {bits:>13.4f} {encode:>7.1f} {decode:>7.1f} {ratio:>7.2f}", flush=True
            )


def report_sizes(data: dict[str, Tensor]) -> None:
    print("\nbits per element")
    print(f"{'codec':>23}", *(f"{name:>14}" for name in data))
    for label, codec in codecs().items():
        sizes = [8 * len(codec.encode(v, np.random.default_rng(0))) / len(v) for v in data.values()]
        print(f"{label:>23}", *(f"{bits:>14.4f}" for bits in sizes), flush=True)


def report_entropy(data: dict[str, Tensor]) -> None:
    print("\nSTC, bits per sent element")
    print(f"{'p':>23}", *(f"{name:>14}" for name in data), f"{'H(p)/p + 1':>14}")
    for p in RATES:
        sizes = [8 * len(STC(p).encode(v)) / math.ceil(p * len(v)) for v in data.values()]
        entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p + 1
        print(f"{p:>23}", *(f"{bits:>14.3f}" for bits in sizes), f"{entropy:>14.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=7_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = vectors(options.elements)
    report_entropy(data)
    report_sizes(data)
    report_times(data, ("Gaussian", "gradient"), options.repeats)


if __name__ == "__main__":
    main()
