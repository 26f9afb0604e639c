"""The reader interface: a data set is a list of patients and a way to read one of them.

To add a format, write one class with `channels`, `regions`, `patients()` and `read()`, and name it
in a data configuration. Nothing else needs to know the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from medfed.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Patient:
    """One patient (case), before anything of it is read.

    Attributes:
        id: Unique in the data set.
        files: The files that belong to it, by role.
        centre: The hospital that it comes from, where the data names one.
        label: Its class, where it has exactly one; partitions by label need it.
        counts: Samples per class, where it has several samples (nodule candidates of one scan).
        split: The split that the data set itself puts it in, where it does.
    """

    id: str
    files: Mapping[str, Path] = field(default_factory=dict)
    centre: str | None = None
    label: int | None = None
    counts: tuple[int, ...] | None = None
    split: Literal["train", "val", "test"] | None = None

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Returns the samples per class, (K,); a patient with one label is one sample.

        Raises:
            ConfigError: If neither a label nor counts are known.

        Example:
            >>> Patient("a", label=1).class_counts(3)
            (0, 1, 0)
        """
        if self.counts is not None:
            return (*self.counts, *[0] * (num_classes - len(self.counts)))
        if self.label is None:
            raise ConfigError(
                f"Patient {self.id} has no label; a partition by label needs one per patient, and "
                "a continuous outcome is none (partition=round_robin, quantity_skew and centre "
                "need none)."
            )
        return tuple(int(k == self.label) for k in range(num_classes))


class Reader(Protocol):
    """What a format has to offer.

    Attributes:
        channels: Names of the image channels, in the order of `read`.
        regions: Names of the label channels, in the order of `read`.
    """

    channels: tuple[str, ...]
    regions: tuple[str, ...]

    def patients(self) -> list[Patient]:
        """Lists the patients without reading voxels, sorted by id.

        Raises:
            DataError: If the folder or an index file is not as the format says.
        """
        ...

    def read(self, patient: Patient) -> dict[str, Tensor]:
        """Reads one patient.

        Returns:
            ``image`` (C, H, W, D) float32, normalised, and ``label`` (R, H, W, D) uint8.

        Raises:
            DataError: Naming the file that cannot be used, and what to do.
        """
        ...

    def shape(self, patient: Patient) -> tuple[int, ...]:
        """Reads the three sizes from a header alone; `read` may return them in another order."""
        ...

    def layout(self) -> dict[str, object]:
        """Returns how a scan's files are found and what they hold, for predictions, as JSON.

        Returns:
            ``files``: name patterns per channel, or None where one 4-D file holds all of
            ``file_channels``; ``regions``: the label values of every region.
        """
        ...

    def record(self) -> dict[str, object]:
        """Returns all that decides what `read` makes of a patient's files, for JSON."""
        ...


def check_names(kind: str, wanted: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Matches names case-insensitively against what the data offers.

    Args:
        kind: What is named, for the error: ``"channel"``, ``"region"``.
        wanted: Names from the configuration.
        known: Names that exist.

    Returns:
        The known names, in the wanted order.

    Raises:
        ConfigError: If a name is unknown or given twice; lists the known names.

    Example:
        >>> check_names("channel", ["flair", "T1w"], ["FLAIR", "T1w"])
        ('FLAIR', 'T1w')
        >>> check_names("channel", ["FLAIRE"], ["FLAIR", "T1w"])
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: Unknown channel FLAIRE; known: FLAIR, T1w (did you mean FLAIR?).
    """
    lower = {name.lower(): name for name in known}
    for name in wanted:
        if name.lower() not in lower:
            hint = did_you_mean(name, known)
            raise ConfigError(f"Unknown {kind} {name}; known: {', '.join(known)}{hint}.")
    found = tuple(lower[name.lower()] for name in wanted)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"Each {kind} must be named once; got: {', '.join(wanted) or 'none'}.")
    return found


def with_hospitals(patients: Sequence[Patient], hospitals: int | None) -> list[Patient]:
    """Gives patients of unknown origin to `hospitals` hospitals, in contiguous blocks.

    Patients whose centre is known, and all patients where `hospitals` is None, stay as they are.

    Args:
        patients: Sorted patients.
        hospitals: How many hospitals to cut the list into.

    Returns:
        The patients, with centres ``hospital_0``, ``hospital_1``, …

    Raises:
        ConfigError: If there are more hospitals than patients.

    Example:
        >>> [p.centre for p in with_hospitals([Patient("a"), Patient("b"), Patient("c")], 2)]
        ['hospital_0', 'hospital_0', 'hospital_1']
    """
    if hospitals is None or all(p.centre is not None for p in patients):
        return list(patients)
    if not 1 <= hospitals <= len(patients):
        raise ConfigError(f"Cannot cut {len(patients)} patients into {hospitals} hospitals.")
    return [
        replace(p, centre=p.centre or f"hospital_{i * hospitals // len(patients)}")
        for i, p in enumerate(patients)
    ]
