"""Writes masks or boxes of cases: one case into a file, several into a folder with a summary.

It holds the results and::

    prediction.json   bundles with their hashes, settings, versions
    summary.csv       a row per case: its files with their bytes, volumes, what went wrong

The same command goes on where an earlier one was interrupted, adds the cases that are new, and
makes again what is missing of a case: a file, or its row. It writes all files of a case elsewhere
and moves them to their places together. A file that is there already stays if the row or its
content shows that it is the same, or if somebody has changed it since; the mere beginning of it is
replaced. A case with any other file in its place fails, unless ``overwrite=true`` says so.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from medfed.common.console import say, short
from medfed.common.schemas import parse_json
from medfed.common.untrusted import reading
from medfed.datamodules.readers.base import account_of
from medfed.delivery.bundle.bundle import Bundle
from medfed.delivery.predict.options import PredictOptions, attempt, check_targets
from medfed.standalone import dicom, files
from medfed.standalone.detections import TABLE, boxes_file, detect, find_ct
from medfed.standalone.errors import ConfigError, MedfedError
from medfed.standalone.masks import SEG, check_apart
from medfed.standalone.predictor import Predictor
from medfed.standalone.scans import ScanFiles

SUMMARY, _LOCK, _INTERRUPTED = "summary.csv", ".lock", "interrupted"
_UNFINISHED = ".medfed-unfinished"  # a folder for the files of one case
_OTHERWISE = "choose another output"
_BEFORE = ("case", "input", "output", "files", "sha256")
_AFTER = ("warning", "error")
_RESULTS = ("bundle", "threshold")  # the settings that masks depend on


class OutputFolder:
    """The folder of a prediction; a context manager, which makes the folder."""

    def __init__(self, options: PredictOptions, bundle: Bundle, columns: Sequence[str]) -> None:
        self.folder = Path(options.output)
        self.overwrite = options.overwrite
        self.header = [*_BEFORE, *columns, *_AFTER]
        keys = ("format", "probabilities", "picture", "threshold", "spacing_tolerance")
        client = {"client": bundle.facts["client"], "files": files.digest(dict(bundle.hashes))}
        self._settings = {"bundle": client, **{k: getattr(options, k) for k in keys}}
        self._rows: dict[str, dict[str, str]] = {}

    @contextmanager
    def open(self) -> Iterator[OutputFolder]:
        """Holds the folder, and leaves its summary sorted."""
        with ExitStack() as stack:
            with files.writing(self.folder, _OTHERWISE):
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.callback(self._unlock)
                stack.enter_context(files.locked(self.folder, _LOCK, wait=False))
            stack.callback(shutil.rmtree, self.folder / _UNFINISHED, ignore_errors=True)
            self._begin()
            try:
                yield self
            finally:
                self._write()

    def is_whole(self, case: Case) -> bool:
        """Whether the files of a case are complete."""
        return self._rows.get(case.name, {"error": _INTERRUPTED})["error"] == ""

    def is_done(self, case: Case) -> bool:
        """Whether a case was predicted from the files as they are now, and the results are here."""
        if not self.is_whole(case) or self.overwrite:
            return False
        listed = self._files(case.name)
        try:
            whole = all(t.stat().st_size == listed.get(t.name) for t in case.targets)
            return whole and self._rows[case.name]["sha256"] == _state(case.inputs())
        except (MedfedError, OSError):
            return False  # the error is reported when the case is predicted

    def predict(self, case: Case, warnings: Sequence[str]) -> Mapping[str, float | str]:
        """Predicts a case: its row is added when its files are whole."""
        if not self._goes_on:
            check_targets(case.targets, self.overwrite, ())
        before, state = self._rows.get(case.name, {}), _state(case.inputs())
        is_same, place = before.get("sha256") == state, case.targets[0].relative_to(self.folder)
        listed = before.get("files") if is_same else ""
        values = (case.name, case.source.resolve(), place, listed, state)
        row = dict(zip(_BEFORE, values, strict=True))
        self._add(case.name, {**row, "error": _INTERRUPTED})
        made = self.folder / _UNFINISHED
        shutil.rmtree(made, ignore_errors=True)
        sizes = case.write(made)
        changed, moved = self._to_be_written(case, made, is_same and not before["error"])
        row["files"] = _listed(case.targets, {t: made / t.name for t in moved})
        self._add(case.name, {**row, "error": _INTERRUPTED})  # what a kill from here on has left
        with files.writing(self.folder, _OTHERWISE):
            for target in moved:
                target.parent.mkdir(parents=True, exist_ok=True)
                (made / target.name).replace(target)
        measured = {k: _text(v) for k, v in sizes.items()}
        self._add(case.name, {**row, **measured, "warning": "; ".join([*warnings, *changed])})
        return sizes

    def _to_be_written(self, case: Case, made: Path, done: bool) -> tuple[list[str], list[Path]]:
        """Says which files somebody has changed since, and which targets are to be written."""
        known, changed, moved = self._files(case.name), list[str](), list[Path]()
        for target in case.targets:
            if self.overwrite or not target.exists():
                moved.append(target)
            elif target.stat().st_size != known.get(target.name):
                kind = _compared(target, made / target.name)
                if kind == "part":
                    moved.append(target)
                elif kind == "other" and done and target.name in known:
                    changed.append(f"{target.name} was changed after the prediction")
                elif kind == "other":
                    check_targets([target], False, ())
        for sentence in changed:
            _log.warning("%s: %s, and stays.", case.name, sentence)
        return changed, moved

    def failed(self, case: Case, sentence: str) -> None:
        """Adds the row of a case that could not be predicted."""
        row = {name: self._rows.get(case.name, {}).get(name, "") for name in _BEFORE}
        now = {"case": case.name, "input": case.source.resolve(), "error": sentence}
        self._add(case.name, {**row, **now})

    def _files(self, case: str) -> dict[str, int]:
        """The bytes of the files that a row names."""
        parts = (n.rpartition(" ") for n in self._rows.get(case, {}).get("files", "").split("/"))
        return {name: int(size) for name, _, size in parts if size.isdecimal()}

    def _begin(self) -> None:
        record, summary = self.folder / files.RECORD, self.folder / SUMMARY
        before = None
        if record.exists():
            with reading(record, _OTHERWISE):
                before = parse_json(record, dict[str, Any])
        if before is None and summary.exists() and not self.overwrite:
            raise ConfigError(
                f"{summary} is there already, and no prediction's; choose another output, or set "
                "overwrite=true to replace it."
            )
        differ = [k for k, v in self._settings.items() if before and before.get(k) != v]
        others = " and ".join(key for key in differ if key in _RESULTS)
        if others and not self.overwrite:
            raise ConfigError(
                f"{self.folder} holds predictions of other bundles or settings ({files.RECORD} has "
                f"another {others}); choose another output, or set overwrite=true to replace them."
            )
        if differ:
            now = ", ".join(f"{k}={json.dumps(self._settings[k])}" for k in differ if k != "bundle")
            other = "of other bundles or settings", f", without a row in {SUMMARY}"
            alike = f"with other settings; it goes on with {now}", ""
            text = "%s holds predictions %s; what is not replaced now stays%s."
            _log.warning(text, self.folder, *(other if others else alike))
        self._goes_on = before is not None and not others
        if self._goes_on:
            self._rows = self._read()
        if differ or before is None:
            begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            with files.writing(record, _OTHERWISE):
                made_by = {"begun": begun, "medfed": version("medfed")}
                files.write_json(record, self._settings | made_by)
        self._write()

    def _read(self) -> dict[str, dict[str, str]]:
        path = self.folder / SUMMARY
        if not path.exists():
            return {}
        with reading(path, _OTHERWISE):
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1].decode()  # a killed process leaves part of a row
            header, *rows = [*csv.reader(io.StringIO(whole, newline=""))] or [self.header]
            if [*map(files.original, header)] != self.header:
                raise ValueError("it has other columns than this prediction")
        texts = (dict(zip(self.header, map(files.original, row), strict=False)) for row in rows)
        return {row["case"]: row for row in texts if len(row) == len(self.header)}

    def _unlock(self) -> None:
        for name in (_LOCK, f"{_LOCK}.pid"):
            with suppress(OSError):
                (self.folder / name).unlink()

    def _write(self) -> None:
        rows = ([row.get(c, "") for c in self.header] for _, row in sorted(self._rows.items()))
        with files.writing(self.folder / SUMMARY, _OTHERWISE):
            files.write_text(self.folder / SUMMARY, files.csv_text(self.header, rows))

    def _add(self, name: str, row: Mapping[str, Any]) -> None:
        self._rows[name] = {c: str(row.get(c, "")) for c in self.header}
        line = files.csv_text([self._rows[name][c] for c in self.header], [])
        path = self.folder / SUMMARY
        with files.writing(path, _OTHERWISE), path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)


def _state(sources: Iterable[Path]) -> str:
    return files.digest([(file.name, files.sha256(file)) for file in sources])


def _listed(targets: Iterable[Path], new: Mapping[Path, Path]) -> str:
    """Names files with their bytes, as a row has them."""
    return "/".join(f"{t.name} {new.get(t, t).stat().st_size}" for t in targets)


def _compared(old: Path, new: Path) -> str:
    """Whether a file is the ``same`` as a new one, a mere ``part``, or an ``other``.

    Each new DICOM SEG has another uid and time, which do not count.
    """
    before, now = old.read_bytes(), new.read_bytes()
    if before == now or old.suffix.lower() != SEG:
        return "same" if before == now else "part" if now.startswith(before) else "other"
    from pydicom import dcmread  # few predictions need it

    parts = ("PixelData", "SegmentSequence", "ReferencedSeriesSequence", "FrameOfReferenceUID")
    try:
        one, other = map(dcmread, (old, new))
    except Exception:  # all errors that a library raises on bad bytes
        return "other"
    if all(one.get(part) == other.get(part) for part in parts):
        return "same"
    is_seg = one.get("SOPClassUID", other.SOPClassUID) == other.SOPClassUID
    is_short = len(one.get("PixelData", b"")) < len(other.PixelData)
    return "part" if is_seg and is_short else "other"


def _text(value: object) -> object:
    return f"{value:.8g}" if isinstance(value, float) else value


_log = logging.getLogger(__name__)
_MOST_ROWS = 40  # rows on the terminal
_AGAIN = "{done} of {all} are done and whole; the same command goes on from there."


@dataclass(frozen=True)
class Case:
    """What is predicted at once."""

    name: str  # its path below the input, without suffix
    source: Path  # a file or folder
    inputs: Callable[[], list[Path]]  # lists the files that it is made of
    # Writes its files into a folder, and returns what :func:`columns` names.
    write: Callable[[Path], Mapping[str, float | str]]
    targets: tuple[Path, ...]  # the files that are written, in one folder, the mask or masks first
    left_out: Callable[[], list[str]] = list  # says what of the source is not part of the case


def predict_cases(
    cases: Sequence[Case],
    what: str,
    unit: str,
    predictor: Predictor,
    options: PredictOptions,
    bundle: Bundle,
    console: Console,
    finish: Callable[[Sequence[Path]], None] = lambda _: None,
) -> None:
    """Predicts cases one at a time; a bad one does not stop the others."""
    check_apart([(case.name, case.targets) for case in cases], what)
    named, left_out = columns(predictor, unit), 0
    table = _table(named, what)

    with ExitStack() as stack:
        record = None
        if options.into_folder:
            record = stack.enter_context(OutputFolder(options, bundle, named).open())
        waiting = [c for c in cases if record is None or not record.is_done(c)]
        if len(waiting) < len(cases):
            finished = len(cases) - len(waiting)
            say(console, f"{finished} of {len(cases)} {what} were predicted before; they stay.")

        def one(case: Case) -> None:
            nonlocal left_out
            check_targets(case.targets, options.overwrite or record is not None, case.inputs())
            warnings, folder = case.left_out(), case.targets[0].parent
            for sentence in warnings:
                _log.warning("%s", sentence)
            sizes = case.write(folder) if record is None else record.predict(case, warnings)
            left_out += len(table.rows) == _MOST_ROWS
            if len(table.rows) < _MOST_ROWS:
                digits = {n: _UNITS[_kind(n)][0] for n in named if _kind(n) in _UNITS}
                texts = (f"{sizes[n]:.{count}f}" for n, count in digits.items())
                table.add_row(short(case.name), *texts, str(case.targets[0]))

        def report() -> None:
            if done := [c.targets[0] for c in cases if record is not None and record.is_whole(c)]:
                finish(done)
            if table.rows:
                console.print(table)
            if left_out:
                say(console, f"And {left_out} more.")
            if record is not None:
                say(console, f"Summary: {record.folder / SUMMARY}")

        folder = (record.failed, _AGAIN) if record else ()
        attempt(waiting, one, what, report, lambda case: case.name, *folder)


_UNITS = {"ml": (1, "ml"), "percent": (2, "% of pixels"), "boxes": (0, "boxes")}
"""Digits and words of what the terminal shows."""


def columns(predictor: Predictor, unit: str) -> list[str]:
    """Names what is measured of a case, and its channels if cases may lack some."""
    kinds, partial = (unit, "highest_probability"), predictor.facts.get("channels_of_cases")
    named = [f"{label}_{kind}" for kind in kinds for label in predictor.labels]
    bounded = [label for label in predictor.labels if label in predictor.bounds]
    ends = (f"_{unit}_{end}_{predictor.level_of_bounds}" for end in ("low", "high"))
    named += [label + end for end in ends for label in bounded]
    return [*named, *["channels"] * bool(partial)]


def _kind(column: str) -> str:
    return column.rpartition("_")[2]


def _table(named: Sequence[str], what: str) -> Table:
    kinds = {name: kind for name in named if (kind := _kind(name)) in _UNITS}
    heads = [f"{short(n.removesuffix(f'_{k}'))} ({_UNITS[k][1]})" for n, k in kinds.items()]
    table = Table(what.removesuffix("s"))
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("file", overflow="fold")  # a path is to be copied
    return table


def left_out(scan: ScanFiles) -> list[str]:
    """Says which files of the folders of DICOM series are no slices of a scan."""
    folders = [volume for volume in scan.parts if volume.is_dir()]
    counts = (account_of(f, dicom.files(f), (SEG,), dicom.others(f)) for f in folders)
    return [count.sentence() for count in counts if count.left_out]


def box_cases(predictor: Predictor, options: PredictOptions) -> tuple[list[Case], str, str]:
    """Returns a case for a CT scan, or for every one of a folder."""
    output, label = Path(options.output), predictor.labels[0]
    if not options.into_folder:
        raise ConfigError(
            f"output={output} must be a folder, a name without a suffix: this model writes {TABLE} "
            "and a file for each scan."
        )
    check_targets([output / TABLE], options.overwrite or (output / files.RECORD).is_file(), ())

    def case(name: str, scan: ScanFiles) -> Case:
        file = boxes_file(scan, output)

        def write(folder: Path) -> dict[str, float | str]:
            scores = detect(predictor, name, scan.path, folder / file.name)
            highest = max(scores, default=0.0)
            return {f"{label}_boxes": len(scores), f"{label}_highest_probability": highest}

        return Case(scan.id, scan.path, scan.files, write, (file,), partial(left_out, scan))

    scans = find_ct(Path(options.input), output)
    return [case(name, scan) for name, scan in scans.items()], "scans", "boxes"
