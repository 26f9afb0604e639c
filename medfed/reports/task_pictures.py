"""The pictures of a report, for the page and for files: scores, models and dials."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from medfed.common.console import evenly
from medfed.common.scores import label_of
from medfed.federation.card import REFERENCES
from medfed.records.folder import Run
from medfed.reports import charts
from medfed.reports.findings import Report
from medfed.reports.sentences import between
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Verdicts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = 7  # curves that a reader can follow
_HOSPITALS = 40  # hospitals with a line each


Looks = Mapping[str, charts.Look]


def pictures_of(task: Task, verdicts: Verdicts, looks: Looks) -> dict[str, charts.Picture]:
    """Draws a task."""
    best = verdicts.best
    pictures = {"forest": _forest(task, verdicts, looks), "bytes": _bytes(task, verdicts, looks)}
    if picture := _gains(task, verdicts, best, looks):
        pictures["gains"] = picture
    return {**pictures, **_courses(task, verdicts, looks)}


def _forest(task: Task, verdicts: Verdicts, looks: Looks) -> charts.Picture:
    rows = []
    for name in verdicts.by_mean:
        ends, look = task.interval(verdicts[name].mean), looks.get(name, charts.SOFT)
        word = "worse" if verdicts[name].is_worse else "better" * bool(verdicts[name].gains)
        rows.append(charts.Row(name, *ends, look, word))
    levels = {
        "a constant": (task.best_constant[1], "the best constant prediction"),
        "in one place": (verdicts.in_one_place[1].mean, "training on all patients in one place"),
    }
    levels = {name: level for name, level in levels.items() if math.isfinite(level[0])}
    lines = {name: task.raw(value) for name, (value, _) in levels.items()}
    figure = charts.forest(rows, lines, label_of(task.metric))
    over = "resampled patients" if task.single else "splits"
    above, words = " and of ".join(what for _, what in levels.values()), {row.word for row in rows}
    text = f"Mean over hospitals with its 95 % interval over {over}."
    text += " ▲: better than local training or FedAvg, and worse than neither." * (
        "better" in words
    )
    text += " ▼: worse than local training or FedAvg." * ("worse" in words)
    text += f" On top: the level of {above}." * bool(above)
    return charts.Picture(figure, text + charts.arrows(figure))


def _bytes(task: Task, verdicts: Verdicts, looks: Looks) -> charts.Picture:
    points = _points(task, verdicts)
    front = _front(task, points)
    return charts.Picture(
        charts.scatter(points, front, label_of(task.metric), looks),
        "Mean on test patients against the bytes of the whole run."
        + " The line joins the methods that no other method beats with as few bytes."
        * (len(front) > 1),
    )


def _points(task: Task, verdicts: Verdicts) -> dict[str, charts.Point]:
    known = verdicts.methods.items()
    return {n: (sum(v.scores.sent), task.raw(v.mean.mean)) for n, v in known}


def _front(task: Task, points: Mapping[str, charts.Point]) -> list[str]:
    """The methods that none beats with as few bytes, by bytes."""
    front: list[str] = []
    top = -math.inf
    for name in sorted(points, key=lambda n: (points[n][0], -task.raw(points[n][1]))):
        if (score := task.raw(points[name][1])) > top:
            front.append(name)
            top = score
    return front


def _gains(task: Task, verdicts: Verdicts, best: str, looks: Looks) -> charts.Picture | None:
    names = [n for n in dict.fromkeys((best, "fedavg")) if n in verdicts]
    if best == "local":  # what the best of the others would have given
        names += [n for n in verdicts.methods.by_mean if n not in REFERENCES][:1]
    harms = {n: h for n in names if (h := verdicts[n].harm) is not None and h.gains}
    if not harms or len(task.clients) > _HOSPITALS:
        return None
    # By the gains of the first method, the most harmed hospital last.
    first = next(iter(harms.values())).gains
    means = {c: gain.difference.mean for c, gain in first.items()}
    order = sorted(task.clients, key=lambda c: 0.0 if math.isnan(means[c]) else -means[c])
    series = {n: [h.gains[c].difference[:3] for c in order] for n, h in harms.items()}
    label = f"gain of {label_of(task.metric)} over training alone"
    figure = charts.hospitals(order, series, label, looks)
    return charts.Picture(
        figure,
        "The gain of each hospital over training alone, with its 95 % interval. Left of the line, "
        f"the hospital scores worse than alone.{charts.arrows(figure)}",
    )


def _leading(verdicts: Verdicts) -> list[str]:
    """The methods that have a curve."""
    names = [verdicts.best, *REFERENCES, *verdicts.by_mean]
    return [n for n in dict.fromkeys(names) if n in verdicts.methods][:_LINES]


def _courses(task: Task, verdicts: Verdicts, looks: Looks) -> dict[str, charts.Picture]:
    """Validation over rounds, gradient passes and bytes, of a few methods."""
    courses = {n: verdicts[n].scores.course for n in _leading(verdicts)}
    courses = {n: course for n, course in courses.items() if len(course) > 1}
    if not courses:
        return {}
    label = f"validation {label_of(task.metric)}"
    pictures = {}
    for name, what, index in (
        ("rounds", "rounds", 0),
        ("passes", "gradient passes of a hospital", 3),
        ("sent", "bytes sent by all", 2),
    ):
        log = name == "sent"
        lines = {n: [(m[index], task.raw(m.score)) for m in of] for n, of in courses.items()}
        if log:
            lines = {n: p for n, p in lines.items() if any(x > 0 for x, _ in p)}
        if lines:
            caption = f"Mean over hospitals and splits on validation patients, against {what}."
            if len(courses) < len(verdicts):
                caption += f" Of {len(verdicts)} methods, the references and the best."
            if log and len(lines) < len(courses):
                caption += " Methods that send nothing are left out."
            figure = charts.curves(lines, what, label, looks, log=log)
            pictures[name] = charts.Picture(figure, caption)
    return pictures


def models_of(task: Task, verdicts: Verdicts) -> list[charts.Picture]:
    """Returns a picture of the first split's predictions at three hospitals, if runs kept them."""
    if (figure := contours_of(task, verdicts, 3)) is None:
        return []
    content = io.BytesIO()
    figure.savefig(content, format="webp", dpi=90, pil_kwargs={"quality": 75, "method": 6})
    caption = "True and predicted contours in a test slice of some hospitals, split 1."
    source = f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
    return [charts.Picture(None, caption, source)]


def contours_of(task: Task, verdicts: Verdicts, most: int) -> Figure | None:
    """Draws true and predicted contours of a few methods; None without stored slices."""
    best, (pooled, _) = verdicts.best, verdicts.in_one_place
    names = [n for n in ("local", "fedavg", best, pooled) if n in verdicts]
    if best in ("local", "fedavg"):
        names += [n for n in verdicts.by_mean if n not in names][:1]
    slices_of = {n: s for n in dict.fromkeys(names) if (s := verdicts[n].scores.slices)}
    if not slices_of:
        return None
    from medfed.models.contours import contour_grid

    cases: dict[str, Any] = {}
    for name, slices in slices_of.items():
        for client, case in slices["cases"].items():
            known = cases.setdefault(client, case)
            known.probabilities[name] = case.probabilities[name]  # type: ignore[index]
    cases = {c: cases[c] for c in evenly([*cases], most)}
    first = next(iter(slices_of.values()))
    return contour_grid(
        cases, first["regions"], threshold=first["threshold"], exclusive=first["exclusive"]
    )


def looks_of(report: Report) -> dict[str, charts.Look]:
    """Returns a colour and a marker for each method, the same on all pictures."""
    # No two methods have the same pair. The methods of a picture with curves, a front or a
    # dial have different colours while there are enough of them.
    groups = [list(REFERENCES), *(list(dial["curves"]) for dial in report.dials.values())]
    for task, verdicts in report.tasks:
        groups.append([*_leading(verdicts), *_front(task, _points(task, verdicts))])
    names = [*groups, *(verdicts for _, verdicts in report.tasks)]
    looks: dict[str, charts.Look] = {}
    for name in dict.fromkeys(n for group in names for n in group):
        near = [looks[n].colour for group in groups if name in group for n in group if n in looks]
        every = [look.colour for look in looks.values()]
        colour = min(charts.SERIES, key=lambda c: (near.count(c), every.count(c)))
        shape = charts.SHAPES[every.count(colour) % len(charts.SHAPES)]
        looks[name] = charts.Look(colour, shape)
    return looks


def dial_pictures(report: Report, looks: Looks) -> dict[str, charts.Picture]:
    """Draws the dials."""
    pictures = {}
    for suite, dial in report.dials.items():
        metric = next(task.metric for task, _ in report.tasks if task.suite == suite)
        lines = {n: list(zip(dial["at"], c, strict=True)) for n, c in dial["curves"].items()}
        where = "; ".join(f"{pair} {between(ends)}" for pair, ends in dial["crossings"].items())
        caption = "No curve crosses that of local training or of FedAvg."
        caption = f"Crossings: {where}." if where else caption
        figure = charts.curves(lines, dial["dial"], label_of(metric), looks, evenly=True)
        pictures[suite] = charts.Picture(figure, caption)
    return pictures


def find(report: Report) -> None:
    """Draws each hospital's metric with each method of finished runs."""
    (task, _), looks = report.tasks[0], looks_of(report)
    clients = next(iter(report.runs.values()))[0].clients
    label = f"test {label_of(task.metric)}"

    def over_runs(runs: Sequence[Run], client: str) -> tuple[float, float, float]:
        every = (run.summary["clients"][client].get(task.metric, math.nan) for run in runs)
        known = [value for value in every if math.isfinite(value)]
        return (float(np.mean(known)), min(known), max(known)) if known else (math.nan,) * 3

    series = {name: [over_runs(runs, c) for c in clients] for name, runs in report.runs.items()}
    figure = charts.hospitals(clients, series, label, looks, zero=False)
    several = any(len(runs) > 1 for runs in report.runs.values())
    caption = (
        f"Test metric of each hospital with each method{', with its range over seeds' * several}."
    )
    caption += charts.arrows(figure)
    report.pictures["clients"] = charts.Picture(figure, caption)
