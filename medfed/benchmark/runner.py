"""Runs the missing cells of a benchmark in processes that stay alive, and shows the progress."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfed.benchmark.plan import Group, best_trial
from medfed.common.console import Steps
from medfed.common.processes import finished, worker_pool
from medfed.records.cells import Cell, read_cell, write_cell
from medfed.run.cell import run_cell
from medfed.standalone.errors import ConfigError, MedfedError, RankError, first_line
from medfed.standalone.files import locked

Result = dict[str, Any]
SCRATCH = "medfed-benchmark-"


@dataclass
class Progress:
    """A group, and the results of its cells as far as they are known."""

    group: Group  # the method and the suite
    results: dict[str, Result] = field(default_factory=dict)  # by the place of a cell
    trial: int | None = None  # the best setting, once it is known
    wanted: list[Cell] = field(default_factory=list)  # the cells of the stage that it is in

    def missing(self, out: Path) -> list[Cell]:
        """Reads the cells that are there; returns those of the present stage that are not."""
        # Once all settings are tried, it chooses the best one, and the next stage begins.
        if self.trial is None:
            self.wanted = self.group.tuning
            if lacking := self._unread(out):
                return lacking
            self.trial = best_trial(self.tuning or [{}])
            self.wanted = self.group.final(self.trial)
        return self._unread(out)

    def _unread(self, out: Path) -> list[Cell]:
        for cell in self.wanted:
            if cell.place not in self.results and (result := read_cell(out, cell)) is not None:
                self.results[cell.place] = result
        return [cell for cell in self.wanted if cell.place not in self.results]

    @property
    def tuning(self) -> list[Result]:
        """The results of tuning, by trial."""
        return [self.results[cell.place] for cell in self.group.tuning]

    @property
    def final(self) -> dict[str, Result]:
        """The results that are reported, as far as they are known."""
        known = ((cell, self.results.get(cell.place)) for cell in self.wanted)
        return {cell.place: r for cell, r in known if r is not None and cell.stage == "final"}

    def finals(self, variant: str) -> list[tuple[Cell, Result | None]]:
        """Returns the cells of a task that are reported, with their results as far as known."""
        cells = [c for c in self.wanted if c.variant == variant and c.stage == "final"]
        return [(cell, self.results.get(cell.place)) for cell in cells]


def run_groups(groups: Sequence[Group], out: Path, workers: int) -> dict[str, str]:
    """Runs all cells that are missing; those that are there are read."""
    results, broken = dict[str, Result](), dict[str, str]()
    progress = [Progress(group, results) for group in groups]  # which share cells of tuning
    tuned = {(g.suite.name, g.method.algorithm): g.size.trials for g in groups}
    total = sum(len(g.variants) * g.size.splits for g in groups)
    total += sum(trials for trials in tuned.values() if trials > 1)

    def calls() -> Iterator[tuple[Cell, tuple[Any, ...]]]:
        reported = {*broken}
        for one in progress:
            for cell in one.missing(out):
                if cell.place not in reported:
                    reported.add(cell.place)
                    yield cell, (run_cell, cell.config, cell.stage, cell.finetuned)

    with (
        scratch() as folder,
        worker_pool(workers, TMPDIR=folder) as pool,
        Steps(total, verb="comput") as steps,
    ):
        # The first stage of all groups is composed before any cell runs, so that a mistake in a
        # suite costs nothing; the second one, once all is tuned, while cells run.
        for stage in ([*calls()], calls()):
            for cell, future in finished(pool, stage, workers):
                try:
                    results[cell.place] = future.result()
                except BrokenProcessPool as error:
                    raise RankError(
                        "A process ended while it ran a cell (killed, or out of memory?). Finished "
                        "cells are kept: run the benchmark again, with fewer workers if memory is "
                        "short."
                    ) from error
                except Exception as error:
                    broken[cell.place] = f"{type(error).__name__}: {first_line(error)}"
                    continue
                write_cell(out, cell, results[cell.place])
                steps.done = len(results) - 1
                steps.advance(cell.place)
    return broken


def found_groups(groups: Sequence[Group], out: Path) -> list[Progress]:
    """Reads the finished cells of groups, without running any."""
    read = [Progress(group) for group in groups]
    for one in read:
        one.missing(out)
    return read


def computed(groups: Sequence[Group], out: Path, workers: int) -> list[Progress]:
    """Runs the missing runs of a pilot, and reads all of them."""
    check_computed(run_groups(groups, out, workers), "runs of the pilot", "runs")
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


def check_computed(broken: Mapping[str, str], what: str, folder: str) -> None:
    """Says what could not be computed, if anything."""
    if broken:
        place, why = next(iter(broken.items()))
        raise MedfedError(
            f"{len(broken)} {what} could not be computed; the first is {place} ({why}). Finished "
            f"{folder} are kept."
        )
