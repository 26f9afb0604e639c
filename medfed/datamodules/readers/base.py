"""The interface of readers. To add a format, write a reader and name it in a configuration.

There are two kinds; no other code knows the format:

- a *function* that reads a whole file or folder of samples with one label each: it returns a
  `samples.ImageSet` (``data=image_folder`` and its like) or a `table.Table` (``data=csv``);
- a *class* for a folder of scans, which reads them one by one: a `VolumeReader`
  (``data=brats`` and its like).

``data.reader._target_`` names it; the other keys below ``data.reader`` are its arguments.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medfed.standalone.errors import ConfigError, did_you_mean, few
from medfed.standalone.files import is_visible, visible_files
from medfed.standalone.volume_files import SUFFIXES
from medfed.standalone.volumes import read_geometry

if TYPE_CHECKING:
    from torch import Tensor

    from medfed.datamodules.splits import Split
    from medfed.standalone.preparation import Preparation


Missing = Literal["error", "zero"]
Names = Sequence[str]
VOLUMES = (*SUFFIXES, ".dcm", ".ima", ".raw", ".zraw")


@dataclass(frozen=True)
class Patient:
    """One patient (case), before any of its data are read.

    Attributes:
        id: Unique in the data set.
        files: Its files, by role.
        centre: Its hospital, if the data name one.
        label: Its class, if it has exactly one; partitions by label need it.
        counts: Samples per class, if it has several samples (nodule candidates of one scan).
        split: Its official split, if the data set has one.
        invented: Whether `centre` is not a hospital from the data; see `with_hospitals`.
        lacks: The channels of a case that have no file, each with a sentence that says which file
            is missing. A patient of several cases has none; its cases have.
        annotated: The regions that somebody has outlined in a case; None for all.
    """

    id: str
    files: Mapping[str, Path] = field(default_factory=dict)
    centre: str | None = None
    label: int | None = None
    counts: tuple[int, ...] | None = None
    split: Split | None = None
    invented: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)
    annotated: tuple[str, ...] | None = None

    def class_counts(self, num_classes: int) -> tuple[int, ...]:
        """Returns the samples per class, (K,); a patient with one label is one sample.

        Raises:
            ConfigError: If neither the label nor the counts are known.

        Example:
            >>> Patient("a", label=1).class_counts(3)
            (0, 1, 0)
        """
        if self.counts is not None:
            return (*self.counts, *[0] * (num_classes - len(self.counts)))
        if self.label is None:
            raise ConfigError(
                f"Patient {self.id} has no label; a partition by label needs one per patient, not "
                "a continuous outcome (partition=round_robin, quantity_skew and centre need no "
                "labels)."
            )
        return tuple(int(k == self.label) for k in range(num_classes))


class Reader(ABC):
    """Base of the readers that read scans one by one.

    Attributes:
        channels: Names of the image channels.
        endings: The endings of the files that it can read.
    """

    channels: tuple[str, ...]
    endings: Collection[str] = VOLUMES
    series: Names = ()  # those to read where a folder of DICOM holds several

    def indices(self) -> list[Path]:
        """Lists the tables and lists that it has read beside the patients' files."""
        return []

    def left(self) -> Mapping[Path, str]:
        """Says why it left some files out, where their ending does not tell."""
        return {}

    @abstractmethod
    def patients(self) -> list[Patient]:
        """Lists the patients without reading voxels, sorted by id.

        Raises:
            DataError: If the folder or an index file does not follow the format.
        """

    def spacing(self, patient: Patient) -> tuple[float, ...]:
        """Reads the distances of the voxels (mm), along the axes of the network's input.

        By default those of the first file's voxels to the right, to the front and to the head.
        """
        return read_geometry(next(iter(patient.files.values())), series=self.series).spacing

    def spacings(self, patients: Sequence[Patient]) -> list[tuple[float, ...]]:
        """Reads what `spacing` does, of several patients."""
        return [self.spacing(patient) for patient in patients]

    @abstractmethod
    def record(self) -> dict[str, object]:
        """Returns all settings that affect how a patient's files are read, for JSON."""


class VolumeReader(Reader):
    """Base of the readers of whole volumes with region masks."""

    # Names of the label channels, in the order of `read`; never the background.
    regions: tuple[str, ...]
    # How grey values are normalised if ``data.normalize`` is null: a value of that key, null for a
    # choice by the channels' names; ``"own"`` if `read` always normalises.
    normalize: object = "own"
    # Whether slices may have any size, so that networks process them window by window.
    any_size: bool = False
    # Whether a case may lack the file of a channel: ``zero`` fills the channel with zeros after
    # normalisation, ``error`` refuses the case, unless the partition says that its hospital lacks
    # the channel.
    missing: Missing = "error"

    @property
    def exclusive(self) -> bool:
        """Whether no voxel can be in two regions, which a softmax over regions requires."""
        return False

    @abstractmethod
    def read(self, patient: Patient) -> dict[str, Tensor]:
        """Reads one patient, or one of the cases of a patient that has several.

        Returns ``image`` (C, H, W, D) float32, z-scored or the like with background 0, and
        ``label`` (R, H, W, D) uint8; H runs to the right, W to the front and D to the head.
        """

    def prepared(self, patient: Patient, preparation: Preparation | None) -> dict[str, Tensor]:
        """Reads one case, prepared in another way than by `read`.

        `preparation`: always None if `normalize` is ``"own"``. Returns as `read`; if image and
        label then have different voxels also ``grid`` (4, 4), from the label's to the image's; and
        ``spacing`` (3,) float64, as `spacing`, if it is known now.
        """
        return self.read(patient)

    def cases_of(self, patient: Patient) -> list[Patient]:
        """Lists the cases of a patient, which are read one by one; often the patient itself."""
        return [patient]

    @abstractmethod
    def shape(self, patient: Patient) -> tuple[int, ...]:
        """Reads the three sizes from a header alone; `read` may return them in another order."""

    def shapes(self, patients: Sequence[Patient]) -> list[tuple[int, ...]]:
        """Reads what `shape` does, of several patients."""
        return [self.shape(patient) for patient in patients]

    def record(self) -> dict[str, object]:
        """See `Reader.record`; subclasses add everything else that `read` depends on."""
        return {"channels": list(self.channels), "regions": list(self.regions)}

    def layout(self) -> dict[str, object]:
        """Returns names of files (None: one 4-D) and values of regions, for predictions."""
        regions = {name: [value] for value, name in enumerate(self.regions, start=1)}
        return {"files": None, "file_channels": list(self.channels), "regions": regions}


def are_exclusive(regions: Mapping[str, Collection[int]]) -> bool:
    """Says whether no label value makes up two regions.

    Example:
        >>> are_exclusive({"liver": [1], "tumour": [2]}), are_exclusive({"a": [1, 2], "b": [2]})
        (True, False)
    """
    values = [value for labels in regions.values() for value in set(labels)]
    return len(values) == len(set(values))


def given_path(path: Path | None) -> Path:
    """Returns the path, or raises if it is not set.

    Example:
        >>> given_path(Path("a")).name
        'a'
    """
    if path is None:
        raise ConfigError("data.path is not set and data.generated is empty; set data.path.")
    return path


def expanded(path: str | Path | None) -> Path | None:
    """Expands ``~``; None stays None.

    Example:
        >>> expanded(None) is None, expanded("data").name
        (True, 'data')
    """
    return None if path is None else Path(path).expanduser()


def check_names(kind: str, wanted: Names, known: Names, where: str = "") -> tuple[str, ...]:
    """Matches names case-insensitively against the names in the data.

    Example:
        >>> check_names("channel", ["flair", "T1w"], ["FLAIR", "T1w"])
        ('FLAIR', 'T1w')
        >>> check_names("channel", ["FLAIRE"], ["FLAIR", "T1w"])
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: Unknown channel FLAIRE; known: FLAIR, T1w (did you mean FLAIR?).
    """  # noqa: E501
    lower, wanted = {name.lower(): name for name in known}, [str(name) for name in wanted]
    for name in wanted:
        if name.lower() not in lower:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{where}Unknown {kind} {name}; known: {few(known)}{hint}.")
    names = tuple(lower[name.lower()] for name in wanted)
    if not names or len(set(names)) < len(names):
        got = ", ".join(wanted) or "none"
        raise ConfigError(f"{where}Each {kind} must be named once; got: {got}.")
    return names


def with_hospitals(patients: Sequence[Patient], hospitals: int | None) -> list[Patient]:
    """Divides patients of unknown origin into hospitals, in blocks; None changes nothing."""
    if hospitals is None or all(p.centre is not None for p in patients):
        return list(patients)
    if not 1 <= hospitals <= len(patients):
        raise ConfigError(f"Cannot cut {len(patients)} patients into {hospitals} hospitals.")
    blocks = [f"hospital_{i * hospitals // len(patients)}" for i in range(len(patients))]
    pairs = zip(patients, blocks, strict=True)
    return [p if p.centre else replace(p, centre=name, invented=True) for p, name in pairs]


@dataclass(frozen=True)
class Account:
    """What was seen, taken and left out."""

    where: str  # the file or folder
    what: str  # what is counted: files, rows, cells
    taken: int  # how many were taken
    # By reason, how many were left out, and the first of them.
    left_out: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many there were."""
        return self.taken + sum(count for count, _ in self.left_out.values())

    def sentence(self) -> str:
        """Returns the account as a sentence.

        Example:
            >>> Account("t.csv", "rows", 40, {"no label": (2, "data row 3")}).sentence()
            't.csv: 40 of 42 rows are taken; left out: 2 no label (data row 3).'
        """
        if not self.left_out:
            return f"{self.where}: all {self.taken} {self.what} are taken."
        reasons = [(f"{n} {why}", f" ({x})" * bool(x)) for why, (n, x) in self.left_out.items()]
        taken = f"{self.taken} of {self.total} {self.what} are taken"
        return f"{self.where}: {taken}; left out: {few([*map(''.join, reasons)], 6)}."

    def record(self) -> dict[str, Any]:
        """Returns the account as JSON."""
        left_out = {why: {"count": n, "first": x} for why, (n, x) in self.left_out.items()}
        counts = {"seen": self.total, "taken": self.taken, "left_out": left_out}
        return {"where": self.where, "what": self.what, **counts}


def account_of(
    path: Path, taken: Iterable[Path], endings: Collection[str], reasons: Mapping[Path, str]
) -> Account:
    """Counts the files of a folder, or beside a table, and says why some are left out."""
    used = {*taken}
    if path.is_dir():
        files = visible_files(path)
    else:
        beside = {file.parent for file in used} - {path.parent}
        files = sorted({f for folder in beside for f in folder.glob("*") if f.is_file()} | {path})
        files = [file for file in files if is_visible(file.name)]
        used.add(path)
    whole, base = {os.path.normpath(file) for file in used}, path if path.is_dir() else path.parent
    groups: dict[str, tuple[int, str]] = {}
    for file in files:
        if os.path.normpath(file) not in whole:
            name = file.name.lower()
            ending = next((e for e in endings if name.endswith(e)), None)
            usual = "another kind of file" if ending is None else "the data set does not name it"
            ending = ending or file.suffix.lower() or "without ending"
            reason = f"{ending}: {reasons.get(file, usual)}"
            count, first = groups.get(reason, (0, os.path.relpath(file, base)))
            groups[reason] = count + 1, first
    most = sorted(groups.items(), key=lambda of: (-of[1][0], of[0]))
    taken_here = len(files) - sum(count for count, _ in groups.values())
    return Account(str(path), "files", taken_here, dict(most))
