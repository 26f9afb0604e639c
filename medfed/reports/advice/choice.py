"""Which method a pilot speaks for, what it would do to every hospital, and what it would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from medfed.common.errors import MedfedError
from medfed.common.scores import mean_of_known
from medfed.reports.advice.gains import Gain, gain_of
from medfed.reports.benchmark.scores import Scores, Task, task_of
from medfed.reports.benchmark.verdicts import floor_of
from medfed.run.benchmark.runner import Progress
from medfed.run.pilot import Question

ALONE = "local"


@dataclass(frozen=True)
class Cost:
    """What a run of all rounds would cost, from what the pilot's runs have.

    Attributes:
        up: Bytes of all hospitals to the server.
        down: Bytes of the server to all hospitals.
        hours: CPU hours of all hospitals together, on such a core as the pilot had.
    """

    up: float
    down: float
    hours: float


@dataclass(frozen=True)
class Judged:
    """A method of the pilot.

    Attributes:
        name: Its name.
        mean: Its metric, mean over hospitals and repetitions.
        gain: Over training alone, mean over hospitals; None for training alone.
        hospitals: The same of each hospital.
        against_shown: Over the method to use, or the best of the pilot where none is surely to be
            used; None for that one and for training alone.
        cost: Of a run of all rounds.
        failed: Repetitions in which its model has failed.
    """

    name: str
    mean: float
    gain: Gain | None
    hospitals: Mapping[str, Gain]
    against_shown: Gain | None
    cost: Cost
    failed: int


@dataclass(frozen=True)
class Advice:
    """What the pilot says.

    Attributes:
        use: The method to use, ``local`` if all others are surely worse; empty: cannot tell.
        best: The method other than training alone with the largest mean.
        methods: By name.
        task: The pilot's scores.
        floor: Name and mean of the best constant predictor.
        repetitions: Of the pilot.
        rounds: Of its runs.
        asked: The question.
        notes: What is left out, and why.
    """

    use: str
    best: str
    methods: Mapping[str, Judged]
    task: Task
    floor: tuple[str, float]
    repetitions: int
    rounds: int
    asked: Question
    notes: Sequence[str]

    @property
    def shown(self) -> str:
        """The method whose hospitals are shown: the one to use, or the best of the pilot."""
        return self.use if self.use not in ("", ALONE) else self.best

    @property
    def alone(self) -> list[str]:
        """Hospitals that would surely be worse off with it than alone."""
        return [c for c, g in self.methods[self.shown].hospitals.items() if g.says == "worse"]

    @property
    def gaining(self) -> list[str]:
        """Hospitals that would surely be better off with it."""
        return [c for c, g in self.methods[self.shown].hospitals.items() if g.says == "better"]

    @property
    def open(self) -> list[str]:
        """Hospitals of which that cannot be told."""
        known = {*self.alone, *self.gaining}
        return [c for c in self.methods[self.shown].hospitals if c not in known]

    @property
    def rivals(self) -> list[str]:
        """Methods that cannot be told apart from the one to use."""
        return [
            name
            for name, found in self.methods.items()
            if found.against_shown is not None and found.against_shown.says == "cannot tell"
        ]

    def plain(self) -> dict[str, Any]:
        """Returns all of it, as JSON holds it."""
        return {
            "use": self.use or None,
            "best_of_pilot": self.best,
            "metric": self.task.metric,
            "smaller_is_better": self.task.falls,
            "hospitals_of": self.shown,
            "gaining": self.gaining,
            "stay_alone": self.alone,
            "cannot_tell": self.open,
            "not_told_apart": self.rivals,
            "methods": {
                name: {
                    **asdict(found),
                    "mean": self.task.raw(found.mean),
                    "cost": {
                        "bytes_up": round(found.cost.up),
                        "bytes_down": round(found.cost.down),
                        "cpu_hours": float(f"{found.cost.hours:.4g}"),
                    },
                }
                for name, found in self.methods.items()
            },
            "constant": {"name": self.floor[0], "mean": self.task.raw(self.floor[1])},
            "pilot": {
                "repetitions": self.repetitions,
                "folds": self.asked.folds,
                "rounds": self.rounds,
                "rounds_of_a_run": self.asked.rounds,
                "patients": {c: len(ids) for c, ids in self.asked.patients.items()},
                "test_patients_left_out": self.asked.kept_out,
                "overrides": list(self.asked.overrides),
                "notes": list(self.notes),
            },
        }


def choose(asked: Question, progress: Sequence[Progress]) -> Advice:
    """Reads the pilot's cells.

    Args:
        asked: The question.
        progress: The cells of every method, training alone among them.

    Raises:
        MedfedError: If there is nothing to compare.
    """
    task = task_of(progress, progress[0].group.variants[0])
    notes = [n.replace(f" on {task.name}", "").replace(task.name, "the pilot") for n in task.notes]
    others = [name for name in task.scores if name != ALONE]
    if ALONE not in task.scores or not others:
        raise MedfedError(
            "The pilot has nothing to compare: " + (" ".join(notes) or "no method was computed.")
        )
    compare = _Comparison(asked, task)
    gains = {name: compare.all(name, ALONE, len(others)) for name in others}
    use = _use(gains)
    best = max(others, key=lambda name: _known(gains[name].mean))
    shown = use if use not in ("", ALONE) else best
    group = progress[0].group
    rounds = group.config(group.variants[0]).rounds
    methods = {
        name: Judged(
            name,
            _mean(task.scores[name]),
            gains.get(name),
            {} if name == ALONE else compare.each(name),
            None if name in (shown, ALONE) else compare.all(name, shown, max(1, len(others) - 1)),
            _cost(own, task.scores[name], asked.rounds / rounds),
            task.scores[name].failed,
        )
        for own in progress
        if (name := own.group.method.name) in task.scores
    }
    size = group.size.splits
    return Advice(use, best, methods, task, floor_of(task), size, rounds, asked, notes)


def _use(gains: Mapping[str, Gain]) -> str:
    """The method to use, ``local`` if all are surely worse than it; empty: cannot tell."""
    better = [name for name, gain in gains.items() if gain.says == "better"]
    if better:  # of these alone, so that a lucky one is not preferred to them
        return max(better, key=lambda name: gains[name].mean)
    return ALONE if all(gain.says == "worse" for gain in gains.values()) else ""


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _mean(scores: Scores) -> float:
    return float(mean_of_known(scores.means, axis=0))


class _Comparison:
    """Differences of methods, over all hospitals or at each."""

    def __init__(self, asked: Question, task: Task) -> None:
        self.asked, self.task = asked, task
        self.again = next(iter(task.scores.values())).values.shape[0] / asked.folds

    def all(self, name: str, other: str, looks: int) -> Gain:
        """One method against another, mean over hospitals."""
        own, given = self.task.scores[name], self.task.scores[other]
        values = mean_of_known(own.values - given.values, axis=1)
        drawn = mean_of_known(_drawn(own, given), axis=2)
        patients = sum(map(len, self.asked.patients.values()))
        return self._gain([float(v) for v in values], drawn, patients, looks)

    def each(self, name: str) -> dict[str, Gain]:
        """A method against training alone, at each hospital."""
        own, given = self.task.scores[name], self.task.scores[ALONE]
        drawn, clients = _drawn(own, given), self.task.clients
        return {
            client: self._gain(
                [float(v) for v in own.values[:, n] - given.values[:, n]],
                drawn[:, :, n],
                len(self.asked.patients[client]),
                len(clients),
            )
            for n, client in enumerate(clients)
        }

    def _gain(self, values: list[float], drawn: Any, patients: int, looks: int) -> Gain:
        over = mean_of_known(drawn, axis=0)
        overlap, again = self.task.overlap, self.again
        return gain_of(values, over, patients, overlap=overlap, again=again, looks=looks)


def _drawn(own: Scores, other: Scores) -> Any:
    """(S, W, C) differences of patients drawn anew."""
    width = min(own.drawn.shape[1], other.drawn.shape[1])
    return own.drawn[:, :width] - other.drawn[:, :width]


def _cost(own: Progress, scores: Scores, times: float) -> Cost:
    seconds = [float(r["cpu_seconds"]) for r in own.final.values()]
    up, down = scores.sent
    return Cost(times * up, times * down, float(np.median(seconds)) * times / 3600)
