"""Compares what medfed reads in files of others with what other libraries read."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from medfed.standalone import itk
from medfed.standalone.errors import MedfedError
from medfed.standalone.volume_files import files_of
from medfed.standalone.volumes import read_volume
from medfed.standalone.voxels import check_finite
from tests.odd_sets import Set
from tests.odd_volumes import Truth, Volume

CHECKS = ("shape", "spacing", "values", "orientation", "count", "patients", "account")
UNSAID = "-"
Verdicts = dict[str, str]


class Heard(logging.Handler):
    """Keeps the lines of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    """The lines that medfed says meanwhile; a warning of a library is an error."""
    logger, handler = logging.getLogger("medfed"), Heard()
    itk._WARNED.clear()  # what an earlier command has said
    level, spread = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = spread


def sentence_of(error: MedfedError, path: Path) -> str | None:
    """What is wrong with a refusal, which must be one sentence that names the file."""
    text = str(error)
    names = {"/nowhere", path.name, path.parent.name, *(f.name for f in path.parent.glob("*"))}
    if path.is_dir():
        names |= {f.name for f in path.rglob("*")}
    if "\n" in text or not text.endswith(".") or "unexpected" in text or "Traceback" in text:
        return f"no single sentence: {text!r}"
    if not any(name in text for name in names):
        return f"it names no file: {text!r}"
    return None


def volume_verdicts(row: Volume, path: Path) -> Verdicts:
    """The verdict of every check of a volume."""
    volume = read_volume(path)
    channels = [str(n) for n in range(len(volume.voxels))]
    check_finite(volume.voxels, channels, [path])
    if row.truth is None:
        return {}
    verdicts = compared(volume.voxels.numpy(), volume.geometry.affine, row.truth(path))
    if row.taken is not None:
        taken = len(files_of(path))
        verdicts["account"] = (
            "equal" if taken == row.taken else f"WRONG: {taken} of {row.taken} files are taken"
        )
    return verdicts


def set_verdicts(row: Set, path: Path) -> Verdicts:
    """The verdict of every check of a data set."""
    found = row.read(path)
    return {
        check: "equal" if same(found[check], value) else f"WRONG: {found[check]}, but {value}"
        for check, value in (row.truth(path) if row.truth else {}).items()
    }


def refusal(error: MedfedError, path: Path, words: str) -> dict[str, str]:
    """The verdict on an error."""
    text = str(error).replace(f"{path.parent}/", "").replace(str(path), path.name)
    if wrong := sentence_of(error, path):
        return {"values": f"WRONG: {wrong}"}
    if not words:
        return {"values": f"WRONG: it is refused: {text}"}
    if not re.search(words, str(error)):
        return {"values": f"WRONG: not '{words}': {text}"}
    return {"values": f"refused: {text}"}


def compared(
    voxels: np.ndarray, affine: np.ndarray, truth: Truth, near: float = 1e-6
) -> dict[str, str]:
    """Compares (C, H, W, D) in RAS with what another library reads, place by place."""
    there = truth.voxels.reshape(*truth.voxels.shape[:3], -1).astype(np.float64)
    steps = truth.affine[:3, :3]
    axes = np.abs(steps / np.linalg.norm(steps, axis=0)).argmax(axis=1)
    sizes = np.linalg.norm(steps, axis=0)[axes]
    mine = np.linalg.norm(affine[:3, :3], axis=0)

    def verdict(holds: bool, got: object, wanted: object) -> str:
        return "equal" if holds else f"WRONG: {got}, but {wanted}"

    shape = tuple(there.shape[axis] for axis in axes)
    upright = np.diag(affine[:3, :3] / mine)
    found = {
        "shape": verdict(voxels.shape[1:] == shape, voxels.shape[1:], shape),
        "spacing": verdict(np.allclose(mine, sizes, rtol=1e-4), mine, sizes),
        "orientation": verdict((upright > 0.5).all(), upright, "right, front, head"),
        "count": verdict(len(voxels) == there.shape[3], len(voxels), there.shape[3]),
    }
    if any(text != "equal" for text in found.values()):
        return {**found, "values": UNSAID}
    places = np.indices(voxels.shape[1:]).reshape(3, -1)
    at = np.linalg.inv(truth.affine) @ affine @ np.vstack([places, np.ones(places.shape[1])])
    index = at[:3].round().astype(int)
    if np.abs(at[:3] - index).max() > 1e-2:
        found["orientation"] = "WRONG: the voxels lie elsewhere"
    inside = ((index >= 0) & (index < np.array(there.shape[:3])[:, None])).all()
    if not inside:
        return {**found, "orientation": "WRONG: the voxels lie outside", "values": UNSAID}
    wanted, got = there[tuple(index)].T, voxels.reshape(len(voxels), -1).astype(np.float64)
    far = np.abs(wanted - got).max() / max(1.0, np.abs(wanted).max())
    return {**found, "values": verdict(far <= near, f"off by {far:.2g}", "the others' values")}


def same(one: Any, other: Any) -> bool:
    """Whether two facts are equal, arrays to half a step of grey."""
    if isinstance(other, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, np.ndarray):
        return one.shape == other.shape and bool(np.abs(one.astype(float) - other).max() <= 0.501)
    return bool(one == other)


def verdicts_of(row: Volume | Set, folder: Path) -> Verdicts:
    """Makes the files of a row in a folder of their own, and returns the verdict of every check."""
    place = folder / "set"
    place.mkdir()
    path = row.make(place) or place
    with heard() as lines:
        try:
            if isinstance(row, Volume):
                verdicts = volume_verdicts(row, path)
            else:
                verdicts = set_verdicts(row, path)
        except MedfedError as error:
            return refusal(error, path, row.refused)
        except Exception as error:
            return {"values": f"WRONG: {type(error).__name__}: {error}"}
    if row.refused:
        return {"values": f"WRONG: it is read, and not refused as '{row.refused}'"}
    if row.line and not any(re.search(row.line, line) for line in lines):
        verdicts["account"] = f"WRONG: no line says '{row.line}'"
    return verdicts
