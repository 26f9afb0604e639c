"""What the builders share."""

from __future__ import annotations

from torch import nn

from medfed.errors import ConfigError


def count_parameters(network: nn.Module) -> int:
    """Counts the trainable scalars of a network.

    Example:
        >>> count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def check_spatial_dims(spatial_dims: int) -> None:
    """Refuses anything but images (2) and volumes (3).

    Raises:
        ConfigError: If ``spatial_dims`` is neither 2 nor 3.

    Example:
        >>> check_spatial_dims(2)
    """
    if spatial_dims not in (2, 3):
        raise ConfigError(f"spatial_dims must be 2 or 3, not {spatial_dims!r}.")
