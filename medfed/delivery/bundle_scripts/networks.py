"""The networks that MONAI does not have as they are, of its parts; the weights keep their names."""

from collections.abc import Sequence
from typing import Any

import torch
from monai.networks.blocks import Convolution
from monai.networks.layers import get_pool_layer
from monai.networks.nets import BasicUNet, DenseNet
from monai.networks.nets.basic_unet import UpCat
from torch import Tensor, nn


def small_stem_densenet(**arguments: Any) -> nn.Module:
    """MONAI's DenseNet with a stem for patches of about 32x32: 3x3, stride 1, no pooling."""
    network: nn.Module = DenseNet(**arguments)
    conv = nn.Conv2d if arguments["spatial_dims"] == 2 else nn.Conv3d
    channels, width = arguments["in_channels"], arguments["init_features"]
    features = network.get_submodule("features")
    features.conv0 = conv(channels, width, kernel_size=3, padding=1, bias=False)
    features.pool0 = nn.Identity()
    return network


def halving_unet(**arguments: Any) -> nn.Module:
    """MONAI's BasicUNet whose last transposed convolution halves its channels, as Ronneberger's."""
    network: nn.Module = BasicUNet(**arguments)
    features, dims = arguments["features"], arguments["spatial_dims"]
    act = ("LeakyReLU", {"negative_slope": 0.1, "inplace": True})  # MONAI's default
    norm, bias, dropout = (arguments[name] for name in ("norm", "bias", "dropout"))
    sizes = (features[1], features[0], features[5])
    network.upcat_1 = UpCat(dims, *sizes, act, norm, bias, dropout)
    return network


class SmallCNN(nn.Module):
    """Convolutions, the mean over all places, and a linear head."""

    def __init__(
        self,
        spatial_dims: int,
        in_channels: int,
        out_channels: int,
        channels: Sequence[int],
        strides: Sequence[int],
        norm: Any,
        dropout: float,
    ) -> None:
        super().__init__()
        widths = [in_channels, *channels]
        layers = [
            Convolution(
                spatial_dims, widths[i], widths[i + 1], strides=strides[i], act="relu", norm=norm
            )
            for i in range(len(channels))
        ]
        mean = get_pool_layer(("adaptiveavg", {"output_size": 1}), spatial_dims)
        self.features = nn.Sequential(*layers, mean, nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(widths[-1], out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits (B, K) of images (B, C, *spatial)."""
        logits: Tensor = self.head(self.features(x))
        return logits


class LogisticRegression(nn.Module):
    """Logistic regression; the logit of the first class is zero."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits (B, K) of features (B, F)."""
        free = self.linear(x)
        return torch.cat([torch.zeros_like(free[:, :1]), free], dim=1)
