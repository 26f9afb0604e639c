"""A small convolutional network for images of 8 to about 64 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from monai.networks.blocks import Convolution
from monai.networks.layers import get_pool_layer
from torch import Tensor, nn

from medfed.common.errors import ConfigError
from medfed.models.networks.convolutions import GROUPS, check_spatial_dims, norm_layer


class SmallCNN(nn.Module):
    """Convolutions, the mean over all places, and a linear head.

    The mean makes it independent of the size of the images. Group normalisation, the default,
    keeps no statistics, so that there are none to average over unlike clients.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Image channels C.
        out_channels: Classes K.
        channels: Width of each convolution.
        strides: Stride of each convolution, 2 to halve the resolution.
        norm: ``"group"``, ``"batch"``, ``"instance"`` (with scale and shift) or ``"none"``.
        dropout: Dropout probability before the head.

    Shapes:
        ``(B, C, *spatial)`` to ``(B, K)`` logits. Parameters: ``features.*`` and ``head.*``.

    Raises:
        ConfigError: If ``spatial_dims`` or ``norm`` is unknown, or a width does not suit them.

    Example:
        >>> import torch
        >>> net = SmallCNN(2, in_channels=1, out_channels=10)
        >>> net(torch.ones(4, 1, 8, 8)).shape, net(torch.ones(4, 1, 28, 28)).shape
        (torch.Size([4, 10]), torch.Size([4, 10]))
        >>> sum(p.numel() for p in net.parameters())
        24170
    """

    personal: ClassVar[tuple[str, ...]] = ("head.*",)

    def __init__(
        self,
        spatial_dims: int,
        in_channels: int,
        out_channels: int,
        *,
        channels: Sequence[int] = (16, 32, 64),
        strides: Sequence[int] = (1, 2, 2),
        norm: str = "group",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_spatial_dims(spatial_dims)
        layer = norm_layer(norm, ("group", "batch", "instance", "none"))
        _check(channels, strides, norm)
        widths = [in_channels, *channels]
        self.features = nn.Sequential(
            *(
                Convolution(spatial_dims, *pair, strides=stride, act="relu", norm=layer)
                for pair, stride in zip(pairwise(widths), strides, strict=True)
            ),
            get_pool_layer(("adaptiveavg", {"output_size": 1}), spatial_dims),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(widths[-1], out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits ``(B, K)`` of images ``(B, C, *spatial)``."""
        logits: Tensor = self.head(self.features(x))
        return logits


def _check(channels: Sequence[int], strides: Sequence[int], norm: str) -> None:
    if not channels or min(*channels, *strides) < 1 or len(channels) != len(strides):
        raise ConfigError(
            "A small CNN needs positive channels and as many strides, not channels "
            f"{list(channels)} with strides {list(strides)}."
        )
    if norm == "group" and any(width % GROUPS for width in channels):
        raise ConfigError(
            f"With norm 'group' all widths must be multiples of {GROUPS}, not {list(channels)}."
        )
