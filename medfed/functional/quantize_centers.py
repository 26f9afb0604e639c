"""The step of the centres of quantised weights: their gradient and their exact proximal map.

Source: QuPeL (Ozkara, Singh, Data and Diggavi 2021), Algorithm 2, corrected. The printed
linearisation of the proximal map has its sign reversed, and passes the median of many weights.
Here the map is solved exactly with assignments held fixed.

======  ==================================================================================
symbol  here
======  ==================================================================================
h       :func:`center_gradient`
mu      ``mu``, the centres after their gradient step, c - eta_2 h
prox_c  :func:`prox_centers` with ``tau`` = lambda eta_2 / 2; :func:`step_centers` has both
======  ==================================================================================
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from medfed.common.errors import ConfigError
from medfed.functional.prox import check_strength
from medfed.functional.quantize import Array, Levels, check_levels, check_like


def center_gradient(gradient: Tensor, x: Tensor, centers: Tensor) -> Tensor:
    """The gradient with respect to each centre: the sum over the weights that it stands for.

    Args:
        gradient: Gradient at ``quantize(x, centers)``, of the shape of ``x``.
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.

    Returns:
        ``(m,)`` float64 tensor on the device of ``x``, summed in float64.

    Raises:
        ConfigError: If an argument cannot be used.
        ValueError: If ``x`` holds NaN.

    Example:
        >>> x = torch.tensor([0.1, 0.2, 0.9])
        >>> center_gradient(torch.tensor([1.0, 2.0, 4.0]), x, torch.tensor([0.0, 1.0])).tolist()
        [3.0, 4.0]
    """
    levels = check_levels(x, centers)
    return torch.from_numpy(_tally(x, gradient, levels)[1]).to(x.device)


def prox_centers(mu: Tensor, x: Tensor, centers: Tensor, tau: float) -> Tensor:
    """For each j the minimiser over c of ``|c - mu_j|^2 / 2 + tau sum_i |c - x_i|``, i assigned j.

    The assignment is that of ``centers``, from where a gradient step has led to ``mu``. A centre is
    drawn towards the median of its weights; while it passes none of them it moves by tau times the
    number above minus the number below. Counts around the old centres tell whether one is passed;
    only the weights on its way are then sorted.

    Args:
        mu: ``(m,)`` finite floating tensor.
        x: Float32 or float64 tensor of any shape.
        centers: ``(m,)`` finite, in ascending order.
        tau: 0 or more; infinity gives the nearest median.

    Returns:
        ``(m,)`` tensor like ``mu``, exact up to rounding; ``mu_j`` where nothing is assigned to j.
        It need not be in ascending order: sort it before it is used as centres.

    Raises:
        ConfigError: If an argument cannot be used.
        ValueError: If ``x`` holds NaN, or ``mu`` NaN or infinity.

    Example:
        >>> x = torch.tensor([0.0, 0.5, 1.0, 7.0, 9.0])
        >>> prox_centers(torch.tensor([0.25, 9.5]), x, torch.tensor([0.0, 8.0]), 0.125).tolist()
        [0.375, 9.25]
    """
    levels, tau = check_levels(x, centers), check_strength("tau", tau)
    if mu.shape != centers.shape or not mu.is_floating_point():
        raise ConfigError(
            f"mu must be a floating tensor of shape {tuple(centers.shape)}, "
            f"not {mu.dtype} {tuple(mu.shape)}."
        )
    start = mu.detach().to("cpu", torch.float64).contiguous().numpy()
    moved = _settle(start, x, levels, _tally(x, None, levels)[0], tau)
    return torch.from_numpy(moved).to(mu)


def step_centers(centers: Tensor, gradient: Tensor, x: Tensor, lr: float, tau: float) -> Tensor:
    """A proximal gradient step of the centres, in one pass over the weights.

    Args:
        centers: ``(m,)`` finite, in ascending order.
        gradient: Gradient at ``quantize(x, centers)``, of the shape of ``x``.
        x: Float32 or float64 tensor of any shape.
        lr: Step size eta_2, 0 or more and finite.
        tau: lambda eta_2 / 2, 0 or more.

    Returns:
        ``(m,)`` tensor like ``centers``: ``prox_centers(centers - lr * h, x, centers, tau)`` with
        ``h = center_gradient(gradient, x, centers)``, sorted.

    Raises:
        ConfigError: If an argument cannot be used.
        ValueError: If ``x`` holds NaN, or ``gradient`` NaN or infinity.

    Example:
        >>> x, gradient = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> step_centers(torch.tensor([0.25, 1.25]), gradient, x, lr=0.125, tau=0.0625).tolist()
        [0.0, 1.1875]
    """
    if not 0 <= lr < float("inf"):
        raise ConfigError(f"lr is {lr}, but it must be 0 or more and finite.")
    levels, tau = check_levels(x, centers), check_strength("tau", tau)
    counts, sums = _tally(x, gradient, levels)
    start = centers.detach().to("cpu", torch.float64).numpy() - lr * sums
    return torch.from_numpy(np.sort(_settle(start, x, levels, counts, tau))).to(centers)


def _tally(x: Tensor, gradient: Tensor | None, levels: Levels) -> tuple[Array, Array]:
    """``(m, 3)`` numbers of elements below, at and above their centre; ``(m,)`` gradient sums."""
    x = x.detach()
    slopes = x.new_empty(0) if gradient is None else check_like("gradient", gradient, x)
    if x.device.type != "cpu":
        found = _tally_torch(x, slopes, *levels.on(x.device))
        counts, sums, clean = found[0].cpu().numpy(), found[1].cpu().numpy(), found[2]
    else:
        from medfed.functional.quantize_kernels import tally

        flat, slopes_flat = x.reshape(-1).numpy(), slopes.reshape(-1).numpy()
        counts, sums, clean = tally(flat, slopes_flat, levels.cuts, levels.values)
    if not clean:
        raise ValueError("The weights hold NaN, which has no nearest centre; training diverged.")
    return counts, sums


def _settle(mu: Array, x: Tensor, levels: Levels, counts: Array, tau: float) -> Array:
    """The proximal map from ``mu``, in float64."""
    from medfed.functional.quantize_kernels import collect, settle, walk

    if not np.isfinite(mu).all():
        raise ValueError(f"The centres step to {mu.tolist()}; their gradient is not finite.")
    rests: Array
    rests, bounds, passing = settle(mu, levels.values, counts, tau)
    if not passing:
        return rests
    x = x.detach()
    if x.device.type == "cpu":
        flat = x.reshape(-1).numpy()
        # Room for all: memory that is never written to is never taken.
        found, numbers = np.empty(len(flat) + 1, flat.dtype), np.zeros((len(mu), 3), np.int64)
        found = found[: collect(flat, levels.cuts, levels.values, bounds, found, numbers)]
    else:
        ends = torch.from_numpy(bounds).to(x.device)
        picked = _collect_torch(x, *levels.on(x.device), ends)
        found, numbers = picked[0].cpu().numpy(), picked[1].cpu().numpy()
    found.sort()
    rests = walk(mu, levels.values, counts, tau, bounds, found, numbers)
    return rests


def _tally_torch(
    x: Tensor, gradient: Tensor, cuts: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """:func:`medfed.functional.quantize_kernels.tally` in plain PyTorch, of any shape."""
    index = torch.bucketize(x, cuts)
    center = values[index]
    side = (x >= center).long() + (x > center).long()
    counts = torch.bincount((3 * index + side).flatten(), minlength=3 * len(values))
    sums = torch.zeros(len(values), dtype=torch.float64, device=x.device)
    if gradient.numel():
        # One sum per centre: adding into places in parallel would differ from run to run.
        for j in range(len(values)):
            sums[j] = gradient.where(index == j, 0.0).sum(dtype=torch.float64)
    return counts.view(-1, 3), sums, not bool(x.isnan().any())


def _collect_torch(
    x: Tensor, cuts: Tensor, values: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`medfed.functional.quantize_kernels.collect` in plain PyTorch: both its results."""
    index = torch.bucketize(x, cuts)
    (low, high), old = bounds[index].unbind(-1), values[index]
    between = (low < x) & (x < high)
    before = ((old < x) & (x <= low)) | ((high <= x) & (x < old))
    kind = before.long() + 2 * between.long()
    numbers = torch.bincount((3 * index + kind).flatten(), minlength=3 * len(values))
    return x[between], numbers.view(-1, 3)
