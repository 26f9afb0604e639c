"""Writes masks or boxes of cases: one case into a file, several into a folder with a summary.

It holds the results and::

    prediction.json   bundles with their hashes, settings, versions
    summary.csv       a row per case: its files, volumes, what went wrong

The same command goes on where an earlier one was interrupted, or adds the cases that are new; what
is predicted already, and whose scan has not changed, stays. Until its files are whole, a case's row
says that it is interrupted; what such a case, or one that failed, has left may be replaced. Nothing
else is, unless ``overwrite=true`` says so.
"""

from __future__ import annotations

import csv
import datetime
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from medfed.common.console import say, shown
from medfed.common.errors import ConfigError, MedfedError
from medfed.common.files import csv_text, digest, locked, original, write_json, write_text, writing
from medfed.common.schemas import parse_json
from medfed.common.untrusted import reading
from medfed.delivery.bundle.bundle import Bundle
from medfed.delivery.predict.options import PredictOptions, attempt, check_place, check_targets
from medfed.standalone.detections import TABLE, boxes_file, detect, find_ct
from medfed.standalone.masks import check_apart
from medfed.standalone.predictor import Predictor
from medfed.standalone.scans import RECORD, ScanFiles

SUMMARY, _LOCK, _INTERRUPTED = "summary.csv", ".lock", "interrupted"
_OTHERWISE = "choose another output"
_BEFORE = ("case", "input", "output", "bytes", "modified")
_AFTER = ("error",)


class OutputFolder:
    """The folder of a prediction; a context manager, which makes the folder.

    Args:
        options: What is wanted; ``output`` is the folder.
        bundle: What answers.
        columns: What is measured of every case.

    Raises:
        ConfigError: If another process writes there, or results of another bundle or settings are
            there.
        DataError: If it cannot be read or written.
    """

    def __init__(self, options: PredictOptions, bundle: Bundle, columns: Sequence[str]) -> None:
        self.folder = Path(options.output)
        self.overwrite = options.overwrite
        self.header = [*_BEFORE, *columns, *_AFTER]
        self._said = said_of(options, bundle)
        self._rows: dict[str, dict[str, str]] = {}

    @contextmanager
    def open(self) -> Iterator[OutputFolder]:
        """Holds the folder, and leaves its summary sorted."""
        with ExitStack() as stack:
            with writing(self.folder, _OTHERWISE):
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.callback(self._unlock)
                stack.enter_context(locked(self.folder, _LOCK, wait=False))
            self._begin()
            try:
                yield self
            finally:
                self._write()

    def is_whole(self, case: Case) -> bool:
        """Whether the files of a case are complete."""
        row = self._rows.get(case.name)
        return row is not None and not row["error"]

    def is_done(self, case: Case) -> bool:
        """Whether a case was predicted from the files as they are now, and the results are here."""
        if not self.is_whole(case) or self.overwrite:
            return False
        row = self._rows[case.name]
        try:
            same = (row["bytes"], row["modified"]) == _state(case.inputs())
        except (MedfedError, OSError):
            return False  # the error is reported when the case is predicted
        return same and all(target.is_file() for target in case.targets)

    def replaceable(self, name: str) -> bool:
        """Whether files that are there may be replaced: the case has left them unfinished."""
        row = self._rows.get(name)
        return row is not None and bool(row["error"] and row["output"])

    def predict(self, case: Case, inputs: Sequence[Path]) -> Mapping[str, float | str]:
        """Predicts a case: its row is added when its files are whole.

        Args:
            case: The case, of whose targets none is there before or must be kept.
            inputs: The files that it is made of.

        Returns:
            What was measured, by column.
        """
        place = case.targets[0].relative_to(self.folder)
        values = (case.name, case.source.resolve(), place, *_state(inputs))
        begun = dict(zip(_BEFORE, values, strict=True))
        self._add(case.name, {**begun, "error": _INTERRUPTED})
        sizes = case.write()
        self._add(case.name, {**begun, **{k: _text(v) for k, v in sizes.items()}})
        return sizes

    def failed(self, case: Case, sentence: str) -> None:
        """Adds the row of a case that could not be predicted."""
        name, source = case.name, case.source.resolve()
        left = self._rows[name]["output"] if self.replaceable(name) else ""
        self._add(name, {"case": name, "input": source, "output": left, "error": sentence})

    def _begin(self) -> None:
        record, summary = self.folder / RECORD, self.folder / SUMMARY
        now, before = digest(self._said), None
        if record.exists():
            with reading(record, _OTHERWISE):
                before = parse_json(record, dict[str, Any])["said"]
        if before is None and summary.exists() and not self.overwrite:
            raise ConfigError(
                f"{summary} is there already, and no prediction's; choose another output, or set "
                "overwrite=true to replace it."
            )
        if before not in (None, now) and not self.overwrite:
            raise ConfigError(
                f"{self.folder} holds predictions of other bundles or settings ({RECORD}); choose "
                "another output, or set overwrite=true to replace them."
            )
        if before == now:
            self._rows = self._read()
        else:
            if before is not None:
                _log.warning(
                    "%s holds predictions of other bundles or settings; what is not replaced now "
                    "stays, without a row in %s.",
                    self.folder,
                    SUMMARY,
                )
            begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            made = {"begun": begun, "medfed": version("medfed"), "said": now}
            with writing(record, _OTHERWISE):
                write_json(record, {**self._said, **made})
        self._write()

    def _read(self) -> dict[str, dict[str, str]]:
        path = self.folder / SUMMARY
        if not path.exists():
            return {}
        with reading(path, _OTHERWISE):
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # the last row of a process that was killed
            header, *rows = csv.reader(io.StringIO(whole, newline=""))
            if [*map(original, header)] != self.header:
                raise ValueError("it has other columns than this prediction")
            texts = [dict(zip(self.header, map(original, row), strict=True)) for row in rows]
        return {row["case"]: row for row in texts}

    def _unlock(self) -> None:
        for name in (_LOCK, f"{_LOCK}.pid"):
            with suppress(OSError):
                (self.folder / name).unlink()

    def _write(self) -> None:
        rows = ([row.get(c, "") for c in self.header] for _, row in sorted(self._rows.items()))
        with writing(self.folder / SUMMARY, _OTHERWISE):
            write_text(self.folder / SUMMARY, csv_text(self.header, rows))

    def _add(self, name: str, row: Mapping[str, Any]) -> None:
        self._rows[name] = {c: str(row.get(c, "")) for c in self.header}
        line = csv_text([self._rows[name][c] for c in self.header], [])
        path = self.folder / SUMMARY
        with writing(path, _OTHERWISE), path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)


def said_of(options: PredictOptions, bundle: Bundle) -> dict[str, Any]:
    """Returns what results depend on: the bundle by the hashes of its files, and settings."""
    keys = ("format", "probabilities", "picture", "threshold", "spacing_tolerance")
    files = {"client": bundle.facts["client"], "files": digest(dict(bundle.hashes))}
    return {"bundle": files, **{k: getattr(options, k) for k in keys}}


def _state(files: Iterable[Path]) -> tuple[str, str]:
    """The size of files, and when the latest one was changed."""
    states = [file.stat() for file in files]
    latest = max((s.st_mtime for s in states), default=0.0)
    changed = datetime.datetime.fromtimestamp(latest, datetime.UTC)
    return str(sum(s.st_size for s in states)), changed.isoformat()


def _text(value: object) -> object:
    return f"{value:.8g}" if isinstance(value, float) else value


_log = logging.getLogger(__name__)
_SHOWN = 40  # rows on the terminal
_AGAIN = "{done} of {all} are done and whole; the same command goes on from there."


@dataclass(frozen=True)
class Case:
    """What is predicted at once.

    Attributes:
        name: Its path below the input, without suffix.
        source: A file or folder.
        inputs: Lists the files that it is made of.
        write: Writes its files, and returns what :func:`columns` names.
        targets: The files that are written, the mask or masks first.
    """

    name: str
    source: Path
    inputs: Callable[[], list[Path]]
    write: Callable[[], Mapping[str, float | str]]
    targets: tuple[Path, ...]


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
    """Predicts cases one at a time; a bad one does not stop the others.

    Args:
        cases: What there is.
        what: What cases are called, in plural.
        unit: Of a region's size: ``ml``, ``percent`` or ``boxes``.
        predictor: What answers.
        options: What is wanted.
        bundle: The predictor's.
        console: Where the table of sizes is printed.
        finish: Called with the first files of all cases that are done, if there are any.

    Raises:
        MedfedError: If nothing can be done, or some cases could not be predicted.
    """
    check_apart([(case.name, case.targets) for case in cases], what)
    check_place(options)
    named = columns(predictor, unit)
    table, left_out = _table(named, what), 0

    with ExitStack() as stack:
        record = None
        if options.into_folder:
            record = stack.enter_context(OutputFolder(options, bundle, named).open())
        waiting = [c for c in cases if record is None or not record.is_done(c)]
        if len(waiting) < len(cases):
            kept = len(cases) - len(waiting)
            say(console, f"{kept} of {len(cases)} {what} were predicted before; they stay.")

        def one(case: Case) -> None:
            nonlocal left_out
            inputs = case.inputs()
            replaced = options.overwrite or bool(record and record.replaceable(case.name))
            check_targets(case.targets, replaced, inputs)
            sizes = case.write() if record is None else record.predict(case, inputs)
            left_out += len(table.rows) == _SHOWN
            if len(table.rows) < _SHOWN:
                digits = {n: _UNITS[_kind(n)][0] for n in named if _kind(n) in _UNITS}
                texts = (f"{sizes[n]:.{count}f}" for n, count in digits.items())
                table.add_row(shown(case.name), *texts, str(case.targets[0]))

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
        attempt(waiting, one, lambda case: case.name, what, report, *folder)


_UNITS = {"ml": (1, "ml"), "percent": (2, "% of pixels"), "boxes": (0, "boxes")}
"""Digits and words of what the terminal shows."""


def columns(predictor: Predictor, unit: str) -> list[str]:
    """Names what is measured of a case, and its channels if cases may lack some.

    Args:
        predictor: What answers.
        unit: Of a region's size.
    """
    kinds, partial = (unit, "highest_probability"), predictor.facts.get("channels_of_cases")
    named = [f"{label}_{kind}" for kind in kinds for label in predictor.labels]
    return [*named, *["channels"] * bool(partial)]


def _kind(column: str) -> str:
    return column.rpartition("_")[2]


def _table(named: Sequence[str], what: str) -> Table:
    kinds = {name: kind for name in named if (kind := _kind(name)) in _UNITS}
    heads = [f"{shown(n.removesuffix(f'_{k}'))} ({_UNITS[k][1]})" for n, k in kinds.items()]
    table = Table(what.removesuffix("s"), *heads, "file")
    for column in table.columns[1:-1]:
        column.justify = "right"
    table.columns[-1].overflow = "fold"  # a path is to be copied
    return table


def box_cases(predictor: Predictor, options: PredictOptions) -> tuple[list[Case], str, str]:
    """Returns a case for a CT scan, or for every one of a folder.

    Args:
        predictor: A detector.
        options: Their ``output`` is a folder.

    Returns:
        The cases, what they are called, in plural, and what is counted.

    Raises:
        MedfedError: If there is no scan, or the output cannot be used.
    """
    output, label = Path(options.output), predictor.labels[0]
    if not options.into_folder:
        raise ConfigError(
            f"output={output} must be a folder, a name without a suffix: this model writes {TABLE} "
            "and a file for each scan."
        )
    check_targets([output / TABLE], options.overwrite or (output / RECORD).is_file(), ())

    def case(name: str, scan: ScanFiles) -> Case:
        file = boxes_file(scan, output)

        def write() -> dict[str, float | str]:
            scores = detect(predictor, name, scan.path, file)
            highest = max(scores, default=0.0)
            return {f"{label}_boxes": len(scores), f"{label}_highest_probability": highest}

        return Case(scan.id, scan.path, scan.files, write, (file,))

    scans = find_ct(Path(options.input), output)
    return [case(name, scan) for name, scan in scans.items()], "scans", "boxes"
