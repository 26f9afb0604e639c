"""The pictures of a task, for the page and for files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from medfed.reports.benchmark.canvas import SERIES, Canvas
from medfed.reports.benchmark.forests import Row, forest, gains
from medfed.reports.benchmark.plots import Point, curves, scatter
from medfed.reports.benchmark.scores import Task
from medfed.reports.benchmark.verdicts import REFERENCES, Verdict, ceiling_of, floor_of
from medfed.reports.benchmark.words import best_of
from medfed.reports.scores import label_of
from medfed.run.benchmark.methods import CEILINGS

_LINES = 7  # curves that can be told apart
_HOSPITALS = 40  # that have a line each


class Picture(NamedTuple):
    """A picture and what stands below it."""

    canvas: Canvas
    caption: str

    def html(self) -> str:
        """Returns both for a page."""
        words = escape(self.caption)
        return f"<figure>{self.canvas.svg()}<figcaption>{words}</figcaption></figure>"


def pictures_of(task: Task, verdicts: Mapping[str, Verdict]) -> dict[str, Picture]:
    """Draws a task.

    Args:
        task: The task.
        verdicts: By method.

    Returns:
        Pictures by their names, those for which there is something to draw.
    """
    best = best_of(verdicts)
    found = {"forest": _forest(task, verdicts)}
    if not task.falls or task.scores:
        found["bytes"] = _bytes(task, verdicts, best)
    if picture := _gains(task, verdicts, best):
        found["gains"] = picture
    return {**found, **_courses(task, verdicts, best)}


def colour_of(name: str, verdict: Verdict) -> str:
    """Returns the colour in which a method is drawn.

    Args:
        name: The method.
        verdict: Of the method.
    """
    if name in CEILINGS:
        return "soft"
    if name in REFERENCES:
        return "ink"
    words = {a.verdict for a in verdict.against.values()}
    return "bad" if "worse" in words else "good" if "better" in words else "c0"


def by_mean(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Returns the methods, best first."""
    return sorted(verdicts, key=lambda n: -verdicts[n].mean.mean)


def _forest(task: Task, verdicts: Mapping[str, Verdict]) -> Picture:
    rows = []
    for name in by_mean(verdicts):
        mean = verdicts[name].mean
        low, high = sorted((task.raw(mean.low), task.raw(mean.high)))
        rows.append(Row(name, task.raw(mean.mean), low, high, colour_of(name, verdicts[name])))
    lines = {"floor": task.raw(floor_of(task)[1]), "ceiling": task.raw(ceiling_of(task)[1])}
    over = "patients drawn anew" if task.single else "splits"
    return Picture(
        forest(rows, lines, label_of(task.metric)),
        f"Mean over hospitals with its 95 % interval over {over}. Green: better than local "
        "training or FedAvg, and worse than neither; orange: worse than one of "
        "them; blue: not told apart. "
        "Floor: the best constant prediction; ceiling: all patients in one place.",
    )


def _bytes(task: Task, verdicts: Mapping[str, Verdict], best: str) -> Picture:
    points = {
        n: (sum(v.scores.sent), task.raw(v.mean.mean))
        for n, v in verdicts.items()
        if n not in CEILINGS
    }
    front = _front(task, points)
    named = {r: "ink" for r in REFERENCES if r in points} | {best: colour_of(best, verdicts[best])}
    named |= {n: colour_of(n, verdicts[n]) for n in front}
    return Picture(
        scatter(points, named, front, label_of(task.metric)),
        "What was reached on test patients for what travelled in the whole run. The line joins "
        "those that no other method beats with fewer bytes.",
    )


def _front(task: Task, points: Mapping[str, Point]) -> list[str]:
    """The methods that none beats with as few bytes, by bytes."""
    found: list[str] = []
    top = -math.inf
    for name in sorted(points, key=lambda n: (points[n][0], -task.raw(points[n][1]))):
        if (score := task.raw(points[name][1])) > top:
            found.append(name)
            top = score
    return found


def _gains(task: Task, verdicts: Mapping[str, Verdict], best: str) -> Picture | None:
    names = [n for n in dict.fromkeys((best, "fedavg")) if n in verdicts]
    if best == "local":  # what the best of the others would have given
        names += [n for n in by_mean(verdicts) if n not in (*CEILINGS, *REFERENCES)][:1]
    harms = {n: h for n in names if (h := verdicts[n].harm) is not None and h.gains}
    if not harms or len(task.clients) > _HOSPITALS:
        return None
    # By what they gain from the first, the most harmed hospital last.
    first = next(iter(harms.values())).gains
    order = sorted(task.clients, key=lambda c: -first[c][0] if first[c][0] == first[c][0] else 0.0)
    series = {n: [h.gains[c] for c in order] for n, h in harms.items()}
    return Picture(
        gains(order, series, f"gain of {label_of(task.metric)} over training alone"),
        "What each hospital gains over training alone, with its 95 % interval; left of the line it "
        "would be better off alone.",
    )


def _courses(task: Task, verdicts: Mapping[str, Verdict], best: str) -> dict[str, Picture]:
    """Validation over rounds, gradient passes and bytes, of a few methods."""
    names = [best, *REFERENCES, *by_mean(verdicts)]
    wanted = [n for n in dict.fromkeys(names) if n in verdicts and n not in CEILINGS][:_LINES]
    courses = {n: verdicts[n].scores.course for n in wanted}
    courses = {n: course for n, course in courses.items() if len(course) > 1}
    if not courses:
        return {}
    label = f"validation {label_of(task.metric)}"
    colours = dict(zip(courses, SERIES, strict=False))
    found = {}
    for name, what, index in (
        ("rounds", "rounds", 0),
        ("passes", "gradient passes of a hospital", 3),
        ("sent", "bytes sent by all", 2),
    ):
        log = name == "sent"
        lines = {
            n: [(moment[index], task.raw(moment.score)) for moment in course]
            for n, course in courses.items()
        }
        if log:
            lines = {n: p for n, p in lines.items() if any(x > 0 for x, _ in p)}
        if lines:
            caption = f"Mean over hospitals and splits on validation patients, against {what}."
            if log and len(lines) < len(courses):
                caption += " What sends nothing is left out."
            drawn = curves(lines, what, label, log=log, colours=colours)
            found[name] = Picture(drawn, caption)
    return found
