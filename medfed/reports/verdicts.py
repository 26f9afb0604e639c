"""Verdicts: which methods are better than local training and FedAvg, and whom they harm.

With several splits, an interval covers other training and test patients. With one split, it covers
the test patients alone. :func:`verdict` alone decides whether a difference is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.common.scores import defining, mean_of_known, redrawn
from medfed.federation.card import CEILINGS, REFERENCES
from medfed.functional.statistics import LEVEL, Difference, difference, holm, percentiles
from medfed.reports.tasks import Scores, Task

Floats = NDArray[np.float64]
UNDECIDED = "undecided"
# The least splits for an interval over splits: that of two is 13 times as wide as that of ten.
LEAST_SPLITS = 4


def over_splits(
    values: Floats, resampled: Floats, overlap: float, comparisons: int = 1
) -> Difference:
    """Returns a mean with its interval: over splits; of a single one over its patients.

    Example:
        >>> found = over_splits(np.array([0.5]), np.array([0.4, 0.5, 0.6]), 0.0)
        >>> round(found.low, 3), round(found.high, 3)
        (0.405, 0.595)
    """
    # Fewer than `LEAST_SPLITS` have a p-value and no interval, which would be nearly all that
    # is possible. `values` is (S,) one per split. `resampled` is (W,) their mean on resampled
    # patients; NaN or empty where it is unknown. `comparisons`: the number of comparisons,
    # for the detectable difference.
    resampled = defining(resampled)
    if len(values) > 1 or not np.isfinite(resampled).any():
        gap = difference(values.tolist(), overlap, LEVEL, comparisons=comparisons)
        return gap if len(values) >= LEAST_SPLITS else gap._replace(low=math.nan, high=math.nan)
    from scipy.stats import norm  # imported here: pages without comparisons need none

    mean, (low, high) = float(values[0]), percentiles(resampled, LEVEL)
    error = float(np.std(resampled, ddof=1))
    p = 2 * float(norm.sf(abs(mean) / error)) if error else float(mean == 0)
    critical = float(norm.ppf(1 - (1 - LEVEL) / comparisons / 2) + norm.ppf(0.8))
    return Difference(mean, low, high, p, error, critical * error)


def paired(one: Scores, other: Scores) -> tuple[Floats, Floats]:
    """Returns (S, C) differences, and (S, W, C) those on the same resampled patients."""
    width = min(one.resampled.shape[1], other.resampled.shape[1])
    return one.values - other.values, one.resampled[:, :width] - other.resampled[:, :width]


def mean_resampled(values: Floats, resampled: Floats) -> Floats:
    """Returns (W,) means over clients and splits on resampled patients.

    Example:
        >>> mean_resampled(np.array([[0.5, 0.7]]), np.array([[[0.4, 0.8], [0.6, 0.8]]])).tolist()
        [0.6000000000000001, 0.7]
        >>> mean_resampled(np.array([[0.5, 0.7]]), np.array([[[0.4, math.nan]]])).tolist()
        [nan]
        >>> of_two = np.array([[[0.4, math.nan], [0.6, 0.8]]])
        >>> mean_resampled(np.array([[0.5, 0.8]]), of_two).round(3).tolist()
        [0.6, 0.7]
    """
    # Where a resample leaves a client undefined, it is drawn anew: the other clients have
    # another mean. If the patients of one client cannot be resampled, the mean over clients
    # is unknown. `values` is (S, C) as they were measured. `resampled` is (S, W, C).
    whole = np.apply_along_axis(redrawn, 1, resampled) if resampled.size else resampled
    lacking = np.isnan(whole).all(axis=1) & ~np.isnan(values)
    resampled = np.where(np.isnan(values)[:, None], math.nan, whole)
    means = mean_of_known(mean_of_known(resampled, axis=2), axis=0)
    return np.full_like(means, math.nan) if lacking.any() else means


class Gain(NamedTuple):
    """How much better a method, or a client with it, is than with a reference."""

    # Mean over splits, its interval, and the smallest difference that the task detects.
    difference: Difference
    # By Holm's p-value among the methods, or the clients: ``better``, ``worse`` or ``undecided``.
    verdict: str
    p: float = math.nan  # that value
    # Interval of the same over resampled patients within the splits.
    patients: tuple[float, float] = (math.nan, math.nan)

    @property
    def turned(self) -> Gain:
        """The gain of the reference over the method, where the method is worse."""
        d = self.difference
        gain = d._replace(mean=-d.mean, low=-d.high, high=-d.low)
        return self._replace(difference=gain, verdict="better")


@dataclass(frozen=True)
class Harm:
    """Which clients score worse than alone."""

    share: float  # of the clients
    # The lower end of its interval, see `share_harmed`; where the hospitals of splits are not the
    # same, of the mean of the splits' shares.
    low: float
    high: float  # the upper end
    # Their names; empty where the hospitals of splits are not the same.
    clients: tuple[str, ...] = ()
    # Those of them that Holm's procedure among the hospitals finds worse off.
    surely: tuple[str, ...] = ()
    # By client how much better it is than alone; empty as `clients`.
    gains: Mapping[str, Gain] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """How many hospitals it is a share of: the data of others leave the metric undefined."""
        return sum(not math.isnan(gain.difference.mean) for gain in self.gains.values())


@dataclass(frozen=True)
class Verdict:
    """A method on a task."""

    scores: Scores  # what it rests on
    # Mean over splits of the means over clients, larger is better, and its interval.
    mean: Difference
    worst: float  # the worst client, mean over splits
    decile: float  # the worst tenth of the clients, mean over splits
    against: Mapping[str, Gain]  # by reference
    harm: Harm | None  # against local training; None for that itself

    @property
    def is_worse(self) -> bool:
        """Whether it is shown to be worse than a reference."""
        return any(gain.verdict == "worse" for gain in self.against.values())

    @property
    def gains(self) -> dict[str, Gain]:
        """By reference, those over which it is shown to be better."""
        return {r: gain for r, gain in self.against.items() if gain.verdict == "better"}


class Verdicts(dict[str, Verdict]):
    """The verdicts on a task, by method."""

    @property
    def methods(self) -> Verdicts:
        """Those on methods that do not need all patients in one place."""
        return Verdicts({n: v for n, v in self.items() if n not in CEILINGS})

    @property
    def by_mean(self) -> list[str]:
        """The names of the methods, best first."""
        return sorted(self, key=lambda n: -self[n].mean.mean)

    @property
    def in_one_place(self) -> tuple[str, Difference]:
        """The better way to train on all patients in one place, and its mean score."""
        means = {n: self[n].mean for n in CEILINGS if n in self}
        best = max(means, key=lambda n: means[n].mean, default="")
        return best, means.get(best, Difference(*[math.nan] * 6))

    @property
    def best(self) -> str:
        """The method that the answer is about."""
        # The highest mean of those that are better than local training and FedAvg. Where there is
        # none, FedAvg, if it is better than local training; else the highest of those that are.
        # Where none is, local training, or FedAvg if there is no local training. Without either,
        # the highest mean.
        methods = self.methods
        alone, average = ([n for n, v in methods.items() if r in v.gains] for r in REFERENCES)
        both = [n for n in alone if n in average]
        if not both and "fedavg" in alone:
            return "fedavg"
        if not alone and "local" in methods:
            return "local"
        if not average and any("fedavg" in v.against for v in methods.values()):
            return "fedavg"
        return max(both or alone or average or methods, key=lambda n: methods[n].mean.mean)


def judge(task: Task) -> Verdicts:
    """Judges all methods of a task."""
    against = {r: _against_reference(task, r) for r in REFERENCES if r in task.scores}
    local, verdicts = task.scores.get("local"), Verdicts()
    for name, scores in task.scores.items():
        resampled = mean_resampled(scores.values, scores.resampled)
        verdicts[name] = Verdict(
            scores,
            over_splits(scores.means, resampled, task.overlap).within(task.limits),
            scores.over_clients("worst"),
            scores.over_clients("worst_decile"),
            {r: all_methods[name] for r, all_methods in against.items() if name in all_methods},
            None if local is None or name == "local" else harm_of(scores, local, task),
        )
    return verdicts


def _against_reference(task: Task, reference: str) -> dict[str, Gain]:
    """All methods against a reference; local training is compared with FedAvg once."""
    names = [n for n in task.scores if n not in (*CEILINGS, *REFERENCES)]
    if reference == "local" and "fedavg" in task.scores:
        names.insert(0, "fedavg")
    return against(task, reference, names)


def against(task: Task, reference: str, names: Sequence[str]) -> dict[str, Gain]:
    """Compares methods with one, with Holm's correction among them."""
    base = task.scores[reference]
    pairs = {name: paired(task.scores[name], base) for name in names}
    resampled = {name: mean_resampled(*pair) for name, pair in pairs.items()}
    means, rest = {n: task.scores[n].means - base.means for n in names}, (task.overlap, len(names))
    whole = {n: over_splits(gap, resampled[n], *rest) for n, gap in means.items()}
    gaps = {n: gap.within(task.gain_limits) for n, gap in whole.items()}
    corrected = holm([gap.p for gap in gaps.values()])
    return {
        name: Gain(
            *(gap, UNDECIDED if task.is_unsure else verdict(gap.mean, p), p),
            percentiles(resampled[name], LEVEL),
        )
        for (name, gap), p in zip(gaps.items(), corrected, strict=True)
    }


def verdict(mean: float, p: float) -> str:
    """Says whether a difference is shown, by its corrected p-value alone."""
    if math.isnan(p) or p >= 1 - LEVEL:
        return UNDECIDED
    return "better" if mean > 0 else "worse"


def harm_of(scores: Scores, local: Scores, task: Task) -> Harm:
    """Judges at each hospital whether a method is better than training alone."""
    differences, resampled = paired(scores, local)
    if not task.same:  # each split has other hospitals
        worse = np.where(np.isnan(differences), np.nan, differences < 0)
        shares = over_splits(mean_of_known(worse, axis=1), np.empty(0), task.overlap)
        return Harm(*shares.within((0.0, 1.0))[:3])
    anew = mean_of_known(resampled, axis=0)
    count = len(task.clients)
    pairs = zip(differences.T, anew.T, strict=True)
    every = [over_splits(*pair, task.overlap, count).within(task.gain_limits) for pair in pairs]
    corrected = zip(task.clients, every, holm([gain.p for gain in every]), strict=True)
    words = UNDECIDED if task.is_unsure else None
    return share_harmed({c: Gain(d, words or verdict(d.mean, p), p) for c, d, p in corrected})


def share_harmed(gains: Mapping[str, Gain]) -> Harm:
    """Returns the share of hospitals that score worse than alone, and its interval.

    At least those with the verdict ``worse`` are worse off, and at most all but those with the
    verdict ``better``. As the chance that Holm's procedure is wrong with any of them is at most
    5 %, the interval has the true share at least as often as it says. The share of resampled
    hospitals below 0 would not do: what resampling adds draws every share towards a half.
    """
    known = [gain for gain in gains.values() if not math.isnan(gain.difference.mean)]
    count = len(known) or math.nan
    worse = tuple(c for c, gain in gains.items() if gain.difference.mean < 0)
    surely = tuple(c for c, gain in gains.items() if gain.verdict == "worse")
    better = sum(gain.verdict == "better" for gain in known)
    ends = len(surely) / count, 1 - better / count
    if all(math.isnan(gain.difference.low) for gain in known):  # too few splits for intervals
        ends = math.nan, math.nan
    return Harm(len(worse) / count, *ends, worse, surely, gains)


def plain(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as JSON holds it, without the scores of single splits."""
    harm = verdict.harm
    gains = {c: (*g.difference[:3], g.verdict) for c, g in harm.gains.items()} if harm else {}
    return {
        "mean": {n: getattr(verdict.mean, n) for n in ("mean", "low", "high", "error")},
        "mean_of_all": verdict.scores.of_all,
        "worst_client": verdict.worst,
        "worst_decile": verdict.decile,
        "against": {
            r: a.difference._asdict()
            | {"p_holm": a.p, "patients": a.patients, "verdict": a.verdict}
            for r, a in verdict.against.items()
        },
        "harmed": None if harm is None else {**vars(harm), "gains": gains},
        "bytes": {"up": verdict.scores.sent[0], "down": verdict.scores.sent[1]},
        "passes": verdict.scores.passes,
        "rise": None if (rise := verdict.scores.rise) is None else rise._asdict(),
        "failed_splits": verdict.scores.failed,
        "setting": dict(verdict.scores.setting),
        "trials": [{"setting": dict(s), "score": v} for s, v in verdict.scores.trials],
    }
