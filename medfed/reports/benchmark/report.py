"""Runs what is missing of a benchmark and reports it: a table, verdicts in words, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from medfed.common.console import say, wide_console
from medfed.common.errors import CheckpointError, ConfigError, MedfedError
from medfed.common.files import writing
from medfed.common.names import cell as as_cell
from medfed.reports.benchmark.claims import judge_claims
from medfed.reports.benchmark.files import shown, write
from medfed.reports.benchmark.findings import Told, findings
from medfed.run.benchmark.arms import chosen_arms
from medfed.run.benchmark.cells import stale_cells
from medfed.run.benchmark.methods import chosen_methods, known_methods
from medfed.run.benchmark.plan import groups, shard_of
from medfed.run.benchmark.runner import Progress, found_groups, run_groups
from medfed.run.benchmark.studies import write_studies
from medfed.run.benchmark.suite import chosen_suites


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
    quiet: bool = False,
) -> Told:
    """Runs the cells that are missing, then writes and prints the report.

    Args:
        suite: A suite, several, or ``all``.
        methods: Methods, or ``all``; None for those of each suite, of which only a few are measured
            on further variants. Local training, FedAvg and the ceilings are always among them.
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
        figures: Whether to write the pictures as files of vectors, too.
        quiet: Whether to print nothing.

    Returns:
        What was found.

    Raises:
        MedfedError: If something is unknown, does not fit, or a cell's file cannot be trusted.
    """
    chosen = chosen_suites(suite, plugins)
    common = ["plugins=[" + ",".join(f'"{p}"' for p in plugins) + "]"] if plugins else []
    root = str(Path(data_root).expanduser().resolve())
    known = known_methods(plugins)
    by_suite = {
        s.name: chosen_methods(methods, s.sized(size).methods or s.methods, known) for s in chosen
    }
    further = chosen_arms(arms, {s.name: s.arms for s in chosen}, known)
    named = methods is not None
    every, notes = groups(chosen, by_suite, size, variants, paths, common, root, further, named)
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
    told.claims = judge_claims(measured, plugins) if arms else []
    told.commands = [_command(suite, methods, size, variants, arms, paths)]
    if not any(own.final for own in progress):
        lost = next(iter(broken.values()), "") or (notes or ["nothing was computed there"])[-1]
        raise CheckpointError(f"There is nothing to report in {out}: {lost}")
    with writing(out, "choose another out=FOLDER"):
        write(out / "report", told, figures)
        write_studies(out / "tuning.journal", progress)
    if not quiet:
        print_tables(told)
        say(console, *told.sentences, f"Report: {out / 'report' / 'report.html'}")
    if broken:
        place, why = next(iter(broken.items()))
        raise MedfedError(
            f"{len(broken)} cells could not be computed, the first of them {place} ({why}); what "
            "was finished is kept."
        )
    return told


def _command(
    suite: str | Sequence[str],
    methods: str | Sequence[str] | None,
    size: str,
    variants: str | Sequence[str] | None,
    arms: bool | str | Sequence[str],
    paths: Mapping[str, str | None] | None,
) -> str:
    """The command line that computes all of it again, wherever data lie there."""
    given = {"suite": suite, "methods": methods, "variants": variants, "arms": arms}
    listed = {
        key: str(value) if isinstance(value, bool | str) else "[" + ",".join(value) + "]"
        for key, value in given.items()
        if value not in (None, False)
    }
    keys = [f"{key}={value.replace('True', 'true')}" for key, value in listed.items()]
    data = [f"paths.{name}=FOLDER" for name, path in (paths or {}).items() if path is not None]
    return " ".join(["medfed benchmark", *keys, f"size={size}", *data])


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


def print_tables(told: Told) -> None:
    """Prints a table for each task."""
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
        for row in shown(task, verdicts):
            table.add_row(*(as_cell(text) if text else "" for text in row))
        console.print(table)
        say(console, *task.left_out.values())
