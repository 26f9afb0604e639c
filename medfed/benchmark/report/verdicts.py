"""What the scores of a task say: intervals, verdicts against local training and FedAvg, harm.

The verdict of a task in words: which method, who would be harmed, and what cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import norm

from medfed.benchmark.report.scores import Floats, Scores, Task
from medfed.benchmark.suite import CEILINGS
from medfed.common.console import few
from medfed.common.scores import mean_of_known
from medfed.functional.statistics import (
    Difference,
    cliques,
    difference,
    harmed,
    holm,
    mean_ranks,
    percentiles,
    surely,
)

REFERENCES = ("local", "fedavg")
NOT_TOLD_APART = "not told apart"
LEVEL = 0.95


@dataclass(frozen=True)
class Against:
    """A method against a reference.

    Attributes:
        reference: ``local`` or ``fedavg``.
        difference: How much better it is, mean over splits, its interval, and the smallest
            difference that could have been seen.
        patients: Interval of the same over patients drawn anew within the splits.
        p: Holm's p-value among all methods against this reference.
        verdict: ``better``, ``worse`` or ``not told apart``.
    """

    reference: str
    difference: Difference
    patients: tuple[float, float]
    p: float
    verdict: str


@dataclass(frozen=True)
class Harm:
    """Which clients would have been better off alone.

    Attributes:
        share: Of the clients.
        low: The lower end of its interval, see `medfed.functional.statistics.harmed`; where the
            hospitals of splits are not the same, of the mean of the splits' shares.
        high: The upper end.
        clients: Their names; empty where the hospitals of splits are not the same.
        surely: Those of them that Holm's procedure among the hospitals finds worse off.
        gains: By client how much better it is than alone, mean over splits, and the ends of its
            interval; empty as `clients`.
    """

    share: float
    low: float
    high: float
    clients: tuple[str, ...] = ()
    surely: tuple[str, ...] = ()
    gains: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A method on a task.

    Attributes:
        scores: What it rests on.
        mean: Mean over splits of the means over clients, larger is better, and its interval.
        worst: The worst client, mean over splits.
        decile: The worst tenth of the clients, mean over splits.
        against: By reference.
        harm: Against local training; None for that itself.
    """

    scores: Scores
    mean: Difference
    worst: float
    decile: float
    against: Mapping[str, Against]
    harm: Harm | None


def judge(task: Task) -> dict[str, Verdict]:
    """Judges all methods of a task.

    Args:
        task: The task. Where it has one split alone, intervals and p-values are those of patients
            drawn anew, which say nothing of other training patients.

    Returns:
        By method, ceilings too, which are compared with nothing.
    """
    against = {r: _against(task, r) for r in REFERENCES if r in task.scores}
    local = task.scores.get("local")
    return {
        name: Verdict(
            scores,
            _difference(scores.means, _means_drawn(scores.drawn), task.overlap),
            scores.over_clients("worst"),
            scores.over_clients("worst_decile"),
            {r: found[name] for r, found in against.items() if name in found},
            None if local is None or name == "local" else _harm(scores, local, task),
        )
        for name, scores in task.scores.items()
    }


def _against(task: Task, reference: str) -> dict[str, Against]:
    """All methods against a reference; local training is compared with FedAvg once."""
    given = task.scores[reference]
    names = [n for n in task.scores if n not in (*CEILINGS, *REFERENCES)]
    if reference == "local" and "fedavg" in task.scores:
        names.insert(0, "fedavg")
    found = {}
    for name in names:
        own = task.scores[name]
        drawn = _means_drawn(_pairs(own, given))
        found[name] = _difference(own.means - given.means, drawn, task.overlap, len(names))
    corrected = dict(zip(found, holm([d.p for d in found.values()]), strict=True))
    return {
        name: Against(
            reference,
            d,
            percentiles(_means_drawn(_pairs(task.scores[name], given)), LEVEL),
            corrected[name],
            verdict(d, corrected[name]),
        )
        for name, d in found.items()
    }


def verdict(found: Difference, p: float) -> str:
    """Says whether a difference can be told from none.

    Args:
        found: The difference.
        p: Its corrected p-value.

    Returns:
        ``better`` or ``worse``, only if the p-value is below 5 % and the difference is no smaller
        than the smallest one that could have been seen.

    Example:
        >>> verdict(difference([0.1, 0.11, 0.1]), 0.001), verdict(difference([0.1, -0.1]), 0.9)
        ('better', 'not told apart')
    """
    if math.isnan(p) or p >= 1 - LEVEL or abs(found.mean) < found.visible:
        return NOT_TOLD_APART
    return "better" if found.mean > 0 else "worse"


def _difference(values: Floats, drawn: Floats, overlap: float, comparisons: int = 1) -> Difference:
    """Over splits; of a single one over its patients, by the bootstrap's standard error."""
    if len(values) > 1 or not np.isfinite(drawn).any():
        return difference(values.tolist(), overlap, LEVEL, comparisons=comparisons)
    mean, (low, high) = float(values[0]), percentiles(drawn, LEVEL)
    error = float(np.nanstd(drawn, ddof=1))
    p = 2 * float(norm.sf(abs(mean) / error)) if error else float(mean == 0)
    critical = float(norm.ppf(1 - (1 - LEVEL) / comparisons / 2) + norm.ppf(0.8))
    return Difference(mean, low, high, p, error, critical * error)


def _pairs(own: Scores, other: Scores) -> Floats:
    """(S, W, C) differences, of the same patients drawn anew."""
    width = min(own.drawn.shape[1], other.drawn.shape[1])
    return np.asarray(own.drawn[:, :width] - other.drawn[:, :width])


def _means_drawn(drawn: Floats) -> Floats:
    """(W,) means over clients and splits."""
    return mean_of_known(mean_of_known(drawn, axis=2), axis=0)


def _harm(own: Scores, local: Scores, task: Task) -> Harm:
    differences, drawn = np.asarray(own.values - local.values), _pairs(own, local)
    if not task.same:  # each split has hospitals of its own
        worse = np.where(np.isnan(differences), np.nan, differences < 0)
        found = difference(mean_of_known(worse, axis=1).tolist(), task.overlap, LEVEL)
        low, high = (float(np.clip(end, 0, 1)) for end in (found.low, found.high))
        return Harm(found.mean, low, high)
    every = [
        _difference(differences[:, i], mean_of_known(drawn[:, :, i], axis=0), task.overlap)
        for i in range(len(task.clients))
    ]
    sure = surely(every, -1, LEVEL)
    named = list(zip(task.clients, every, sure, strict=True))
    return Harm(
        *harmed(every, LEVEL),
        tuple(c for c, gain, _ in named if gain.mean < 0),
        tuple(c for c, _, worse in named if worse),
        {c: (gain.mean, gain.low, gain.high) for c, gain, _ in named},
    )


def floor_of(task: Task) -> tuple[str, float]:
    """Returns the best constant predictor and its mean score, larger is better."""
    means = {n: float(np.mean(mean_of_known(v, axis=1))) for n, v in task.floor.items()}
    known = {n: v for n, v in means.items() if not math.isnan(v)}
    best = max(known, key=lambda n: known[n], default="")
    return best, known.get(best, math.nan)


def ceiling_of(task: Task) -> tuple[str, float]:
    """Returns the best of what all patients in one place reach, and its mean score."""
    means = {n: float(np.mean(task.scores[n].means)) for n in CEILINGS if n in task.scores}
    best = max(means, key=lambda n: means[n], default="")
    return best, means.get(best, math.nan)


def ranks_of(tasks: Sequence[Task]) -> dict[str, Any]:
    """Ranks methods over blocks of task and split; for a description, not for a test.

    Splits of one task are not independent of each other, so that neither the critical difference
    nor the p-value is what it would be of independent blocks.

    Args:
        tasks: One of every suite.

    Returns:
        Ranks by method, critical difference, groups that are not told apart, number of blocks;
        empty where fewer than two methods are in all tasks.
    """
    names = [
        n
        for n in (tasks[0].scores if tasks else ())
        if n not in CEILINGS and all(n in task.scores for task in tasks)
    ]
    if len(names) < 2:
        return {}
    table = np.concatenate(
        [np.stack([task.scores[n].means for n in names], axis=1) for task in tasks]
    )
    table = table[np.isfinite(table).all(axis=1)]
    if not len(table):
        return {}
    found = mean_ranks(table)
    return {
        "ranks": dict(zip(names, found.ranks, strict=True)),
        "critical_difference": found.critical,
        "friedman_p": found.p,
        "blocks": len(table),
        "groups": [[names[i] for i in group] for group in cliques(found.ranks, found.critical)],
        "remark": "A description: splits of one task are no independent blocks.",
    }


def plain(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as JSON holds it, without the scores of single splits."""
    return {
        "mean": verdict.mean._asdict(),
        "worst_client": verdict.worst,
        "worst_decile": verdict.decile,
        "against": {
            r: {
                **a.difference._asdict(),
                "p_holm": a.p,
                "patients": a.patients,
                "verdict": a.verdict,
            }
            for r, a in verdict.against.items()
        },
        "harmed": None if verdict.harm is None else asdict(verdict.harm),
        "bytes": {"up": verdict.scores.sent[0], "down": verdict.scores.sent[1]},
        "passes": verdict.scores.passes,
        "failed_splits": verdict.scores.failed,
        "setting": dict(verdict.scores.setting),
        "trials": [{"setting": dict(s), "score": v} for s, v in verdict.scores.trials],
    }


LABELS = {"local": "local training", "fedavg": "FedAvg"}
Verdicts = Mapping[str, Verdict]


def best_of(verdicts: Verdicts) -> str:
    """Returns the method that the answer is about.

    The highest mean of those that are better than local training and FedAvg. Where there is none,
    FedAvg, if it is better than local training; else the highest of those that are. Where none is,
    local training.

    Args:
        verdicts: By method.
    """
    methods = {n: v for n, v in verdicts.items() if n not in CEILINGS}
    alone, average = (_better(methods, r) for r in REFERENCES)
    both = [n for n in alone if n in average]
    if not both and "fedavg" in alone:
        return "fedavg"
    if not alone and "local" in methods:
        return "local"
    return max(both or alone or average or methods, key=lambda n: methods[n].mean.mean)


def answer(task: Task, verdicts: Verdicts) -> list[str]:
    """Returns a few sentences: which method, and who would be harmed.

    Args:
        task: The task.
        verdicts: By method; at least one that is no ceiling.
    """
    best = best_of(verdicts)
    where = "On the test patients of the one split that there is: " if task.single else ""
    told = [where + _which(task, verdicts, best)]
    for name in dict.fromkeys((best, "fedavg")):
        if name in verdicts and verdicts[name].harm is not None:
            told.append(_who(name, verdicts[name], task))
    return told


def _which(task: Task, verdicts: Verdicts, best: str) -> str:
    methods = {n: v for n, v in verdicts.items() if n not in CEILINGS}
    alone, average = (_better(methods, r) for r in REFERENCES)
    own = verdicts[best]
    by = {r: f"{LABELS[r]} (by {_by(a)})" for r, a in own.against.items() if a.verdict == "better"}
    named = f"{LABELS.get(best, best)} ({task.raw(own.mean.mean):.4f})"
    if by and len(by) == len(REFERENCES):
        more = [n for n in alone if n in average and n != best]
        return f"{named} is better than {' and than '.join(by.values())}{_and(more)}."
    if best == "fedavg" and by:
        more = [n for n in alone if n != best]
        rest = f"; {_some(more)} better than local training, too" if more else ""
        none = "no method is seen to be better than FedAvg"
        return f"{named} is better than {by['local']}; {none}{rest}."
    if by:
        (reference,) = by
        more = [n for n in (alone if reference == "local" else average) if n != best]
        state = ""
        if reference == "local" and "fedavg" in verdicts:
            verdict = verdicts["fedavg"].against["local"].verdict
            link = "from" if verdict == NOT_TOLD_APART else "than"
            state = f" FedAvg is {verdict} {link} local training."
        return f"{named} is better than {by[reference]}{_and(more)}.{state}"
    if best == "local":
        fedavg = methods["fedavg"].against.get("local") if "fedavg" in methods else None
        state = ""
        if fedavg is not None and fedavg.verdict == "worse":
            state = f" FedAvg is worse (by {_by(fedavg)})."
        seen = _visible(methods, "local")
        return f"No method is seen to be better than {named}{seen}.{state}{_room(task, own)}"
    return (
        f"{named} has the best mean of {len(methods)}; without a run of "
        f"{' and '.join(LABELS[r] for r in REFERENCES if r not in verdicts) or 'more splits'} no "
        "more can be said."
    )


def _better(methods: Verdicts, reference: str) -> list[str]:
    """Those that are better than a reference, best first."""
    found = [
        n
        for n, v in methods.items()
        if reference in v.against and v.against[reference].verdict == "better"
    ]
    return sorted(found, key=lambda n: -methods[n].mean.mean)


def _by(a: Against) -> str:
    d = a.difference
    return f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]"


def _and(more: Sequence[str]) -> str:
    return f"; so {'is' if len(more) == 1 else 'are'} {few(more, 4)}" if more else ""


def _some(more: Sequence[str]) -> str:
    return f"{few(more, 4)} {'is' if len(more) == 1 else 'are'}"


def _visible(methods: Verdicts, reference: str) -> str:
    """From where on differences could have been seen."""
    found = [
        v.against[reference].difference.visible for v in methods.values() if reference in v.against
    ]
    known = sorted(v for v in found if math.isfinite(v))
    if not known:
        return ""
    least = known[len(known) // 2]
    return f"; a gain of {least:.4f} or more would have been found with half of them"


def _room(task: Task, local: Verdict) -> str:
    """How much there is to win at all."""
    name, ceiling = ceiling_of(task)
    if not name:
        return ""
    return f" All patients in one place reach {task.raw(ceiling):.4f} ({name})."


def _who(name: str, v: Verdict, task: Task) -> str:
    harm = v.harm
    assert harm is not None
    label = LABELS.get(name, name)
    ends = "" if math.isnan(harm.low) else f" [{harm.low:.0%} to {harm.high:.0%}]"
    if math.isnan(harm.share):
        return f"With {label} it is not known who would be harmed."
    told = f"With {label} {harm.share:.0%}{ends} of the hospitals would be better off alone"
    if not harm.clients:
        return f"{told}." if task.same else f"{told}; they are others in every split."
    perhaps = [c for c in harm.clients if c not in harm.surely]
    parts = [f"surely {few(harm.surely, 8)}"] * bool(harm.surely)
    parts += [f"perhaps {few(perhaps, 8)}"] * bool(perhaps)
    return f"{told}: {'; '.join(parts)}."


def short_of(task: Task) -> list[str]:
    """Says in a line what a task lacks; its notes have the reasons.

    Args:
        task: The task.
    """
    rest = [task.unfinished] * bool(task.unfinished)
    if not task.left_out:
        return rest
    count = "1 method is" if len(task.left_out) == 1 else f"{len(task.left_out)} methods are"
    names = few([*task.left_out], 12)
    return [f"{task.name}: {count} left out, for reasons told there: {names}.", *rest]


def ends_of(task: Task) -> str:
    """Says between what a task's scores lie.

    Args:
        task: The task.
    """
    floor, low = floor_of(task)
    ceiling, high = ceiling_of(task)
    parts = [f"A constant prediction ({floor}) reaches {task.raw(low):.4f}"] * bool(floor)
    parts += [f"all patients in one place {task.raw(high):.4f} ({ceiling})"] * bool(ceiling)
    return f"{', '.join(parts)}." if parts else ""


def details(task: Task, verdicts: Verdicts) -> list[str]:
    """Returns the long lists: which methods are better, worse, not told apart; and who is harmed.

    Args:
        task: The task.
        verdicts: By method.
    """
    told = []
    for reference in REFERENCES:
        against = {n: v.against[reference] for n, v in verdicts.items() if reference in v.against}
        for word in ("better", "worse", NOT_TOLD_APART):
            if who := [n for n, a in against.items() if a.verdict == word]:
                link = "from" if word == NOT_TOLD_APART else "than"
                told.append(f"{word.capitalize()} {link} {LABELS[reference]}: {', '.join(who)}.")
        seen = sorted(a.difference.visible for a in against.values())
        if seen := [v for v in seen if math.isfinite(v)]:
            told.append(
                f"Against {LABELS[reference]}, differences from {seen[0]:.4f} to {seen[-1]:.4f}, "
                "by method, could have been seen."
            )
    return told
