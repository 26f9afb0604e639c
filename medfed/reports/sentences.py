"""What verdicts say in words: which method, who would be harmed, and what cannot be told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from medfed.common.console import few
from medfed.federation.card import CEILINGS, REFERENCES
from medfed.reports.tasks import Task
from medfed.reports.verdicts import (
    NOT_TOLD_APART,
    Against,
    Verdict,
    Verdicts,
    best_of,
    better_than,
    ceiling_of,
    floor_of,
)

LABELS = {"local": "local training", "fedavg": "FedAvg"}


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
    alone, average = (better_than(methods, r) for r in REFERENCES)
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
    if best == "local" or any(best in v.against for v in methods.values()):
        fedavg = methods["fedavg"].against.get("local") if "fedavg" in methods else None
        state = ""
        if fedavg is not None and fedavg.verdict == "worse":
            state = f" FedAvg is worse (by {_by(fedavg)})."
        seen = _visible(methods, best)
        return f"No method is seen to be better than {named}{seen}.{state}{_room(task, own)}"
    return (
        f"{named} has the best mean of {len(methods)}; without a run of "
        f"{' and '.join(LABELS[r] for r in REFERENCES if r not in verdicts) or 'more splits'} no "
        "more can be said."
    )


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
