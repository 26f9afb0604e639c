"""Volumes on disk as they were read, in a fraction of the time and, mostly, of the bytes.

A z-scored volume is zero outside the head, and where the scanner wrote integers each channel has
few values: so the box around the head is stored, as numbers of two bytes into a table of the
channel's values. What is read from the cache equals what was stored, bit by bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.files import sha256
from medfed.common.seeding import one_thread
from medfed.datamodules.cache.arrays import Arrays
from medfed.datamodules.cache.store import Store
from medfed.datamodules.patches import bounding_box
from medfed.datamodules.readers.base import Patient, VolumeReader


def read_volume(reader: VolumeReader, patient: Patient) -> Arrays:
    """Reads one patient from its own files, for the cache.

    Args:
        reader: Reads the patient.
        patient: The patient.

    Returns:
        See `encode`; and ``sha256`` (F, 32) uint8 of the patient's files, so that the record of a
        run need not read all of them again.
    """
    hashes = [bytes.fromhex(sha256(path)) for path in patient.files.values()]
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
        What `VolumeReader.read` gave: ``image`` (C, H, W, D) float32, ``label`` (R, H, W, D) uint8.
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
