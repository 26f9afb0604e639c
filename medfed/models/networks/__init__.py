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
Logistic regression       (none)     Features + 1 for two classes.
Linear regression         (none)     Features + 1.
========================  =========  ===========================================================
"""

from __future__ import annotations

from monai.networks.nets import BasicUNet, DenseNet, UNet
from torch import nn

from medfed.models.networks.canonical import Canonical
from medfed.models.networks.common import count_parameters
from medfed.models.networks.densenet import densenet121, densenet_bc
from medfed.models.networks.linear import LinearRegression, linear_regression
from medfed.models.networks.logistic import LogisticRegression, logistic_regression
from medfed.models.networks.small_cnn import SmallCNN, small_cnn
from medfed.models.networks.unet import basic_unet, unet

__all__ = [
    "Canonical",
    "LinearRegression",
    "LogisticRegression",
    "SmallCNN",
    "basic_unet",
    "count_parameters",
    "default_personal",
    "densenet121",
    "densenet_bc",
    "linear_regression",
    "logistic_regression",
    "small_cnn",
    "unet",
]


def default_personal(network: nn.Module) -> tuple[str, ...]:
    """Names the part of a network that stays with its client in the published experiments.

    Args:
        network: A network of this module, or any other.

    Returns:
        ``fnmatch`` patterns on names relative to ``network``: the classifier of a DenseNet or a
        small CNN, the up-sampling path and output layer of a U-Net, all of a logistic or
        linear regression, the membership vector of a canonical model.
        An empty tuple (nothing personal) for other networks.

    Example:
        >>> default_personal(densenet_bc(2, 1, 2))
        ('class_layers.*',)
        >>> default_personal(unet(2, 1, 1, channels=(4, 8, 16), strides=(2, 2)))
        ('model.2.*', 'model.1.submodule.2.*')
    """
    if isinstance(network, Canonical):
        return ("membership",)
    if isinstance(network, LinearRegression | LogisticRegression):
        return ("*",)
    if isinstance(network, SmallCNN):
        return ("head.*",)
    if isinstance(network, DenseNet):
        return ("class_layers.*",)
    if isinstance(network, BasicUNet):
        return ("upcat_*", "final_conv.*")
    if isinstance(network, UNet):
        # Each level is Sequential(0 down, 1 SkipConnection(submodule = next level), 2 up).
        return tuple(f"model.{'1.submodule.' * level}2.*" for level in range(len(network.strides)))
    return ()
