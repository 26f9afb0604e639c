"""The pictures of a report, for the page and for files: scores, models, dials, ranks."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from medfed.common.console import evenly
from medfed.common.scores import label_of
from medfed.federation.card import CEILINGS, REFERENCES
from medfed.reports.charts import (
    SERIES,
    Canvas,
    Point,
    Row,
    curves,
    forest,
    gains,
    scatter,
    shares,
)
from medfed.reports.findings import Report
from medfed.reports.sentences import between
from medfed.reports.tasks import Task
from medfed.reports.verdicts import (
    Verdict,
    Verdicts,
    best_of,
    by_mean,
    floor_of,
    in_one_place,
)

_LINES = 7  # curves that a reader can follow
_HOSPITALS = 40  # that have a line each


class Picture(NamedTuple):
    """A picture and what stands below it.

    Attributes:
        canvas: The picture, or None where it is an image.
        caption: The words.
        source: Of an image, its content as an address.
    """

    canvas: Canvas | None
    caption: str
    source: str = ""


Colours = Mapping[str, str]


def pictures_of(task: Task, verdicts: Verdicts, colours: Colours) -> dict[str, Picture]:
    """Draws a task.

    Args:
        task: The task.
        verdicts: By method.
        colours: By method, see :func:`colours_of`.

    Returns:
        Pictures by their names, those for which there is something to draw.
    """
    best = best_of(verdicts)
    found = {
        "forest": _forest(task, verdicts, colours),
        "bytes": _bytes(task, verdicts, best, colours),
    }
    if picture := _gains(task, verdicts, best, colours):
        found["gains"] = picture
    return {**found, **_courses(task, verdicts, best, colours)}


def _word(verdict: Verdict) -> str:
    words = {a.verdict for a in verdict.against.values()}
    return "worse" if "worse" in words else "better" if "better" in words else ""


def _forest(task: Task, verdicts: Verdicts, colours: Colours) -> Picture:
    rows = []
    for name in by_mean(verdicts):
        mean = verdicts[name].mean
        low, high = sorted((task.raw(mean.low), task.raw(mean.high)))
        colour = colours.get(name, "soft")
        rows.append(Row(name, task.raw(mean.mean), low, high, colour, _word(verdicts[name])))
    lines = {
        "a constant": task.raw(floor_of(task)[1]),
        "in one place": task.raw(in_one_place(verdicts)[1].mean),
    }
    over = "patients drawn anew" if task.single else "splits"
    return Picture(
        forest(rows, lines, label_of(task.metric)),
        f"Mean over hospitals with its 95 % interval over {over}. ▲: better than local "
        "training or FedAvg, and worse than neither; ▼: worse than one of them. "
        "Lines: the best constant prediction, and training on all patients in one place.",
    )


def _bytes(task: Task, verdicts: Verdicts, best: str, colours: Colours) -> Picture:
    points = _points(task, verdicts)
    front = _front(task, points)
    named = {n: colours.get(n, "soft") for n in (*front, best, *REFERENCES) if n in points}
    return Picture(
        scatter(points, named, front, label_of(task.metric)),
        "What was reached on test patients for what travelled in the whole run. The line joins "
        "those that no other method beats with fewer bytes.",
    )


def _points(task: Task, verdicts: Verdicts) -> dict[str, Point]:
    return {
        n: (sum(v.scores.sent), task.raw(v.mean.mean))
        for n, v in verdicts.items()
        if n not in CEILINGS
    }


def _front(task: Task, points: Mapping[str, Point]) -> list[str]:
    """The methods that none beats with as few bytes, by bytes."""
    found: list[str] = []
    top = -math.inf
    for name in sorted(points, key=lambda n: (points[n][0], -task.raw(points[n][1]))):
        if (score := task.raw(points[name][1])) > top:
            found.append(name)
            top = score
    return found


def _gains(task: Task, verdicts: Verdicts, best: str, colours: Colours) -> Picture | None:
    names = [n for n in dict.fromkeys((best, "fedavg")) if n in verdicts]
    if best == "local":  # what the best of the others would have given
        names += [n for n in by_mean(verdicts) if n not in (*CEILINGS, *REFERENCES)][:1]
    harms = {n: h for n in names if (h := verdicts[n].harm) is not None and h.gains}
    if not harms or len(task.clients) > _HOSPITALS:
        return None
    # By what they gain from the first, the most harmed hospital last.
    first = next(iter(harms.values())).gains
    means = {c: gain.difference.mean for c, gain in first.items()}
    order = sorted(task.clients, key=lambda c: 0.0 if math.isnan(means[c]) else -means[c])
    series = {n: [h.gains[c].difference[:3] for c in order] for n, h in harms.items()}
    return Picture(
        gains(order, series, f"gain of {label_of(task.metric)} over training alone", colours),
        "What each hospital gains over training alone, with its 95 % interval; left of the line it "
        "would be better off alone.",
    )


def _leading(verdicts: Verdicts) -> list[str]:
    """The methods that have a curve."""
    names = [best_of(verdicts), *REFERENCES, *by_mean(verdicts)]
    return [n for n in dict.fromkeys(names) if n in verdicts and n not in CEILINGS][:_LINES]


def _courses(task: Task, verdicts: Verdicts, best: str, colours: Colours) -> dict[str, Picture]:
    """Validation over rounds, gradient passes and bytes, of a few methods."""
    courses = {n: verdicts[n].scores.course for n in _leading(verdicts)}
    courses = {n: course for n, course in courses.items() if len(course) > 1}
    if not courses:
        return {}
    label = f"validation {label_of(task.metric)}"
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


_GRAPHS, _CLIENTS = 2, 3


def looks_of(task: Task, verdicts: Verdicts) -> list[Picture]:
    """Returns pictures of the first split's models.

    Args:
        task: The task.
        verdicts: By method.
    """
    parts = [_contours(task, verdicts), *_graphs(verdicts), memberships(verdicts)]
    return [part for part in parts if part is not None]


def memberships(verdicts: Verdicts) -> Picture | None:
    """Draws the memberships of the best method that has some, beside the truth if it is known.

    Args:
        verdicts: By method.
    """
    for name in by_mean(verdicts):
        kept = verdicts[name].scores.looks.get("memberships")
        if not kept:
            continue
        blocks = {f"{name}": kept["rows"]}
        if kept.get("truth"):
            blocks["truth"] = kept["truth"]
        told = "Memberships of hospitals in the canonical models of the selected round, first split"
        if kept.get("truth"):
            told += ", beside the mixtures by which the data were made"
        return Picture(shares(kept["clients"], blocks, told), f"{told}.")
    return None


def _graphs(verdicts: Verdicts) -> list[Picture]:
    found = []
    for name in by_mean(verdicts):
        for title, svg in verdicts[name].scores.looks.get("pictures", {}).items():
            told = (
                f"{name}: {title.replace('_', ' ')}, as the server has it at the end; first split."
            )
            found.append(_image(svg.encode(), "svg+xml", told))
    return found[:_GRAPHS]


def _contours(task: Task, verdicts: Verdicts) -> Picture | None:
    best, (pooled, _) = best_of(verdicts), in_one_place(verdicts)
    names = [n for n in ("local", "fedavg", best, pooled) if n in verdicts]
    if best in ("local", "fedavg"):
        names += [n for n in by_mean(verdicts) if n not in names][:1]
    kept = {n: s for n in dict.fromkeys(names) if (s := verdicts[n].scores.looks.get("slices"))}
    if not kept:
        return None
    from medfed.models.contours import contour_grid
    from medfed.records.predictions import unpacked

    cases: dict[str, Any] = {}
    for name, slices in kept.items():
        own = slices["cases"] if "cases" in slices else unpacked(slices["clients"], name)
        for client, case in own.items():
            known = cases.setdefault(client, case)
            known.probabilities[name] = case.probabilities[name]  # type: ignore[index]
    cases = {c: cases[c] for c in evenly([*cases], _CLIENTS)}
    first = next(iter(kept.values()))
    figure = contour_grid(
        cases, first["regions"], threshold=first["threshold"], exclusive=first["exclusive"]
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="webp", dpi=90, pil_kwargs={"quality": 75, "method": 6})
    told = "A tested slice of some hospitals in the first split: true and predicted contours."
    return _image(drawn.getvalue(), "webp", told)


def _image(content: bytes, kind: str, told: str) -> Picture:
    return Picture(None, told, f"data:image/{kind};base64,{base64.b64encode(content).decode()}")


def colours_of(report: Report) -> dict[str, str]:
    """Returns a colour for each method that a curve, a front or a dial shows, on all pictures.

    Methods of one picture have different colours as long as there are any.

    Args:
        report: The report.
    """
    groups = [list(REFERENCES), *(list(dial["curves"]) for dial in report.dials.values())]
    for task, verdicts in report.tasks:
        groups.append([*_leading(verdicts), *_front(task, _points(task, verdicts))])
    found: dict[str, str] = {}
    for name in dict.fromkeys(n for group in groups for n in group):
        near = [found[n] for group in groups if name in group for n in group if n in found]
        found[name] = min(SERIES, key=near.count)
    return found


def dial_pictures(report: Report, colours: Colours) -> dict[str, Picture]:
    """Draws the dials.

    Args:
        report: The report.
        colours: By method.

    Returns:
        By suite.
    """
    found = {}
    for suite, dial in report.dials.items():
        metric = next(task.metric for task, _ in report.tasks if task.suite == suite)
        lines = {n: list(zip(dial["at"], c, strict=True)) for n, c in dial["curves"].items()}
        where = "; ".join(f"{pair} {between(ends)}" for pair, ends in dial["crossings"].items())
        crossed = [tuple(point) for points in dial["crossed"].values() for point in points]
        caption = (
            f"Crossings: {where}."
            if where
            else "No curve crosses that of local training or of FedAvg."
        )
        canvas = curves(
            lines, dial["dial"], label_of(metric), evenly=True, crossed=crossed, colours=colours
        )
        found[suite] = Picture(canvas, caption)
    return found


def ranks_picture(report: Report, colours: Colours) -> Picture:
    """Draws mean ranks, each with half of the critical difference to both sides."""
    ordered = sorted(report.ranks["ranks"].items(), key=lambda item: float(item[1]))
    half = report.ranks["critical_difference"] / 2
    rows = [Row(n, r, r - half, r + half, colours.get(n, "soft")) for n, r in ordered]
    return Picture(
        forest(rows, {}, "mean rank"),
        f"Mean ranks over {report.ranks['blocks']} blocks of suite and split; intervals that do "
        f"not overlap differ by more than the critical difference. {report.ranks['remark']}",
    )
