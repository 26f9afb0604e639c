"""Verdicts in words: which method to use, whom it harms, and what a task cannot tell.

The decision card has for each situation the method, its gain, whom it harms and its cost. The tasks
of a situation share lines; a task without a situation has lines of its own. Every cell comes from
the verdicts, none from a rule about a method.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from medfed.common.console import brief, grouped, size, visible
from medfed.common.scores import CHOSEN, LEAST_CASES
from medfed.common.tables import Table
from medfed.federation.card import REFERENCES
from medfed.functional.statistics import Difference, detectable_by, splits_needed
from medfed.reports.tasks import Task
from medfed.reports.verdicts import LEAST_SPLITS, UNDECIDED, Gain, Harm, Verdict, Verdicts
from medfed.standalone.errors import few
from medfed.standalone.files import text_templates

LABELS = {"local": "local training", "fedavg": "FedAvg"}
TEMPLATES = Path(__file__).parent / "templates"


def lines_of(template: str, folder: Path = TEMPLATES, **facts: Any) -> list[str]:
    """Returns the sentences of a template, one a line; no name from outside begins another line."""
    environment = text_templates(folder).overlay(finalize=_on_one_line)
    words = {"few": few, "signed": signed, "labels": LABELS, **facts}
    return [*filter(None, environment.get_template(template).render(words).split("\n"))]


def _on_one_line(value: object) -> object:
    return visible(value) if isinstance(value, str) else value


def answer(task: Task, verdicts: Verdicts) -> list[str]:
    """Returns a few sentences: which method, and who would be harmed."""
    methods, best = verdicts.methods, verdicts.best
    gains = {r: gain.difference for r, gain in verdicts[best].gains.items()}
    alike = [n for n in methods.by_mean if n != best and gains.keys() <= methods[n].gains.keys()]
    names = [n for n in dict.fromkeys((best, *REFERENCES)) if n in verdicts]
    means_of = {
        words: [
            f"{LABELS.get(n, n)} {task.raw(mean):.4f}"
            for n in names
            if not math.isnan(mean := verdicts[n].scores.chosen_mean(words))
        ]
        for words in CHOSEN
    }
    average = verdicts["fedavg"].against.get("local") if "fedavg" in verdicts else None
    rest = (_room(task, verdicts, best), _pooled(task, verdicts))
    return lines_of(
        "answer.txt",
        task=task,
        verdicts=verdicts,
        best=best,
        gains=gains,
        alike=alike,
        fedavg=None if average is None or average.verdict == UNDECIDED else average,
        room="".join(f" {sentence}" for sentence in rest if sentence),
        is_reference=any(best in v.against for v in methods.values()),
        count=len(methods),
        lacking=[LABELS[r] for r in REFERENCES if r not in verdicts],
        small=grouped(task.small),
        least_cases=LEAST_CASES,
        least_splits=LEAST_SPLITS,
        means_of=means_of,
        harms={n: v.harm for n in names if n != "local" and (v := verdicts[n]).harm is not None},
        shares=shares,
        names=names_of,
    )


def notes_on(task: Task, verdicts: Verdicts) -> list[str]:
    """Returns what else a reader must know of a task."""
    floor, needed = task.best_constant, list[str]()
    rises = {name: s.rise for name, s in task.scores.items() if s.rise is not None}
    still = {name: rise.mean for name, rise in rises.items() if rise.p < 0.05 and rise.mean > 0}
    # By the spread of the paired differences so far.
    for name, verdict in verdicts.items() if task.target is not None else ():
        for reference, one in verdict.against.items():
            count = sum(reference in v.against for v in verdicts.values())
            splits = _splits_for(task, one.difference, task.target or 0.0, count)
            needed.append(f"{name} against {reference} {splits or 'more than 1000'}")
    return lines_of(
        "notes_on_task.txt",
        task=task,
        floor=floor,
        weak=[n for n, v in verdicts.items() if v.mean.mean <= floor[1]],
        has_courses=bool(rises),
        still=[f"{name} ({rise:+.4f} in the last quarter)" for name, rise in still.items()],
        needed=needed,
    )


def signed(difference: Sequence[float], sign: str = "+") -> str:
    """Writes a difference with its sign, or a value without one, and its interval.

    Example:
        >>> signed(Difference(0.1, 0.05, 0.15, 0.01, 0.02, 0.06)), signed((0.1, 0.05, 0.15), "")
        ('+0.1000 [+0.0500, +0.1500]', '0.1000 [0.0500, 0.1500]')
    """
    mean, low, high = (f"{value:{sign}.4f}" for value in difference[:3])
    return mean if math.isnan(difference[1]) else f"{mean} [{low}, {high}]"


def _room(task: Task, verdicts: Verdicts, reference: str) -> str:
    """Says what it takes to show the largest gain seen, and a gain worth knowing."""
    against = {n: v.against[reference] for n, v in verdicts.items() if reference in v.against}
    known = {n: a.difference for n, a in against.items()}
    gaps = {n: gap for n, gap in known.items() if math.isfinite(gap.error)}
    if not gaps:
        return ""
    name = max(gaps, key=lambda n: gaps[n].mean)
    # The gain worth knowing: as stated; else 0.02, or 2 % of a score without limits.
    usual = 1.0 if all(map(math.isfinite, task.limits)) else abs(verdicts[reference].mean.mean)
    largest, target = gaps[name].mean, task.target or 0.02 * usual
    over = f" over {LABELS.get(reference, reference)}"
    start, wanted = f"No method gains{over} here.", dict[str, float]()
    if largest > 0:
        start = f"The largest gain{over} is that of {name}, {largest:+.4f}."
        wanted["one as large"] = largest
    if target <= task.limits[1] - verdicts[reference].mean.mean:
        wanted[f"a gain of {target:.4g}"] = target
    takes = {w: takes_to_show(task, gaps[name], gain, len(gaps)) for w, gain in wanted.items()}
    limit = "; more splits of the same patients will not do"
    patients = any("times as many patients" in of for of in takes.values()) and not task.single
    if (
        not takes or task.is_unsure or gaps[name].error == 0
    ):  # nobody knows how much chance there is
        return start
    listed = ", and ".join(f"{what} takes {of}" for what, of in takes.items())
    if len({*takes.values()}) == 1:
        listed = f"{' or '.join(takes)} takes {next(iter(takes.values()))}"
    return f"{start} To show {listed}{limit * patients}."


_ENOUGH = 20  # splits: more make the estimated spread hardly more certain


def takes_to_show(task: Task, now: Difference, gain: float, comparisons: int) -> str:
    """Says how many splits, or else patients, show a gain in 8 of 10 cases."""
    if now.detectable <= gain:
        return "no more than there is"
    if not task.single and (splits := _splits_for(task, now, gain, comparisons)):
        return f"about {about(splits)} splits instead of {task.splits}"
    # Few splits leave the spread uncertain, which is no reason to collect patients.
    count = task.splits if task.single else max(task.splits, _ENOUGH)
    detectable = now.detectable
    if count > task.splits:
        detectable = detectable_by(count, now, task.splits, task.overlap, comparisons)
    if (times := (detectable / gain) ** 2) > 100:  # which is no plan
        return "more than 100 times as many patients"
    by = f" and {count} splits" if count > task.splits else ""
    return f"about {about(times)} times as many patients{by}"


def _splits_for(task: Task, now: Difference, gain: float, comparisons: int) -> int | None:
    return splits_needed(gain, now, task.splits, task.overlap, comparisons)


def about(count: float) -> int:
    """Rounds a number of splits, patients or times up to two digits, as no more are known."""
    digits = 10.0 ** max(0, len(str(int(count))) - 2)
    return int(math.ceil(count / digits) * digits)


def shares(harm: Harm) -> str:
    """Writes the share of hospitals that score worse than alone, with its interval."""
    ends = "" if math.isnan(harm.low) else f" [{harm.low:.0%} to {harm.high:.0%}]"
    return f"{harm.share:.0%}{ends}"


def names_of(harm: Harm) -> str:
    """Names the hospitals that score worse than alone."""
    perhaps = [c for c in harm.clients if c not in harm.surely]
    parts = [f"surely {few(harm.surely, 8)}"] * bool(harm.surely)
    parts += [f"perhaps {few(perhaps, 8)}"] * bool(perhaps)
    return "; ".join(parts)


def between(crossed: Iterable[Sequence[float]]) -> str:
    """Writes between which points of a dial two curves cross.

    Example:
        >>> between([(1, 2), (4, 8)])
        'between 1 and 2, between 4 and 8'
    """
    return ", ".join(f"between {low:g} and {high:g}" for low, high in crossed)


def ends_of(task: Task, verdicts: Verdicts) -> str:
    """Says what a constant reaches, and what training on all patients in one place reaches."""
    floor, low = task.best_constant
    constant = f"A constant prediction ({floor}) reaches {task.raw(low):.4f}." * bool(floor)
    return " ".join(filter(None, (constant, _pooled(task, verdicts))))


def _pooled(task: Task, verdicts: Verdicts) -> str:
    name, score = verdicts.in_one_place
    ends = task.interval(score)
    reached = f"Training on all patients in one place ({name}) reaches {signed(ends, '')}."
    return reached * bool(name)


HEAD = (
    *("situation", "data", "best shown", "over local training", "over FedAvg"),
    *("over FedAvg, both recalibrated", "harms", "cost of a run", "how sure"),
)
SCARCE = "bytes are scarce"
_ALONE = "it compares no method with local training"


class Entry(NamedTuple):
    """A method that a task shows to be the one to use."""

    task: Task
    name: str
    verdict: Verdict
    gains: Mapping[str, Gain]  # by reference over which it is better
    average: float  # bytes that FedAvg sends; NaN where it has not run


def _shown_by(task: Task, verdicts: Verdicts, scarce: bool = False) -> Entry | None:
    """Returns the method that a task shows to be the one to use; None where it shows none."""
    name = verdicts.best
    gains = verdicts[name].gains
    if name == "local":
        average = verdicts["fedavg"].against.get("local") if "fedavg" in verdicts else None
        gains = {"fedavg": average.turned} if average and average.verdict == "worse" else {}
    elif gains and scarce:
        # Better than all that the best is better than, and worse than nothing.
        better = [(n, v) for n, v in verdicts.methods.items() if gains.keys() <= v.gains.keys()]
        alike = [n for n, v in better if not v.is_worse]
        name = min(alike, key=lambda n: sum(verdicts[n].scores.sent))
        gains = verdicts[name].gains
    if not gains:
        return None
    sent = sum(verdicts["fedavg"].scores.sent) if "fedavg" in verdicts else math.nan
    return Entry(task, name, verdicts[name], gains, sent)


def _saving(task: Task, verdicts: Verdicts) -> Entry | None:
    """A method with the verdicts of the best one that sends less than it and than FedAvg."""
    usual, saving = _shown_by(task, verdicts), _shown_by(task, verdicts, scarce=True)
    if usual is None or saving is None or saving.name == usual.name:
        return None
    return saving if sum(saving.verdict.scores.sent) < saving.average else None


def card(tasks: Iterable[tuple[Task, Verdicts]]) -> Table:
    """Returns the decision card: lines for each situation, by how many tasks show the method."""
    # Generated and real data are situations of their own.
    situations = defaultdict[tuple[str, str], list[tuple[Task, Verdicts]]](list)
    kinds = defaultdict[str, list[tuple[Task, Verdicts]]](list)
    for task, verdicts in tasks:
        situations[task.situation or task.name, task.data].append((task, verdicts))
        kinds[task.data].append((task, verdicts))
    answers = {at: [_shown_by(*one) for one in ones] for at, ones in situations.items()}
    surest = sorted(answers, key=lambda at: -sum(map(bool, answers[at])) / len(answers[at]))
    rows = [row for at in surest for row in _rows(*at, situations[at], answers[at])]
    for data, judged in kinds.items():
        if saving := [one for judged_task in judged if (one := _saving(*judged_task))]:
            rows += _rows(SCARCE, data, judged, saving)[:1]
    filled = [title for title, *texts in zip(HEAD, *rows, strict=True) if any(texts)]
    return replace(Table.of(HEAD, rows, range(len(HEAD))).only(filled), kind="card")


def _rows(
    situation: str, data: str, judged: Sequence[tuple[Task, Verdicts]], ones: Sequence[Entry | None]
) -> list[list[str]]:
    """The lines of a situation: one for each method that some task shows."""
    by_method = defaultdict[str, list[Entry]](list)
    for one in filter(None, ones):
        by_method[one.name].append(one)
    if not by_method:
        harms = _harms_of([(t, v["fedavg"]) for t, v in judged if "fedavg" in v])
        why = _unseen(judged)
        if len(judged) == 1:
            why = _room(*judged[0], judged[0][1].best) or _ALONE
        return [[situation, data, "none", "", "", "", f"FedAvg: {harms}" * bool(harms), "", why]]
    least = {
        name: min(a.difference.mean for one in texts for a in one.gains.values())
        for name, texts in by_method.items()
    }
    order = sorted(by_method, key=lambda name: (-len(by_method[name]), -least[name]))
    return [[situation, data, *_texts(n, by_method[n], len(judged))] for n in order]


def _unseen(judged: Sequence[tuple[Task, Verdicts]]) -> str:
    """Says which gains tasks that show no method would have missed."""
    missed: dict[str, list[float]] = {}
    for task, verdicts in judged:
        best = verdicts.best
        gaps = (v.against[best].difference for v in verdicts.values() if best in v.against)
        if known := [gap.detectable for gap in gaps if math.isfinite(gap.detectable)]:
            missed.setdefault(task.metric, []).append(max(known))
    sizes = (f"{_range(of, float, '{:.2g}'.format)} of {name}" for name, of in missed.items())
    unseen = f"; gains below {', '.join(sizes)} may go unseen" * bool(missed)
    return f"none of {len(judged)} tasks shows a method{unseen}"


def _texts(name: str, cells: Sequence[Entry], count: int) -> list[str]:
    gains = []
    for reference in REFERENCES:
        ones = [one.gains[reference].difference for one in cells if reference in one.gains]
        gains.append(_range(ones, lambda gain: gain.mean, signed))
    pairs = [
        (one.verdict.scores, one.task.scores["fedavg"])
        for one in cells
        if "fedavg" in one.gains and "fedavg" in one.task.scores
    ]
    levels = [a.chosen_mean("recalibrated") - b.chosen_mean("recalibrated") for a, b in pairs]
    known = [gap for gap in levels if gap == gap]
    gains.append(_range(known, float, "{:+.4f}".format) * bool(known))
    passes = _range([one.verdict.scores.passes for one in cells], float, lambda v: f"{v:.2f}")
    sent = _range([sum(one.verdict.scores.sent) for one in cells], float, lambda v: size(round(v)))
    times = [sum(o.verdict.scores.sent) / o.average for o in cells if o.average > 0]
    cost = f"passes {passes}; {sent}"
    if times and name not in REFERENCES:
        cost += f", {_range(times, float, brief)} times FedAvg's"
    worst = max(a.p for one in cells for a in one.gains.values())
    splits = _range([one.task.splits for one in cells], float, lambda v: f"{v:.0f}")
    p = "p < 0.001" if worst < 0.001 else f"p ≤ {math.ceil(worst * 1000) / 1000:.3f}"
    sure = f"{p} (Holm), {splits} split{'s' * (splits != '1')} of the patients"
    if count > 1:
        sure = f"{len(cells)} of {count} tasks ({few([o.task.name for o in cells], 3)}): {sure}"
    harms = _harms_of([(one.task, one.verdict) for one in cells]) or "–"
    return [LABELS.get(name, name), *gains, harms, cost, sure]


def _harms_of(ones: Sequence[tuple[Task, Verdict]]) -> str:
    """The share of hospitals that score worse than alone, and which surely do."""
    if len(ones) == 1 and ones[0][1].harm is not None:
        harm = ones[0][1].harm
        return ": ".join(filter(None, (shares(harm), names_of(harm))))
    harms = [v.harm for _, v in ones if v.harm is not None and not math.isnan(v.harm.share)]
    if not harms:
        return ""
    surely, known = sum(len(h.surely) for h in harms), sum(len(h.gains) for h in harms)
    ends = _range([h.share for h in harms], float, lambda v: f"{v:.0%}")
    return f"{ends}; surely {surely} of {known}" if known else ends


def _range(values: Sequence[Any], key: Callable[[Any], float], text: Callable[[Any], str]) -> str:
    """The smallest and the largest of some values as texts, one where they are alike."""
    if not values:
        return "–"
    ends = (text(min(values, key=key)), text(max(values, key=key)))
    return " to ".join(dict.fromkeys(ends))
