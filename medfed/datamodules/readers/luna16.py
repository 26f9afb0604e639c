"""LUNA16: CT scans as MetaImage files, and a table of candidates for lung nodules.

``subset0`` to ``subset9`` hold ``<seriesuid>.mhd`` and ``.raw`` (a flat folder does as well). As
published, LUNA16 has one scan per patient, so a series is a patient here. Of the many candidates
that are not nodules, the reader keeps a few per nodule.

Source: A. A. A. Setio et al., "Validation, comparison, and combination of algorithms for automatic
detection of pulmonary nodules in computed tomography images: The LUNA16 challenge", Medical Image
Analysis 42, 2017.
"""

from __future__ import annotations

from typing import Literal

from medfed.datamodules.extending import *
from medfed.datamodules.readers import looks
from medfed.datamodules.readers.centres import LISTS, named_centres
from medfed.standalone import ct
from medfed.standalone.ct import Candidates, ScanSpec
from medfed.standalone.files import sha256
from medfed.standalone.itk import source_of
from medfed.standalone.volumes import read_geometries

_RULE = (
    "all nodules; of the other candidates those that rank first by a hash of seed, series and "
    "place among the rows of their series, negatives_per_positive for every nodule of the data set"
)
Absent = Literal["error", "skip"]  # what is done about scans that are not there
ByScan = Mapping[str, Candidates]  # by series id


def _subsample(points: ByScan, ratio: float | None, seed: int) -> dict[str, Candidates]:
    """Keeps all nodules, and so many other candidates for each; None keeps all.

    Example:
        >>> value = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
        >>> points = Candidates(np.zeros((5, 3)), value, np.arange(1, 6))
        >>> len(_subsample({"1.2": points}, 2.0, seed=0)["1.2"])
        3
    """
    if ratio is None:
        return dict(points)
    starts = {series: derive_seed(seed, "negatives", series) for series in points}
    keys = {}
    for series, of in points.items():
        start = np.uint64(starts[series]) << np.uint64(32)
        keys[series] = mix(start | np.arange(of.row.size, dtype=np.uint64))
    nodules = {series: of.value == 1 for series, of in points.items()}
    others = [keys[series][~of] for series, of in nodules.items()]
    count = round(ratio * sum(int(of.sum()) for of in nodules.values()))
    first = np.sort(np.concatenate([np.empty(0, np.uint64), *others]))[:count]
    chosen = {s: of.some(nodules[s] | np.isin(keys[s], first)) for s, of in points.items()}
    return {series: of for series, of in chosen.items() if len(of)}


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
        odd = [of.some((of.value != 0) & (of.value != 1)) for of in points.values()]
        if strange := [(of.row[0], of.value[0]) for of in odd if len(of)]:
            row, value = min(strange)
            what = f"{self._csv}, data row {row}: class {value:g} is unknown"
            raise DataError(f"{what}; known: 0 (non-nodule) and 1 (nodule). Mend the row.")
        self._candidates = _subsample(self._usable(points, missing), negatives_per_positive, seed)
        self._counts = {"listed": _count(points), "kept": _count(self._candidates)}
        if not self._candidates:
            why = "it has no nodules, and their number decides how many others are kept"
            mend = "Set data.reader.negatives_per_positive=null to keep all"
            raise DataError(f"{self._csv}: no candidate is left: {why}. {mend}.")
        self._series = sorted(self._candidates)

    def _read(self, path: Path, names: Names, column: str) -> ByScan:
        """Finds the scans of a folder and the first of some tables, and reads it."""
        self.path, self._scans = path, ct.find_scans(path)
        if (file := next((path / n for n in names if (path / n).is_file()), None)) is None:
            mend = "unpack it there, or name it in data.reader"
            raise DataError(f"{path} has no {' or '.join(names)}; {mend}.")
        self._csv = file
        return ct.read_points(file, column)

    def indices(self) -> list[Path]:
        """See `Reader.indices`."""
        return [self._csv, *(self.path / name for name in LISTS)]

    def left(self) -> Mapping[Path, str]:
        """See `Reader.left`."""
        idle = (self._scans[name] for name in self._scans.keys() - self._candidates.keys())
        files = (file for scan in idle for file in (scan, source_of(scan).file))
        return dict.fromkeys(files, "a scan without candidates")

    def patients(self) -> list[Patient]:
        """Lists the scans with candidates after the subsampling, and counts of both classes."""
        centres, patients = named_centres(self.path, self._series), []
        voxels = {series: source_of(self._scans[series]).file for series in self._series}
        for series in self._series:
            files = {"header": self._scans[series]}
            if voxels[series] != files["header"]:
                files["raw"] = voxels[series]
            of = centres.get(series)
            patients.append(Patient(series, files, of, counts=self._counts_of(series)))
        return patients

    def spacings(self, patients: Sequence[Patient]) -> list[tuple[float, ...]]:
        """See `Reader.spacings`."""
        grids = read_geometries([patient.files["header"] for patient in patients])
        return [grid.spacing for grid in grids]

    def _counts_of(self, series: str) -> tuple[int, ...]:
        classes = self._candidates[series].value.astype(np.int64)
        return tuple(np.bincount(classes, minlength=2).tolist())

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

    def _usable(self, points: ByScan, missing: str) -> dict[str, Candidates]:
        """The points whose scan is there."""
        absent = [series for series in points if series not in self._scans]
        self._skipped = len(absent)
        if absent and missing == "error":
            row = points[absent[0]].row[0]
            what = f"{self._csv}, data row {row}: series {absent[0]} has no .mhd file"
            count = f"({len(absent)} of {len(points)} series have none)"
            mend = "copy the scans there, or set data.reader.missing=skip"
            raise DataError(f"{what} below {self.path} {count}; {mend}.")
        if len(absent) == len(points):
            what = f"{self._csv}: none of its {len(absent)} series has a scan below {self.path}"
            raise DataError(f"{what}; set data.path to the folder with the subsets.")
        if absent:
            rows = sum(len(points[series]) for series in absent)
            text = "%s: %d of %d series have no scan; their %d candidates are skipped."
            log.warning(text, self._csv, len(absent), len(points), rows)
        return {series: of for series, of in points.items() if series in self._scans}


def _count(points: ByScan) -> dict[str, int]:
    values = [of.value for of in points.values()]
    every, nodules = sum(map(len, values)), sum(int(of.sum()) for of in values)
    return {"non-nodule": every - nodules, "nodule": nodules}


class Luna16ScanReader(Luna16Reader):
    """Finds all scans of LUNA16 and their nodules, also the scans without one."""

    classes = ("nodule",)  # type: ignore[assignment]  # of one class, not two

    @checked("data.reader")
    def __init__(
        self, path: Path, annotations: str = "annotations.csv", missing: Absent = "error"
    ) -> None:
        points = self._read(path, (annotations,), "diameter_mm")
        if wrong := [
            int(of.row[of.value <= 0][0]) for of in points.values() if of.value.min() <= 0
        ]:
            what = f"{self._csv}, data row {min(wrong)}: diameter_mm is not above 0"
            raise DataError(f"{what}; mend it.")
        self._candidates = self._usable(points, missing)
        self._series = sorted(self._scans)

    def _counts_of(self, series: str) -> tuple[int, ...]:
        return (len(self.nodules_of(series)),)

    def nodules_of(self, series: str) -> Candidates:
        """Returns the nodules of a scan; their values are diameters in mm."""
        empty = np.zeros(0, dtype=np.int64)
        none = Candidates(np.zeros((0, 3)), np.zeros(0), empty, str(self._csv))
        return self._candidates.get(series, none)

    def record(self) -> dict[str, Any]:
        """See `Reader.record`."""
        return self._source()


def read_with_nodules(header: Path, nodules: Candidates, spec: ScanSpec) -> dict[str, NDArray[Any]]:
    """Reads a scan for the cache: ``image``, and ``boxes`` (m, 6) of nodules in its voxels."""
    grid = read_geometry(header, "LPS")
    ct.centre_voxels(header, grid, nodules)
    middle = ct.places(grid, nodules.world, spec.spacing)
    half = nodules.value[:, None] / 2 / np.array(spec.spacing)
    boxes = np.concatenate([middle - half, middle + half], axis=1).astype(np.float32)
    return {"image": ct.read_scan(header, spec), "boxes": boxes}


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
