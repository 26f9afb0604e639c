"""Where the centres of a weight tensor start."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from medfed.errors import ConfigError

METHODS = ("kmeans", "uniform")


def initial_centers(x: Tensor, bits: int, method: str = "kmeans") -> Tensor:
    """``2**bits`` centres for the elements of a tensor, in ascending order and without chance.

    Args:
        x: Finite floating tensor of any shape, at least one element.
        bits: 1 to 8.
        method: ``kmeans``, Lloyd's iteration from the quantiles; or ``uniform``, the middles of
            ``2**bits`` equal parts of the range.

    Returns:
        ``(2**bits,)`` tensor in the dtype and on the device of ``x``. Where ``x`` has fewer
        distinct values, some centres are equal.

    Raises:
        ConfigError: If an argument cannot be used.
        ValueError: If ``x`` holds NaN or infinity.

    Example:
        >>> initial_centers(torch.tensor([0.0, 1.0, 9.0, 10.0]), bits=1).tolist()
        [0.5, 9.5]
        >>> initial_centers(torch.tensor([0.0, 1.0, 9.0, 8.0]), bits=1, method="uniform").tolist()
        [2.25, 6.75]
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ConfigError(f"bits is {bits!r}, but it must be a whole number from 1 to 8.")
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}; choose {' or '.join(METHODS)}.")
    if x.numel() == 0 or not x.is_floating_point():
        raise ConfigError(f"x must be floating and not empty, not {x.dtype} {tuple(x.shape)}.")
    values = x.detach().double().cpu().numpy().ravel()
    if not np.isfinite(values).all():
        raise ValueError("x holds NaN or infinity, and has no centres.")
    found = _uniform(values, 2**bits) if method == "uniform" else _lloyd(np.sort(values), 2**bits)
    return torch.from_numpy(found).to(x)


def _uniform(values: np.ndarray, m: int) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    levels: np.ndarray = low + (np.arange(m) + 0.5) / m * (high - low)
    return levels


def _lloyd(values: np.ndarray, m: int) -> np.ndarray:
    """Lloyd's iteration on sorted values, each group an interval of them."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.round(np.arange(m + 1) * len(values) / m).astype(np.int64)
    centers: np.ndarray = values[np.minimum(ends[:-1], len(values) - 1)]
    for _ in range(1000):
        counts = np.diff(ends)
        means = np.diff(sums[ends]) / np.maximum(counts, 1)
        centers = np.sort(np.where(counts > 0, means, centers))
        inner = np.searchsorted(values, (centers[1:] + centers[:-1]) / 2, side="right")
        new = np.concatenate([[0], inner, [len(values)]])
        if (new == ends).all():
            break
        ends = new
    return centers
