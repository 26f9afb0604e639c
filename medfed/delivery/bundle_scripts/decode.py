"""Reads models/model.pt: dense tensors, and packed ones as bit planes with their centres."""

from pathlib import Path

import torch
from torch import Tensor, nn


def decode(path: str | Path) -> dict[str, Tensor]:
    """Returns all weights by name.

    A packed tensor of n elements is ``planes``, (bits, ceil(n / 8)) uint8, and ``centers``, (m,).
    Plane b holds bit b of the number of each element's centre; element i is in byte i // 8 under
    the mask 1 << (i % 8).
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content.get("format") != "medfed-bundle" or content.get("version") != 1:
        raise ValueError(f"{path} is no weight file of version 1; export the bundle anew.")
    masks = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    weights = dict(content["dense"])
    for name, packed in content["packed"].items():
        planes, shape = packed["planes"], torch.Size(packed["shape"])
        bits = (torch.bitwise_and(planes[:, :, None], masks) != 0).reshape(len(planes), -1)
        number = (bits * 2 ** torch.arange(len(planes))[:, None]).sum(dim=0)[: shape.numel()]
        weights[name] = packed["centers"].index_select(0, number).reshape(shape)
    return weights


def load(network: nn.Module, path: str | Path) -> nn.Module:
    """Puts the weights into a network, which keeps its own integer counters, and returns it."""
    counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
    network.load_state_dict({**counters, **decode(path)})
    return network.eval()
