"""Network builders around MONAI, and the parts of them that stay personal by default.

The published experiments of pFedNet use three networks. The parameter counts say how far the
builders agree with them:

========================  =========  ===========================================================
Network                   Published  Here
========================  =========  ===========================================================
DenseNet-BC, growth 6     197,936    198,224 with MONAI's 7×7 stem; the difference of 288 is that
                                     of a 5×5 stem. 197,744 with ``stem="small"``.
U-Net, width 8            486,562    488,394 for :func:`basic_unet` as MONAI builds it (3 channels
                                     in, 2 out, batch norm); 486,562 with ``published=True``.
Logistic regression       features   features + 1 for two classes
========================  =========  ===========================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.networks.nets import BasicUNet, DenseNet, UNet
from monai.networks.nets.basic_unet import UpCat
from torch import Tensor, nn

from medfed.errors import ConfigError, did_you_mean

_NORMS: dict[str, str | tuple[str, dict[str, bool]]] = {
    "batch": "batch",
    # MONAI's bare "instance" has no scale and shift, which leaves FedBN nothing to keep local.
    "instance": ("instance", {"affine": True}),
}
_STEMS = ("imagenet", "small")


class LogisticRegression(nn.Module):
    """Multinomial logistic regression whose first class is the reference.

    The logit of class 0 is fixed at zero, so two classes need one weight per feature, and the
    coefficients are identified (a softmax over free logits has a direction that changes nothing).
    All coefficients start at zero: the problem is convex, and clients then start as equals.

    Args:
        in_channels: Number of features F.
        out_channels: Number of classes K, at least 2.

    Shapes:
        ``(B, F)`` to ``(B, K)`` logits. Parameters: ``linear.weight (K-1, F)``, ``linear.bias``.

    Raises:
        ConfigError: If there are fewer than two classes.

    Example:
        >>> net = LogisticRegression(in_channels=30, out_channels=2)
        >>> net(torch.ones(4, 30)).shape, [name for name, _ in net.named_parameters()]
        (torch.Size([4, 2]), ['linear.weight', 'linear.bias'])
    """

    def __init__(self, in_channels: int, out_channels: int = 2) -> None:
        super().__init__()
        if out_channels < 2:
            raise ConfigError(f"Logistic regression needs out_channels >= 2, not {out_channels}.")
        self.linear = nn.Linear(in_channels, out_channels - 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits ``(B, K)`` of features ``(B, F)``."""
        free = self.linear(x)
        return torch.cat([torch.zeros_like(free[:, :1]), free], dim=1)


def logistic_regression(in_channels: int, out_channels: int = 2) -> LogisticRegression:
    """Builds :class:`LogisticRegression` on ``in_channels`` features for ``out_channels`` classes.

    Example:
        >>> count_parameters(logistic_regression(30))
        31
    """
    return LogisticRegression(in_channels, out_channels)


def densenet_bc(
    spatial_dims: int,
    in_channels: int,
    out_channels: int,
    *,
    growth_rate: int = 6,
    block_config: Sequence[int] = (16, 16, 16),
    init_features: int = 12,
    bn_size: int = 4,
    dropout: float = 0.0,
    stem: str = "imagenet",
) -> nn.Module:
    """Builds a DenseNet with bottlenecks and compression (DenseNet-BC), by default the paper's.

    Source: G. Huang et al., "Densely Connected Convolutional Networks", CVPR 2017.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Image channels C.
        out_channels: Classes K.
        growth_rate: Channels that each dense layer adds.
        block_config: Layers in each dense block.
        init_features: Channels after the stem.
        bn_size: A bottleneck has ``bn_size * growth_rate`` channels.
        dropout: Dropout probability after each dense layer.
        stem: ``"imagenet"`` (7×7, stride 2, pooling: an eighth of the detail survives) or
            ``"small"`` (3×3, stride 1, no pooling: for patches of about 32×32).

    Returns:
        A network from ``(B, C, *spatial)`` to logits ``(B, K)``; its classifier is
        ``class_layers.out``.

    Raises:
        ConfigError: If ``spatial_dims`` or ``stem`` is unknown.

    Example:
        >>> [count_parameters(densenet_bc(2, 1, 2, stem=stem)) for stem in ("imagenet", "small")]
        [198224, 197744]
    """
    _check_spatial_dims(spatial_dims)
    if stem not in _STEMS:
        raise ConfigError(
            f"Unknown stem {stem!r}: use one of {_STEMS}{did_you_mean(stem, _STEMS)}."
        )
    net: nn.Module = DenseNet(
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        out_channels=out_channels,
        init_features=init_features,
        growth_rate=growth_rate,
        block_config=tuple(block_config),
        bn_size=bn_size,
        dropout_prob=dropout,
    )
    if stem == "small":
        _use_small_stem(net, spatial_dims, in_channels, init_features)
    return net


def densenet121(
    spatial_dims: int, in_channels: int, out_channels: int, *, dropout: float = 0.0
) -> nn.Module:
    """Builds DenseNet-121: growth 32, blocks (6, 12, 24, 16), 64 features after the stem.

    Arguments, shapes, errors and source as for :func:`densenet_bc`.

    Example:
        >>> count_parameters(densenet121(2, 1, 2))
        6949634
    """
    return densenet_bc(
        spatial_dims,
        in_channels,
        out_channels,
        growth_rate=32,
        block_config=(6, 12, 24, 16),
        init_features=64,
        dropout=dropout,
    )


def unet(
    spatial_dims: int,
    in_channels: int,
    out_channels: int,
    *,
    channels: Sequence[int] = (8, 16, 32, 64, 128),
    strides: Sequence[int] = (2, 2, 2, 2),
    num_res_units: int = 1,
    norm: str = "batch",
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
        >>> count_parameters(unet(2, 4, 3))
        211657
    """
    _check_spatial_dims(spatial_dims)
    if len(channels) < 2 or len(strides) != len(channels) - 1:
        raise ConfigError(
            f"A U-Net needs at least two channels and one stride fewer than channels, "
            f"not channels {list(channels)} with strides {list(strides)}."
        )
    net: nn.Module = UNet(
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        out_channels=out_channels,
        channels=tuple(channels),
        strides=tuple(strides),
        num_res_units=num_res_units,
        norm=_norm(norm),
        dropout=dropout,
    )
    return net


def basic_unet(
    spatial_dims: int,
    in_channels: int,
    out_channels: int,
    *,
    features: Sequence[int] = (8, 16, 32, 64, 128, 8),
    norm: str = "batch",
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
        >>> [count_parameters(basic_unet(2, 3, 2, published=flag)) for flag in (False, True)]
        [488394, 486562]
    """
    _check_spatial_dims(spatial_dims)
    if len(features) != 6:
        raise ConfigError(f"A BasicUNet needs six features, not {list(features)}.")
    act = ("LeakyReLU", {"negative_slope": 0.1, "inplace": True})  # MONAI's default
    net: nn.Module = BasicUNet(
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        out_channels=out_channels,
        features=tuple(features),
        act=act,
        norm=_norm(norm),
        bias=not published,
        dropout=dropout,
    )
    if published:
        net.upcat_1 = UpCat(
            spatial_dims, features[1], features[0], features[5], act, _norm(norm), False, dropout
        )
    return net


def default_personal(network: nn.Module) -> tuple[str, ...]:
    """Names the part of a network that stays with its client in the published experiments.

    Args:
        network: A network of this module, or any other.

    Returns:
        ``fnmatch`` patterns on names relative to ``network``: the classifier of a DenseNet, the
        up-sampling path and output layer of a U-Net, all of a logistic regression. An empty tuple
        (nothing personal) for other networks.

    Example:
        >>> default_personal(densenet_bc(2, 1, 2))
        ('class_layers.*',)
        >>> default_personal(unet(2, 1, 1, channels=(4, 8, 16), strides=(2, 2)))
        ('model.2.*', 'model.1.submodule.2.*')
    """
    if isinstance(network, LogisticRegression):
        return ("*",)
    if isinstance(network, DenseNet):
        return ("class_layers.*",)
    if isinstance(network, BasicUNet):
        return ("upcat_*", "final_conv.*")
    if isinstance(network, UNet):
        # Each level is Sequential(0 down, 1 SkipConnection(submodule = next level), 2 up).
        return tuple(f"model.{'1.submodule.' * level}2.*" for level in range(len(network.strides)))
    return ()


def count_parameters(network: nn.Module) -> int:
    """Counts the trainable scalars of a network.

    Example:
        >>> count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def _use_small_stem(net: nn.Module, spatial_dims: int, in_channels: int, width: int) -> None:
    conv = nn.Conv2d if spatial_dims == 2 else nn.Conv3d
    features = net.features
    assert isinstance(features, nn.Sequential)
    features.conv0 = conv(in_channels, width, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(features.conv0.weight)  # as MONAI does for all its convolutions
    features.pool0 = nn.Identity()


def _check_spatial_dims(spatial_dims: int) -> None:
    if spatial_dims not in (2, 3):
        raise ConfigError(f"spatial_dims must be 2 or 3, not {spatial_dims!r}.")


def _norm(name: str) -> str | tuple[str, dict[str, bool]]:
    if name not in _NORMS:
        raise ConfigError(
            f"Unknown norm {name!r}: use batch or instance{did_you_mean(name, _NORMS)}."
        )
    return _NORMS[name]
