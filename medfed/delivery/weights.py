"""The weight file of a bundle: dense tensors as they are, quantised ones as bit planes and centres.

``torch.load(path, weights_only=True)`` gives::

    {"format": "medfed-bundle", "version": 1,
     "dense": {name: tensor},
     "packed": {name: {"planes": (bits, ceil(n / 8)) uint8, "centers": (m,), "shape": [...]}}}

The tensors are pieces of few long ones: PyTorch pads every storage of a file to 64 bytes and names
it twice, which for the hundreds of short vectors of a deep network takes more than the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfed.delivery.codebook import Codebook
from medfed.delivery.packing import MAX_BITS, unpack
from medfed.errors import CheckpointError

FORMAT = "medfed-bundle"
VERSION = 1
Tensors = dict[str, Tensor]


def save_weights(path: Path, dense: Mapping[str, Tensor], books: Mapping[str, Codebook]) -> None:
    """Writes a weight file.

    Args:
        path: Where to.
        dense: Tensors that stay as they are, by name.
        books: Quantised tensors, by name.
    """
    planes = _together({n: b.planes() for n, b in books.items()})
    centers = _together({n: b.centers for n, b in books.items()})
    packed = {
        n: {"planes": planes[n], "centers": centers[n], "shape": list(b.shape)}
        for n, b in books.items()
    }
    content = {"format": FORMAT, "version": VERSION, "dense": _together(dense), "packed": packed}
    torch.save(content, path)


def load_weights(path: Path) -> tuple[Tensors, dict[str, Codebook]]:
    """Reads a weight file; no code in it is ever run.

    Args:
        path: A file of :func:`save_weights`.

    Returns:
        The dense tensors and the codebooks, by name.

    Raises:
        CheckpointError: If the file is missing, damaged, of another format or version.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; export the bundle anew.") from None
    except Exception as error:  # whatever PyTorch raises on bad bytes
        cause = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise CheckpointError(
            f"{path} is truncated or damaged ({cause}); copy the bundle again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no weight file of a bundle; export the model anew.")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {content.get('version')}, but this program reads version "
            f"{VERSION}; export the bundle anew, or update the program."
        )
    try:
        dense = {str(n): _tensor(t) for n, t in content["dense"].items()}
        return dense, {str(n): _book(p) for n, p in content["packed"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"{path} does not hold what a weight file holds ({error}); export the bundle anew."
        ) from error


def entropy_bound(dense: Mapping[str, Tensor], books: Mapping[str, Codebook]) -> int:
    """Returns the bytes of dense tensors and centres, and of all indices at their entropy.

    Example:
        >>> book = Codebook(torch.arange(8) % 2, torch.tensor([0.0, 1.0]), (8,))
        >>> entropy_bound({"bias": torch.zeros(3)}, {"weight": book})
        21
    """
    plain = sum(t.numel() * t.element_size() for t in dense.values())
    centers = sum(b.centers.numel() * b.centers.element_size() for b in books.values())
    bits = sum(b.entropy() * len(b.indices) for b in books.values())
    return plain + centers + math.ceil(bits / 8)


def _together(tensors: Mapping[str, Tensor]) -> Tensors:
    """The same tensors, as pieces of one per data type."""
    found: Tensors = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
        own = {n: t.detach().cpu() for n, t in tensors.items() if t.dtype == dtype}
        flat = torch.cat([t.reshape(-1) for t in own.values()])
        pieces = flat.split([t.numel() for t in own.values()])
        found |= {n: p.view(t.shape) for (n, t), p in zip(own.items(), pieces, strict=True)}
    return {n: found[n] for n in tensors}


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} stands where a tensor belongs")
    return value.clone()


def _book(packed: Mapping[str, Any]) -> Codebook:
    shape = tuple(int(s) for s in packed["shape"])
    planes, centers = _tensor(packed["planes"]), _tensor(packed["centers"])
    if centers.ndim != 1 or not len(planes) <= MAX_BITS:
        raise ValueError(f"{len(planes)} planes and centres of shape {tuple(centers.shape)}")
    indices = unpack(planes, math.prod(shape))
    if len(indices) and int(indices.max()) >= len(centers):
        raise ValueError(f"an index of {int(indices.max())} for {len(centers)} centres")
    return Codebook(indices, centers, shape)
