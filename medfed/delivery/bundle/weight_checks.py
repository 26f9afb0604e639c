"""Weight files from elsewhere: what they announce is compared with their size before it is used."""

from __future__ import annotations

import math
import reprlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_BITS = 8


def check_archive(path: Path, size: int) -> None:
    """Refuses an archive that grows when it is unpacked; PyTorch writes none."""
    with zipfile.ZipFile(path) as archive:
        inside = archive.infolist()
    if sum(e.file_size for e in inside) > size or any(e.compress_type for e in inside):
        raise ValueError("it is compressed")


def check_content(content: Mapping[str, Any], size: int) -> None:
    """Refuses tensors that say they are larger than their file, before they are copied."""
    dense, packed = content["dense"], content["packed"]
    tensors = [*dense.values(), *(p[k] for p in packed.values() for k in ("planes", "centers"))]
    for tensor in tensors:
        usual = type(tensor) is Tensor and tensor.layout == torch.strided
        if not usual or tensor.device.type != "cpu":
            raise TypeError(f"{type(tensor).__name__} in place of a tensor")
    if sum(t.numel() * t.element_size() for t in tensors) > size:
        raise ValueError("its tensors are larger than the file")
    for name in (*dense, *packed):
        if not isinstance(name, str):
            raise TypeError("a name is no text")
        numbers = dense[name] if name in dense else packed[name]["centers"]
        if not numbers.is_floating_point() or not numbers.isfinite().all():
            raise ValueError(f"{name} is not of finite numbers")
        if name in packed:
            _check_packed(name, dense, **packed[name])


def _check_packed(
    name: str, dense: Mapping[str, Tensor], planes: Tensor, centers: Tensor, shape: Any
) -> None:
    if name in dense:
        raise ValueError(f"{name} is there twice")
    if centers.ndim != 1 or planes.ndim != 2 or not 1 <= len(planes) <= MAX_BITS:
        raise ValueError(f"{name} has planes {tuple(planes.shape)}, centres {tuple(centers.shape)}")
    whole = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    # Beyond the last element there are at most seven bits, so the planes bound the shape.
    if not whole or not 0 <= 8 * planes.shape[1] - math.prod(shape) < 8:
        raise ValueError(f"{name} has the shape {reprlib.repr(shape)}")
