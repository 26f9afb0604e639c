"""Samples that have one label and one patient each: rows of a table, or images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.partitions.thinning import thin
from medfed.datamodules.readers.base import Patient
from medfed.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
    """What is known of N samples, apart from their features or pixels.

    Attributes:
        labels: (N,) int64 class indices, or floats: outcomes, which are no classes.
        num_classes: K.
        patients: (N) patient id of every sample.
        centres: (N) hospital of every sample; empty where none is known.
        splits: (N) official split of every sample; empty where there is none.
        files: (N) file of every sample; empty where there is none.
    """

    labels: NDArray[Any]
    num_classes: int
    patients: Sequence[str]
    centres: Sequence[str] = ()
    splits: Sequence[Literal["train", "val", "test"]] = ()
    files: Sequence[Path] = ()

    @cached_property
    def rows(self) -> dict[str, list[int]]:
        """Sample numbers per patient, both in the order of the data."""
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.patients):
            rows.setdefault(name, []).append(row)
        return rows

    @property
    def continuous(self) -> bool:
        """Whether labels are outcomes rather than classes."""
        return self.labels.dtype.kind == "f"

    @property
    def grouped(self) -> bool:
        """Whether a patient has several samples."""
        return len(self.rows) < len(self.patients)

    def list_patients(self) -> list[Patient]:
        """Lists the patients in the order of the data.

        Returns:
            Patients with a label where all their samples agree, and with counts per class where
            any patient has several samples; without both where labels are outcomes.

        Raises:
            ConfigError: If a patient is at two centres.
            DataError: If a patient is in two official splits.

        Example:
            >>> samples = Samples(np.array([0, 1, 1]), 2, ["a", "a", "b"])
            >>> [(p.id, p.label, p.counts) for p in samples.list_patients()]
            [('a', None, (1, 1)), ('b', 1, (0, 1))]
        """
        return [self._patient(name, rows) for name, rows in self.rows.items()]

    def _patient(self, name: str, rows: list[int]) -> Patient:
        centres = {self.centres[row] for row in rows} if self.centres else set()
        splits = {self.splits[row] for row in rows} if self.splits else set()
        files = dict.fromkeys(self.files[row] for row in rows) if self.files else {}
        if len(centres) > 1:
            raise ConfigError(
                f"Patient {name} has samples at several centres ({', '.join(sorted(centres))}); a "
                "patient belongs to one client."
            )
        if len(splits) > 1:
            raise DataError(
                f"Patient {name} has samples in several splits ({', '.join(sorted(splits))}); set "
                "data.official_splits=false to split by patient."
            )
        label, counts = self._classes(rows)
        return Patient(
            id=name,
            files={f"file_{n}": file for n, file in enumerate(files)},
            centre=centres.pop() if centres else None,
            label=label,
            counts=counts,
            split=splits.pop() if splits else None,
        )

    def _classes(self, rows: list[int]) -> tuple[int | None, tuple[int, ...] | None]:
        """The class that all rows share, if any, and the samples per class where they count."""
        if self.continuous:
            return None, None
        labels = [int(self.labels[row]) for row in rows]
        counts = tuple(np.bincount(labels, minlength=self.num_classes).tolist())
        return labels[0] if len(set(labels)) == 1 else None, counts if self.grouped else None

    def select(
        self, patients: Sequence[str], shares: Sequence[float] | None, seed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Finds the samples of one client's split.

        Args:
            patients: Patient ids.
            shares: (K,) class proportions to which the samples are thinned, or None. (Where every
                patient is one sample, the partition has seen to them by its choice of patients.)
            seed: Seed of the thinning.

        Returns:
            (n,) sample numbers and (n,) index of each one's patient in `patients`.

        Example:
            >>> samples = Samples(np.array([0, 1, 1]), 2, ["a", "b", "a"])
            >>> [array.tolist() for array in samples.select(["b", "a"], None, seed=0)]
            [[1, 0, 2], [0, 1, 1]]
        """
        index = np.array([r for p in patients for r in self.rows[p]], dtype=np.int64)
        sizes = [len(self.rows[p]) for p in patients]
        case = np.repeat(np.arange(len(patients), dtype=np.int64), sizes)
        if shares is None or not self.grouped or self.continuous:
            return index, case
        kept = thin(self.labels[index], shares, seed)
        return index[kept], case[kept]
