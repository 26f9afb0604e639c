"""The scores of methods on a task, read from cells; what cannot stand in a table is named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.benchmark.runner import Progress
from medfed.common.console import few
from medfed.common.errors import CheckpointError
from medfed.common.scores import federation_statistics, mean_of_known, worst_value
from medfed.records.cells import Cell

Floats = NDArray[np.float64]
Result = Mapping[str, Any]


class Moment(NamedTuple):
    """A round of a run that was evaluated.

    Attributes:
        round: Its number, from 1.
        score: Mean over clients of the validation metric, turned so that larger is better.
        bytes: What had travelled by then.
        passes: Gradient passes that a client had taken by then.
    """

    round: int
    score: float
    bytes: float
    passes: float


@dataclass(frozen=True)
class Scores:
    """A method on a task.

    Attributes:
        method: Its name.
        values: (S, C) the metric of every split and client, turned so that larger is better; NaN
            where a client's patients leave it undefined.
        drawn: (S, W, C) the same of patients drawn anew; W is 0 where there are none.
        sent: Bytes of a run, up and down, mean over splits.
        passes: Gradient passes of the client that took most, as a share of the budget.
        failed: Splits in which its model has failed, which count as the worst possible.
        setting: What was changed of its defaults.
        course: What validation gave after how many rounds, bytes and passes, mean over splits.
        looks: What pictures of the first split need; see `medfed.benchmark.work`.
        keys: The hashes of its cells, by split.
        trials: Of the task that it was tuned on, what was changed in every trial, and its score on
            validation patients, turned so that larger is better; the defaults' first.
    """

    method: str
    values: Floats
    drawn: Floats
    sent: tuple[float, float]
    passes: float
    failed: int
    setting: Mapping[str, float]
    course: tuple[Moment, ...] = ()
    looks: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    trials: tuple[tuple[Mapping[str, float], float | None], ...] = ()

    @property
    def means(self) -> Floats:
        """(S,) means over the clients."""
        return mean_of_known(self.values, axis=1)

    def over_clients(self, name: str) -> float:
        """Returns a statistic over clients, mean over splits: ``worst`` or ``worst_decile``."""
        found = [federation_statistics([*row])[name] for row in self.values]
        return float(np.mean([v for v in found if not math.isnan(v)] or [math.nan]))


@dataclass
class Task:
    """A variant of a suite, with the methods that can be compared on it.

    Attributes:
        suite: The suite.
        variant: The variant.
        metric: The metric.
        falls: Whether smaller is better.
        clients: Their names.
        scores: By method.
        floor: By constant predictor the (S, C) scores, turned so that larger is better.
        overlap: Test patients per training patient, where splits are of the same patients.
        left_out: By method why it is left out.
        unfinished: What of it is not there yet.
        patients: Test patients of all splits and clients together.
        title: What it is, in a line.
        same: Whether a client's name means the same hospital in all splits.
    """

    suite: str
    variant: str
    metric: str = ""
    falls: bool = False
    clients: tuple[str, ...] = ()
    scores: dict[str, Scores] = field(default_factory=dict)
    floor: dict[str, Floats] = field(default_factory=dict)
    overlap: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)
    unfinished: str = ""
    patients: int = 0
    title: str = ""
    same: bool = True

    @property
    def name(self) -> str:
        """The suite and the variant, if it has any."""
        return f"{self.suite}/{self.variant}".rstrip("/")

    @property
    def notes(self) -> list[str]:
        """All that is to be said of it."""
        return [*self.left_out.values(), *([self.unfinished] * bool(self.unfinished))]

    @property
    def splits(self) -> int:
        """How many splits there are."""
        return max((len(s.values) for s in self.scores.values()), default=0)

    @property
    def single(self) -> bool:
        """Whether there is one split, so that nothing is known of other training patients."""
        return self.splits == 1

    def raw(self, value: float) -> float:
        """Returns a score as the metric has it."""
        return -value if self.falls else value


def task_of(progress: Sequence[Progress], variant: str) -> Task:
    """Reads a task.

    Args:
        progress: What there is of every method on the suite.
        variant: The task.

    Raises:
        CheckpointError: If cells of one split are not of the same patients; one is named.
    """
    suite = progress[0].group.suite
    task = Task(suite.name, variant, title=suite.title, same=suite.splits != "seed")
    data: dict[int, tuple[str, str]] = {}
    missing: list[str] = []
    for own in progress:
        cells = [c for c in own.wanted if c.variant == variant and c.stage == "final"]
        results = [own.final.get(c.place) for c in cells]
        found = [r for r in results if r is not None]
        if wrong := next((str(r["error"]) for r in found if "error" in r), None):
            name = own.group.method.name
            task.left_out[name] = f"{name} cannot be used on {task.name}: {wrong}"
            continue
        if len(found) < own.group.size.splits:
            missing.append(own.group.method.name)
            continue
        for cell, result in zip(cells, found, strict=True):
            if "data" not in result:
                continue
            first = data.setdefault(cell.split, (cell.place, result["data"]))
            if first[1] != result["data"]:
                raise CheckpointError(
                    f"{cell.place} and {first[0]} are not of the same patients, so that they "
                    "cannot stand in one table; remove the one whose data are not the suite's."
                )
        _add(task, own, found, cells)
    if len(missing) == len(progress):
        task.unfinished = f"{task.name} is not finished with any method: there is no table of it."
    elif missing:
        task.unfinished = (
            f"{task.name} has {len(progress) - len(missing)} of {len(progress)} methods; of "
            f"{few(missing, 8)} not all splits are there."
        )
    return task


def _add(task: Task, own: Progress, results: Sequence[Result], cells: Sequence[Cell]) -> None:
    """Adds a method's scores, unless it has failed everywhere or exceeded its budget."""
    name, group = own.group.method.name, own.group
    whole = [r for r in results if "clients" in r]
    if not whole:
        failed = results[0].get("failed", "")
        task.left_out[name] = f"{name} is left out of {task.name}: {failed}"
        return
    metric, mode = whole[0]["metric"]
    if not task.clients:
        task.metric, task.falls = metric, mode == "min"
        task.clients = tuple(whole[0]["clients"])
        counts = [r["patients"] for r in whole]
        tested = [sum(c["test"] for c in own.values()) for own in counts]
        trained = [sum(c["train"] + c["val"] for c in own.values()) for own in counts]
        task.patients = sum(tested)
        if group.suite.splits == "folds":
            task.overlap = float(np.mean(np.divide(tested, trained)))
    sign = -1 if task.falls else 1
    spent = max(max(r["passes"].values()) for r in whole) / group.budget
    if not group.is_ceiling and spent > group.suite.passes:
        task.left_out[name] = (
            f"{name} is left out of {task.name}: it cannot keep the budget of {group.budget} "
            f"gradient passes, of which it took {spent:.2f} times as many."
        )
        return
    up, down = (float(np.mean([r["bytes"][way] for r in whole])) for way in ("up", "down"))
    limit, fedavg = group.suite.bytes, task.scores.get("fedavg")
    if not group.is_ceiling and limit is not None and fedavg and sum(fedavg.sent):
        times = (up + down) / sum(fedavg.sent)
        if times > limit:
            task.left_out[name] = (
                f"{name} is left out of {task.name}: it cannot keep the budget of {limit:g} times "
                f"FedAvg's bytes, of which it sent {times:.2f} times as many."
            )
            return
    worst = worst_value(metric)
    rows = [
        [_number(r["clients"][c][metric]) if "clients" in r else worst for c in task.clients]
        for r in results
    ]
    task.scores[name] = Scores(
        name,
        sign * np.array(rows, dtype=float),
        sign * _drawn(results, task.clients, worst),
        (up, down),
        spent,
        len(results) - len(whole),
        group.settings[own.trial or 0],
        _course(whole),
        results[0].get("looks") or {},
        tuple(cell.key for cell in cells),
        _trials(own) if task.variant == group.suite.base else (),
    )
    for constant in whole[0].get("constant", {}) if name == "local" else ():
        values = [[_number(r["constant"][constant].get(c)) for c in task.clients] for r in whole]
        task.floor[constant] = sign * np.array(values, dtype=float)


def _trials(own: Progress) -> tuple[tuple[Mapping[str, float], float | None], ...]:
    found = ((own.group.settings[n], own.tuning[n].get("score")) for n in sorted(own.tuning))
    known = ((s, v if v is not None and math.isfinite(v) else None) for s, v in found)
    return tuple(known)


def _course(results: Sequence[Result]) -> tuple[Moment, ...]:
    """The mean over splits of how a method went, at the rounds that all splits have."""
    by_round: dict[int, list[Moment]] = {}
    for result in results:
        passes = max(result["passes"].values())
        for at in result.get("course", ()):
            own = Moment(at["round"], _number(at["score"]), at["bytes"], at["passes"] * passes)
            by_round.setdefault(own.round, []).append(own)
    return tuple(
        Moment(number, *(float(v) for v in mean_of_known(np.array(found)[:, 1:], axis=0)))
        for number, found in sorted(by_round.items())
        if len(found) == len(results)
    )


def _drawn(results: Sequence[Result], clients: Sequence[str], worst: float) -> Floats:
    """(S, W, C) scores of patients drawn anew."""
    count = {len(v) for r in results for v in r.get("resampled", {}).values()}
    width = min(count, default=0)
    return np.array(
        [
            [
                [_number(v) for v in r["resampled"][c][:width]]
                if c in r.get("resampled", {})
                else [worst if "clients" not in r else math.nan] * width
                for c in clients
            ]
            for r in results
        ],
        dtype=float,
    ).transpose(0, 2, 1)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def tasks_of(progress: Sequence[Progress]) -> list[Task]:
    """Reads all tasks, in the order of suites and variants."""
    by_suite: dict[str, list[Progress]] = {}
    for own in progress:
        by_suite.setdefault(own.group.suite.name, []).append(own)
    return [
        task_of([own for own in members if variant in own.group.variants], variant)
        for members in by_suite.values()
        for variant in max((own.group.variants for own in members), key=len)
    ]
