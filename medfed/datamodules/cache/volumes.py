"""Volumes on disk as they were read, in a fraction of the time and, mostly, of the bytes.

A z-scored volume is zero outside the head, and where the scanner wrote integers each channel has
few values: so the box around the head is stored, as numbers of two bytes into a table of the
channel's values. What is read from the cache equals what was stored, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
from medfed.datamodules.preparation import Preparation, prepared_case
from medfed.datamodules.readers.base import Patient, VolumeReader
from medfed.datamodules.readers.volumes import files_of


def read_volume(
    reader: VolumeReader, case: Patient, preparation: Preparation | None = None
) -> Arrays:
    """Reads one case from its own files, for the cache.

    Args:
        reader: Reads the case.
        case: A patient, or one of its cases.
        preparation: See `preparation.prepared_case`.

    Returns:
        See `encode`; ``grid`` (4, 4) where image and label have other voxels; and ``sha256``
        (F, 32) uint8 of the case's files, so that the record of a run need not read all of them
        again.
    """
    hashes = [bytes.fromhex(sha256(path)) for path in case_files(case)]
    with one_thread():
        sample = prepared_case(reader, case, preparation)
        arrays = encode(sample["image"].numpy(), sample["label"].numpy())
    if "grid" in sample:
        arrays["grid"] = sample["grid"].numpy()
    return {**arrays, "sha256": np.array([list(h) for h in hashes], dtype=np.uint8)}


def case_files(case: Patient) -> list[Path]:
    """Lists all files that a case is read from: a DICOM series has many."""
    return [file for path in case.files.values() for file in files_of(path)]


def cached_volume(store: Store, patient: str) -> dict[str, Tensor]:
    """Reads one patient from the cache.

    Args:
        store: The cache.
        patient: The patient's id.

    Returns:
        What `preparation.prepared_case` gave.
    """
    arrays = store.arrays(patient)
    image, label = decode(arrays)
    found = {"image": torch.from_numpy(image), "label": torch.from_numpy(label)}
    return (
        {**found, "grid": torch.from_numpy(np.array(arrays["grid"]))} if "grid" in arrays else found
    )


def cached_hashes(store: Store, patient: Patient) -> dict[str, str]:
    """Returns the SHA-256 of a patient's files as they were when the cache was made, by path."""
    digests = store.arrays(patient.id)["sha256"]
    found = zip(case_files(patient), digests, strict=True)
    return {str(path): digest.tobytes().hex() for path, digest in found}


def encode(image: NDArray[np.float32], label: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Crops a volume to what is not zero, and numbers its values where they are few.

    Args:
        image: (C, H, W, D), finite.
        label: (R, H, W, D).

    Returns:
        ``box`` (3, 3) int64: first voxel and end of the box, and the volume's size; ``label_box``
        alike where the label has a grid of its own; ``label`` (R, h, w, d); and ``image``
        (C, h, w, d) float32, or ``codes`` (C, h, w, d) uint16 with ``values`` (C, K) float32,
        padded with zeros, where no channel has more than 65,536 values.

    Example:
        >>> image = np.zeros((1, 4, 4, 4), np.float32)
        >>> image[0, 1:3, 2, 0] = 7.5, -0.5
        >>> stored = encode(image, np.zeros((1, 4, 4, 4), np.uint8))
        >>> stored["codes"].ravel().tolist(), stored["values"].tolist()
        ([1, 0], [[-0.5, 7.5]])
        >>> bool((decode(stored)[0] == image).all())
        True
    """
    inside, labelled = (image != 0).any(axis=0), (label != 0).any(axis=0)
    if inside.shape == labelled.shape:
        box = label_box = bounding_box(inside | labelled)
    else:
        box, label_box = bounding_box(inside), bounding_box(labelled)
    arrays = {"box": _spans(box, inside), "label": np.ascontiguousarray(label[:, *label_box])}
    if inside.shape != labelled.shape:
        arrays["label_box"] = _spans(label_box, labelled)
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
    (x, y, z), size = _box(arrays["box"])
    stored = arrays.get("codes", arrays.get("image"))
    assert stored is not None
    image = np.zeros((len(stored), *size), dtype=np.float32)
    for channel, values in enumerate(stored):
        inside = arrays["values"][channel].take(values) if "values" in arrays else values
        image[channel, x, y, z] = inside
    (x, y, z), size = _box(arrays.get("label_box", arrays["box"]))
    label = np.zeros((len(arrays["label"]), *size), dtype=np.uint8)
    label[:, x, y, z] = arrays["label"]
    return image, label


def _spans(box: Sequence[slice], mask: NDArray[np.bool_]) -> NDArray[Any]:
    spans = [[s.start for s in box], [s.stop for s in box], list(mask.shape)]
    return np.array(spans, dtype=np.int64)


def _box(spans: NDArray[Any]) -> tuple[list[slice], list[int]]:
    starts, ends, size = np.asarray(spans).tolist()
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)], size
