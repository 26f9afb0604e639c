"""``medfed compare``: what ``medfed report`` knows of finished runs, with all metrics and pictures.

`FINDINGS` names the modules that add sentences, tables and pictures about how the runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from medfed.common.console import in_markdown, say, wide_console
from medfed.common.errors import ConfigError
from medfed.common.figures import FORMATS, save_figures
from medfed.common.files import csv_text, write_text, writing
from medfed.common.scores import WITHOUT_SMALL, federation_statistics, number, over_seeds
from medfed.reports import subsets, sweeps, task_pictures
from medfed.reports.findings import Finding, Report, report_on
from medfed.reports.report import markdown, print_tables
from medfed.reports.runs import common_folder, find_runs
from medfed.reports.tables import Table

# Modules with a function ``find`` from a report to a Finding, in the order of the text.
FINDINGS = (task_pictures, sweeps, subsets)
_TITLE = "Comparison"
_SPENT = ("steps", "gradient_passes", "forward_passes")
_HEAD = ("metric", "place", "method", "seeds", "value", "sd_over_seeds", "low", "high")
Values = Mapping[str, Sequence[float]]
"""By method, one value for each of its runs."""


def metrics_of(report: Report) -> list[str]:
    """Returns the metrics that all runs have, the one of the verdicts first."""
    runs = chain.from_iterable(report.runs.values())
    known = [next(iter(run.summary["clients"].values())) for run in runs]
    first = report.tasks[0][0].metric
    return [first, *(n for n in known[0] if n != first and all(n in one for one in known))]


def values_of(report: Report) -> Iterator[tuple[str, str, Values]]:
    """Yields metric, place and values: of clients, statistics over them, then what runs cost."""
    task = report.tasks[0][0]
    summaries = {name: [run.summary for run in runs] for name, runs in report.runs.items()}
    first = next(iter(summaries.values()))
    every = list(chain.from_iterable(summaries.values()))
    known = [
        n for n in first[0].get("constant", {}) if all(n in s.get("constant", {}) for s in every)
    ]
    scored = {**summaries, **{name: [s["constant"][name] for s in first] for name in known}}
    smaller = [WITHOUT_SMALL] * bool(task.small)
    for metric in metrics_of(report):
        for place in (*first[0]["clients"], "mean", *smaller, "sd", "worst"):
            yield (
                metric,
                place,
                {n: [_at(s, metric, place, task.clients) for s in of] for n, of in scored.items()},
            )
    for way in ("up", "down"):
        yield (
            f"bytes {way}",
            "total",
            {n: [s["bytes"][way] for s in of] for n, of in summaries.items()},
        )
    for name in _SPENT:
        for client in first[0]["clients"]:
            yield (
                name.replace("_", " "),
                client,
                {n: [s[name][client] for s in of] for n, of in summaries.items()},
            )
    yield (
        "selected round",
        "total",
        {n: [(s["selected_round"] or 0) + 1 for s in of] for n, of in summaries.items()},
    )


def _at(content: Mapping[str, Any], metric: str, place: str, deciding: Sequence[str]) -> float:
    """A metric of a client, or a statistic over clients; NaN where there is none."""
    clients = content["clients"]
    if place == WITHOUT_SMALL:
        return federation_statistics([clients[c].get(metric, math.nan) for c in deciding])["mean"]
    if place in clients:
        return float(clients[place].get(metric, math.nan))
    return float(content["federation"].get(metric, {}).get(place, math.nan))


def to_csv(report: Report) -> str:
    """Returns a line per metric, place and method or constant predictor.

    The spread is the sample standard deviation over seeds; one seed has the interval of its run.
    """
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
    of = {"mean": intervals["mean"], **intervals["clients"]} if intervals else {}
    ends = of.get(place, {}).get(metric) or (math.nan,) * 2
    return (None, None) if any(map(math.isnan, ends)) else ends


def means_table(report: Report) -> Table:
    """Returns the means of all metrics, by method and constant predictor.

    Where some hospitals are too small to decide, the means without them stand beside.
    """
    metrics = [metric for metric in metrics_of(report) if "/" not in metric]
    rows: dict[str, dict[str, list[str]]] = {}
    for metric, place, values in values_of(report):
        for name, of in values.items():
            means, mean = rows.setdefault(name, {}), over_seeds(of)[0]
            if metric in metrics and place in ("mean", WITHOUT_SMALL):
                means.setdefault(place, []).append(number(mean))
            elif metric == "selected round":
                means["mean"].append(f"{mean:.4g}")
    lines = [
        [name + place.removeprefix("mean").replace(" w", ", w"), *texts, *[""] * (place != "mean")]
        for name, means in rows.items()
        for place, texts in means.items()
    ]
    head = ("method", *(metric.replace("_", " ") for metric in metrics), "round")
    whole = [[*line, *[""] * (len(head) - len(line))] for line in lines]
    return Table.of(head, whole, prose=(0,)).upright("metric")


def compare_runs(
    runs: str | Sequence[str], out: Path | None = None, metric: str | None = None, kind: str = "png"
) -> Report:
    """Compares runs, prints the tables and writes ``comparison.csv``, ``.md`` and pictures.

    Args:
        runs: Run folders, or folders that hold runs.
        out: The folder for the files; ``None`` takes the folder that holds all runs.
        metric: The metric of verdicts and pictures; ``None`` takes the one that selected rounds.
        kind: The format of pictures; see :func:`medfed.common.figures.save_figures`.

    Returns:
        The report on the runs.

    Raises:
        MedfedError: If the runs cannot be read or compared, or ``out`` cannot be written, or holds
            files of these names that no comparison wrote.
    """
    folders = find_runs(runs)
    report = report_on(folders, metric, pictures=kind != "none")
    report.title = _TITLE
    folder = common_folder(folders) if out is None else out.expanduser()
    found = [module.find(report) for module in FINDINGS]
    sentences = [sentence for one in found for sentence in one.sentences]
    tables = {
        "comparison": to_csv(report),
        **{n: t for one in found for n, t in one.tables.items()},
    }
    pictures = {n: p for one in found for n, p in one.pictures.items() if kind != "none"}
    means = means_table(report)
    _refuse_others_files(folder, (*tables, *pictures))
    with writing(folder, "choose another out=FOLDER"):
        # The text comes first: it identifies the folder when a killed comparison is repeated.
        text = markdown(report, means, Finding(in_markdown(sentences), {}, pictures))
        write_text(folder / "comparison.md", text)
        for name, text in tables.items():
            write_text(folder / f"{name}.csv", text)
        save_figures(folder, {n: p.figure for n, p in pictures.items()}, kind)
    console = wide_console()
    print_tables(report, console)
    console.print(means.printed("Means of the test metrics, over hospitals and seeds"))
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
