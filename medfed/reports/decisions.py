"""The decision card: for each situation the method, its gain, whom it harms and its cost.

The tasks of a situation share lines; a task without a situation has lines of its own. Every cell
comes from the verdicts, none from a rule about a method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from medfed.common.console import size
from medfed.common.errors import few
from medfed.federation.card import CEILINGS, REFERENCES
from medfed.reports.sentences import LABELS, names, room, shares, signed
from medfed.reports.tables import Cell, Table
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Against, Verdict, Verdicts, best_of

HEAD = (
    *("situation", "best shown", "over local training", "over FedAvg"),
    *("harms", "cost of a run", "how sure"),
)
SCARCE = "bytes are scarce"


class Shown(NamedTuple):
    """A method that a task shows to be the one to use.

    Attributes:
        task: The task.
        name: The method.
        verdict: Of the method.
        gains: By reference over which it is better.
        average: Bytes that FedAvg sends; NaN where it has not run.
    """

    task: Task
    name: str
    verdict: Verdict
    gains: Mapping[str, Against]
    average: float


def shown_by(task: Task, verdicts: Verdicts, scarce: bool = False) -> Shown | None:
    """Returns the method that a task shows to be the one to use; None where it shows none.

    Training alone is shown where FedAvg is worse.

    Args:
        task: The task.
        verdicts: By method.
        scarce: Whether to take, of the methods with the same verdicts, the one of fewest bytes.
    """
    name, words = best_of(verdicts), _words(verdicts[best_of(verdicts)])
    if name == "local":
        against = verdicts["fedavg"].against.get("local") if "fedavg" in verdicts else None
        if against is None or against.verdict != "worse":
            return None
        gains = {"fedavg": _turned(against)}
    elif "better" not in words.values():
        return None
    else:
        alike = [n for n, v in verdicts.items() if n not in CEILINGS and _as_good(v, words)]
        if scarce:
            name = min(alike, key=lambda n: sum(verdicts[n].scores.sent))
        gains = {r: a for r, a in verdicts[name].against.items() if a.verdict == "better"}
    sent = sum(verdicts["fedavg"].scores.sent) if "fedavg" in verdicts else math.nan
    return Shown(task, name, verdicts[name], gains, sent)


def _saving(task: Task, verdicts: Verdicts) -> Shown | None:
    """A method with the verdicts of the best one that sends less than it and than FedAvg."""
    usual, saving = shown_by(task, verdicts), shown_by(task, verdicts, scarce=True)
    if usual is None or saving is None or saving.name == usual.name:
        return None
    return saving if sum(saving.verdict.scores.sent) < saving.average else None


def _words(verdict: Verdict) -> dict[str, str]:
    return {r: a.verdict for r, a in verdict.against.items()}


def _as_good(verdict: Verdict, words: Mapping[str, str]) -> bool:
    """Whether it is better than all that the best is better than, and worse than nothing."""
    verdicts = _words(verdict)
    return "worse" not in verdicts.values() and all(
        verdicts.get(r) == "better" for r, word in words.items() if word == "better"
    )


def _turned(against: Against) -> Against:
    """The reference against the method."""
    d = against.difference
    turned = d._replace(mean=-d.mean, low=-d.high, high=-d.low)
    return Against("fedavg", turned, against.patients, against.p, "better")


def card(tasks: Iterable[tuple[Task, Verdicts]]) -> Table:
    """Returns the decision card: lines for each situation, by how many tasks show the method.

    Args:
        tasks: Each with the verdicts of its methods.
    """
    judged = list(tasks)
    situations: dict[str, list[tuple[Task, Verdicts]]] = {}
    for task, verdicts in judged:
        situations.setdefault(task.situation or task.name, []).append((task, verdicts))
    shown = {s: [shown_by(*one) for one in ones] for s, ones in situations.items()}
    surest = sorted(shown, key=lambda s: -sum(map(bool, shown[s])) / len(shown[s]))
    rows = [row for s in surest for row in _rows(s, situations[s], shown[s])]
    saving = [one for judged_task in judged if (one := _saving(*judged_task))]
    if saving:
        rows += _rows(SCARCE, judged, saving)[:1]
    note = (
        "Gains: differences of test scores with 95 % intervals, larger is better; for several "
        "tasks "
        "the smallest and the largest. Harms: hospitals that would be better off alone. Cost: "
        "gradient passes as a share of the budget, and bytes of all hospitals."
    )
    return Table(HEAD, rows, prose=range(len(HEAD)), kind="card", note=note)


def _rows(
    situation: str, judged: Sequence[tuple[Task, Verdicts]], ones: Sequence[Shown | None]
) -> list[list[Cell]]:
    """The lines of a situation: one for each method that some task shows."""
    by_method: dict[str, list[Shown]] = {}
    for one in ones:
        if one is not None:
            by_method.setdefault(one.name, []).append(one)
    if not by_method:
        harms = _harms_of([(t, v["fedavg"]) for t, v in judged if "fedavg" in v])
        texts = ["none", "", "", f"FedAvg: {harms}" * bool(harms)]
        why = room_of(*judged[0]) if len(judged) == 1 else f"none of {len(judged)} tasks shows one"
        return [[Cell(text) for text in (situation, *texts, "", why)]]
    order = sorted(by_method.items(), key=lambda item: (-len(item[1]), -_least(item[1])))
    return [
        [Cell(text) for text in (situation * (n == 0), *_texts(name, shown, len(judged)))]
        for n, (name, shown) in enumerate(order)
    ]


def _least(shown: Sequence[Shown]) -> float:
    return min(a.difference.mean for one in shown for a in one.gains.values())


def _texts(name: str, shown: Sequence[Shown], count: int) -> list[str]:
    gains = []
    for reference in REFERENCES:
        ones = [one.gains[reference].difference for one in shown if reference in one.gains]
        gains.append(_ends(ones, lambda gain: gain.mean, signed))
    passes = _ends([one.verdict.scores.passes for one in shown], float, lambda v: f"{v:.2f}")
    sent = _ends([sum(one.verdict.scores.sent) for one in shown], float, lambda v: size(round(v)))
    times = [sum(o.verdict.scores.sent) / o.average for o in shown if o.average > 0]
    cost = f"passes {passes}; {sent}"
    if times and name not in REFERENCES:
        cost += f", {_ends(times, float, lambda v: f'{v:.2g}')} times FedAvg's"
    worst = max(a.p for one in shown for a in one.gains.values())
    splits = _ends([one.task.splits for one in shown], float, lambda v: f"{v:.0f}")
    p = "p < 0.001" if worst < 0.001 else f"p ≤ {math.ceil(worst * 1000) / 1000:.3f}"
    sure = f"{p} (Holm), {splits} split{'s' * (splits != '1')} of the patients"
    if count > 1:
        sure = f"{len(shown)} of {count} tasks ({few([o.task.name for o in shown], 3)}): {sure}"
    harms = _harms_of([(one.task, one.verdict) for one in shown]) or "–"
    return [LABELS.get(name, name), *gains, harms, cost, sure]


def _harms_of(ones: Sequence[tuple[Task, Verdict]]) -> str:
    """The share of hospitals that are worse off than alone, and which surely are."""
    if len(ones) == 1 and ones[0][1].harm is not None:
        harm = ones[0][1].harm
        return ": ".join(filter(None, (shares(harm), names(harm))))
    harms = [v.harm for _, v in ones if v.harm is not None and not math.isnan(v.harm.share)]
    if not harms:
        return ""
    surely, known = sum(len(h.surely) for h in harms), sum(len(h.gains) for h in harms)
    ends = _ends([h.share for h in harms], float, lambda v: f"{v:.0%}")
    return f"{ends}; surely {surely} of {known}" if known else ends


def _ends(values: Sequence[Any], key: Callable[[Any], float], text: Callable[[Any], str]) -> str:
    """The smallest and the largest of some values as texts, one where they are alike."""
    if not values:
        return "–"
    ends = (text(min(values, key=key)), text(max(values, key=key)))
    return " to ".join(dict.fromkeys(ends))


def room_of(task: Task, verdicts: Verdicts) -> str:
    """Says what a task that shows no method to use could have shown."""
    return room(task, verdicts, best_of(verdicts)) or "it compares no method with local training"


def undecided(tasks: Iterable[tuple[Task, Verdicts]]) -> dict[str, str]:
    """Returns what the tasks that show no method to use could have shown, by task.

    Args:
        tasks: Each with the verdicts of its methods.
    """
    return {t.name: room_of(t, v) for t, v in tasks if shown_by(t, v) is None}
