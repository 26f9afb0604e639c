"""DenseNets for classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from monai.networks.nets import DenseNet
from torch import nn

from .checks import checked
from .small import Dims

Stem = Literal["imagenet", "small"]


@checked("model.network")
def densenet_bc(
    spatial_dims: Dims,
    in_channels: int,
    out_channels: int,
    *,
    growth_rate: int = 6,
    block_config: Sequence[int] = (16, 16, 16),
    init_features: int = 12,
    bn_size: int = 4,
    dropout: float = 0.0,
    stem: Stem = "imagenet",
) -> nn.Module:
    """Builds a DenseNet with bottlenecks and compression (DenseNet-BC), by default the paper's.

    Source: G. Huang et al., "Densely Connected Convolutional Networks", CVPR 2017.

    Example:
        >>> networks = [densenet_bc(2, 1, 2, stem=stem) for stem in ("imagenet", "small")]
        >>> [sum(p.numel() for p in network.parameters()) for network in networks]
        [198224, 197744]
    """
    sizes = (init_features, growth_rate, tuple(block_config), bn_size)
    net: nn.Module = DenseNet(spatial_dims, in_channels, out_channels, *sizes, dropout_prob=dropout)
    if stem == "small":
        _use_small_stem(net, spatial_dims, in_channels, init_features)
    return net


def _use_small_stem(net: nn.Module, spatial_dims: int, in_channels: int, width: int) -> None:
    conv = nn.Conv2d if spatial_dims == 2 else nn.Conv3d
    features = net.features
    assert isinstance(features, nn.Sequential)
    features.conv0 = conv(in_channels, width, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(features.conv0.weight)  # as MONAI does for all its convolutions
    features.pool0 = nn.Identity()
