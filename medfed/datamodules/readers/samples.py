"""Samples with one label and one patient each: rows of a table, or images in memory."""

from __future__ import annotations

from medfed.datamodules.extending import *
from medfed.datamodules.partitions.by_label import thin
from medfed.standalone.names import tidy

Index = NDArray[np.int64]
SPLIT_NAMES: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "validate"), "val"),
}


def official_splits(sheet: Sheet, column: str | None) -> Sequence[Split | None]:
    """Reads a column of splits, of which the training is open; empty without the column."""
    texts = sheet.known(column) if column and sheet.has(column) else []
    for at, text in enumerate(texts):
        if text.lower() not in SPLIT_NAMES:
            what = f"{text[:40]!r} is none of train, val and test; mend it"
            raise sheet.bad(at, f", column {column}: {what}.")
    return open_training([SPLIT_NAMES[text.lower()] for text in texts])


def open_training(splits: Sequence[Split | None]) -> Sequence[Split | None]:
    """Leaves the split of training images open where validation or test are taken from them."""
    if set(SPLITS) <= set(splits):
        return splits
    left = [None if split == "train" else split for split in splits]
    return left if any(left) else ()


def is_survival(label: NDArray[Any]) -> bool:
    """Says whether labels (N, 2) are times and events: float64, whereas findings are float32."""
    return label.ndim == 2 and label.dtype == np.float64


def check_rows(data: Any, classes: int) -> None:
    """Gives what a reader says of each row the types of `Samples`; refuses what does not fit."""
    kind, labels = f"The reader's {type(data).__name__} has", np.asarray(data.labels)
    if labels.dtype.kind in "biu":
        labels = labels.astype(np.int64, copy=False)
    odd = labels != labels  # NaN
    if labels.dtype.kind == "i":
        odd = (labels < 0) | (labels >= classes)
    if labels.dtype.kind not in "if" or (labels.ndim == 1 and odd.any()):
        label = labels[odd][0] if odd.any() else labels.flat[0]
        raise DataError(
            f"{kind} the label {label}; write numbers, classes from 0 to {classes - 1}."
        )
    object.__setattr__(data, "labels", labels)
    for name in ("patients", "centres", "splits", "files"):
        cells = () if (array := getattr(data, name)) is None else array
        known = [None if v is None or v != v else v for v in cells]  # NaN is none
        values = [v if v is None or isinstance(v, Path) else tidy(str(v)) for v in known]
        if len(values) != len(labels) and (values or name == "patients"):
            what = f"{len(values)} {name} and {len(labels)} labels"
            raise DataError(f"{kind} {what}; give one for each row.")
        if name == "splits" and (odd_splits := {*values} - {*SPLITS, None}):
            raise DataError(f"{kind} the split {odd_splits.pop()}; write train, val or test.")
        object.__setattr__(data, name, values)


Shares = Sequence[float] | None


@dataclass(frozen=True)
class Samples:
    """The facts about N samples other than their features or pixels.

    Attributes:
        labels: (N,) int64 class indices, floats for continuous outcomes, or (N, 2) float64 times
            and events, of which the events are the strata of splits.
        num_classes: K.
        patients: (N) patient id of every sample.
        centres: (N) hospital of every sample; empty if unknown.
        splits: (N) official split of every sample, None for one that any may take; empty if there
            are none.
        files: (N) file of every sample; empty if there are none.
    """

    labels: NDArray[Any]
    num_classes: int
    patients: Sequence[str]
    centres: Sequence[str] = ()
    splits: Sequence[Split | None] = ()
    files: Sequence[Path] = ()

    def __post_init__(self) -> None:
        check_rows(self, self.num_classes)

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
    def survival(self) -> bool:
        """Whether labels are times and events."""
        return is_survival(self.labels)

    @property
    def grouped(self) -> bool:
        """Whether a patient has several samples."""
        return len(self.rows) < len(self.patients)

    def list_patients(self) -> list[Patient]:
        """Lists the patients in the order of the data.

        Returns:
            Patients have a label if all their samples agree, and counts per class if any patient
            has several samples; they have neither if labels are continuous outcomes.

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
        centres = {self.centres[row] for row in rows} if self.centres else {None}
        splits = {self.splits[row] for row in rows} if self.splits else {None}
        files = dict.fromkeys(self.files[row] for row in rows) if self.files else {}
        if len(centres) > 1:
            several = sorted(map(str, centres))
            where = f"at several centres ({', '.join(several)})"
            what = f"has samples {where}; a patient belongs to one client"
            mend = f"if these are two persons, give them two ids, such as {several[0]}_{name}"
            raise ConfigError(f"Patient {name} {what}: {mend}; if one, write one centre.")
        if len(splits) > 1:
            listed = ", ".join(sorted(s or "train" for s in splits))
            mend = "set data.official_splits=false to split by patient"
            raise DataError(f"Patient {name} has samples in several splits ({listed}); {mend}.")
        (centre,), (split,), (label, counts) = centres, splits, self._classes(rows)
        roles = {f"file_{n}": file for n, file in enumerate(files)}
        return Patient(name, roles, centre, label, counts, split)

    def _classes(self, rows: list[int]) -> tuple[int | None, tuple[int, ...] | None]:
        """The class that all rows share, if any, and the samples per class if needed."""
        if self.continuous and not self.survival:
            return None, None
        labels = [int(self.labels[row][1] if self.survival else self.labels[row]) for row in rows]
        counts = tuple(np.bincount(labels, minlength=self.num_classes).tolist())
        return labels[0] if len(set(labels)) == 1 else None, counts if self.grouped else None

    def select(self, patients: Sequence[str], shares: Shares, seed: int) -> tuple[Index, Index]:
        """Finds the samples of one client's split; see `select_rows`.

        If every patient is one sample, the partition's choice of patients already gives the shares.
        """
        thinned = self.grouped and not self.continuous
        rows = [self.rows[patient] for patient in patients]
        return select_rows(rows, self.labels, shares if thinned else None, seed)


def select_rows(
    rows: Sequence[Sequence[int]], labels: NDArray[Any], shares: Shares, seed: int
) -> tuple[Index, Index]:
    """(n,) samples of some patients and each one's patient, thinned to class proportions (K,).

    Example:
        >>> [a.tolist() for a in select_rows([[1], [0, 2]], np.array([0, 1, 1]), None, seed=0)]
        [[1, 0, 2], [0, 1, 1]]
    """
    index = np.array([row for of_patient in rows for row in of_patient], dtype=np.int64)
    case = np.repeat(np.arange(len(rows), dtype=np.int64), list(map(len, rows)))
    if shares is None:
        return index, case
    chosen = thin(labels[index], shares, seed)
    return index[chosen], case[chosen]


@dataclass(frozen=True)
class ImageSet:
    """Images with one class each, in memory.

    Attributes:
        images: (N, C, *spatial) uint8; a float32 copy would take four times the memory.
        channels: (C) channel names.
        classes: (K) class names.
        samples: Class, patient, and if known centre, split and file of every image.
        source: Their origin, for the user.
        peak: The value of white, which becomes 1; 0 becomes -1.
        converted: Whether images of any size and colour were converted to one.
        white: The value of white in files of 16 bits.
        left: Why some files beside the images were left out.
    """

    images: NDArray[np.uint8]
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    samples: Samples
    source: str
    peak: int = 255
    converted: bool = False
    white: int = 65535
    left: Mapping[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        images, size = np.asanyarray(self.images), (len(self.samples.labels), len(self.channels))
        if images.dtype != np.uint8 or images.ndim not in (4, 5) or images.shape[:2] != size:
            what = (
                f"The reader's ImageSet has images of type {images.dtype} and shape {images.shape}"
            )
            wanted = f"({size[0]}, {size[1]}, height, width) for its labels and channels"
            raise DataError(f"{what}; give uint8 from 0 to peak, {wanted}.")
        object.__setattr__(self, "images", images)


def channel_names(count: int) -> tuple[str, ...]:
    """Names the channels of a grey or colour image.

    Example:
        >>> channel_names(3)
        ('red', 'green', 'blue')
    """
    return ("grey",) if count == 1 else ("red", "green", "blue")
