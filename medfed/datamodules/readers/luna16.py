"""LUNA16: CT scans as MetaImage files, and a table of candidates for lung nodules.

``subset0`` to ``subset9`` hold ``<seriesuid>.mhd`` and ``.raw`` (a flat folder does as well). As
published, LUNA16 has one scan per patient, so a series is a patient here. Of the many candidates
that are not nodules, the reader keeps a few per nodule.

Source: A. A. A. Setio et al., "Validation, comparison, and combination of algorithms for automatic
detection of pulmonary nodules in computed tomography images: The LUNA16 challenge", Medical Image
Analysis 42, 2017.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.cases import named_centres
from medfed.standalone.ct_patches import Candidates, Points, centre_voxels, find_scans, read_points
from medfed.standalone.ct_scans import ScanSpec, places, read_scan
from medfed.standalone.files import sha256
from medfed.standalone.itk import source_of

_RULE = (
    "all nodules; of the other candidates those that rank first by a hash of seed, series and "
    "place among the rows of their series, negatives_per_positive for every nodule of the data set"
)
Mask = NDArray[np.bool_]
Absent = Literal["error", "skip"]  # what is done about scans that are not there


def _subsample(points: Points, usable: Mask, ratio: float | None, seed: int) -> Mask:
    """(n,) bool: keeps all nodules, and so many usable others for each; None keeps all.

    Example:
        >>> value = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
        >>> points = Points(("1.2",), np.zeros(5, int), np.zeros((5, 3)), value, np.arange(1, 6))
        >>> _subsample(points, np.ones(5, bool), 2.0, seed=0).sum()
        np.int64(3)
    """
    positive = points.value == 1
    if ratio is None:
        return np.ones(len(positive), dtype=bool)
    negatives = np.flatnonzero(usable & ~positive)
    count = round(ratio * int((usable & positive).sum()))
    seeds = np.array([derive_seed(seed, "negatives", s) for s in points.series], dtype=np.uint64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(points.scan))[:-1]])
    place = np.empty(len(positive), dtype=np.int64)  # of a row among the rows of its series
    order = np.argsort(points.scan, kind="stable")
    place[order] = np.arange(len(order)) - starts[points.scan[order]]
    keys = mix((seeds[points.scan] << np.uint64(32)) | place.astype(np.uint64))
    kept = np.array(positive, dtype=bool)
    kept[negatives[np.argsort(keys[negatives], kind="stable")[:count]]] = True
    return kept


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes 64-bit numbers one to one (SplitMix64's finalizer): close numbers end far apart.

    Source: G. L. Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014.
    `keys` is (n,) uint64. Returns (n,) uint64.

    Example:
        >>> [f"{key:x}" for key in mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64))]
        ['e220a8397b1dcdaf']
    """
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


log = logging.getLogger(__name__)

_CANDIDATE_FILES = ("candidates_V2.csv", "candidates.csv")


class Luna16Reader(Reader):
    """Finds the scans and candidates of LUNA16; no voxels are read here.

    `negatives_per_positive`: how many non-nodules to keep for every nodule; None keeps all.
    """

    channels = ("CT",)
    classes = ("non-nodule", "nodule")

    @checked("data.reader")
    def __init__(
        self,
        path: Path,
        candidates: str | None = None,
        negatives_per_positive: Annotated[float | None, check_not_negative] = 10.0,
        seed: int = 0,
        missing: Absent = "error",
    ) -> None:
        self.negatives_per_positive = negatives_per_positive
        self.seed = seed
        points = self._read(path, (candidates,) if candidates else _CANDIDATE_FILES, "class")
        strange = (points.value != 0) & (points.value != 1)
        if strange.any():
            at = int(strange.argmax())
            what = f"{self._csv}, data row {points.row[at]}: class {points.value[at]:g} is unknown"
            raise DataError(f"{what}; known: 0 (non-nodule) and 1 (nodule). Mend the row.")
        usable = self._usable(points, missing)
        kept = usable & _subsample(points, usable, negatives_per_positive, seed)
        self._counts = {"listed": _count(points.value), "kept": _count(points.value[kept])}
        if not kept.any():
            why = "it has no nodules, and their number decides how many others are kept"
            mend = "Set data.reader.negatives_per_positive=null to keep all"
            raise DataError(f"{self._csv}: no candidate is left: {why}. {mend}.")
        self._candidates = self._group(points, kept)
        self._series = sorted(self._candidates)

    def _read(self, path: Path, names: Names, column: str) -> Points:
        """Finds the scans of a folder and the first of some tables, and reads it."""
        self.path, self._scans = path, find_scans(path)
        if (file := next((path / n for n in names if (path / n).is_file()), None)) is None:
            mend = "unpack it there, or name it in data.reader"
            raise DataError(f"{path} has no {' or '.join(names)}; {mend}.")
        self._csv = file
        return read_points(file, column)

    def indices(self) -> list[Path]:
        """See `Reader.indices`."""
        return [self._csv, *(self.path / name for name in ("centres.json", "centres.csv"))]

    def left(self) -> Mapping[Path, str]:
        """See `Reader.left`."""
        idle = (self._scans[name] for name in self._scans.keys() - self._candidates.keys())
        files = (file for scan in idle for file in (scan, source_of(scan).file))
        return dict.fromkeys(files, "a scan without candidates")

    def patients(self) -> list[Patient]:
        """Lists the scans with candidates after the subsampling, and counts of both classes."""
        centres, patients = named_centres(self.path, self._series), []
        for series in self._series:
            files = {"header": self._scans[series]}
            if (voxels := source_of(files["header"]).file) != files["header"]:
                files["raw"] = voxels
            of = centres.get(series)
            patients.append(Patient(series, files, of, counts=self._counts_of(series)))
        return patients

    def spacing(self, patient: Patient) -> tuple[float, ...]:
        """See `Reader.spacing`."""
        return read_geometry(patient.files["header"]).spacing

    def _counts_of(self, series: str) -> tuple[int, ...]:
        return tuple(np.bincount(self._candidates[series].label, minlength=2).tolist())

    def candidates_of(self, series: str) -> Candidates:
        """Returns the candidates of one scan that the subsampling kept."""
        if series not in self._candidates:
            raise DataError(f"{self._csv} has no candidates for series {series}.")
        return self._candidates[series]

    def record(self) -> dict[str, Any]:
        """See `Reader.record`: how the candidates were chosen."""
        chosen = {
            "rule": "all candidates" if self.negatives_per_positive is None else _RULE,
            "negatives_per_positive": self.negatives_per_positive,
            "seed": self.seed,
            **self._counts,
        }
        return self._source() | chosen

    def _source(self) -> dict[str, Any]:
        """Which table it has read, and of how many series there is no scan."""
        table = {"candidates": self._csv.name, "sha256": sha256(self._csv)}
        return {**table, "absent_series": self._skipped}

    def _usable(self, points: Points, missing: str) -> Mask:
        """(n,) bool, the points whose scan is there."""
        absent = [n for n, series in enumerate(points.series) if series not in self._scans]
        self._skipped, usable = len(absent), ~np.isin(points.scan, absent)
        if not absent:
            return usable
        rows = int((~usable).sum())
        if missing == "error":
            row = points.row[int((points.scan == absent[0]).argmax())]
            what = (
                f"{self._csv}, data row {row}: series {points.series[absent[0]]} has no .mhd file"
            )
            count = f"({len(absent)} of {len(points.series)} series have none)"
            mend = "copy the scans there, or set data.reader.missing=skip"
            raise DataError(f"{what} below {self.path} {count}; {mend}.")
        if len(absent) == len(points.series):
            what = f"{self._csv}: none of its {len(absent)} series has a scan below {self.path}"
            raise DataError(f"{what}; set data.path to the folder with the subsets.")
        text = "%s: %d of %d series have no scan; their %d candidates are skipped."
        log.warning(text, self._csv, len(absent), len(points.series), rows)
        return usable

    def _group(self, points: Points, kept: NDArray[np.bool_]) -> dict[str, Candidates]:
        """Candidates by series, in the order of the rows."""
        order, source = np.flatnonzero(kept), str(self._csv)
        rows_of = {s: order[points.scan[order] == s] for s in np.unique(points.scan[order])}
        return {points.series[s]: points.some(rows, source) for s, rows in rows_of.items()}


def _count(labels: NDArray[np.float64]) -> dict[str, int]:
    positives = int((labels == 1).sum())
    return {"non-nodule": len(labels) - positives, "nodule": positives}


class Luna16ScanReader(Luna16Reader):
    """Finds all scans of LUNA16 and their nodules, also the scans without one."""

    classes = ("nodule",)  # type: ignore[assignment]  # of one class, not two

    @checked("data.reader")
    def __init__(
        self, path: Path, annotations: str = "annotations.csv", missing: Absent = "error"
    ) -> None:
        points = self._read(path, (annotations,), "diameter_mm")
        if (points.value <= 0).any():
            row = points.row[int((points.value <= 0).argmax())]
            raise DataError(f"{self._csv}, data row {row}: diameter_mm is not above 0; mend it.")
        self._candidates = self._group(points, self._usable(points, missing))
        self._series = sorted(self._scans)
        self._diameters = dict(zip(points.row.tolist(), points.value.tolist(), strict=True))

    def _counts_of(self, series: str) -> tuple[int, ...]:
        return (len(self.nodules_of(series)[0]),)

    def nodules_of(self, series: str) -> tuple[Candidates, NDArray[np.float64]]:
        """Returns the nodules of a scan and their diameters in mm."""
        empty = np.zeros(0, dtype=np.int64)
        none = Candidates(np.zeros((0, 3)), empty, empty, str(self._csv))
        nodules = self._candidates.get(series, none)
        return nodules, np.array([self._diameters[row] for row in nodules.row.tolist()])

    def record(self) -> dict[str, Any]:
        """See `Reader.record`."""
        return self._source()


def read_with_nodules(
    header: Path, nodules: Candidates, diameters: NDArray[np.float64], spec: ScanSpec
) -> dict[str, NDArray[Any]]:
    """Reads a scan for the cache: ``image``, and ``boxes`` (m, 6) of nodules in its voxels."""
    grid = read_geometry(header, "LPS")
    centre_voxels(header, grid, nodules)
    middle = places(grid, nodules.world, spec.spacing)
    half = diameters[:, None] / 2 / np.array(spec.spacing)
    boxes = np.concatenate([middle - half, middle + half], axis=1).astype(np.float32)
    return {"image": read_scan(header, spec), "boxes": boxes}


def looks_like(path: Path, answers: looks.Answers) -> looks.Guess | None:
    """Guesses by the names of folders and tables; see `looks`."""
    tables = [name for name in _CANDIDATE_FILES if (path / name).is_file()]
    if not any(path.glob("subset*")) or not (tables or (path / "annotations.csv").is_file()):
        return None
    guess = looks.Guess("luna16" if tables else "luna16_scans", path)
    if len(tables) > 1:
        also = f"as published later; not {tables[1]}: data.reader.candidates"
        guess.took.append(("candidates", tables[0], also))
    return guess
