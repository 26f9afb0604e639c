"""Which method a pilot speaks for, what it would do to every hospital, and what it would cost.

How much better than alone a pilot has found methods, and what would be needed to tell.

An interval is the wider one, at either end, of two: over repetitions, whose training sets overlap
(Nadeau and Bengio, see :mod:`medfed.functional.statistics`), and over patients drawn anew. It
counts how many such intervals are looked at (Bonferroni), so that all of them hold at once: whoever
picks the best of several methods, or the worst of many hospitals, may rely on its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from medfed.benchmark.measured import task_of
from medfed.benchmark.pilot import Question
from medfed.benchmark.runner import Progress
from medfed.common.errors import MedfedError
from medfed.common.scores import mean_of_known
from medfed.functional.statistics import (
    LEVEL,
    Difference,
    Floats,
    difference,
    noncentrality,
    percentiles,
)
from medfed.reports.intervals import mean_drawn, paired
from medfed.reports.tasks import Scores, Task
from medfed.reports.verdicts import floor_of, side

POWER = 0.8
FEW = 10
"""Patients below which nothing is said of a hospital."""
LEAST = 3
"""Repetitions below which an interval would mean nothing."""
MOST = 100
"""Times as many patients, or repetitions, beyond which nobody would ask for them."""


@dataclass(frozen=True)
class Gain:
    """How much better one side is than the other, larger is better whatever the metric.

    Attributes:
        mean: Over repetitions.
        low: The lower end of its interval.
        high: The upper end.
        visible: The smallest true difference that would be found in 8 of 10 such pilots.
        says: ``better`` or ``worse`` only if the interval is on one side of 0.
        why: Why nothing can be told, and what would be needed; empty where it can.
        repetitions: That define the metric.
        patients: Who were tested.
        times: How many times as many patients would show a difference as large as the measured one;
            NaN where that is unknown, or more than anybody has.
        repeats: How many repetitions would show it with the present patients; 0: none.
    """

    mean: float
    low: float
    high: float
    visible: float
    says: str
    why: str
    repetitions: int
    patients: int
    times: float = math.nan
    repeats: int = 0


def gain_of(
    values: Sequence[float],
    drawn: Floats,
    patients: int,
    *,
    overlap: float,
    again: float = 1.0,
    looks: int = 1,
) -> Gain:
    """Says what repetitions of a pilot show.

    Args:
        values: (S,) a difference per repetition; NaN where the patients leave it undefined.
        drawn: (W,) their mean, of patients drawn anew; empty where that is unknown.
        patients: Who were tested, once or several times.
        overlap: Test patients per training patient.
        again: How often each patient was tested. Draws of the same patients are no new ones, so
            that their interval is widened by its root.
        looks: How many such differences are looked at.

    Example:
        >>> found = gain_of([0.1, 0.12, 0.11, 0.1], np.array([]), 40, overlap=0.3)
        >>> found.says, round(found.mean, 4)
        ('better', 0.1075)
        >>> gain_of([0.1, 0.12, 0.11, 0.1], np.array([]), 5, overlap=0.3).says
        'cannot tell'
    """
    level = 1 - (1 - LEVEL) / looks
    found = difference(values, overlap, level, POWER)
    count = sum(not math.isnan(v) for v in values)
    low, high = wider(found, drawn, again, level)
    known = (found.mean, low, high, found.visible)
    if not count:
        return Gain(*known, "cannot tell", "its patients leave the metric undefined", 0, patients)
    if patients < FEW:
        why = f"{patients} patients are too few to say anything; {FEW} are the least"
        return Gain(*known, "cannot tell", why, count, patients)
    if count < LEAST:
        why = f"only {count} repetitions define the metric; {LEAST} are the least"
        return Gain(*known, "cannot tell", why, count, patients)
    if not math.isfinite(found.error):
        why = "a model has failed, so that there is no mean"
        return Gain(*known, "cannot tell", why, count, patients)
    if found.error == 0:
        same = "there is no difference" if found.mean == 0 else "all repetitions give the same"
        return Gain(*known, "cannot tell", same, count, patients)
    if says := side(low, high):
        return Gain(*known, says, "", count, patients)
    times, repeats = needed(found, count, overlap, level)
    why = _words(found, patients, times, repeats, count)
    return Gain(*known, "cannot tell", why, count, patients, times, repeats)


def wider(found: Difference, drawn: Floats, again: float, level: float) -> tuple[float, float]:
    """Returns the wider of two intervals, at either end.

    Args:
        found: Over repetitions.
        drawn: See `gain_of`.
        again: See `gain_of`.
        level: Of the interval.

    Example:
        >>> wider(Difference(0.0, -1.0, 1.0, 1.0, 0.1, 0.1), np.array([-2.0, 0.0, 0.5]), 1.0, 1.0)
        (-2.0, 1.0)
    """
    ends = percentiles(np.asarray(drawn, dtype=float), level)
    low, high = (found.mean + math.sqrt(again) * (end - found.mean) for end in ends)
    if math.isnan(low) or math.isnan(found.low):
        return found.low, found.high
    return min(found.low, low), max(found.high, high)


def needed(found: Difference, count: int, overlap: float, level: float) -> tuple[float, int]:
    """Returns how much larger a pilot would have to be, if the truth is what was measured.

    More repetitions deal the same patients anew, and leave the share of the variance that comes of
    their being the same. Beyond it, only more patients help; the variance falls with their number.

    Args:
        found: The measured difference.
        count: Repetitions.
        overlap: See `gain_of`.
        level: Of the interval.

    Returns:
        Times as many patients, NaN if more than `MOST`; and repetitions of the present ones, 0 if
        more than `MOST`.

    Example:
        >>> times, repeats = needed(difference([0.1, -0.1, 0.2, 0.1]), 4, 0.0, 0.95)
        >>> round(times, 1), repeats
        (12.7, 25)
    """
    alpha = 1 - level
    spread = found.error / math.sqrt(1 / count + overlap)
    times = math.nan
    if found.mean != 0 and (found.visible / found.mean) ** 2 <= MOST:
        times = max(1.0, (found.visible / found.mean) ** 2)
    for repeats in range(count + 1, MOST + 1):
        error = spread * math.sqrt(1 / repeats + overlap)
        if error * 2 > abs(found.mean):  # no test needs fewer standard errors
            continue
        if error * noncentrality(repeats - 1, alpha, POWER) <= abs(found.mean):
            return times, repeats
    return times, 0


def _words(found: Difference, patients: int, times: float, repeats: int, count: int) -> str:
    seen = f"a difference below {found.visible:.2g} could not be seen"
    if math.isnan(times):
        return f"{seen}; if it is as small as measured, no pilot of a sensible size would show it"
    how = f"about {_round(times * patients):,} patients rather than {patients:,}"
    if repeats:
        how += f", or {repeats} repetitions rather than {count},"
    return f"{seen}; if it is as large as measured, {how} would show it"


def _round(value: float) -> int:
    """Two digits, as no more are known."""
    digits = 10.0 ** max(0, len(str(int(value))) - 2)
    return int(math.ceil(value / digits) * digits)


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
        gaps, drawn = paired(self.task.scores[name], self.task.scores[other])
        patients = sum(map(len, self.asked.patients.values()))
        return self._gain(mean_of_known(gaps, axis=1), mean_drawn(gaps, drawn), patients, looks)

    def each(self, name: str) -> dict[str, Gain]:
        """A method against training alone, at each hospital."""
        gaps, drawn = paired(self.task.scores[name], self.task.scores[ALONE])
        clients = self.task.clients
        return {
            client: self._gain(
                gaps[:, n],
                mean_of_known(drawn[:, :, n], axis=0),
                len(self.asked.patients[client]),
                len(clients),
            )
            for n, client in enumerate(clients)
        }

    def _gain(self, values: Floats, drawn: Floats, patients: int, looks: int) -> Gain:
        overlap, again = self.task.overlap, self.again
        gaps = values.tolist()
        return gain_of(gaps, drawn, patients, overlap=overlap, again=again, looks=looks)


def _cost(own: Progress, scores: Scores, times: float) -> Cost:
    seconds = [float(r["cpu_seconds"]) for r in own.final.values()]
    up, down = scores.sent
    return Cost(times * up, times * down, float(np.median(seconds)) * times / 3600)
