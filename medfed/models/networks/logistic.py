"""Logistic regression."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medfed.errors import ConfigError


class LogisticRegression(nn.Module):
    """Multinomial logistic regression whose first class is the reference.

    The logit of class 0 is fixed at zero, so two classes need one weight per feature, and the
    coefficients are identified (a softmax over free logits has a direction that changes nothing).
    All coefficients start at zero: the problem is convex, and clients then start as equals. The
    instances of a canonical model must start apart, which a ``spread`` makes them do.

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

    def __init__(self, in_channels: int, out_channels: int = 2, spread: float = 0.0) -> None:
        super().__init__()
        if out_channels < 2:
            raise ConfigError(
                f"Logistic regression needs out_channels >= 2, not {out_channels} (a continuous "
                "outcome needs model=linear)."
            )
        self.linear = nn.Linear(in_channels, out_channels - 1)
        if not spread >= 0:
            raise ConfigError(f"spread must not be negative, not {spread}.")
        for coefficients in self.linear.parameters():
            nn.init.uniform_(coefficients, -spread, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits ``(B, K)`` of features ``(B, F)``."""
        free = self.linear(x)
        return torch.cat([torch.zeros_like(free[:, :1]), free], dim=1)


def logistic_regression(
    in_channels: int, out_channels: int = 2, spread: float = 0.0
) -> LogisticRegression:
    """Builds :class:`LogisticRegression`; arguments and errors are those of the class.

    Example:
        >>> from medfed.models.networks import count_parameters
        >>> count_parameters(logistic_regression(30))
        31
    """
    return LogisticRegression(in_channels, out_channels, spread)
