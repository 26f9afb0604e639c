"""Samples and blocks that are read, or become numbers, only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common.seeding import one_thread
from medfed.datamodules.cache.arrays import map_array
from medfed.datamodules.client_data import Block


class ArrayRows:
    """Rows of an array as `medfed.datamodules.client_data.Rows`: those of one client.

    A file is mapped when the first row is taken, in every process anew; pickled, the object is then
    a path and row numbers.

    Args:
        source: The array (N, ...), or the ``.npy`` file that holds it.
        index: (n,) the numbers of its rows that count, in order.
        convert: Turns gathered rows into what a batch holds, such as int16 HU into [-1, 1].

    Example:
        >>> rows = ArrayRows(np.array([[7], [8], [9]], np.uint8), np.array([2, 0]), np.float32)
        >>> rows.shape, rows.take(torch.tensor([1, 1, 0])).ravel().tolist()
        ((2, 1), [7.0, 7.0, 9.0])
    """

    def __init__(
        self,
        source: NDArray[Any] | Path,
        index: NDArray[np.int64],
        convert: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> None:
        self.source = source
        self.index = index
        self.convert = convert
        self._mapped: NDArray[Any] | None = None

    @property
    def array(self) -> NDArray[Any]:
        """The whole array, (N, ...)."""
        if not isinstance(self.source, Path):
            return self.source
        if self._mapped is None:
            self._mapped = map_array(self.source)
        return self._mapped

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, ...), as of a tensor."""
        return (len(self.index), *self.array.shape[1:])

    def take(self, index: Tensor) -> Tensor:
        """See `Rows.take`; gathers by NumPy on one thread, and copies."""
        return torch.from_numpy(self.convert(self.array.take(self.index[index.numpy()], axis=0)))

    def some(self, index: Tensor) -> ArrayRows:
        """See `Rows.some`."""
        return ArrayRows(self.source, self.index[index.numpy()], self.convert)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": None}


class BlocksOnDemand(Sequence[Block]):
    """A block per patient that is read anew whenever it is asked for, and not kept.

    Args:
        patients: Their ids.
        read: Reads the block of a patient; called with its id and its place among `patients`.

    Example:
        >>> blocks = BlocksOnDemand(["a", "b"], lambda name, n: {"case": torch.tensor([n])})
        >>> [block["case"].item() for block in blocks]
        [0, 1]
    """

    def __init__(self, patients: Sequence[str], read: Callable[[str, int], Block]) -> None:
        self.patients = patients
        self.read = read

    def __len__(self) -> int:
        return len(self.patients)

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        if isinstance(index, slice):
            return [self[n] for n in range(len(self))[index]]
        case = range(len(self))[index]
        with one_thread():
            return self.read(self.patients[case], case)
