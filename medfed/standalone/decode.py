"""Reads weights: a plain state dict, or dense tensors and packed ones, bit planes with centres."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FORMAT, VERSION = "medfed-bundle", 1


def decode(path: str | Path) -> dict[str, Tensor]:
    """Returns the weights of models/packed.pt or models/model.pt by name."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    return content if isinstance(content, dict) else decode_content(content[0])


def decode_content(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights of a file with packed tensors: ``planes`` of numbers of ``centers``."""
    check_version(content)
    weights = {str(name): tensor.clone() for name, tensor in content["dense"].items()}
    for name, packed in content["packed"].items():
        centers, shape = packed["centers"], torch.Size(packed["shape"])
        index = unpack(packed["planes"], shape.numel())
        if len(index) and index.max() >= len(centers):
            raise ValueError(f"an index of {int(index.max())} for {len(centers)} centres")
        weights[str(name)] = centers.index_select(0, index).reshape(shape)
    return weights


def check_version(content: Mapping[str, Any]) -> None:
    """Refuses packed tensors of another form."""
    if type(version := content.get("version")) is not int or version != VERSION:
        raise ValueError(f"it has version {version!r:.60}, but only {VERSION} is read")


def unpack(planes: Tensor, count: int) -> Tensor:
    """Returns the integers of bit planes; i is in byte i // 8 under the mask 1 << (i % 8)."""
    if planes.dtype != torch.uint8 or planes.ndim != 2 or planes.shape[1] != -(-count // 8):
        what = f"Planes of {count} integers are (bits, {-(-count // 8)}) uint8"
        raise ValueError(f"{what}, not {tuple(planes.shape)} {planes.dtype}.")
    bits = np.unpackbits(planes.numpy(), axis=1, count=count, bitorder="little")
    return torch.from_numpy(bits.T.astype(np.int64) @ 2 ** np.arange(len(planes)))


def fill(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Puts the weights into a network, which keeps its own integer counters, and returns it."""
    names = network.state_dict(keep_vars=True)
    # Tied weights are one tensor under several names, of which the file may hold any one.
    values = {id(t): weights[n] for n, t in names.items() if n in weights}
    counters = {n: t for n, t in names.items() if not t.is_floating_point()}
    tied = {n: values[id(t)] for n, t in names.items() if id(t) in values}
    network.load_state_dict({**counters, **tied, **weights})
    return network.eval()
