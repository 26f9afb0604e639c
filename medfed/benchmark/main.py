"""Runs the missing cells of a benchmark, then writes and prints its report.

A suite with ``published`` numbers prints them beside those of medfed. A row holds if the difference
of the means has an interval (Welch's, 95 %) that contains 0 and is nowhere beyond :data:`MARGIN`;
if the interval contains 0 and is wider, the runs cannot tell. A published value of one run has no
deviation: the interval is then that of medfed's mean (Student's), as if the other were exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medfed.benchmark import runner, tasks
from medfed.benchmark.plan import groups, shard_of
from medfed.benchmark.runner import Progress
from medfed.benchmark.suite import Published, wanted_of
from medfed.common.console import say, wide_console
from medfed.common.tables import Table
from medfed.records.cells import stale_cells
from medfed.records.folder import with_nan
from medfed.reports.findings import Report
from medfed.reports.report import print_tables, write
from medfed.standalone.errors import CheckpointError, ConfigError, MachineError, did_you_mean, few
from medfed.standalone.files import filled, write_text, writing


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
    figures: bool = True,
    target: float | None = None,
    published: str | Path | None = None,
) -> Report:
    """Runs the cells that are missing, then writes and prints the report."""
    chosen, by_suite, further = wanted_of(suite, methods, size, arms, plugins, published)
    common = ["plugins=[" + ",".join(f'"{p}"' for p in plugins) + "]"] if plugins else []
    root, named = str(Path(data_root).expanduser().resolve()), methods is not None
    every, notes = groups(chosen, by_suite, size, variants, paths, common, root, further, named)
    mine = shard_of(every, shard)
    if not mine:
        raise ConfigError(" ".join(notes) or f"shard={shard} leaves nothing to do; use fewer.")
    console = wide_console()
    say(console, *notes)
    broken = {} if report_only else runner.run_groups(mine, out, workers)
    read = runner.found_groups(mine, out)
    if stale := [*stale_cells(out, [cell for one in read for cell in one.wanted])]:
        notes.append(
            f"Stale cells are not in this report, as their settings, data, code or libraries have "
            f"changed: {few(stale, 3)}; run the benchmark to compute them again."
        )
    repeated = [one for one in read if one.group.suite.repeats]
    progress = [one for one in read if one.group.arm is None and one not in repeated]
    report = tasks.findings(progress, size, notes, target)
    request = {"suite": suite, "methods": methods, "variants": variants, "arms": arms}
    report.commands = [_command(request, size, paths or {})]
    if not any(one.final for one in [*progress, *repeated]):
        lost = next(iter(broken.values()), "") or (notes or ["nothing was computed there"])[-1]
        needs = {one.suite.name: one.suite.fetch for one in mine if one.suite.fetch}
        ending = "".join(f" suite={name} needs {fetch}." for name, fetch in needs.items())
        ending *= not lost.startswith(MachineError.__name__)
        raise CheckpointError(f"There is nothing to report in {out}: {lost.rstrip('.')}.{ending}")
    with writing(out, "choose another out=FOLDER"):
        if repeated:
            report.notes += _write_published(out / "published.md", repeated)
        if progress:
            write(out / "report", report, figures)
    print_tables(report)
    page = [f"Report: {out / 'report' / 'report.html'}"] * bool(progress)
    say(console, *report.sentences, *page)
    runner.check_computed(broken, "cells", "cells")
    return report


def _command(options: Mapping[str, Any], size: str, paths: Mapping[str, str | None]) -> str:
    """The command line that repeats the benchmark, without the paths of data."""
    wanted = ((key, value) for key, value in options.items() if value not in (None, False))
    listed = {k: str(v) if isinstance(v, bool | str) else f"[{','.join(v)}]" for k, v in wanted}
    keys = [f"{key}={value.replace('True', 'true')}" for key, value in listed.items()]
    data = [f"paths.{name}=FOLDER" for name, path in paths.items() if path is not None]
    return " ".join(["medfed benchmark", *keys, f"size={size}", *data])


MARGIN = 0.05
"""How far apart two means may be and still be called the same."""
_EQUAL = 5e-4  # with three digits they are equal
_HEAD = ("method", "published", "ours", "difference", "holds")
_TEMPLATE = Path(__file__).parent / "templates" / "published.md"


def difference(ours: Sequence[float], known: Sequence[float]) -> tuple[str, str]:
    """Returns the difference of two means with its interval, and whether the row holds.

    Example:
        >>> difference([0.70, 0.71, 0.72], [0.71, 0.72, 0.73])
        ('-0.010 [-0.033, +0.013]', 'holds')
        >>> difference([0.9, 0.91, 0.92], [0.71, 0.72, 0.73])[1], difference([0.9], [0.8, 0.7])
        ('does not hold', ('+0.150', 'cannot tell'))
        >>> difference([0.70, 0.71, 0.72], [0.71])  # one published run
        ('+0.000 [-0.025, +0.025]', 'holds')
        >>> difference([0.7101, 0.7101], [0.71]), difference([0.72, 0.72], [0.71, 0.71])
        (('+0.000', 'holds'), ('+0.010', 'cannot tell'))
    """
    if not len(ours) or not len(known):
        return "", "not known" if len(ours) else "not computed"
    gap = float(np.mean(ours) - np.mean(known))
    if len(ours) < 2 or max(np.ptp(ours), np.ptp(known)) < _EQUAL:  # nothing tells of chance
        return f"{gap:+.3f}", "holds" if len(ours) > 1 and abs(gap) < _EQUAL else "cannot tell"
    from scipy import stats  # imported here: tables without published results need none

    if len(known) == 1:
        low, high = np.subtract(stats.ttest_1samp(ours, 0).confidence_interval(), known[0])
    else:
        low, high = stats.ttest_ind(ours, known, equal_var=False).confidence_interval()
    word = "holds" if max(-low, high) <= MARGIN else "cannot tell"
    return f"{gap:+.3f} [{low:+.3f}, {high:+.3f}]", word if low <= 0 <= high else "does not hold"


def mean_of(result: Mapping[str, Any], row: Published, metric: str = "") -> float:
    """Returns a run's test score of one hospital, or its mean over hospitals or their patients."""
    name = metric or result["metric"][0]
    scores = {c: with_nan(of)[name] for c, of in result["clients"].items()}
    if row.over not in ("hospitals", "patients"):
        return float(scores[row.over])
    known = {c: score for c, score in scores.items() if not math.isnan(score)}
    tested = [result["patients"][c]["test"] if row.over == "patients" else 1 for c in known]
    return float(np.average([*known.values()], weights=tested)) if known else math.nan


def _published(progress: Sequence[Progress]) -> Iterator[tuple[str, Table]]:
    """Yields the title and the rows of each suite."""
    for suite in {one.group.suite.name: one.group.suite for one in progress}.values():
        ran = {one.group.method.name: one for one in progress if one.group.suite.name == suite.name}
        rows = []
        for row in suite.published or [Published(method, ()) for method in ran]:
            finals = ran[row.method].finals(row.variant or suite.base) if row.method in ran else []
            whole = [result for _, result in finals if result and "clients" in result]
            of = row.over if row.over not in ("hospitals", "patients") else ""
            if of and whole and of not in whole[0]["clients"]:
                hint = did_you_mean(of, whole[0]["clients"])
                rows.append([row.method, _spread(row.means), "", "", f"no hospital {of}{hint}"])
                continue
            each = (mean_of(result, row, suite.metric) for result in whole)
            means = [mean for mean in each if not math.isnan(mean)]
            name = " ".join([row.method, *(f"({w})" for w in (row.variant, of, row.table) if w)])
            rows.append([name, _spread(row.means), _spread(means), *difference(means, row.means)])
        yield suite.title, Table.of(_HEAD, rows, prose=(0, 4))


def _failures(progress: Sequence[Progress]) -> Iterator[str]:
    """Why runs have no score, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for one in progress:
        for place, result in one.final.items():
            if reason := result.get("error") or result.get("failed"):
                reasons.setdefault(reason, []).append(place)
    for reason, places in reasons.items():
        yield f"{few(places, 1)} could not be computed: {reason}"


def _spread(values: Sequence[float]) -> str:
    """A mean with the deviation of several values; empty where there is none."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


def _write_published(file: Path, progress: Sequence[Progress]) -> list[str]:
    """Writes and prints the tables; returns the sentences below them."""
    every = [*_published(progress)]
    hours = sum(r["cpu_seconds"] for one in progress for r in one.final.values()) / 3600
    suites = {one.group.suite.name: one.group.suite for one in progress}.values()
    sources = dict.fromkeys(suite.source for suite in suites)
    single = any(len(row.means) == 1 for suite in suites for row in suite.published)
    words = {"tables": every, "sources": sources, "margin": MARGIN, "single": single}
    words |= {"hours": hours, "failures": [*_failures(progress)]}
    words["unknown"] = [suite.name for suite in suites if not suite.published]
    page, _, below = filled(_TEMPLATE, **words).partition("====\n")
    write_text(file, page + below)
    for title, table in every:
        wide_console().print(table.printed(title))
    return [*below.splitlines(), f"Page: {file}"]
