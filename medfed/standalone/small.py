"""Small networks: linear and logistic regression, and a CNN for images of 8 to about 64 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from monai.networks.blocks import Convolution
from monai.networks.layers import get_pool_layer
from torch import Tensor, nn

from .checks import check_not_negative, checked
from .errors import ConfigError

Dims = Literal[2, 3]
Spread = Annotated[float, check_not_negative]


class LinearRegression(nn.Module):
    """One number as a weighted sum of features and a constant.

    All coefficients start at zero, so that clients start as equals; instances of a canonical model
    must start apart, by ``spread``.

    Shapes:
        ``(B, F)`` to ``(B, 1)``. Parameters: ``linear.weight (1, F)``, ``linear.bias (1,)``.
    """

    personal: ClassVar[tuple[str, ...]] = ("*",)

    @checked("model.network")
    def __init__(
        self,
        in_channels: int,
        out_channels: int = 1,
        spread: Spread = 0.0,
        link: Literal["identity", "log"] = "identity",
    ) -> None:
        super().__init__()
        self.link = link
        if out_channels != 1:
            raise ConfigError(
                f"Linear regression predicts one number, and these data have {out_channels} "
                "classes; choose model=logistic, or data with a continuous outcome."
            )
        self.linear = _spread_linear(in_channels, 1, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outcomes ``(B, 1)`` of features ``(B, F)``."""
        outcome: Tensor = self.linear(x)
        return outcome.exp() if self.link == "log" else outcome


class LogisticRegression(nn.Module):
    """Multinomial logistic regression whose first class is the reference.

    The logit of class 0 is fixed at zero, so that the coefficients are identified. They start as
    those of :class:`LinearRegression` do.

    Shapes:
        ``(B, F)`` to ``(B, K)`` logits. Parameters: ``linear.weight (K-1, F)``, ``linear.bias``.
    """

    personal: ClassVar[tuple[str, ...]] = ("*",)

    @checked("model.network")
    def __init__(
        self,
        in_channels: int,
        out_channels: int = 2,
        spread: Spread = 0.0,
        link: Literal["logit", "probit"] = "logit",
    ) -> None:
        super().__init__()
        self.link = link
        if link == "probit" and out_channels != 2:
            what = f"link=probit is for two classes, and these data have {out_channels}"
            raise ConfigError(f"{what}; choose model.network.link=logit.")
        if out_channels < 2:
            raise ConfigError(
                f"Logistic regression needs out_channels >= 2, not {out_channels} (a continuous "
                "outcome needs model=linear or model=mlp_regression)."
            )
        self.linear = _spread_linear(in_channels, out_channels - 1, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits ``(B, K)`` of features ``(B, F)``."""
        free = self.linear(x)
        if self.link == "probit":  # the logit of the probability, so that all else stays as it is
            free = torch.special.log_ndtr(free) - torch.special.log_ndtr(-free)
        return torch.cat([torch.zeros_like(free[:, :1]), free], dim=1)


def _spread_linear(features: int, outputs: int, spread: float) -> nn.Linear:
    layer = nn.Linear(features, outputs)
    for coefficients in layer.parameters():
        nn.init.uniform_(coefficients, -spread, spread)
    return layer


Norm = str | tuple[str, dict[str, int | bool]] | None
GROUPS = 4
NORMS: dict[str, Norm] = {
    "batch": "batch",
    # MONAI's bare "instance" has no scale and shift, which leaves FedBN nothing to keep local.
    "instance": ("instance", {"affine": True}),
    "group": ("group", {"num_groups": GROUPS}),
    "none": None,
}


class SmallCNN(nn.Module):
    """Convolutions, the mean over all places, and a linear head, for images of any size.

    Group normalisation, the default, keeps no statistics to average over unlike clients.

    Shapes:
        ``(B, C, *spatial)`` to ``(B, K)`` logits. Parameters: ``features.*`` and ``head.*``.

    Example:
        >>> import torch
        >>> net = SmallCNN(2, in_channels=1, out_channels=10)
        >>> net(torch.ones(4, 1, 8, 8)).shape, net(torch.ones(4, 1, 28, 28)).shape
        (torch.Size([4, 10]), torch.Size([4, 10]))
        >>> sum(p.numel() for p in net.parameters())
        24170
    """

    personal: ClassVar[tuple[str, ...]] = ("head.*",)

    @checked("model.network")
    def __init__(
        self,
        spatial_dims: Dims,
        in_channels: int,
        out_channels: int,
        *,
        channels: Sequence[int] = (16, 32, 64),
        strides: Sequence[int] = (1, 2, 2),
        norm: Literal["group", "batch", "instance", "none"] = "group",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(channels, strides, norm)
        widths = [in_channels, *channels]
        self.features = nn.Sequential(
            *(
                Convolution(spatial_dims, *pair, strides=stride, act="relu", norm=NORMS[norm])
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
        what = "A small CNN needs positive channels and as many strides"
        raise ConfigError(f"{what}, not channels {list(channels)} with strides {list(strides)}.")
    if norm == "group" and any(width % GROUPS for width in channels):
        what = f"With norm 'group' all widths must be multiples of {GROUPS}"
        raise ConfigError(f"{what}, not {list(channels)}.")
