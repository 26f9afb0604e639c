"""Advice in words and tables: on a terminal, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator

from medfed.benchmark.advice import ALONE, FEW, Advice, Gain
from medfed.common.console import in_markdown, say, shown, size, wide_console
from medfed.common.errors import few
from medfed.reports.tables import Table

METHODS = ("method", "mean", "better than alone by", "", "sent in a run", "CPU time of a run")
HOSPITALS = ("hospital", "patients", "better than alone by", "")
VERDICT = {"better": "gains", "worse": "stays alone", "cannot tell": "cannot tell"}


def sentences(advice: Advice) -> Iterator[str]:
    """Yields the sentences of the advice, the answer first.

    Args:
        advice: The advice.
    """
    yield _answer(advice)
    if advice.use and advice.use != ALONE and advice.rivals:
        yield f"No difference from {advice.use} is shown for {_rivals(advice)}."
    yield from _hospitals(advice)
    name, floor = advice.floor
    reached = advice.methods[advice.shown].mean
    if name and not math.isnan(floor) and reached <= floor:
        yield (
            f"Even {advice.shown} is no better than the constant predictor {name}, which "
            "ignores the "
            f"input ({advice.task.raw(floor):.4f}): first find a model that learns something."
        )
    yield _rests_on(advice)
    if advice.rounds < advice.asked.rounds:
        yield (
            f"Runs of the pilot had {advice.rounds} rounds instead of {advice.asked.rounds}: "
            "methods "
            "that learn slowly seem worse than they are. The advice multiplies bytes and hours "
            f"by {advice.asked.rounds / advice.rounds:.3g}."
        )
    for judged in advice.methods.values():
        if judged.failed:
            yield (
                f"{judged.name} has failed in {judged.failed} of {advice.repetitions} repetitions "
                "(values that are not finite), which counts as the worst possible."
            )
    yield from advice.notes


def _answer(advice: Advice) -> str:
    metric = advice.task.metric
    gain = advice.methods[advice.shown].gain
    assert gain is not None
    if advice.use == ALONE:
        return (
            f"Train alone: every method of the pilot is worse in {metric}. The best of them, "
            f"{advice.best}, differs by {_interval(gain)}."
        )
    if advice.use:
        return (
            f"Use {advice.use}: in {metric} it is better than training alone by {_interval(gain)}."
        )
    return (
        f"The pilot cannot tell whether any of these methods is better than training alone. The "
        f"best of the pilot, {advice.best}, differs in {metric} by {_interval(gain)}: {gain.why}. "
        "Until then, training alone harms no hospital."
    )


def _rivals(advice: Advice) -> str:
    rivals = []
    sent = sum((advice.methods[advice.use].cost.up, advice.methods[advice.use].cost.down))
    for name in advice.rivals:
        cost = advice.methods[name].cost
        rivals.append(
            f"{name} ({(cost.up + cost.down) / sent:.2g} times its bytes)" if sent else name
        )
    return ", ".join(rivals)


def _hospitals(advice: Advice) -> Iterator[str]:
    if advice.alone:
        yield (
            f"With {advice.shown}, {few([shown(c) for c in advice.alone])} would be worse off than "
            "alone. They can take part, as in the pilot, and use the model that they train alone."
        )
    elif advice.use not in ("", ALONE):
        yield "No hospital is surely worse off than alone."
    hospitals = advice.methods[advice.shown].hospitals
    if advice.open:
        below = [c for c in advice.open if hospitals[c].mean < 0]
        least = f"; below training alone: {few([shown(c) for c in below])}" if below else ""
        yield f"The pilot cannot tell whether {few([shown(c) for c in advice.open])} gain{least}."
    tiny = [c for c, gain in hospitals.items() if gain.patients < FEW]
    if tiny:
        yield (
            f"{few([shown(c) for c in tiny])} have fewer than {FEW} patients, too few for a "
            "verdict."
        )


def _rests_on(advice: Advice) -> str:
    asked = advice.asked
    again = advice.repetitions // asked.folds
    times = {1: "once", 2: "twice"}.get(again, f"{again} times")
    return (
        f"The advice rests on {advice.repetitions} repetitions. Models that had not seen a patient "
        f"tested each of the {sum(map(len, asked.patients.values())):,} training and validation "
        f"patients {times}; the pilot never used the {asked.kept_out:,} test patients. All methods "
        "had the given settings, untuned. Verdicts hold for all methods, or all hospitals of a "
        "method, at once (Holm, 5 %); intervals are at 95 %."
    )


def _interval(gain: Gain) -> str:
    if math.isnan(gain.low):
        return f"{gain.mean:+.4f}"
    return f"{gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"


def method_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Returns a line per method, best first.

    Args:
        advice: The advice.
    """
    rows: list[tuple[str, ...]] = []
    for judged in sorted(advice.methods.values(), key=lambda j: -_sortable(j.mean)):
        gain, cost = judged.gain, judged.cost
        rows.append(
            (
                judged.name,
                f"{advice.task.raw(judged.mean):.4f}",
                "" if gain is None else _interval(gain),
                "" if gain is None else gain.says,
                size(round(cost.up + cost.down)),
                duration(cost.hours),
            )
        )
    return rows


def duration(hours: float) -> str:
    """Returns a time as people write it.

    Example:
        >>> duration(0.0003), duration(0.5), duration(30)
        ('1.1 s', '30 min', '30 h')
    """
    if hours * 60 < 2:
        return f"{3600 * hours:.2g} s"
    return f"{60 * hours:.0f} min" if hours < 2 else f"{hours:.0f} h"


def _sortable(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def hospital_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Returns a line per hospital, with the method that is shown.

    Args:
        advice: The advice.
    """
    return [
        (
            client,
            str(gain.patients),
            "–" if math.isnan(gain.mean) else _interval(gain),
            VERDICT[gain.says] + (f": {gain.why}" if gain.why else ""),
        )
        for client, gain in advice.methods[advice.shown].hospitals.items()
    ]


def markdown(advice: Advice, command: str) -> str:
    """Returns the advice as a page.

    Args:
        advice: The advice.
        command: The command that trains as advised; alone if the pilot cannot tell.
    """
    first, *rest = in_markdown(sentences(advice))
    title = f"use {advice.use}" if advice.use else "cannot tell"
    better = "smaller" if advice.task.falls else "larger"
    tables = _tables(advice)
    return "\n".join(
        [
            f"# Advice: {title}",
            "",
            first,
            "",
            *(f"- {s}" for s in rest),
            "",
            "```",
            command,
            "```",
            "",
            f"## Methods, {advice.task.metric} ({better} is better)",
            "",
            *tables[0].markdown(),
            "",
            _of_costs(advice),
            "",
            f"## Hospitals, with {advice.shown}",
            "",
            *tables[1].markdown(),
            "",
            "Gain of each hospital over training alone with each method; * marks a shown "
            "difference:",
            "",
            *_every(advice).markdown(),
            "",
        ]
    )


def _every(advice: Advice) -> Table:
    """A line per hospital, a column per method."""
    names = [name for name in advice.methods if name != ALONE]
    rows = []
    for client in advice.task.clients:
        gains = [advice.methods[name].hospitals[client] for name in names]
        texts = ["–" if math.isnan(g.mean) else f"{g.mean:+.4f}" for g in gains]
        sure = ["" if g.says == "cannot tell" else " *" for g in gains]
        rows.append([client, *(a + b for a, b in zip(texts, sure, strict=True))])
    return Table.of(["hospital", *names], rows, prose=(0,))


def _tables(advice: Advice) -> tuple[Table, Table]:
    """Methods, and hospitals with the method that is shown."""
    return (
        Table.of(METHODS, method_rows(advice), prose=(0, 3)),
        Table.of(HOSPITALS, hospital_rows(advice), prose=(0, 3)),
    )


def _of_costs(advice: Advice) -> str:
    times = advice.asked.rounds / advice.rounds
    how = "" if times == 1 else f", those of the pilot multiplied by {times:.3g}"
    return (
        "Bytes and CPU time are totals over all hospitals in one run of "
        f"{advice.asked.rounds} rounds{how}. CPU time includes reading and testing on one core of "
        "this machine; it says little about another machine or a GPU."
    )


def print_advice(advice: Advice, command: str) -> None:
    """Prints the advice.

    Args:
        advice: The advice.
        command: The command that trains as advised; alone if the pilot cannot tell.
    """
    console = wide_console()
    first, *rest = sentences(advice)
    console.print()
    console.print(first, style="bold", highlight=False, markup=False)
    titles = (f"Methods: {advice.task.metric}", f"Hospitals, with {advice.shown}")
    for title, table in zip(titles, _tables(advice), strict=True):
        console.print(table.printed(title))
    say(console, *rest, _of_costs(advice), f"To train so: {command}")
