"""Volumes on disk as they were read, in a fraction of the time and, mostly, of the bytes.

A z-scored volume is zero outside the head, and where the scanner wrote integers each channel has
few values: so the box around the head is stored, as numbers of two bytes into a table of the
channel's values. What is read from the cache equals what was stored, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.datamodules.cache import Item, Recipe, Store
from medfed.datamodules.cache.files import Arrays
from medfed.datamodules.client_data import Block
from medfed.datamodules.readers.base import Patient, Reader
from medfed.datamodules.splits import sha256_of
from medfed.datamodules.threads import one_thread

Box = tuple[slice, slice, slice]


def volume_recipe(reader: Reader, patients: Sequence[Patient], path: Path, command: str) -> Recipe:
    """Says what a cache of volumes is made of.

    Args:
        reader: Reads the patients.
        patients: All of them, in the order of the cache.
        path: Where the data lie, which tells apart data sets with the same patient ids.
        command: What to run to make the cache again.

    Returns:
        A recipe with an item per patient.
    """
    items = tuple(Item(p.id, tuple(p.files.values()), args=(reader, p)) for p in patients)
    settings = {"path": str(path.resolve()), "reader": reader.record()}
    return Recipe("volumes", settings, items, read_volume, joined=False, command=command)


def read_volume(reader: Reader, patient: Patient) -> Arrays:
    """Reads one patient from its own files, for the cache.

    Args:
        reader: Reads the patient.
        patient: The patient.

    Returns:
        See `encode`; and ``sha256`` (F, 32) uint8 of the patient's files, so that the record of a
        run need not read all of them again.
    """
    hashes = [bytes.fromhex(sha256_of(path)) for path in patient.files.values()]
    with one_thread():
        sample = reader.read(patient)
        arrays = encode(sample["image"].numpy(), sample["label"].numpy())
    return {**arrays, "sha256": np.array([list(h) for h in hashes], dtype=np.uint8)}


def cached_volume(store: Store, patient: str) -> dict[str, Tensor]:
    """Reads one patient from the cache.

    Args:
        store: The cache.
        patient: The patient's id.

    Returns:
        What `Reader.read` gave: ``image`` (C, H, W, D) float32, ``label`` (R, H, W, D) uint8.
    """
    image, label = decode(store.arrays(patient))
    return {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}


def cached_hashes(store: Store, patient: Patient) -> dict[str, str]:
    """Returns the SHA-256 of a patient's files as they were when the cache was made, by path."""
    digests = store.arrays(patient.id)["sha256"]
    found = zip(patient.files.values(), digests, strict=True)
    return {str(path): digest.tobytes().hex() for path, digest in found}


def encode(image: NDArray[np.float32], label: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Crops a volume to what is not zero, and numbers its values where they are few.

    Args:
        image: (C, H, W, D), finite.
        label: (R, H, W, D).

    Returns:
        ``box`` (3, 3) int64: first voxel and end of the box, and the volume's size; ``label``
        (R, h, w, d); and ``image`` (C, h, w, d) float32, or ``codes`` (C, h, w, d) uint16 with
        ``values`` (C, K) float32, padded with zeros, where no channel has more than 65,536 values.

    Example:
        >>> image = np.zeros((1, 4, 4, 4), np.float32)
        >>> image[0, 1:3, 2, 0] = 7.5, -0.5
        >>> stored = encode(image, np.zeros((1, 4, 4, 4), np.uint8))
        >>> stored["codes"].ravel().tolist(), stored["values"].tolist()
        ([1, 0], [[-0.5, 7.5]])
        >>> bool((decode(stored)[0] == image).all())
        True
    """
    box = bounding_box((image != 0).any(axis=0) | (label != 0).any(axis=0))
    spans = [[s.start for s in box], [s.stop for s in box], list(image.shape[1:])]
    arrays: dict[str, NDArray[Any]] = {
        "box": np.array(spans, dtype=np.int64),
        "label": np.ascontiguousarray(label[:, *box]),
    }
    cropped = np.ascontiguousarray(image[:, *box])
    values = [np.unique(channel) for channel in cropped]
    longest = max(map(len, values))
    if longest > 2**16:
        return {**arrays, "image": cropped}
    codes = [np.searchsorted(v, c) for v, c in zip(values, cropped, strict=True)]
    tables = [np.pad(v, (0, longest - len(v))) for v in values]
    return {**arrays, "codes": np.stack(codes).astype(np.uint16), "values": np.stack(tables)}


def decode(arrays: Arrays) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Undoes `encode`.

    Args:
        arrays: As it returned them; they may be mapped from a file.

    Returns:
        ``image`` (C, H, W, D) and ``label`` (R, H, W, D), in memory.
    """
    starts, ends, size = np.asarray(arrays["box"]).tolist()
    x, y, z = (slice(a, b) for a, b in zip(starts, ends, strict=True))
    stored = arrays.get("codes", arrays.get("image"))
    assert stored is not None
    image = np.zeros((len(stored), *size), dtype=np.float32)
    for channel, values in enumerate(stored):
        inside = arrays["values"][channel].take(values) if "values" in arrays else values
        image[channel, x, y, z] = inside
    label = np.zeros((len(arrays["label"]), *size), dtype=np.uint8)
    label[:, x, y, z] = arrays["label"]
    return image, label


def bounding_box(mask: NDArray[np.bool_]) -> Box:
    """Finds the smallest box around the voxels of a mask.

    Args:
        mask: (H, W, D).

    Returns:
        Three slices; of one voxel at the origin where the mask is empty.

    Example:
        >>> mask = np.zeros((4, 4, 4), bool)
        >>> mask[1:3, 2, 0] = True
        >>> bounding_box(mask)
        (slice(1, 3, None), slice(2, 3, None), slice(0, 1, None))
    """
    x, y, z = (
        np.flatnonzero(mask.any(axis=tuple({0, 1, 2} - {axis}))).tolist() for axis in range(3)
    )
    if not len(x):
        return slice(0, 1), slice(0, 1), slice(0, 1)
    return slice(x[0], x[-1] + 1), slice(y[0], y[-1] + 1), slice(z[0], z[-1] + 1)


class BlocksOnDemand(Sequence[Block]):
    """A block per patient that is read anew whenever it is asked for, and not kept.

    Args:
        length: Number of patients.
        read: Reads the block of the n-th.

    Example:
        >>> blocks = BlocksOnDemand(2, lambda n: {"case": torch.tensor([n])})
        >>> [block["case"].item() for block in blocks]
        [0, 1]
    """

    def __init__(self, length: int, read: Callable[[int], Block]) -> None:
        self.length = length
        self.read = read

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        if isinstance(index, slice):
            return [self.read(n) for n in range(self.length)[index]]
        with one_thread():
            return self.read(range(self.length)[index])
