"""Time of the maps of quantised weights, per element and as a share of a local step.

Times are medians of CPU time on one thread. The floor is ``x.add_(y)`` on a tensor of the same
size; each map and its floor alternate. A local step is forward, backward and SGD on one batch; with
it alternate the maps that QuPeL adds to it (its second gradient is not among them), in two fused
passes per layer and as four calls. ``--largest 6`` stops at 10^6 elements.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from medfed.functional.kmeans import initial_centers
from medfed.functional.quantize import (
    center_gradient,
    prox_centers,
    prox_quantize,
    quantize,
    step_centers,
)
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.unet import basic_unet, unet

BITS = (1, 2, 4)
LR, TAU = 1e-4, 1e-8
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "DenseNet-BC": (lambda: densenet_bc(2, 1, 2, stem="small"), 1, 32),
    "U-Net": (lambda: unet(2, 4, 3), 4, 64),
    "basic U-Net": (lambda: basic_unet(2, 4, 3), 4, 64),
}
"""Networks of configs/model, channels and side of their images."""


def seconds(action: Callable[[], object], repeats: int = 1) -> float:
    """CPU seconds of one of ``repeats`` calls."""
    start = time.process_time()
    for _ in range(repeats):
        action()
    return (time.process_time() - start) / repeats


def alternating(actions: list[Callable[[], object]], blocks: int, repeats: int) -> list[float]:
    """Median CPU seconds of each action."""
    for action in actions:
        action()
    times = [[seconds(action, repeats) for action in actions] for _ in range(blocks)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def maps(x: Tensor, centers: Tensor) -> dict[str, Callable[[], object]]:
    """What is measured, on one tensor; the same work at every call."""
    gradient, out = torch.randn_like(x), torch.empty_like(x)
    rounded = quantize(x, centers)
    # Twice the spacing of the weights of one centre, so that some are passed.
    wide = 4 * float(x.std()) / len(x) ** 2 + 1e-12
    return {
        "quantize": partial(quantize, x, centers),
        "prox_quantize": partial(prox_quantize, x, centers, 0.01, out=out),
        "center_gradient": partial(center_gradient, gradient, x, centers),
        "prox_centers, none passed": partial(prox_centers, centers, rounded, centers, TAU),
        "prox_centers, some passed": partial(prox_centers, centers + 1e-3, x, centers, wide),
        "prox_centers, to the median": partial(prox_centers, centers, x, centers, 1.0),
        "step_centers": partial(step_centers, centers, gradient, x, LR, TAU),
    }


def report_elements(largest: int, dtype: torch.dtype) -> None:
    """Prints ns per element, by bits and size, with the multiple of the floor in brackets."""
    name = str(dtype).removeprefix("torch.")
    sizes = [10**e for e in range(min(4, largest), largest + 1)]
    print(f"{name}: ns/element (times the floor)")
    print(f"{'map':>28} {'bits':>4}" + "".join(f"{d:>16}" for d in sizes))
    for bits in BITS:
        columns: list[dict[str, str]] = []
        for d in sizes:
            x = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=dtype)
            floor = partial(torch.zeros_like(x).add_, x)
            found = {}
            for key, action in maps(x, initial_centers(x, bits)).items():
                repeats = max(1, 10**5 // d)
                ours, least = alternating([action, floor], 7, repeats)
                found[key] = f"{ours / d * 1e9:.2f} ({ours / least:.1f})"
            columns.append(found)
        for key in columns[0]:
            print(f"{key:>28} {bits:>4}" + "".join(f"{c[key]:>16}" for c in columns), flush=True)


def local_step(network: nn.Module, batch: Tensor) -> Callable[[], None]:
    """One step of SGD; what the loss measures does not matter here."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()

    return step


def report_share(name: str, batch_size: int, blocks: int, bits: int) -> None:
    """Prints what the maps of all quantised layers add to a local step."""
    make, channels, side = NETWORKS[name]
    network = make().train()
    # All kernels and matrices but the first and the last.
    weights = [p for p in network.parameters() if p.ndim > 1][1:-1]
    centers = [initial_centers(w, bits) for w in weights]
    gradients = [torch.randn_like(w) for w in weights]

    def fused() -> None:
        for w, c, g in zip(weights, centers, gradients, strict=True):
            prox_quantize(w, c, TAU, out=w)
            step_centers(c, g, w, LR, TAU)

    step = local_step(network, torch.randn(batch_size, channels, side, side))
    plain, two = alternating([step, fused], blocks, 1)
    count = sum(w.numel() for w in weights)
    print(
        f"{name:>12}: {len(weights)} layers, {count} weights, step {1e3 * plain:.1f} ms, "
        f"maps {1e3 * two:.2f} ms in two passes ({100 * two / plain:.2f} %)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=7, help="exponent of the largest size")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=15, help="repeats of a local step")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Share of a local step, 2 bits, batches of {options.batch_size}")
    for name in options.networks:
        report_share(name, options.batch_size, options.blocks, bits=2)
    for dtype in (torch.float32, torch.float64):
        report_elements(options.largest, dtype)


if __name__ == "__main__":
    main()
