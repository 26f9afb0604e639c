"""Runs what is missing of a benchmark and reports it: a table, verdicts in words, files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from medfed.common.console import say, size, wide_console
from medfed.common.errors import CheckpointError, ConfigError, MedfedError
from medfed.common.files import csv_text, write_json, write_text, writing
from medfed.common.names import cell as as_cell
from medfed.config.compose import CONFIG_DIR
from medfed.reports.benchmark.findings import Told, findings
from medfed.reports.benchmark.page import latex, page
from medfed.reports.benchmark.verdicts import REFERENCES, Verdict
from medfed.run.benchmark.arms import chosen_arms
from medfed.run.benchmark.cells import stale_cells
from medfed.run.benchmark.methods import chosen_methods
from medfed.run.benchmark.plan import groups, shard_of
from medfed.run.benchmark.runner import Progress, found_groups, run_groups
from medfed.run.benchmark.studies import write_studies
from medfed.run.benchmark.suite import chosen_suites

COLUMNS = (
    *("suite", "variant", "method", "metric", "splits", "mean", "low", "high"),
    *("worst_client", "worst_decile"),
    *(
        f"{name}_{reference}"
        for reference in REFERENCES
        for name in (
            *("difference", "low", "high", "patients_low", "patients_high"),
            *("p_holm", "visible", "verdict"),
        )
    ),
    *("harmed", "harmed_low", "harmed_high", "harmed_clients", "surely_harmed_clients"),
    *("bytes_up", "bytes_down", "passes", "failed_splits", "setting"),
)

_LAST = ("− local", "− FedAvg", "harmed", "sent")


def benchmark(
    suite: str | Sequence[str],
    methods: str | Sequence[str] | None = None,
    *,
    size: str = "small",
    variants: str | Sequence[str] | None = None,
    arms: bool | str | Sequence[str] = False,
    out: Path = Path("outputs/benchmark"),
    workers: int = 1,
    shard: str | None = None,
    report_only: bool = False,
    data_root: str = "data",
    paths: Mapping[str, str | None] | None = None,
    plugins: Sequence[str] = (),
    quiet: bool = False,
) -> Told:
    """Runs the cells that are missing, then writes and prints the report.

    Args:
        suite: A suite, several, or ``all``.
        methods: Methods, or ``all``; None for those of each suite. Local training, FedAvg and the
            ceilings are always among them.
        size: ``smoke``, ``small`` or ``full``.
        variants: Tasks beside the first of a suite, or ``all``.
        arms: Whether to measure also the arms of the suites, or which of them.
        out: Where cells are kept; the report goes to ``report`` within it.
        workers: Processes; 0 computes in this one.
        shard: ``i/n``, the i-th of n jobs; the report is then of this job's methods only.
        report_only: Whether to run nothing.
        data_root: Where generated cohorts are kept.
        paths: Of real data, by suite.
        plugins: Folders of suites and methods of a user's own.
        quiet: Whether to print nothing.

    Returns:
        What was found.

    Raises:
        MedfedError: If something is unknown, does not fit, or a cell's file cannot be trusted.
    """
    chosen = chosen_suites(suite, plugins)
    common = ["plugins=[" + ",".join(f'"{p}"' for p in plugins) + "]"] if plugins else []
    root = str(Path(data_root).expanduser().resolve())
    known = sorted(
        p.stem
        for folder in (CONFIG_DIR, *(Path(f) / "configs" for f in plugins))
        for p in (folder / "algorithm").glob("*.yaml")
    )
    by_suite = {
        s.name: chosen_methods(methods, s.sizes[size].methods or s.methods, known) for s in chosen
    }
    further = chosen_arms(arms, {s.name: s.arms for s in chosen}, known)
    every, notes = groups(chosen, by_suite, size, variants, paths, common, root, further)
    mine = list(shard_of(every, shard))
    if not mine:
        raise ConfigError(" ".join(notes) or f"shard={shard} leaves nothing to do; use fewer.")
    console = wide_console()
    if not quiet:
        say(console, *notes)
    broken = {} if report_only else run_groups(mine, out, workers, quiet)
    measured = found_groups(mine, out)
    notes += _missing(measured, out)
    progress = [own for own in measured if own.group.arm is None]
    told = findings(progress, size, notes)
    if not any(own.final for own in progress):
        lost = next(iter(broken.values()), "") or (notes or ["nothing was computed there"])[-1]
        raise CheckpointError(f"There is nothing to report in {out}: {lost}")
    with writing(out, "choose another out=FOLDER"):
        _write(out / "report", told)
        write_studies(out / "tuning.journal", progress)
    if not quiet:
        _print(told)
        say(console, *told.sentences, f"Report: {out / 'report' / 'report.html'}")
    if broken:
        place, why = next(iter(broken.items()))
        raise MedfedError(
            f"{len(broken)} cells could not be computed, the first of them {place} ({why}); what "
            "was finished is kept."
        )
    return told


def _missing(progress: Sequence[Progress], out: Path) -> list[str]:
    """Names stale cells, of which the report has nothing."""
    cells = [cell for own in progress for cell in own.wanted]
    stale = list(stale_cells(out, cells))
    if not stale:
        return []
    more = f" and {len(stale) - 3} more" * (len(stale) > 3)
    return [
        f"Stale, and not in this report, as their settings, data, code or libraries have changed "
        f"since: {', '.join(stale[:3])}{more}; run the benchmark to compute them anew."
    ]


def _row(told: Told, task: Any, name: str, v: Verdict) -> list[object]:
    raw = task.raw
    ends = sorted((raw(v.mean.low), raw(v.mean.high)))
    cells: list[object] = [
        *(task.suite, task.variant, name, task.metric, len(v.scores.values)),
        *(raw(v.mean.mean), *ends, raw(v.worst), raw(v.decile)),
    ]
    for reference in REFERENCES:
        if (a := v.against.get(reference)) is None:
            cells += [""] * 8
            continue
        d = a.difference
        cells += [d.mean, d.low, d.high, *a.patients, a.p, d.visible, a.verdict]
    if v.harm is None:
        cells += [""] * 5
    else:
        cells += [v.harm.share, v.harm.low, v.harm.high]
        cells += [" ".join(v.harm.clients), " ".join(v.harm.surely)]
    setting = " ".join(f"{key}={value:g}" for key, value in v.scores.setting.items())
    return [*cells, *v.scores.sent, v.scores.passes, v.scores.failed, setting]


def _write(folder: Path, told: Told) -> None:
    rows = [
        [_cell(value) for value in _row(told, task, name, v)]
        for task, verdicts in told.tasks
        for name, v in verdicts.items()
    ]
    write_text(folder / "table.csv", csv_text(COLUMNS, rows))
    clients = [
        [task.suite, task.variant, name, split, client, _cell(task.raw(float(value)))]
        for task, verdicts in told.tasks
        for name, v in verdicts.items()
        for split, values in enumerate(v.scores.values)
        for client, value in zip(task.clients, values, strict=True)
    ]
    head = ("suite", "variant", "method", "split", "client", "value")
    write_text(folder / "clients.csv", csv_text(head, clients))
    write_json(folder / "findings.json", told.plain())
    write_text(folder / "report.md", markdown(told))
    write_text(folder / "tables.tex", latex(told))
    write_text(folder / "report.html", page(told))


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def markdown(told: Told) -> str:
    """Returns the report: verdicts in words first, then a table for each task.

    Args:
        told: What was found.
    """
    lines = ["# Benchmark", "", *(f"- {s}" for s in told.sentences), ""]
    head = (
        *("method", "mean [95 %]", "worst client", "worst decile", "against local"),
        *("against FedAvg", "harmed", "sent"),
    )
    for task, verdicts in told.tasks:
        better = "smaller" if task.falls else "larger"
        lines += [f"## {task.name}", "", f"{task.metric}, {better} is better.", ""]
        lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in _shown(task, verdicts)] + [""]
        lines += [f"- {note}" for note in task.notes] + [""] * bool(task.notes)
    return "\n".join(lines).rstrip() + "\n"


def _shown(task: Any, verdicts: Mapping[str, Verdict]) -> list[tuple[str, ...]]:
    """The lines of a table for people, best first."""
    rows = []
    for name, v in sorted(verdicts.items(), key=lambda item: -item[1].mean.mean):
        low, high = sorted((task.raw(v.mean.low), task.raw(v.mean.high)))
        told = []
        for reference in REFERENCES:
            a = v.against.get(reference)
            told.append("" if a is None else f"{a.difference.mean:+.4f} {a.verdict}")
        harm = "" if v.harm is None else f"{v.harm.share:.0%} [{v.harm.low:.0%}, {v.harm.high:.0%}]"
        rows.append(
            (
                name,
                f"{task.raw(v.mean.mean):.4f} [{low:.4f}, {high:.4f}]",
                f"{task.raw(v.worst):.4f}",
                f"{task.raw(v.decile):.4f}",
                *told,
                harm.replace("nan%", "–"),
                size(round(sum(v.scores.sent))),
            )
        )
    return rows


def _print(told: Told) -> None:
    console = wide_console()
    for task, verdicts in told.tasks:
        table = Table(box=SIMPLE_HEAD, title=f"{task.name}: {task.metric}", title_justify="left")
        for column in (
            "method",
            "mean",
            "worst",
            "decile",
            "− local",
            "− FedAvg",
            "harmed",
            "sent",
        ):
            table.add_column(column, justify="left" if column == "method" else "right")
        for row in _shown(task, verdicts):
            table.add_row(*(as_cell(text) if text else "" for text in row))
        console.print(table)
