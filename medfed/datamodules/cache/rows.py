"""Samples that stay on disk: rows of a mapped array, converted as they are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.datamodules.cache.files import map_array


class MappedRows:
    """Rows of a ``.npy`` file as `medfed.datamodules.client_data.Rows`.

    The file is mapped when the first row is taken, in every process anew; pickled, the object is a
    path and row numbers.

    Args:
        path: The file, (N, ...).
        rows: (n,) the numbers of its rows that count, in order.
        convert: Turns gathered rows into what a batch holds, such as int16 HU into [-1, 1].
    """

    def __init__(
        self,
        path: Path,
        rows: NDArray[np.int64],
        convert: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ) -> None:
        self.path = path
        self.rows = rows
        self.convert = convert
        self._array: NDArray[Any] | None = None

    @property
    def array(self) -> NDArray[Any]:
        """The whole mapped array, (N, ...)."""
        if self._array is None:
            self._array = map_array(self.path)
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, ...), as of a tensor."""
        return (len(self.rows), *self.array.shape[1:])

    def take(self, index: Tensor) -> Tensor:
        """Gathers samples, by NumPy on one thread.

        Args:
            index: (B,) int64, positions in `rows`.

        Returns:
            (B, ...), a copy.
        """
        taken = self.array.take(self.rows[index.numpy()], axis=0)
        return torch.from_numpy(taken if self.convert is None else self.convert(taken))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_array": None}
