"""Runs the missing cells of a benchmark or a pilot, then writes and prints its report or advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medfed.benchmark import runner, tasks
from medfed.benchmark.plan import groups, shard_of
from medfed.benchmark.published import write as write_published
from medfed.benchmark.suite import wanted_of
from medfed.common.console import say, wide_console
from medfed.records.cells import stale_cells
from medfed.reports.findings import Report
from medfed.reports.report import print_tables, write
from medfed.standalone.errors import CheckpointError, ConfigError, MachineError, few
from medfed.standalone.files import writing


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
    mine = list(shard_of(every, shard))
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
            report.notes += write_published(out / "published.md", repeated)
        if progress:
            write(out / "report", report, figures)
    print_tables(report)
    page = [f"Report: {out / 'report' / 'report.html'}"] * bool(progress)
    say(console, *report.sentences, *page)
    runner.check_computed(broken, "cells", "cells")
    return report


def _command(given: Mapping[str, Any], size: str, paths: Mapping[str, str | None]) -> str:
    """The command line that repeats the benchmark, without the paths of data."""
    wanted = ((key, value) for key, value in given.items() if value not in (None, False))
    listed = {k: str(v) if isinstance(v, bool | str) else f"[{','.join(v)}]" for k, v in wanted}
    keys = [f"{key}={value.replace('True', 'true')}" for key, value in listed.items()]
    data = [f"paths.{name}=FOLDER" for name, path in paths.items() if path is not None]
    return " ".join(["medfed benchmark", *keys, f"size={size}", *data])
