"""Runs the missing cells of a benchmark in processes that stay alive, and shows the progress."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfed.benchmark.plan import Group, best_trial
from medfed.common.console import Steps
from medfed.common.processes import worker_pool
from medfed.records.cells import Cell, read_cell, write_cell
from medfed.run.cell import run_cell
from medfed.standalone.errors import ConfigError, MedfedError, RankError, first_line
from medfed.standalone.files import locked

Result = dict[str, Any]
SCRATCH = "medfed-benchmark-"


@dataclass
class Progress:
    """The state of a group."""

    group: Group  # the method and the suite
    tuning: dict[int, Result] = field(default_factory=dict)  # results by trial, as they come
    trial: int | None = None  # the best setting, once it is known
    final: dict[str, Result] = field(default_factory=dict)  # results by cell, as they come
    wanted: list[Cell] = field(default_factory=list)  # the cells of the stage that it is in

    def missing(self, out: Path) -> list[Cell]:
        """Reads the cells that are there; returns those of the present stage that are not."""
        # Once all settings are tried, it chooses the best one, and the next stage begins.
        if self.trial is None:
            self.wanted = self.group.tuning
            if lacking := [cell for cell in self.wanted if not self._reads(out, cell)]:
                return lacking
            self.trial = best_trial([self.tuning[n] for n in sorted(self.tuning)] or [{}])
            self.wanted = self.group.final(self.trial)
        return [cell for cell in self.wanted if not self._reads(out, cell)]

    def _reads(self, out: Path, cell: Cell) -> bool:
        known = cell.trial in self.tuning if cell.stage == "tune" else cell.place in self.final
        if not known and (result := read_cell(out, cell)) is not None:
            self.take(cell, result)
            return True
        return known

    def take(self, cell: Cell, result: Result) -> None:
        """Adds the result of a cell."""
        if cell.stage == "tune":
            self.tuning[cell.trial] = result
        else:
            self.final[cell.place] = result

    def finals(self, variant: str) -> list[tuple[Cell, Result | None]]:
        """Returns the cells of a task that are reported, with their results as far as known."""
        cells = [c for c in self.wanted if c.variant == variant and c.stage == "final"]
        return [(cell, self.final.get(cell.place)) for cell in cells]

    @property
    def total(self) -> int:
        """The number of all its cells."""
        trials = len(self.group.settings)
        final = len(self.group.variants) * self.group.size.splits
        return final + (trials if trials > 1 else 0)

    @property
    def done(self) -> int:
        """The number of its finished cells."""
        return len(self.tuning) + len(self.final)


def run_groups(
    groups: Sequence[Group], out: Path, workers: int, quiet: bool = False
) -> dict[str, str]:
    """Runs all cells that are missing; those that are there are read."""
    progress = [Progress(g) for g in groups]
    broken: dict[str, str] = {}
    waiting: dict[Future[Result], list[tuple[Progress, Cell]]] = {}
    by_file: dict[Path, Future[Result]] = {}

    def ask(one: Progress, pool: Executor) -> None:
        for cell in one.missing(out):
            file = cell.file(out)
            if file not in by_file:
                by_file[file] = pool.submit(run_cell, cell.config, cell.stage, cell.finetuned)
            waiting.setdefault(by_file[file], []).append((one, cell))

    def gather(pool: Executor, seconds: float) -> None:
        for future in wait(waiting, seconds, FIRST_COMPLETED).done:
            owners = waiting.pop(future)
            cell = owners[0][1]
            try:
                result = future.result()
            except BrokenProcessPool:
                raise
            except Exception as error:
                broken[cell.place] = f"{type(error).__name__}: {first_line(error)}"
                continue
            write_cell(out, cell, result)
            for one, wanted in owners:
                one.take(wanted, result)
                if wanted.stage == "tune" and len(one.tuning) == len(one.wanted):
                    ask(one, pool)
            steps.done = sum(one.done for one in progress) - 1
            steps.advance(cell.place)

    total = sum(one.total for one in progress)
    try:
        with (
            scratch() as folder,
            worker_pool(workers, TMPDIR=folder) as pool,
            Steps(total, quiet, verb="comput") as steps,
        ):
            for one in progress:
                ask(one, pool)
                gather(pool, 0)  # keeps what is finished while others are composed
            while waiting:
                # Ctrl-C may reach another thread, and a wait without end would not see it.
                gather(pool, 1.0)
    except BrokenProcessPool as error:
        raise RankError(
            "A process ended while it ran a cell (killed, or out of memory?). Finished cells are "
            "kept: run the benchmark again, with fewer workers if memory is short."
        ) from error
    return broken


def found_groups(groups: Sequence[Group], out: Path) -> list[Progress]:
    """Reads the finished cells of groups, without running any."""
    read = [Progress(group) for group in groups]
    for one in read:
        one.missing(out)
    return read


def computed(
    groups: Sequence[Group], out: Path, workers: int, quiet: bool = False
) -> list[Progress]:
    """Runs the missing runs of a pilot, and reads all of them."""
    check_computed(run_groups(groups, out, workers, quiet), "runs of the pilot", "runs")
    return found_groups(groups, out)


@contextmanager
def scratch() -> Iterator[str]:
    """Gives a folder for the files of cells, and removes those of killed benchmarks."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with suppress(ConfigError, OSError):  # it is at work, or somebody else's
            if (left / "lock").is_file() and time.time() - left.stat().st_mtime > 60:
                with locked(left, wait=False):
                    shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as folder,
        locked(Path(folder)),
    ):
        yield folder


def check_computed(broken: Mapping[str, str], what: str, kept: str) -> None:
    """Says what could not be computed, if anything."""
    if broken:
        place, why = next(iter(broken.items()))
        raise MedfedError(
            f"{len(broken)} {what} could not be computed; the first is {place} ({why}). Finished "
            f"{kept} are kept."
        )
