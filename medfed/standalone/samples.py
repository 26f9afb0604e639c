"""Samples that become rows of a CSV file: table rows, images, and candidates in CT scans.

Each is read as in training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import ct, pictures
from .columns import Array, Columns, from_facts
from .csv_files import read_features
from .errors import CheckpointError, ConfigError, DataError, few
from .files import csv_text, reading, write_text, writing
from .masks import Facts
from .predictor import Predictor
from .scans import check_spacing, find_images
from .volumes import read_geometry

Each = Callable[[Sequence[Any], Callable[[Any], None], str, Callable[[], None]], None]
"""Works through items of a name in plural; what is called last saves the results."""
_log = logging.getLogger(__name__)
_MOST_WARNED = 10  # rows that are named
_CELLS = ("missing", "limits")  # how cells are read


def inputs_of(rows: Array, columns: Columns, facts: Facts) -> NDArray[np.float32]:
    """The inputs of rows, as in training."""
    scaling, numbers = facts["normalization"], rows[:, columns.numeric]
    return columns.encode(rows, numbers if scaling is None else from_facts(scaling).scale(numbers))


def _unusual_cells(
    rows: Array, columns: Columns, facts: Facts, texts: Mapping[str, Sequence[str | None]]
) -> dict[int, list[str]]:
    """Names by row, from 1, the cells (N, F) of which a model has learnt nothing.

    Example:
        >>> columns = Columns(("age", "sex"), {"sex": ("f", "m")}, ("sex",))
        >>> facts = {"input": {"indicators": ["sex"], "lowest": [40], "highest": [60]}}
        >>> rows = np.array([[50.0, 0.0], [130.0, -1.0], [np.nan, np.nan]])
        >>> unusual = _unusual_cells(rows, columns, facts, {"sex": ["f", "x", None]})
        >>> print(*unusual[2], sep=chr(10))
        age is 130, outside of about 40 to 60 in training
        sex is 'x', unknown in training (f, m)
    """
    source, unusual = facts["input"], dict[int, list[str]]()
    lowest, highest = source.get("lowest"), source.get("highest")
    place = {at: number for number, at in enumerate(columns.numeric)}
    for at, name in enumerate(columns.names):
        for row, value in enumerate(rows[:, at].tolist()):
            sentence = None
            if np.isnan(value):
                if name not in columns.indicators:
                    sentence = "is missing, which it never was in training"
            elif name in columns.categories:
                if value < 0:
                    known = few([*columns.categories[name]], 4)
                    sentence = f"is {texts[name][row]!r:.60}, unknown in training ({known})"
            elif lowest is not None and highest is not None:
                sentence = _outside(value, lowest[place[at]], highest[place[at]])
            if sentence:
                unusual.setdefault(row + 1, []).append(f"{name} {sentence}")
    return dict(sorted(unusual.items()))


def _outside(value: float, low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return f"is {value:g}, but fewer than 20 training rows had a value of it"
    if low <= value <= high:
        return None
    return f"is {value:g}, outside of about {low:g} to {high:g} in training"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a CSV file, whole or not at all; numbers with eight digits."""
    written = ([f"{c:.8g}" if isinstance(c, float) else c for c in row] for row in rows)
    with writing(path, "choose another output"):
        write_text(path, csv_text(header, written))


def _predict_rows(predictor: Predictor, source: Path, output: Path) -> None:
    """Predicts the rows of one CSV file, features by the names in the header."""
    if source.is_dir():
        raise DataError(f"{source} is a folder; name one CSV file in input.")
    facts = predictor.facts["input"]
    columns, limits = Columns.from_facts(facts), {k: facts[k] for k in _CELLS if facts.get(k)}
    rows, others, texts = read_features(source, columns.names, columns.categories, **limits)
    unusual = _unusual_cells(rows, columns, predictor.facts, texts)
    inputs = torch.from_numpy(inputs_of(rows, columns, predictor.facts)) * predictor.present
    answers = predictor.classify(inputs, source).tolist()
    _warn(unusual, source, output)
    warnings = ["; ".join(unusual.get(n + 1, ())) for n in range(len(rows))]
    names, taken = list[str](), {n.lower() for n in ("row", "warning", *predictor.columns)}
    for name in others:
        names.append(name)
        while names[-1].lower() in taken:
            names[-1] = f"input_{names[-1]}"
        taken.add(names[-1].lower())
        if names[-1] != name:
            text = "%s has a column %s, as the output does; in %s it is %s."
            _log.warning(text, source, name, output, names[-1])
    before = zip(range(1, len(rows) + 1), *others.values(), warnings, strict=True)
    cells = ([*a, *b] for a, b in zip(before, answers, strict=True))
    write_csv(output, ["row", *names, "warning", *predictor.columns], cells)


def _warn(unusual: Mapping[int, list[str]], source: Path, output: Path) -> None:
    """Names the first rows with cells that training has not seen the like of."""
    for number, cells in [*unusual.items()][:_MOST_WARNED]:
        more = f"; and {len(cells) - 3} more" * (len(cells) > 3)
        _log.warning("%s, data row %d: %s%s.", source, number, "; ".join(cells[:3]), more)
    if len(unusual) > _MOST_WARNED:
        text = "%d rows in all have such cells; the column warning of %s names them."
        _log.warning(text, len(unusual), output)


def predict_table(
    predictor: Predictor,
    kind: str,
    source: Path,
    output: Path,
    each: Each,
    candidates: Path | None = None,
    tolerance: float | None = None,
) -> None:
    """Predicts what becomes one CSV file: rows of a table, images, or candidates of scans.

    A table's rows keep the cells of all columns that are no features; images are named by their
    path below the input (in an ``.npz`` file by array and number). Candidates keep their order,
    without those of scans that are lacking or have a candidate outside, as its coordinates are of
    another frame.
    """
    if kind == "table":
        _predict_rows(predictor, source, output)
    elif kind == "images":
        root = source if source.is_dir() else source.parent
        images: list[list[object]] = []
        each(
            find_images(source),
            lambda file: images.extend(_rows_of_image(file, root, predictor)),
            "images",
            lambda: write_csv(output, ["image", *predictor.columns], images) if images else None,
        )
    else:
        if candidates is None:
            names = "name them in candidates=FILE.csv, with the columns seriesuid, coordX, coordY"
            raise ConfigError(f"This model classifies candidates; {names}, coordZ.")
        points = ScanCandidates(source, candidates, predictor, tolerance)
        each(points.series, points.classify, "scans", lambda: points.save(output))


class ScanCandidates:
    """The candidates of a CSV file, and what a model says of those whose scans were read."""

    def __init__(
        self, scans: Path, source: Path, predictor: Predictor, tolerance: float | None
    ) -> None:
        self.source, self.predictor, self.tolerance = source, predictor, tolerance
        self.points = ct.read_points(source, None)
        self.folder = scans
        self.scans = ct.find_scans(scans) if scans.is_dir() else self._one_scan(scans)
        self.series = list(self.points if scans.is_dir() else self.scans)  # the scans to read
        self.rows = list[tuple[int, list[object]]]()  # number in the file, and cells

    def _one_scan(self, path: Path) -> dict[str, Path]:
        if not path.is_file() or path.suffix.lower() not in (".mhd", ".mha"):
            what = f"{path} is no MetaImage scan (.mhd, .mha), in which LUNA16 has its CTs"
            raise DataError(f"{what}; name a scan, or a folder of scans, in input.")
        series = path.name[: -len(path.suffix)]
        if series not in self.points:
            what = f"{self.source} has no candidates of series {series}"
            raise DataError(f"{what}; the scan's file must be named by its series id.")
        return {series: path}

    def classify(self, series: str) -> None:
        """Classifies the candidates of one scan."""
        points = self.points[series]
        if series not in self.scans:
            raise DataError(
                f"{self.source}, data row {points.row[0]}: series {series} has no scan below "
                f"{self.folder}; copy it there, or remove its rows."
            )
        file = self.scans[series]
        patches = _patches(file, points, self.tolerance, self.predictor)
        chances = self.predictor.classify(patches, file).double().tolist()
        for row, place, chance in zip(points.row, points.world.tolist(), chances, strict=True):
            # Coordinates as they were read, to the last digit.
            self.rows.append((row, [series, *map(repr, place), *chance]))

    def save(self, output: Path) -> None:
        """Writes the classified candidates, in the order of their file; no file without any."""
        if self.rows:
            header = ["seriesuid", "coordX", "coordY", "coordZ", *self.predictor.columns]
            write_csv(output, header, [cells for _, cells in sorted(self.rows)])


def _patches(
    header: Path, candidates: ct.Candidates, tolerance: float | None, predictor: Predictor
) -> Tensor:
    """(n, C, *spatial) patches of the candidates of one scan, as in training."""
    try:
        spec = ct.PatchSpec(**predictor.facts["input"]["patches"])
    except (KeyError, TypeError) as error:
        what = f"The bundle does not say how patches are cut ({error})"
        raise CheckpointError(f"{what}; export it anew.") from error
    resampled = range(0 if spec.spacing is None else len(spec.size))  # may be of any spacing
    axes = [axis for axis in range(3) if axis not in resampled]
    check_spacing(read_geometry(header).spacing, predictor.facts, tolerance, header, axes)
    patches = ct.extract(header, candidates, spec)
    return torch.from_numpy(ct.to_unit(patches, spec.window, predictor.present.numpy()))


def _rows_of_image(file: Path, root: Path, predictor: Predictor) -> list[list[object]]:
    """Classifies the image of a file, or the images of an ``.npz`` file."""
    name = file.relative_to(root).as_posix()
    if file.suffix.lower() != ".npz":
        return [[name, *predictor.classify(_read_pixels(file, predictor), file)[0].tolist()]]
    rows: list[list[object]] = []
    for key, images in _read_arrays(file).items():
        answers = predictor.classify(pixels_of(images, f"{file}, {key}", predictor), file)
        rows += ([f"{name}/{key}/{n}", *answer] for n, answer in enumerate(answers.tolist()))
    return rows


def _read_pixels(file: Path, predictor: Predictor) -> Tensor:
    """Reads one image, or a NumPy array ``(C, *spatial)``, as in training."""
    facts = predictor.facts["input"]
    size = list(facts["size"])
    if file.suffix.lower() == ".npy":
        return pixels_of(_array(file)[None], str(file), predictor)
    if len(size) == 3:
        raise DataError(f"{file} is flat, but the model takes volumes of {size}; give .npy.")
    if facts.get("converted", False):
        pictures.say_other_color(file, facts["color"])
    else:
        _check_image(file, size, facts["color"])
    pixels = pictures.read_image(file, size, facts["color"], facts.get("white", 65535))
    return pixels_of(pixels[None], str(file), predictor)


def _read_arrays(file: Path) -> dict[str, NDArray[np.uint8]]:
    """Reads the images of an ``.npz`` file: ``images``, or ``test_images`` and so on (MedMNIST)."""
    with pictures.arrays_of(file) as arrays:
        names = [n for n in arrays if n == "images" or n.endswith("_images")]
        if not names:
            others = ", ".join(arrays)[:200] or "none"
            what = f"{file} has no array of the name images or *_images, but {others}"
            raise DataError(f"{what}; name it so.")
        splits = {n: n.removesuffix("_images") for n in names}
        return {n: pictures.channels_first(file, of, arrays[n]) for n, of in splits.items()}


def pixels_of(images: NDArray[np.uint8], source: str, predictor: Predictor) -> Tensor:
    """Returns images (n, C, *spatial) as the model sees them: float32."""
    shape = (len(predictor.present), *predictor.facts["input"]["size"])
    if images.shape[1:] != shape or images.dtype != np.uint8:
        wanted = f"the model takes uint8 {shape} (channels first)"
        raise DataError(f"{source} is {images.dtype} {images.shape[1:]}, but {wanted}.")
    record = predictor.facts["normalization"]
    white, black = record["range"][1], record.get("to", [-1, 1])[0]
    if len(images) and images.max() > white:
        what = f"{source} has values up to {images.max()}, but white was {white} in training"
        raise DataError(f"{what}; scale the image.")
    pixels = pictures.unit_range(images, white, predictor.present.numpy(), black)
    if "mean" in record:
        pixels = pictures.standardized(pixels, record["mean"], record["sd"])
    return torch.from_numpy(pixels)


def _check_image(file: Path, size: list[int], color: str) -> None:
    """Refuses what training never saw, where training took the images as they were."""
    width, height, kind = pictures.picture_header(file)
    if [height, width] != size:
        wanted = f"the model was trained on {size[0]} × {size[1]}; resample the image"
        raise DataError(f"{file} has {height} × {width} pixels, but {wanted}.")
    if kind == "rgb" and color == "grey" and not pictures.has_colours(file):
        kind = "grey"
    if kind != color:
        is_, was = ("grey", "coloured") if kind == "grey" else ("coloured", "grey")
        raise DataError(f"{file} is {is_}, but the model was trained on {was} images.")


def _array(file: Path) -> NDArray[Any]:
    with reading(file, "an array", "write it again"):
        return np.asarray(np.load(file, allow_pickle=False))
