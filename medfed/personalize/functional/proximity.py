"""The squared distance to an anchor, as a differentiable penalty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proximity:
    """The penalty (μ/2)‖w − a‖² over the names of the anchor a.

    Attributes:
        weight: μ.
        anchor: Name to tensor; parameters that it does not name are free.

    Example:
        >>> w = {"x": torch.tensor([3.0], requires_grad=True)}
        >>> value = Proximity(0.5, {"x": torch.tensor([1.0])})(w)
        >>> value, torch.autograd.grad(value, w["x"])
        (tensor(1., grad_fn=<MulBackward0>), (tensor([1.]),))
    """

    weight: float
    anchor: Mapping[str, Tensor]

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Returns the penalty at ``parameters``, a scalar."""
        names = list(self.anchor)
        gaps = torch._foreach_sub([parameters[n] for n in names], [self.anchor[n] for n in names])
        squares = torch.stack([gap.square().sum() for gap in gaps])
        return self.weight / 2 * squares.sum()
