"""U-Nets for segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from monai.networks.nets import BasicUNet, DynUNet, UNet
from monai.networks.nets.basic_unet import UpCat
from torch import Tensor, nn

from .checks import checked
from .errors import ConfigError, MachineError
from .small import NORMS, Dims


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
    """Builds MONAI's recursive U-Net: quick, as it halves the resolution in its first convolution.

    Source: E. Kerfoot et al., "Left-Ventricle Quantification Using Residual U-Net", STACOM 2018.

    Example:
        >>> sum(p.numel() for p in unet(2, 4, 3).parameters())
        211657
    """
    if len(channels) < 2 or len(strides) != len(channels) - 1:
        what = "A U-Net needs at least two channels and one stride fewer than channels"
        raise ConfigError(f"{what}, not channels {list(channels)} with strides {list(strides)}.")
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


class PlannedUNet(DynUNet):
    """MONAI's DynUNet, whose coarser outputs keep their size, as nnU-Net's; the coarsest goes."""

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Returns logits; in training with the coarser ones, the finest first."""
        out: Tensor = self.output_block(self.skip_layers(x))
        return [out, *self.heads] if self.training and self.deep_supervision else out


@checked("model.network")
def planned_unet(
    spatial_dims: Dims,
    in_channels: int,
    out_channels: int,
    *,
    plan: Mapping[str, Any] | None,
    deep_supervision: bool = True,
    dropout: float = 0.0,
) -> nn.Module:
    """Builds the network of a plan on which clients have agreed.

    Source: F. Isensee et al., "nnU-Net", Nature Methods 2021.
    """
    if plan is None:
        what = "model=planned is the network of a plan, and these data have none"
        raise ConfigError(f"{what}; choose experiment=nnunet, or another model.")
    strides = [tuple(stride) for stride in plan["strides"]]
    if len(strides) < 3:
        what = f"The plan's network has {len(strides)} stages, and needs 3"
        mend = "set more data.planning.memory_gb, or a data.patch_size of 16 or more along two axes"
        raise ConfigError(f"{what}; {mend}.")
    coarser = len(strides) - 3
    deep_supervision = deep_supervision and coarser > 0
    if plan.get("residual") is not None:
        sizes = spatial_dims, in_channels, out_channels
        return _residual_unet(*sizes, plan, deep_supervision, dropout)
    network: nn.Module = PlannedUNet(
        spatial_dims,
        in_channels,
        out_channels,
        [tuple(size) for size in plan["kernel_sizes"]],
        strides,
        strides[1:],
        filters=list(plan["features"]),
        dropout=dropout or None,
        norm_name=("INSTANCE", {"affine": True}),
        deep_supervision=deep_supervision,
        deep_supr_num=max(1, coarser),
    )
    return network


def _residual_unet(
    dims: int, channels: int, outputs: int, plan: Mapping[str, Any], deep: bool, dropout: float
) -> nn.Module:
    """nnU-Net's own class, so that the weights have its names; it answers as PlannedUNet does."""
    try:
        from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
    except ImportError as error:
        what = "A residual encoder needs a package that is not installed"
        raise MachineError(f"{what}: pip install dynamic-network-architectures.") from error
    stages = plan["kernel_sizes"], plan["strides"], plan["blocks"]
    network: nn.Module = ResidualEncoderUNet(
        *(channels, len(plan["features"]), plan["features"], getattr(nn, f"Conv{dims}d"), *stages),
        *(outputs, plan["decoder_blocks"]),
        conv_bias=True,
        norm_op=getattr(nn, f"InstanceNorm{dims}d"),
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        dropout_op=nn.Dropout if dropout else None,
        dropout_op_kwargs={"p": dropout},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=deep,
    )
    network.apply(ResidualEncoderUNet.initialize)
    decoder: Any = network.decoder
    heads = decoder.seg_layers  # the coarsest first
    for stage in range(1 if deep else len(heads) - 1):
        heads[stage] = nn.Identity()  # it would not be trained
    if deep:
        decoder.register_forward_hook(_trained_heads)
    return network


def _trained_heads(decoder: nn.Module, _: Any, outputs: list[Tensor]) -> Tensor | list[Tensor]:
    # The coarsest, of the weight 0, comes from no layer.
    return outputs[:-1] if decoder.training else outputs[0]
