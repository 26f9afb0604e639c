"""Arrays on disk: mapped when read, without pickle; and their checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError

Arrays = Mapping[str, NDArray[Any]]


def map_array(path: Path, whole: bool = False) -> NDArray[Any]:
    """Maps a ``.npy`` file, read-only and without pickle.

    Args:
        path: The file.
        whole: Whether to read it now; of small files, that is faster than mapping each.

    Returns:
        An array whose values are read from the disk when they are touched.

    Raises:
        DataError: If the file is missing, torn or no such array.
    """
    try:
        mapped = np.load(path, mmap_mode=None if whole else "r", allow_pickle=False)
    except Exception as error:  # whatever NumPy raises on bad bytes, its tokenizer's errors too
        raise DataError(f"{path} cannot be read ({error}); prepare the data again.") from error
    return np.asarray(mapped)  # without the memmap class, whose indexing is slow


def checksum(arrays: Arrays) -> str:
    """Hashes arrays with their names, types and shapes.

    Args:
        arrays: Arrays by name.

    Returns:
        The SHA-256 in hexadecimal.

    Example:
        >>> one = checksum({"image": np.zeros((1, 2), np.int16)})
        >>> one == checksum({"image": np.zeros((1, 2), np.int16)})
        True
        >>> one == checksum({"image": np.zeros((2, 1), np.int16)})
        False
    """
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        found.update(array.data)
    return found.hexdigest()
