"""Validation of the arguments of quantisation, short enough for layers of a few weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfed.errors import ConfigError

Array = np.ndarray[Any, Any]


class Levels(NamedTuple):
    """Checked centres in the dtype of the weights, in main memory."""

    values: Array
    """``(m,)`` centres in ascending order."""
    cuts: Array
    """``(m - 1,)``: the largest numbers that still belong to the lower of two centres."""

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The cuts and the centres as tensors on a device."""
        return torch.from_numpy(self.cuts).to(device), torch.from_numpy(self.values).to(device)


def check_levels(x: Tensor, centers: Tensor) -> Levels:
    """Returns the centres of a weight tensor, and what separates them.

    Args:
        x: The weights.
        centers: ``(m,)`` centres.

    Returns:
        Both in the dtype of ``x``.

    Raises:
        ConfigError: If ``x`` is no float32 or float64 tensor, or the centres are not finite, in
            ascending order and at least one.

    Example:
        >>> check_levels(torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, 1.0, 3.0])).cuts
        array([0.5, 2. ])
    """
    # Imported on first use: compiled code has no business in `import medfed`.
    from medfed.personalize.functional.quantization_kernels import find_cuts

    if x.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"The weights must be float32 or float64, not {x.dtype}; convert them.")
    if centers.ndim != 1 or len(centers) == 0 or not centers.is_floating_point():
        raise ConfigError(
            f"centers must be a floating tensor of shape (m,), m at least 1, "
            f"not {centers.dtype} {tuple(centers.shape)}."
        )
    values: Array = centers.detach().to("cpu", x.dtype).contiguous().numpy()
    cuts, usable = find_cuts(values)
    if not usable:
        raise ConfigError(
            f"centers must be finite and in ascending order, not {values.tolist()}; sort them."
        )
    return Levels(values, cuts)


def check_tau(tau: float) -> float:
    """Returns tau as a float where it is 0 or more, infinity included.

    Raises:
        ConfigError: If it is negative or NaN.

    Example:
        >>> check_tau(1)
        1.0
    """
    value = float(tau)
    if not value >= 0:
        raise ConfigError(f"tau is {value}, but it must be 0 or more.")
    return value


def check_like(name: str, other: Tensor, x: Tensor) -> Tensor:
    """Returns ``other`` detached where it has the shape and device of the weights, in their dtype.

    Args:
        name: What an error calls it.
        other: A tensor that goes with the weights.
        x: The weights.

    Returns:
        ``other`` itself where its dtype is that of ``x``.

    Raises:
        ConfigError: If shape or device differ.

    Example:
        >>> check_like("gradient", torch.ones(2, dtype=torch.float64), torch.ones(2)).dtype
        torch.float32
    """
    if other.shape != x.shape or other.device != x.device:
        raise ConfigError(
            f"{name} is {tuple(other.shape)} on {other.device}, but the weights are "
            f"{tuple(x.shape)} on {x.device}."
        )
    return other.detach().to(x.dtype)
