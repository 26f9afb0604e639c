"""Linear regression."""

from __future__ import annotations

from torch import Tensor, nn

from medfed.errors import ConfigError


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
        >>> import torch
        >>> LinearRegression(in_channels=10)(torch.ones(4, 10)).shape
        torch.Size([4, 1])
    """

    def __init__(self, in_channels: int, out_channels: int = 1, spread: float = 0.0) -> None:
        super().__init__()
        if out_channels != 1:
            raise ConfigError(
                f"Linear regression predicts one number, and these data have {out_channels} "
                "classes; choose model=logistic, or data with a continuous outcome."
            )
        if not spread >= 0:
            raise ConfigError(f"spread must not be negative, not {spread}.")
        self.linear = nn.Linear(in_channels, 1)
        for coefficients in self.linear.parameters():
            nn.init.uniform_(coefficients, -spread, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outcomes ``(B, 1)`` of features ``(B, F)``."""
        outcome: Tensor = self.linear(x)
        return outcome


def linear_regression(
    in_channels: int, out_channels: int = 1, spread: float = 0.0
) -> LinearRegression:
    """Builds :class:`LinearRegression`; arguments and errors are those of the class.

    Example:
        >>> from medfed.models.networks import count_parameters
        >>> count_parameters(linear_regression(10))
        11
    """
    return LinearRegression(in_channels, out_channels, spread)
