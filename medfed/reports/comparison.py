"""``medfed compare``: what ``medfed report`` knows of finished runs, with all metrics and pictures.

`FINDINGS` names the modules that add sentences, tables and pictures about how the runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from medfed.common.console import in_markdown, say, wide_console
from medfed.common.figures import FORMATS, save_figures
from medfed.common.scores import WITHOUT_SMALL, over_seeds
from medfed.reports import subsets, sweeps, task_pictures
from medfed.reports.charts import Picture
from medfed.reports.findings import Finding, Report, report_on
from medfed.reports.report import markdown, print_tables
from medfed.reports.runs import common_folder, find_runs, metrics_of, value_at, with_constants
from medfed.standalone.errors import ConfigError
from medfed.standalone.files import csv_text, write_text, writing

# Modules with a function ``find`` from a report to a Finding, in the order of the text.
FINDINGS = (task_pictures, sweeps, subsets)
_TITLE = "Comparison"
_SPENT = ("steps", "gradient_passes", "forward_passes")
_HEAD = ("metric", "place", "method", "seeds", "value", "sd_over_seeds", "low", "high")
Values = Mapping[str, Sequence[float]]  # by method, one value for each of its runs


def values_of(report: Report) -> Iterator[tuple[str, str, Values]]:
    """Yields metric, place and values: of clients, statistics over them, then what runs cost."""
    task = report.tasks[0][0]
    every = {name: [run.summary for run in runs] for name, runs in report.runs.items()}
    clients, scored = [*next(iter(every.values()))[0]["clients"]], with_constants(report.runs)
    for metric in metrics_of(report.runs, task.metric):
        for place in (*clients, "mean", *[WITHOUT_SMALL] * bool(task.small), "sd", "worst"):
            some = task.clients if place == WITHOUT_SMALL else clients
            yield (
                metric,
                place,
                {n: [value_at(s, metric, place, some) for s in of] for n, of in scored.items()},
            )
    costs = [(f"bytes {way}", "total", ("bytes", way)) for way in ("up", "down")]
    costs += [(name.replace("_", " "), c, (name, c)) for name in _SPENT for c in clients]
    for metric, place, (kind, of_what) in costs:
        yield metric, place, {n: [s[kind][of_what] for s in of] for n, of in every.items()}
    rounds = {n: [(s["selected_round"] or 0) + 1 for s in of] for n, of in every.items()}
    yield "selected round", "total", rounds


def to_csv(report: Report) -> str:
    """Returns a line per metric, place and method or constant predictor."""
    # The spread is the sample standard deviation over seeds; one seed has the interval of its
    # run.
    return csv_text(
        _HEAD,
        (
            [metric, place, name, len(of), *over_seeds(of), *_ends(report, name, metric, place)]
            for metric, place, values in values_of(report)
            for name, of in values.items()
        ),
    )


def _ends(report: Report, name: str, metric: str, place: str) -> Sequence[float | None]:
    """The interval that a method's only run has of a client's metric, or of the mean."""
    one, *others = report.runs.get(name, [None, None])
    intervals = None if one is None or others else one.summary.get("intervals")
    means = ("mean", WITHOUT_SMALL)
    of = {n: intervals.get(n, {}) for n in means} | intervals["clients"] if intervals else {}
    ends = of.get(place, {}).get(metric) or (math.nan,) * 2
    return (None, None) if any(map(math.isnan, ends)) else ends


def compare_runs(
    runs: str | Sequence[str], out: Path | None = None, metric: str | None = None, kind: str = "png"
) -> Report:
    """Compares runs, prints the tables and writes ``comparison.csv``, ``.md`` and pictures."""
    folders = find_runs(runs)
    report = report_on(folders, metric, pictures=kind != "none")
    report.title = _TITLE
    folder = common_folder(folders) if out is None else out.expanduser()
    sentences, tables, pictures = list[str](), {"comparison": to_csv(report)}, dict[str, Picture]()
    for finding in (module.find(report) for module in FINDINGS):
        sentences += finding.sentences
        tables |= finding.tables
        pictures |= finding.pictures if kind != "none" else {}
    _refuse_others_files(folder, (*tables, *pictures))
    with writing(folder, "choose another out=FOLDER"):
        # The text comes first: it identifies the folder when a killed comparison is repeated.
        text = markdown(report, Finding(in_markdown(sentences), {}, pictures))
        write_text(folder / "comparison.md", text)
        for name, text in tables.items():
            write_text(folder / f"{name}.csv", text)
        save_figures(folder, {n: p.figure for n, p in pictures.items()}, kind)
    console = wide_console()
    print_tables(report, console)
    say(console, *report.sentences, *sentences, f"Tables and pictures: {folder}")
    return report


def _refuse_others_files(folder: Path, names: Iterable[str]) -> None:
    """Lets a comparison replace the files of an earlier comparison, and no others."""
    text, head = folder / "comparison.md", f"# {_TITLE}\n".encode()
    if text.is_file() and text.read_bytes()[: len(head)] == head:
        return
    for name in names:
        for path in (folder / f"{name}.{ending}" for ending in ("md", "csv", *FORMATS)):
            if path.exists():
                raise ConfigError(
                    f"{path} is there and no comparison has written it; choose another out=FOLDER."
                )
