"""Time and memory of one ADMM iteration of the network lasso.

N = 5 nodes, the 10 edges of the complete graph, d from 10^4 to 10^7 columns. Every iteration is
timed next to one copy of an (M, d) array, alternating, in CPU time, and the ratio is the quotient
of the medians. ``--largest 6`` stops at 10^6.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from medfed.functional.graph import complete_edges
from medfed.functional.network_lasso import AdmmSteps, solve_network_lasso

NODES = 5
NORMS = (1.0, 2.0, math.inf)


def problem(d: int, p: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random points, the complete graph, and weights that fuse some differences and not others."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(NODES, d, generator=generator, dtype=dtype)
    edges = complete_edges(NODES)
    scale = {1.0: 0.1, 2.0: 0.1 * math.sqrt(d), math.inf: 0.05 * d}[p]
    return v, edges, torch.full((len(edges),), scale, dtype=torch.float64)


def cpu_time(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def iteration_times(d: int, p: float, dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """Median CPU seconds of an iteration and of a copy, alternating."""
    v, edges, weight = problem(d, p, dtype)
    source, target = v.new_ones(len(edges), d), v.new_empty(len(edges), d)
    ones = torch.ones(len(v), dtype=torch.float64)
    steps = AdmmSteps(v, ones, edges, weight, p, v.new_zeros(len(edges), d), rho=0.2)
    # Compiles, and warms up the clip levels of p = inf.
    for _ in range(5):
        steps.step()
        target.copy_(source)
    pairs = [(cpu_time(steps.step), cpu_time(lambda: target.copy_(source))) for _ in range(repeats)]
    iteration, copy = zip(*pairs, strict=True)
    return statistics.median(iteration), statistics.median(copy)


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


def report(largest: int, dtype: torch.dtype) -> None:
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
            iteration, copy = iteration_times(d, p, dtype, repeats=max(5, min(200, 10**7 // d)))
            print(
                f"{p:>4.0f} {d:>9} {iteration * 1e3:>13.3f} {copy * 1e3:>9.3f} "
                f"{iteration / copy:>6.1f} {iteration / d * 1e9:>10.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=7, help="exponent of the largest d")
    parser.add_argument("--dtype", default="float64", choices=("float32", "float64"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(options.largest, getattr(torch, options.dtype))


if __name__ == "__main__":
    main()
