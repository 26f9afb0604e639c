"""Verdicts in words: which method to use, whom it harms, and what a task cannot tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from medfed.common.errors import few
from medfed.federation.card import CEILINGS, REFERENCES
from medfed.functional.statistics import Difference, splits_needed
from medfed.reports.tasks import Task
from medfed.reports.verdicts import (
    UNDECIDED,
    Harm,
    Verdict,
    Verdicts,
    best_of,
    better_than,
    floor_of,
    in_one_place,
)

LABELS = {"local": "local training", "fedavg": "FedAvg"}


def answer(task: Task, verdicts: Verdicts) -> list[str]:
    """Returns a few sentences: which method, and who would be harmed.

    Args:
        task: The task.
        verdicts: By method; at least one that hospitals can use.
    """
    best = best_of(verdicts)
    where = "On the test patients of the only split: " if task.single else ""
    sentences = [where + _which(task, verdicts, best)]
    for name in dict.fromkeys((best, "fedavg")):
        if name in verdicts and verdicts[name].harm is not None:
            sentences.append(_who(name, verdicts[name], task))
    return sentences


def _which(task: Task, verdicts: Verdicts, best: str) -> str:
    methods = {n: v for n, v in verdicts.items() if n not in CEILINGS}
    alone, average = (better_than(methods, r) for r in REFERENCES)
    chosen = verdicts[best]
    by = {
        r: f"{LABELS[r]} (by {signed(a.difference)})"
        for r, a in chosen.against.items()
        if a.verdict == "better"
    }
    named = f"{LABELS.get(best, best)} ({task.raw(chosen.mean.mean):.4f})"
    if by and len(by) == len(REFERENCES):
        more = [n for n in alone if n in average and n != best]
        return f"{named} is better than {' and than '.join(by.values())}{_so_are(more)}."
    if best == "fedavg" and by:
        more = [n for n in alone if n != best]
        return (
            f"{named} is better than {by['local']}{_so_are(more)}. No method is shown to be better "
            f"than FedAvg.{_room(task, verdicts, best)}"
        )
    if by:
        (reference,) = by
        more = [n for n in (alone if reference == "local" else average) if n != best]
        return f"{named} is better than {by[reference]}{_so_are(more)}.{_fedavg(verdicts)}"
    if best == "local" or any(best in v.against for v in methods.values()):
        return (
            f"No method is shown to be better than {named}.{_room(task, verdicts, best)}"
            f"{_fedavg(verdicts)}"
        )
    lacking = " and ".join(LABELS[r] for r in REFERENCES if r not in verdicts) or "more splits"
    return f"{named} has the best mean of {len(methods)}; to say more needs a run of {lacking}."


def signed(difference: Difference) -> str:
    """Writes a difference with its sign and its interval.

    Example:
        >>> signed(Difference(0.1, 0.05, 0.15, 0.01, 0.02, 0.06))
        '+0.1000 [+0.0500, +0.1500]'
    """
    mean, low, high = difference[:3]
    ends = "" if math.isnan(low) else f" [{low:+.4f}, {high:+.4f}]"
    return f"{mean:+.4f}{ends}"


def _so_are(more: Sequence[str]) -> str:
    return f"; so {'is' if len(more) == 1 else 'are'} {few(more, 4)}" if more else ""


def _fedavg(verdicts: Verdicts) -> str:
    """How FedAvg compares with local training, where that is shown."""
    against = verdicts["fedavg"].against.get("local") if "fedavg" in verdicts else None
    if against is None or against.verdict == UNDECIDED:
        return ""
    return f" FedAvg is {against.verdict} than local training (by {signed(against.difference)})."


def _room(task: Task, verdicts: Verdicts, reference: str) -> str:
    parts = (room(task, verdicts, reference), _pooled(task, verdicts))
    return "".join(f" {part}" for part in parts if part)


def room(task: Task, verdicts: Verdicts, reference: str) -> str:
    """Says whether a task could have shown a gain, and how many splits it would need.

    Args:
        task: The task.
        verdicts: By method.
        reference: Over which.
    """
    gaps = [v.against[reference].difference for v in verdicts.values() if reference in v.against]
    known = sorted((g for g in gaps if math.isfinite(g.detectable)), key=lambda g: g.detectable)
    start = verdicts[reference].mean.mean
    gain, most = in_one_place(verdicts)[1].mean - start, task.limits[1] - start
    if not known:
        return ""
    middle = known[len(known) // 2]
    least = f"{middle.detectable:.4f}"
    possible = gain if 0 < gain < most else most
    if middle.detectable <= possible:
        return f"A gain of {least} would be detected with 80 % power."
    limit = (
        f"training on all patients in one place gains {possible:.4f}"
        if possible == gain
        else f"no gain can exceed {possible:.4f}"
    )
    return (
        f"This task cannot tell: it detects gains of {least} or more, and {limit}. "
        f"{_needed(task, middle, possible, len(gaps))}"
    )


def _needed(task: Task, now: Difference, target: float, comparisons: int) -> str:
    """How many splits, or else patients, would show a gain."""
    if not task.single and (
        splits := splits_needed(target, now, task.splits, task.overlap, comparisons)
    ):
        return f"About {about(splits)} splits would be needed, instead of {task.splits}."
    if not target:
        return "No number of splits would be enough."
    times = f"about {about((now.detectable / target) ** 2):,} times as many patients"
    if task.single:
        return f"{times.capitalize()} would be needed."
    return f"More splits of the same patients would not be enough; {times} would."


def about(count: float) -> int:
    """Rounds a number of splits, patients or times up to two digits, as no more are known.

    Example:
        >>> about(12.3), about(1234)
        (13, 1300)
    """
    digits = 10.0 ** max(0, len(str(int(count))) - 2)
    return int(math.ceil(count / digits) * digits)


def _ends(task: Task, score: Difference) -> str:
    low, high = sorted((task.raw(score.low), task.raw(score.high)))
    ends = "" if math.isnan(low) else f" [{low:.4f}, {high:.4f}]"
    return f"{task.raw(score.mean):.4f}{ends}"


def _who(name: str, v: Verdict, task: Task) -> str:
    harm = v.harm
    assert harm is not None
    label = LABELS.get(name, name)
    if math.isnan(harm.share):
        return f"With {label}, it is unknown which hospitals are worse off than alone."
    start = f"With {label}, {shares(harm)} of the hospitals are worse off than alone"
    if not harm.clients:
        return f"{start}." if task.same else f"{start}; each split has other hospitals."
    return f"{start}: {names(harm)}."


def shares(harm: Harm) -> str:
    """Writes the share of hospitals that are worse off than alone, with its interval."""
    ends = "" if math.isnan(harm.low) else f" [{harm.low:.0%} to {harm.high:.0%}]"
    return f"{harm.share:.0%}{ends}"


def names(harm: Harm) -> str:
    """Names the hospitals that are worse off than alone."""
    perhaps = [c for c in harm.clients if c not in harm.surely]
    parts = [f"surely {few(harm.surely, 8)}"] * bool(harm.surely)
    parts += [f"perhaps {few(perhaps, 8)}"] * bool(perhaps)
    return "; ".join(parts)


def short_of(task: Task) -> list[str]:
    """Names the methods that a task leaves out, in one line; its notes have the reasons.

    Args:
        task: The task.
    """
    rest = [task.unfinished] * bool(task.unfinished)
    if not task.left_out:
        return rest
    count = "1 method" if len(task.left_out) == 1 else f"{len(task.left_out)} methods"
    names = few([*task.left_out], 12)
    return [f"{task.name}: the table leaves out {count}, with the reasons: {names}.", *rest]


def between(crossed: Iterable[Sequence[float]]) -> str:
    """Writes between which points of a dial two curves cross.

    Args:
        crossed: Pairs of neighbouring points.

    Example:
        >>> between([(1, 2), (4, 8)])
        'between 1 and 2, between 4 and 8'
    """
    return ", ".join(f"between {low:g} and {high:g}" for low, high in crossed)


def ends_of(task: Task, verdicts: Verdicts) -> str:
    """Says what a constant reaches, and what training on all patients in one place reaches.

    Args:
        task: The task.
        verdicts: By method.
    """
    floor, low = floor_of(task)
    constant = f"A constant prediction ({floor}) reaches {task.raw(low):.4f}." * bool(floor)
    return " ".join(filter(None, (constant, _pooled(task, verdicts))))


def _pooled(task: Task, verdicts: Verdicts) -> str:
    name, score = in_one_place(verdicts)
    reached = f"Training on all patients in one place ({name}) reaches {_ends(task, score)}."
    return reached * bool(name)


def details(task: Task, verdicts: Verdicts) -> list[str]:
    """Returns the long lists: which methods are better, worse or undecided.

    Args:
        task: The task.
        verdicts: By method.
    """
    sentences = []
    for reference in REFERENCES:
        against = {n: v.against[reference] for n, v in verdicts.items() if reference in v.against}
        for word, link in (("better", "than"), ("worse", "than"), (UNDECIDED, "against")):
            if names := [n for n, a in against.items() if a.verdict == word]:
                head = f"{word.capitalize()} {link} {LABELS[reference]}"
                sentences.append(f"{head}: {', '.join(names)}.")
        limits = sorted(a.difference.detectable for a in against.values())
        if limits := [v for v in limits if math.isfinite(v)]:
            sentences.append(
                f"Against {LABELS[reference]}, the smallest detectable differences are "
                f"{limits[0]:.4f} to {limits[-1]:.4f}, by method (80 % power)."
            )
    return sentences
