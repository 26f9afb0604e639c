"""What the convolutional networks share: images or volumes, and the norms between layers."""

from __future__ import annotations

from collections.abc import Sequence

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError

Norm = str | tuple[str, dict[str, int | bool]] | None
GROUPS = 4
_NORMS: dict[str, Norm] = {
    "batch": "batch",
    # MONAI's bare "instance" has no scale and shift, which leaves FedBN nothing to keep local.
    "instance": ("instance", {"affine": True}),
    "group": ("group", {"num_groups": GROUPS}),
    "none": None,
}


def check_spatial_dims(spatial_dims: int) -> None:
    """Refuses anything but images (2) and volumes (3).

    Raises:
        ConfigError: If ``spatial_dims`` is neither 2 nor 3.

    Example:
        >>> check_spatial_dims(2)
    """
    if spatial_dims not in (2, 3):
        raise ConfigError(f"spatial_dims must be 2 or 3, not {spatial_dims!r}.")


def norm_layer(name: str, known: Sequence[str] = ("batch", "instance")) -> Norm:
    """Returns a normalisation as MONAI's blocks take it.

    Args:
        name: Its name.
        known: The names that the network accepts.

    Raises:
        ConfigError: If it accepts no such norm.

    Example:
        >>> norm_layer("instance")
        ('instance', {'affine': True})
    """
    check_known("norm", name, known)
    return _NORMS[name]
