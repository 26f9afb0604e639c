"""Channels last: convolution weights in the layout in which a CPU's kernels are quickest.

The layout belongs to the live network alone. States, messages, checkpoints and bundles hold tensors
in ordinary layout, and their numbers are those of the elements, not of their places.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

ChannelsLast = bool | Literal["auto"]
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last_pays(network: nn.Module) -> bool:
    """Returns whether a network on a CPU is likely quicker so: 2-D or 3-D convolutions.

    Instance normalisation, which brings every tensor back to ordinary layout, costs more than the
    convolutions save.

    Example:
        >>> channels_last_pays(nn.Conv2d(1, 2, 3)), channels_last_pays(nn.Linear(2, 2))
        (True, False)
        >>> channels_last_pays(nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2)))
        False
    """
    modules = list(network.modules())
    return any(_kernels(m) is not None for m in modules) and not any(
        isinstance(m, _InstanceNorm) for m in modules
    )


def lay_out(network: nn.Module, wanted: ChannelsLast) -> None:
    """Puts the kernels of all 2-D and 3-D convolutions into one layout or the other, in place.

    The outputs of a convolution follow its kernels, and the layers behind it follow its outputs.

    Args:
        network: The live network; its parameters remain the same objects.
        wanted: ``auto``: where the network is on a CPU and :func:`channels_last_pays`.

    Example:
        >>> layer = nn.Conv2d(2, 2, 3)
        >>> lay_out(layer, True)
        >>> layer.weight.stride(), layer(torch.ones(1, 2, 3, 3)).is_contiguous()
        ((18, 1, 6, 2), True)
    """
    if wanted == "auto":
        on_cpu = all(p.device.type == "cpu" for p in network.parameters())
        wanted = on_cpu and channels_last_pays(network)
    for module in network.modules():
        if (kernels := _kernels(module)) is not None:
            form = _FORMATS[kernels.ndim] if wanted else torch.contiguous_format
            # Not `contiguous`, which leaves kernels of one channel as they are: they have both
            # layouts, but their strides say which one the outputs get.
            kernels.data = kernels.data.clone(memory_format=form)


def ordinary(tensor: Tensor) -> Tensor:
    """Returns a detached copy in ordinary layout.

    Example:
        >>> last = torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
        >>> ordinary(last).stride()
        (18, 9, 3, 1)
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _kernels(module: nn.Module) -> Tensor | None:
    if not isinstance(module, _ConvNd):
        return None
    kernels = module._parameters.get("weight")  # adapters compute it from others
    return kernels if kernels is not None and kernels.ndim in _FORMATS else None
