"""U-Nets for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from monai.networks.nets import BasicUNet, UNet
from monai.networks.nets.basic_unet import UpCat
from torch import nn

from medfed.common.checks import checked
from medfed.common.errors import ConfigError
from medfed.models.networks.small import NORMS, Dims


@checked("model.network")
def unet(
    spatial_dims: Dims,
    in_channels: int,
    out_channels: int,
    *,
    channels: Sequence[int] = (8, 16, 32, 64, 128),
    strides: Sequence[int] = (2, 2, 2, 2),
    num_res_units: int = 1,
    norm: Literal["batch", "instance"] = "batch",
    dropout: float = 0.0,
) -> nn.Module:
    """Builds MONAI's recursive U-Net, which halves the resolution in its first convolution.

    It is several times quicker than :func:`basic_unet`, since no convolution of the contracting
    path runs at full resolution.

    Source: E. Kerfoot et al., "Left-Ventricle Quantification Using Residual U-Net", STACOM 2018.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Image channels C.
        out_channels: Regions R.
        channels: Width of each level, the finest first.
        strides: Stride between levels, one fewer than ``channels``; sides of the patch must be
            divisible by their product.
        num_res_units: Convolutions per residual unit, 0 for plain convolutions.
        norm: ``"batch"`` or ``"instance"`` (with scale and shift).
        dropout: Dropout probability.

    Returns:
        A network from ``(B, C, *spatial)`` to logits ``(B, R, *spatial)``.

    Raises:
        ConfigError: If ``spatial_dims`` or ``norm`` is unknown, or the lengths do not fit.

    Example:
        >>> sum(p.numel() for p in unet(2, 4, 3).parameters())
        211657
    """
    if len(channels) < 2 or len(strides) != len(channels) - 1:
        raise ConfigError(
            f"A U-Net needs at least two channels and one stride fewer than channels, "
            f"not channels {list(channels)} with strides {list(strides)}."
        )
    sizes = (spatial_dims, in_channels, out_channels, tuple(channels), tuple(strides))
    net: nn.Module = UNet(*sizes, num_res_units=num_res_units, norm=NORMS[norm], dropout=dropout)
    return net


@checked("model.network")
def basic_unet(
    spatial_dims: Dims,
    in_channels: int,
    out_channels: int,
    *,
    features: Sequence[int] = (8, 16, 32, 64, 128, 8),
    norm: Literal["batch", "instance"] = "batch",
    dropout: float = 0.0,
    published: bool = False,
) -> nn.Module:
    """Builds the classic U-Net: two convolutions per level, max pooling, transposed convolutions.

    Source: O. Ronneberger et al., "U-Net", MICCAI 2015; T. Falk et al., Nature Methods 2019.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Image channels C.
        out_channels: Regions R.
        features: Widths of the five levels, and of the last up-sampling block.
        norm: ``"batch"`` or ``"instance"`` (with scale and shift).
        dropout: Dropout probability.
        published: Match the 486,562 parameters that pFedNet reports (for 3 channels in and 2 out):
            convolutions without bias, and a last transposed convolution that halves its channels.

    Returns:
        A network from ``(B, C, *spatial)`` to logits ``(B, R, *spatial)``.

    Raises:
        ConfigError: If ``spatial_dims`` or ``norm`` is unknown, or there are not six features.

    Example:
        >>> networks = [basic_unet(2, 3, 2, published=flag) for flag in (False, True)]
        >>> [sum(p.numel() for p in network.parameters()) for network in networks]
        [488394, 486562]
    """
    if len(features) != 6:
        raise ConfigError(f"A BasicUNet needs six features, not {list(features)}.")
    act = ("LeakyReLU", {"negative_slope": 0.1, "inplace": True})  # MONAI's default
    blocks = (act, NORMS[norm], not published, dropout)  # of every convolution
    sizes = (spatial_dims, in_channels, out_channels, tuple(features))
    net: nn.Module = BasicUNet(*sizes, *blocks)
    if published:
        net.upcat_1 = UpCat(spatial_dims, features[1], features[0], features[5], *blocks)
    return net
