"""The layout of convolution weights in which a CPU's kernels are fastest: channels last.

Only the live network has this layout. States, messages, checkpoints and bundles hold tensors in
ordinary layout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

ChannelsLast = bool | Literal["auto"]
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEWEST = 5


def channels_last_pays(network: nn.Module) -> bool:
    """Returns whether channels last probably speeds up a network on a CPU.

    This needs five or more 2-D or 3-D convolutions: in networks of two or three, it gains or loses
    a tenth, depending on the size of the images. And it needs that no layer is an instance
    normalisation, which restores ordinary layout at a higher cost than the convolutions save.

    Example:
        >>> deep = [nn.Conv2d(1, 1, 3) for _ in range(5)]
        >>> channels_last_pays(nn.Sequential(*deep)), channels_last_pays(nn.Conv2d(1, 2, 3))
        (True, False)
        >>> channels_last_pays(nn.Sequential(*deep, nn.InstanceNorm2d(1)))
        False
    """
    modules = list(network.modules())
    return sum(_kernels(m) is not None for m in modules) >= _FEWEST and not any(
        isinstance(m, _InstanceNorm) for m in modules
    )


def lay_out(network: nn.Module, wanted: ChannelsLast) -> None:
    """Sets the layout of the kernels of all 2-D and 3-D convolutions, in place.

    The outputs of a convolution follow its kernels, and the layers behind it follow its outputs.
    `network`: the live network; its parameters remain the same objects.

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
            # Not `contiguous`, which skips kernels of one channel: they have both layouts, but
            # their strides decide the layout of the outputs.
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
