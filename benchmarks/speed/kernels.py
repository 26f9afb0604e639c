"""CPU time of the proximal maps: fused lasso, network lasso, and maps of quantised weights.

    python benchmarks/speed/kernels.py fused_lasso --largest 6    # stops at 10^6 elements
    python benchmarks/speed/kernels.py network_lasso
    python benchmarks/speed/kernels.py quantised

Medians on one thread; each map and its floor alternate.

*fused_lasso*: the exact 1-D fused lasso, next to the paper's ADMM. Gamma is relative to mean |g|.
The floor is one solve of a tridiagonal system of the same length by LAPACK, factored beforehand;
the ADMM needs one per iteration.

*network_lasso*: an ADMM iteration with N = 5 nodes and the 10 edges of the complete graph; the
floor is a copy of an (M, d) array.

*quantised*: the maps that QuPeL adds to a local step (forward, backward and SGD on one batch; its
second gradient is not among them), in two calls per layer.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor, nn

from medfed.functional.graph import complete_edges
from medfed.functional.kmeans import initial_centers
from medfed.functional.network_lasso import AdmmSteps, solve_network_lasso
from medfed.functional.prox import _magnitude, fused_lasso
from medfed.functional.quantize import prox_quantize, step_centers
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.unet import basic_unet, unet

Array = np.ndarray[Any, Any]
Action = Callable[[], object]
GAMMAS = (0.05, 0.1, 0.5)
MOST_ITERATIONS = 4000
NODES = 5
NORMS = (1.0, 2.0, math.inf)
LR, TAU = 1e-4, 1e-8
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "DenseNet-BC": (lambda: densenet_bc(2, 1, 2, stem="small"), 1, 32),
    "U-Net": (lambda: unet(2, 4, 3), 4, 64),
    "basic U-Net": (lambda: basic_unet(2, 4, 3), 4, 64),
}
"""Networks of configs/model, channels and side of their images."""


def seconds(action: Action, repeats: int = 1) -> float:
    """CPU seconds of one of ``repeats`` calls."""
    start = time.process_time()
    for _ in range(repeats):
        action()
    return (time.process_time() - start) / repeats


def alternating(actions: list[Action], blocks: int, repeats: int) -> list[float]:
    """Median CPU seconds of each action."""
    for action in actions:
        action()
    times = [[seconds(action, repeats) for action in actions] for _ in range(blocks)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def gaussian(d: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def layers(d: int) -> Tensor:
    """Kernels of nine weights, alike within a kernel, in layers whose scales differ 100-fold."""
    generator = np.random.default_rng(0)
    scale = np.exp(1.5 * generator.standard_normal(d // 1000 + 1)).repeat(1000)[:d]
    kernels = generator.standard_normal(d // 9 + 1).repeat(9)[:d]
    return torch.from_numpy(scale * (kernels + 0.5 * generator.standard_normal(d)))


def flattening(d: int) -> Tensor:
    return torch.arange(d, dtype=torch.float64).sqrt()


def ramp(d: int) -> Tensor:
    return torch.arange(d, dtype=torch.float64)


def zigzag(d: int) -> Tensor:
    steps = torch.arange(d, dtype=torch.float64)
    return torch.where(steps % 2 == 0, steps, -steps)


def constant(d: int) -> Tensor:
    return torch.ones(d, dtype=torch.float64)


def absolute(g: Tensor, relative: float) -> float:
    return relative * float(g.abs().mean())


def exact_and_floor(g: Tensor, gamma: float) -> list[float]:
    """Median CPU seconds of a fused lasso and of a tridiagonal solve."""
    d = len(g)
    factor = lapack.dpttrf(np.full(d, 3.0), np.full(d - 1, -1.0))[:2]
    solve = partial(lapack.dpttrs, *factor, g.double().numpy())
    return alternating([partial(fused_lasso, g, gamma), solve], max(3, min(30, 3 * 10**6 // d)), 1)


def report_exact(largest: int) -> None:
    print("The exact solution")
    print(f"{'data':>10} {'dtype':>8} {'gamma':>7} {'d':>9} {'ns/element':>11} {'solves':>7}")
    typical = [
        (make, dtype, gamma)
        for make in (gaussian, layers)
        for dtype in (torch.float64, torch.float32)
        for gamma in GAMMAS
    ]
    extreme = [
        (make, torch.float64, gamma)
        for make in (constant, ramp, zigzag, flattening)
        for gamma in (0.05, 1e3)
    ]
    for make, dtype, relative in typical + extreme:
        for exponent in range(min(5, largest), largest + 1):
            g = make(10**exponent).to(dtype)
            ours, floor = exact_and_floor(g, absolute(g, relative))
            name = str(dtype).removeprefix("torch.")
            print(
                f"{make.__name__:>10} {name:>8} {relative:>7g} {len(g):>9} "
                f"{ours / len(g) * 1e9:>11.1f} {ours / floor:>7.1f}",
                flush=True,
            )


class Found(NamedTuple):
    """What :func:`fused_lasso_admm` found; fused neighbours are close, not equal."""

    w: Tensor
    iterations: int
    converged: bool


def fused_lasso_admm(
    g: Tensor, gamma: float, rho: float = 1.0, iterations: int = 10_000, tol: float = 1e-6
) -> Found:
    """Solves the problem of :func:`fused_lasso` by the paper's ADMM, corrected.

    Source: pFedNet, the ADMM of CER, and Boyd et al. 2011, section 3.3. Deviations: the threshold
    is gamma / rho (the printed rho is wrong), the linear system is solved as the tridiagonal one it
    is, without a d x d eigen-decomposition, and the residuals stop the iteration. s is the
    splitting, equal to Lambda w in the end, and u the dual divided by rho.

    """
    cut = gamma / rho
    vector = g.detach().cpu().contiguous()
    if _magnitude(vector) == 0:
        return Found(torch.zeros_like(g), 0, True)
    y = vector.double().numpy()
    limit = tol * _norm(y)
    s, u = np.zeros_like(y), np.zeros_like(y)
    # I + rho Lambda^T Lambda; SciPy wants one entry beside the diagonal where there is none.
    diagonal = np.full(len(y), 1.0 + 2.0 * rho)
    diagonal[0] = 1.0 + rho
    factor = lapack.dpttrf(diagonal, np.full(max(len(y) - 1, 1), -rho))[:2]
    count, met = 0, False
    while count < iterations and not met:
        w = lapack.dpttrs(*factor, y + rho * adjoint(s - u))[0]
        a = differences(w) + u
        # What soft-thresholding takes away is the new dual.
        taken = np.clip(a, -cut, cut)
        primal = _norm(taken - u)
        before, s, u = s, a - taken, taken
        count, met = count + 1, max(primal, rho * _norm(adjoint(s - before))) <= limit
    return Found(torch.from_numpy(w).to(g), count, met)


def differences(w: Array) -> Array:
    """Lambda w: every element minus its right neighbour, which is 0 for the last."""
    out = w.copy()
    out[:-1] -= w[1:]
    return out


def adjoint(u: Array) -> Array:
    """Lambda^T u: every element minus its left neighbour, which is 0 for the first."""
    out = u.copy()
    out[1:] -= u[:-1]
    return out


def _norm(x: Array) -> float:
    # By PyTorch, whose threads the run sets; BLAS would start its own.
    return float(torch.linalg.vector_norm(torch.from_numpy(x)))


def iterations_needed(g: Tensor, gamma: float, exact: Tensor, bound: float) -> int | None:
    """The first number of iterations, to 5 %, whose largest error is within ``bound``."""

    def enough(count: int) -> bool:
        return (
            float((fused_lasso_admm(g, gamma, iterations=count, tol=1e-300).w - exact).abs().max())
            <= bound
        )

    low, high = 0, 16
    while not enough(high):
        if high >= MOST_ITERATIONS:
            return None
        low, high = high, min(2 * high, MOST_ITERATIONS)
    while high - low > max(1, high // 20):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def report_admm(d: int) -> None:
    print(f"The paper's ADMM, corrected, rho = 1, float64, d = {d}, against the exact solution:")
    print("until its residuals are 1e-4 (and the error it then has, in units of mean |g|),")
    print("and until its largest error is 1e-4 of mean |g|")
    print(
        f"{'data':>10} {'gamma':>6} {'ns/iteration':>13} {'stops at':>9} {'error':>8} {'times':>6} "
        f"{'exact at':>9} {'times':>6}"
    )
    for make in (gaussian, layers):
        g = make(d)
        mean = float(g.abs().mean())
        for relative in GAMMAS:
            gamma = absolute(g, relative)
            exact = fused_lasso(g, gamma)
            ours, _ = exact_and_floor(g, gamma)
            steps = partial(fused_lasso_admm, g, gamma, iterations=20, tol=1e-300)
            step = statistics.median(seconds(steps) / 20 for _ in range(5))
            w, stopped, _ = fused_lasso_admm(g, gamma, iterations=MOST_ITERATIONS, tol=1e-4)
            error = float((w - exact).abs().max()) / mean
            needed = iterations_needed(g, gamma, exact, 1e-4 * mean)
            count, more = (needed, "") if needed is not None else (MOST_ITERATIONS, ">")
            print(
                f"{make.__name__:>10} {relative:>6g} {step / d * 1e9:>13.1f} {stopped:>9} "
                f"{error:>8.1e} {stopped * step / ours:>6.0f} {more + str(count):>9} "
                f"{more + format(count * step / ours, '.0f'):>6}",
                flush=True,
            )


def problem(d: int, p: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random points, the complete graph, and weights that fuse some differences and not others."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(NODES, d, generator=generator, dtype=dtype)
    edges = complete_edges(NODES)
    scale = {1.0: 0.1, 2.0: 0.1 * math.sqrt(d), math.inf: 0.05 * d}[p]
    return v, edges, torch.full((len(edges),), scale, dtype=torch.float64)


def iteration_times(d: int, p: float, dtype: torch.dtype) -> list[float]:
    """Median CPU seconds of an iteration and of a copy."""
    v, edges, weight = problem(d, p, dtype)
    source, target = v.new_ones(len(edges), d), v.new_empty(len(edges), d)
    ones = torch.ones(len(v), dtype=torch.float64)
    steps = AdmmSteps(v, ones, edges, weight, p, v.new_zeros(len(edges), d), rho=0.2)
    for _ in range(5):  # warms up the clip levels of p = inf
        steps.step()
    actions: list[Action] = [steps.step, lambda: target.copy_(source)]
    return alternating(actions, max(5, min(200, 10**7 // d)), 1)


def peak_arrays(d: int, p: float, dtype: torch.dtype) -> float:
    """Peak memory of a whole warm-started solve, over the input, in (M, d) arrays.

    Runs in a process of its own, because a process never forgets its peak. The input is not
    counted; the state that is passed in and the one that is returned are.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure_memory, (d, p, dtype))


def measure_memory(d: int, p: float, dtype: torch.dtype) -> float:
    v, edges, weight = problem(d, p, dtype)
    small = solve_network_lasso(*problem(64, p, dtype), p, max_iter=5000)
    assert small.converged
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    first = solve_network_lasso(v, edges, weight, p)
    solve_network_lasso(v, edges, weight, p, state=first.state)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - before) / (len(edges) * d * v.element_size())


def report_network(largest: int, dtype: torch.dtype) -> None:
    # Before anything large is allocated here: a child starts from its parent's peak.
    d = 10 ** min(largest, 6)
    for p in NORMS:
        arrays = peak_arrays(d, p, dtype)
        print(f"p = {p:.0f}: a warm-started solve at d = {d} peaks at {arrays:.1f} (M, d) arrays")
    print(f"{dtype}, one thread, N = {NODES}, 10 edges; CPU time, medians")
    print(f"{'p':>4} {'d':>9} {'ms/iteration':>13} {'ms/copy':>9} {'ratio':>6} {'ns/column':>10}")
    for p in NORMS:
        for exponent in range(4, largest + 1):
            d = 10**exponent
            iteration, copy = iteration_times(d, p, dtype)
            print(
                f"{p:>4.0f} {d:>9} {iteration * 1e3:>13.3f} {copy * 1e3:>9.3f} "
                f"{iteration / copy:>6.1f} {iteration / d * 1e9:>10.1f}",
                flush=True,
            )


def local_step(network: nn.Module, batch: Tensor) -> Action:
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

    def maps() -> None:
        for w, c, g in zip(weights, centers, gradients, strict=True):
            w.data.copy_(prox_quantize(w, c, TAU)[0])
            step_centers(c, g, w, LR, TAU)

    step = local_step(network, torch.randn(batch_size, channels, side, side))
    plain, two = alternating([step, maps], blocks, 1)
    count = sum(w.numel() for w in weights)
    print(
        f"{name:>12}: {len(weights)} layers, {count} weights, step {1e3 * plain:.1f} ms, "
        f"maps {1e3 * two:.2f} ms in two passes ({100 * two / plain:.2f} %)",
        flush=True,
    )


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("of", choices=["fused_lasso", "network_lasso", "quantised"])
    parser.add_argument("--largest", type=int, default=7, help="exponent of the largest size")
    parser.add_argument("--dtype", default="float64", choices=("float32", "float64"))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=15, help="repeats of a local step")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.of == "fused_lasso":
        report_admm(10 ** min(options.largest, 5))
        report_exact(options.largest)
    elif options.of == "network_lasso":
        report_network(options.largest, getattr(torch, options.dtype))
    else:
        print(f"Share of a local step, 2 bits, batches of {options.batch_size}")
        for name in options.networks:
            report_share(name, options.batch_size, options.blocks, bits=2)


if __name__ == "__main__":
    main()
