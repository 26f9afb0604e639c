"""The weight files of a bundle.

``models/model.pt`` is the plain state dict of the network that the bundle's ``network_def`` builds,
in single precision, as MONAI's tools load it.

``models/packed.pt`` is there where weights are quantised: dense tensors as they are, quantised ones
as bit planes and centres. It is the small file, and whole by itself. Its
``torch.load(path, weights_only=True)`` is::

    [{"format": "medfed-bundle", "version": 1,
      "dense": {name: tensor},
      "packed": {name: {"planes": (bits, ceil(n / 8)) uint8, "centers": (m,), "shape": [...]}}}]

A list, at which MONAI's tools stop: of a mapping they load the names that they know, if only none.

Plane ``b`` holds bit ``b`` of all n indices of centres, the least significant bit first. Within a
plane index ``i`` lies in byte ``i // 8`` under the mask ``1 << (i % 8)``, which is
``numpy.packbits`` with ``bitorder="little"``. Bits beyond the last index are zero.

Its tensors are pieces of few long ones: PyTorch pads every storage of a file to 64 bytes and names
it twice, which for the hundreds of short vectors of a deep network takes more than the vectors.

Weight files from elsewhere: what they announce is compared with their size before it is used.
"""

from __future__ import annotations

import io
import math
import reprlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from medfed.common.schemas import fit
from medfed.common.tensors import Tensors, cut, flatten, layout_of
from medfed.common.untrusted import reading
from medfed.standalone.decode import FORMAT, VERSION, check_version, decode_content
from medfed.standalone.errors import CheckpointError, ConfigError

MAX_BITS = 8


def check_archive(path: Path, size: int) -> None:
    """Refuses an archive that grows when it is unpacked, as PyTorch writes none, and programs."""
    with zipfile.ZipFile(path) as archive:
        inside = archive.infolist()
    if any(e.filename.endswith("/constants.pkl") for e in inside):
        raise ValueError("it is TorchScript")
    if sum(e.file_size for e in inside) > size or any(e.compress_type for e in inside):
        raise ValueError("it is compressed")


class Packed(TypedDict):
    """A quantised tensor: bit planes, centres, and the shape of what they are of."""

    planes: Tensor
    centers: Tensor
    shape: list[Annotated[int, Meta(gt=0)]]


class Content(TypedDict):
    """The content of a file with packed tensors, without its format and version."""

    dense: dict[str, Tensor]
    packed: dict[str, Packed]


def _check_content(content: Mapping[str, Any], size: int) -> None:
    """Refuses tensors that say they are larger than their file, before they are copied."""
    whole = fit(content, Content)
    dense, packed = whole["dense"], whole["packed"]
    if twice := [*(dense.keys() & packed)]:
        raise ValueError(f"{min(twice)} is there twice")
    numbers = {**dense, **{name: each["centers"] for name, each in packed.items()}}
    _check_tensors(numbers, [each["planes"] for each in packed.values()], size)
    for name, each in packed.items():
        planes, centers = each["planes"], each["centers"]
        if centers.ndim != 1 or planes.ndim != 2 or not 1 <= len(planes) <= MAX_BITS:
            sizes = f"planes {tuple(planes.shape)}, centres {tuple(centers.shape)}"
            raise ValueError(f"{name} has {sizes}")
        # Beyond the last element there are at most seven bits, so the planes bound the shape.
        if not 0 <= 8 * planes.shape[1] - math.prod(each["shape"]) < 8:
            raise ValueError(f"{name} has the shape {reprlib.repr(each['shape'])}")


def _check_plain(content: Mapping[str, Any], size: int) -> Tensors:
    """Refuses tensors of a state dict as `_check_content` does; returns those that are different.

    Tied weights are one tensor, which has several names in a state dict; the first one stays.
    """
    tensors, first = fit(content, dict[str, Tensor]), dict[Any, str]()
    for name, t in tensors.items():
        place = (t.data_ptr(), t.dtype, t.shape, t.stride()) if t.numel() else name
        first.setdefault(place, name)
    different = {name: tensors[name] for name in first.values()}
    _check_tensors(different, (), size)
    return different


def _check_tensors(numbers: Mapping[str, Tensor], planes: Sequence[Tensor], size: int) -> None:
    every = [*numbers.values(), *planes]
    # A sparse tensor, or a strided one of a small storage, may stand for more than memory holds.
    if any(t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized for t in every):
        raise TypeError("a tensor is no dense one")
    if sum(t.numel() * t.element_size() for t in every) > size:
        raise ValueError("its tensors are larger than the file")
    for name, tensor in numbers.items():
        if tensor.is_complex() or not tensor.isfinite().all():
            raise ValueError(f"{name} is not of finite numbers")


@dataclass(frozen=True)
class Codebook:
    """A tensor whose elements are few different numbers: for each, the index of its centre.

    Example:
        >>> book = Codebook(torch.tensor([1, 0, 1, 1]), torch.tensor([-0.5, 2.0]), (2, 2))
        >>> book.dense(), book.bits
        (tensor([[ 2.0000, -0.5000],
                [ 2.0000,  2.0000]]), 1)
    """

    indices: Tensor  # ``(n,)`` int64, which centre each element is
    centers: Tensor  # ``(m,)`` the sorted numbers, m from 1 to 256
    shape: tuple[int, ...]  # the tensor's shape, of n elements

    @property
    def bits(self) -> int:
        """Bits per element."""
        return max(1, math.ceil(math.log2(len(self.centers))))

    def dense(self) -> Tensor:
        """Returns the tensor, in the type of the centres."""
        return self.centers.index_select(0, self.indices).reshape(self.shape)


def from_centers(tensor: Tensor, centers: Tensor) -> Codebook:
    """Looks up a tensor in the centres that its elements equal.

    Example:
        >>> from_centers(torch.tensor([[2.0, -1.0]]), torch.tensor([-1.0, 2.0])).indices
        tensor([1, 0])
    """
    if centers.ndim != 1 or not 1 <= len(centers) <= 256 or bool((centers.diff() < 0).any()):
        raise CheckpointError("Centres must be 1 to 256 numbers in increasing order.")
    flat = tensor.detach().reshape(-1).contiguous()
    centers = centers.detach().to(flat.dtype)
    indices = torch.searchsorted(centers, flat).clamp_(max=len(centers) - 1)
    if not torch.equal(centers.index_select(0, indices), flat):
        raise CheckpointError("A weight is none of its parameter's centres, which are another's.")
    return Codebook(indices, centers.clone(), tuple(tensor.shape))


def kmeans(tensor: Tensor, bits: int) -> Codebook:
    """Quantises a trained tensor by k-means of its elements.

    Example:
        >>> kmeans(torch.tensor([0.0, 0.2, 1.0, 1.2]), bits=1).centers
        tensor([0.1000, 1.1000])
    """
    # Imported late: compiled kernels come with it, and reading a bundle needs none of them.
    from medfed.functional.kmeans import initial_centers
    from medfed.functional.quantize import assign

    flat = tensor.detach().reshape(-1)
    centers = initial_centers(flat, bits).unique()
    return Codebook(assign(flat, centers).to(torch.int64), centers, tuple(tensor.shape))


def pack(indices: Tensor, bits: int) -> Tensor:
    """Packs n integers into ``(bits, ceil(n / 8))`` bit planes; `scripts.decode.unpack` undoes it.

    Example:
        >>> pack(torch.tensor([3, 0, 1]), bits=2)
        tensor([[5],
                [1]], dtype=torch.uint8)
    """
    check_bits(bits)
    flat = indices.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < 2**bits:
        raise ValueError(f"Integers from {flat.min()} to {flat.max()} do not fit into {bits} bits.")
    planes = flat.to(torch.uint8).numpy() >> np.arange(bits, dtype=np.uint8)[:, None] & 1
    return torch.from_numpy(np.packbits(planes, axis=1, bitorder="little"))


def check_bits(bits: int, name: str = "bits", otherwise: str = "") -> None:
    """Checks a number of bits per weight.

    Example:
        >>> check_bits(9)
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: bits=9 must be a whole number from 1 to 8.
    """
    if type(bits) is not int or not 1 <= bits <= MAX_BITS:
        raise ConfigError(f"{name}={bits} must be a whole number from 1 to {MAX_BITS}{otherwise}.")


def with_codebooks(weights: Mapping[str, Tensor], books: Mapping[str, Codebook]) -> Tensors:
    """Returns the weights with the quantised ones, dense, in their places."""
    return {**weights, **{n: b.dense() for n, b in books.items()}}


def save_packed(path: Path, dense: Mapping[str, Tensor], books: Mapping[str, Codebook]) -> None:
    """Writes a file with packed tensors."""
    planes = _together({n: pack(b.indices, b.bits) for n, b in books.items()})
    centers = _together({n: b.centers for n, b in books.items()})
    parts = ((n, planes[n], centers[n], list(b.shape)) for n, b in books.items())
    packed = {n: {"planes": p, "centers": c, "shape": s} for n, p, c, s in parts}
    content = {"format": FORMAT, "version": VERSION, "dense": _together(dense), "packed": packed}
    save(path, [content])


def save(path: Path, content: object) -> None:
    """Writes a file of PyTorch's."""
    buffer = io.BytesIO()  # PyTorch's own writer hides what goes wrong with a file
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())


def load_weights(path: Path) -> Tensors:
    """Reads a weight file; no code in it is ever run."""
    with reading(path, "copy the bundle again"):
        size = path.stat().st_size
        check_archive(path, size)
        content = torch.load(path, map_location="cpu", weights_only=True)
    with reading(path, "export the bundle anew, or update the program"):
        if isinstance(content, dict):
            return _check_plain(content, size)
        if isinstance(content, list) and [*map(type, content)] == [dict]:
            check_version(content[0])
            _check_content(content[0], size)
            return decode_content(content[0])
    raise CheckpointError(f"{path} is no weight file of a bundle; export the model anew.")


def _together(tensors: Mapping[str, Tensor]) -> Tensors:
    """The same tensors, as pieces of one per data type."""
    joined: Tensors = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
        alike = {n: t.detach().cpu() for n, t in tensors.items() if t.dtype == dtype}
        joined |= cut(flatten(alike), layout_of(alike))
    return {n: joined[n] for n in tensors}
