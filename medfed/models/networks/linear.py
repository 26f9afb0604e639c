"""Linear models of feature vectors: linear and logistic regression."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from medfed.common.errors import ConfigError


class LinearRegression(nn.Module):
    """One number as a weighted sum of features and a constant.

    All coefficients start at zero: the problem is convex, and clients then start as equals. The
    instances of a canonical model must start apart, which a ``spread`` makes them do.

    Args:
        in_channels: Number of features F.
        out_channels: Number of outcomes, 1.
        spread: Coefficients start uniformly in [-spread, spread].

    Shapes:
        ``(B, F)`` to ``(B, 1)``. Parameters: ``linear.weight (1, F)``, ``linear.bias (1,)``.

    Raises:
        ConfigError: If there is another number of outcomes, or the spread is negative.

    Example:
        >>> LinearRegression(in_channels=10)(torch.ones(4, 10)).shape
        torch.Size([4, 1])
    """

    personal: ClassVar[tuple[str, ...]] = ("*",)

    def __init__(self, in_channels: int, out_channels: int = 1, spread: float = 0.0) -> None:
        super().__init__()
        if out_channels != 1:
            raise ConfigError(
                f"Linear regression predicts one number, and these data have {out_channels} "
                "classes; choose model=logistic, or data with a continuous outcome."
            )
        self.linear = _spread_linear(in_channels, 1, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outcomes ``(B, 1)`` of features ``(B, F)``."""
        outcome: Tensor = self.linear(x)
        return outcome


class LogisticRegression(nn.Module):
    """Multinomial logistic regression whose first class is the reference.

    The logit of class 0 is fixed at zero, so two classes need one weight per feature, and the
    coefficients are identified (a softmax over free logits has a direction that changes nothing).
    They start as those of :class:`LinearRegression` do.

    Args:
        in_channels: Number of features F.
        out_channels: Number of classes K, at least 2.
        spread: Coefficients start uniformly in [-spread, spread].

    Shapes:
        ``(B, F)`` to ``(B, K)`` logits. Parameters: ``linear.weight (K-1, F)``, ``linear.bias``.

    Raises:
        ConfigError: If there are fewer than two classes, or the spread is negative.

    Example:
        >>> net = LogisticRegression(in_channels=30, out_channels=2)
        >>> net(torch.ones(4, 30)).shape, [name for name, _ in net.named_parameters()]
        (torch.Size([4, 2]), ['linear.weight', 'linear.bias'])
    """

    personal: ClassVar[tuple[str, ...]] = ("*",)

    def __init__(self, in_channels: int, out_channels: int = 2, spread: float = 0.0) -> None:
        super().__init__()
        if out_channels < 2:
            raise ConfigError(
                f"Logistic regression needs out_channels >= 2, not {out_channels} (a continuous "
                "outcome needs model=linear or model=mlp_regression)."
            )
        self.linear = _spread_linear(in_channels, out_channels - 1, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits ``(B, K)`` of features ``(B, F)``."""
        free = self.linear(x)
        return torch.cat([torch.zeros_like(free[:, :1]), free], dim=1)


def _spread_linear(features: int, outputs: int, spread: float) -> nn.Linear:
    if not spread >= 0:
        raise ConfigError(f"spread must not be negative, not {spread}.")
    layer = nn.Linear(features, outputs)
    for coefficients in layer.parameters():
        nn.init.uniform_(coefficients, -spread, spread)
    return layer
