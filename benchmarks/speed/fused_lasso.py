"""Time of the exact 1-D fused lasso, next to the paper's ADMM.

Gamma is relative to mean |g|. Times are medians of CPU time on one thread. The floor is one solve
of a tridiagonal system of the same length by LAPACK, factored beforehand; the ADMM needs one per
iteration.
Run with ``python benchmarks/speed/fused_lasso.py``; ``--largest 6`` stops at 10^6 elements.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from medfed.functional.prox import _magnitude, fused_lasso

Array = np.ndarray[Any, Any]

GAMMAS = (0.05, 0.1, 0.5)
MOST_ITERATIONS = 4000


def gaussian(d: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient(d: int) -> Tensor:
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


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    action()
    return clock() - start


def absolute(g: Tensor, relative: float) -> float:
    return relative * float(g.abs().mean())


def exact_and_floor(g: Tensor, gamma: float) -> tuple[float, float]:
    """Median CPU seconds of a fused lasso and of a tridiagonal solve, alternating."""
    d = len(g)
    factor = lapack.dpttrf(np.full(d, 3.0), np.full(d - 1, -1.0))[:2]
    right = g.double().numpy()
    fused_lasso(g[:2], gamma)
    repeats = max(3, min(30, 3 * 10**6 // d))
    actions = partial(fused_lasso, g, gamma), partial(lapack.dpttrs, *factor, right)
    pairs = [[seconds(action) for action in actions] for _ in range(repeats)]
    ours, floor = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(floor)


def report_exact(largest: int) -> None:
    print("The exact solution")
    print(f"{'data':>10} {'dtype':>8} {'gamma':>7} {'d':>9} {'ns/element':>11} {'solves':>7}")
    typical = [
        (make, dtype, gamma)
        for make in (gaussian, gradient)
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


@dataclass(frozen=True)
class FusedLassoResult:
    """What :func:`fused_lasso_admm` found."""

    w: Tensor
    iterations: int
    primal: float
    dual: float
    converged: bool


def fused_lasso_admm(
    g: Tensor, gamma: float, rho: float = 1.0, iterations: int = 10_000, tol: float = 1e-6
) -> FusedLassoResult:
    """Solves the problem of :func:`fused_lasso` by the paper's ADMM, corrected.

    Source: pFedNet, the ADMM of CER, and Boyd et al. 2011, section 3.3. Deviations: the threshold
    is gamma / rho (the printed rho is wrong), the linear system is solved as the tridiagonal one it
    is, without a d x d eigen-decomposition, and the residuals stop the iteration. s is the
    splitting, equal to Lambda w in the end, and u the dual divided by rho.

    """
    cut = gamma / rho
    vector = g.detach().cpu().contiguous()
    if _magnitude(vector) == 0:
        return FusedLassoResult(torch.zeros_like(g), 0, 0.0, 0.0, True)
    y = vector.double().numpy()
    limit = tol * _norm(y)
    s, u = np.zeros_like(y), np.zeros_like(y)
    # I + rho Lambda^T Lambda; SciPy wants one entry beside the diagonal where there is none.
    diagonal = np.full(len(y), 1.0 + 2.0 * rho)
    diagonal[0] = 1.0 + rho
    factor = lapack.dpttrf(diagonal, np.full(max(len(y) - 1, 1), -rho))[:2]
    for count in range(1, iterations + 1):
        w = lapack.dpttrs(*factor, y + rho * adjoint(s - u))[0]
        a = differences(w) + u
        # What soft-thresholding takes away is the new dual.
        taken = np.clip(a, -cut, cut)
        primal = _norm(taken - u)
        before, s, u = s, a - taken, taken
        dual = rho * _norm(adjoint(s - before))
        met = primal <= limit and dual <= limit
        found = FusedLassoResult(torch.from_numpy(w), count, primal, dual, met)
        if met:
            break
    else:
        warnings.warn(
            f"The fused lasso's ADMM stopped after iterations={iterations} above its tolerance; "
            "raise iterations or tol, or use fused_lasso.",
            RuntimeWarning,
            stacklevel=2,
        )
    return replace(found, w=found.w.to(g))


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


def run_admm(g: Tensor, gamma: float, iterations: int, tol: float = 1e-300) -> tuple[Tensor, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fused_lasso_admm(g, gamma, iterations=iterations, tol=tol)
    return found.w, found.iterations


def iterations_needed(g: Tensor, gamma: float, exact: Tensor, bound: float) -> int | None:
    """The first number of iterations, to 5 %, whose largest error is within ``bound``."""

    def enough(count: int) -> bool:
        return float((run_admm(g, gamma, count)[0] - exact).abs().max()) <= bound

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
    for make in (gaussian, gradient):
        g = make(d)
        mean = float(g.abs().mean())
        for relative in GAMMAS:
            gamma = absolute(g, relative)
            exact = fused_lasso(g, gamma)
            ours, _ = exact_and_floor(g, gamma)
            steps = partial(run_admm, g, gamma, 20)
            step = statistics.median(seconds(steps) / 20 for _ in range(5))
            w, stopped = run_admm(g, gamma, MOST_ITERATIONS, tol=1e-4)
            error = float((w - exact).abs().max()) / mean
            needed = iterations_needed(g, gamma, exact, 1e-4 * mean)
            count, more = (needed, "") if needed is not None else (MOST_ITERATIONS, ">")
            print(
                f"{make.__name__:>10} {relative:>6g} {step / d * 1e9:>13.1f} {stopped:>9} "
                f"{error:>8.1e} {stopped * step / ours:>6.0f} {more + str(count):>9} "
                f"{more + format(count * step / ours, '.0f'):>6}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=7, help="exponent of the largest d")
    largest = parser.parse_args().largest
    torch.set_num_threads(1)
    report_admm(10 ** min(largest, 5))
    report_exact(largest)


if __name__ == "__main__":
    main()
