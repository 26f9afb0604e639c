"""What a run folder has of single cases: patients drawn anew, and predicted slices.

The pictures of a task, for the page and for files.

What the models of a task look like: contours, graphs and clusters, memberships.

The tables of a page: methods, who is harmed, hospital by hospital.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from medfed.common.console import evenly, size
from medfed.common.scores import label_of, mean_of_known
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
from medfed.reports.runs import CEILINGS, REFERENCES
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Verdict, best_of, ceiling_of, floor_of

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


_GRAPHS, _CLIENTS = 2, 3


def looks_of(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    """Returns pictures of the first split's models.

    Args:
        task: The task.
        verdicts: By method.
    """
    parts = [_contours(task, verdicts), *_graphs(verdicts)]
    if picture := memberships(verdicts):
        parts.append(picture.html())
    return "".join(parts)


def memberships(verdicts: Mapping[str, Verdict]) -> Picture | None:
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


def _graphs(verdicts: Mapping[str, Verdict]) -> list[str]:
    found = []
    for name in by_mean(verdicts):
        for title, svg in verdicts[name].scores.looks.get("pictures", {}).items():
            told = (
                f"{name}: {title.replace('_', ' ')}, as the server has it at the end; first split."
            )
            found.append(_image(svg.encode(), "svg+xml", told))
    return found[:_GRAPHS]


def _contours(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    best, (ceiling, _) = best_of(verdicts), ceiling_of(task)
    names = [n for n in ("local", "fedavg", best, ceiling) if n in verdicts]
    if best in ("local", "fedavg"):
        names += [n for n in by_mean(verdicts) if n not in names][:1]
    kept = {n: s for n in dict.fromkeys(names) if (s := verdicts[n].scores.looks.get("slices"))}
    if not kept:
        return ""
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


def _image(content: bytes, kind: str, told: str) -> str:
    data = base64.b64encode(content).decode()
    label = escape(told, quote=True)
    return (
        f'<figure><img alt="{label}" loading="lazy" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{escape(told)}</figcaption></figure>"
    )


def table(head: Sequence[str], lines: Iterable[Iterable[str]], kind: str = "") -> str:
    """Returns a table that scrolls by itself where it is wider than the page.

    Args:
        head: What stands above the columns.
        lines: Of each line its cells, as HTML.
        kind: A class of the table.
    """
    body = [[*cells] for cells in lines]
    kinds = [' class="words"' * c.startswith('<td class="words"') for c in (body or [[*head]])[0]]
    titles = "".join(f"<th{k}>{escape(h)}</th>" for k, h in zip(kinds, head, strict=True))
    rows = "".join(f"<tr>{''.join(cells)}</tr>" for cells in body)
    named = f' class="{kind}"' if kind else ""
    return (
        f'<div class="wide"><table{named}><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>"
    )


def folded(title: str, body: str) -> str:
    """Returns what is shown on request, and in print."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def number(value: float, digits: int = 4, kind: str = "", sign: str = "") -> str:
    """Returns a cell with a number, a dash where there is none."""
    named = f' class="{kind}"' if kind else ""
    if math.isnan(value):
        return f"<td{named}>–</td>"
    return f'<td{named} data-v="{value:.6g}">{value:{sign}.{digits}f}</td>'


def words(text: str) -> str:
    """Returns a cell with words."""
    return f'<td class="words">{escape(text)}</td>'


def methods_table(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    """Returns a line for each method, best first.

    Args:
        task: The task.
        verdicts: By method.
    """
    head = ["method", "mean [95 %]", "worst hospital", "worst decile"]
    shown = [r for r in REFERENCES if any(r in v.against for v in verdicts.values())]
    for reference in shown:
        label = "local" if reference == "local" else "FedAvg"
        head += [f"− {label} [95 %]", "p (Holm)", "seen from"]
    head += ["harmed", "sent", "passes"]
    lines = []
    for name in by_mean(verdicts):
        v = verdicts[name]
        low, high = sorted((task.raw(v.mean.low), task.raw(v.mean.high)))
        cells = [f"<td>{escape(name)}</td>", _between(task.raw(v.mean.mean), low, high)]
        cells += [number(task.raw(x)) for x in (v.worst, v.decile)]
        for reference in shown:
            if (a := v.against.get(reference)) is None:
                cells += ["<td></td>"] * 3
                continue
            d = a.difference
            kind = a.verdict if a.verdict in ("better", "worse") else ""
            cells.append(_between(d.mean, d.low, d.high, kind, "+"))
            cells += [number(a.p, 3), number(d.visible)]
        cells.append(_share(v))
        sent = sum(v.scores.sent)
        cells.append(f'<td data-v="{sent:.6g}">{size(round(sent))}</td>')
        cells.append(number(v.scores.passes, 2))
        lines.append(cells)
    return (
        table(head, lines) + '<p class="note">Green: better, told apart; orange: worse. Seen from: '
        "the smallest difference that could have been seen. Harmed: the share of hospitals that "
        "would be better off alone. Passes: gradient passes as a share of the budget. Click on a "
        "head to sort.</p>"
    )


def _between(value: float, low: float, high: float, kind: str = "", sign: str = "") -> str:
    """A cell with a number and its interval."""
    if math.isnan(low):
        return number(value, kind=kind, sign=sign)
    ends = f" <small>[{low:{sign}.3f}, {high:{sign}.3f}]</small></td>"
    return number(value, kind=kind, sign=sign).replace("</td>", ends)


def _share(v: Verdict) -> str:
    if v.harm is None:
        return "<td></td>"
    ends = "" if math.isnan(v.harm.low) else f" [{v.harm.low:.0%}, {v.harm.high:.0%}]"
    return f'<td data-v="{v.harm.share:.6g}">{v.harm.share:.0%}{ends}</td>'


def harmed_table(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    """Returns who would be better off alone, by method; the most harmful first.

    Args:
        task: The task.
        verdicts: By method.
    """
    harms = {n: v.harm for n, v in verdicts.items() if n not in CEILINGS and v.harm is not None}
    if not harms:
        return ""
    if not task.same:
        return (
            '<p class="note">Hospitals are others in every split, so that they have no names.</p>'
        )
    order = sorted(harms, key=lambda n: (-len(harms[n].surely), -harms[n].share))
    lines = []
    for name in order:
        harm = harms[name]
        perhaps = [c for c in harm.clients if c not in harm.surely]
        if harm.clients:
            cells = [f"<td>{escape(name)}</td>", _share(verdicts[name])]
            who = [f"surely {', '.join(harm.surely)}"] * bool(harm.surely)
            who += [f"perhaps {', '.join(perhaps)}"] * bool(perhaps)
            lines.append([*cells, words("; ".join(who))])
    nobody = [name for name in order if not harms[name].clients]
    told = f"Nobody would be with {', '.join(nobody)}. " if nobody else ""
    return (table(("method", "harmed", "who"), lines, "list") if lines else "") + (
        f'<p class="note">{escape(told)}Surely: it is worse off after Holm\'s correction for the '
        "number of hospitals, too; perhaps: its mean is. The share's interval is from those that "
        "are surely worse off to all but those that are surely better off.</p>"
    )


def hospitals_table(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    """Returns what each hospital reaches alone, and gains with each method.

    Args:
        task: The task.
        verdicts: By method.
    """
    local = verdicts.get("local")
    if local is None or not task.same or not task.clients:
        return ""
    alone = _means(local)
    lines = [["<td>local</td>", *(number(task.raw(v), 3) for v in alone)]]
    for name in by_mean(verdicts):
        harm = verdicts[name].harm
        if harm is None:
            continue
        cells = [f"<td>{escape(name)}</td>"]
        for client in task.clients:
            gain, low, high = harm.gains[client]
            kind = "worse" if high < 0 else "better" if low > 0 else ""
            cells.append(number(gain, 3, kind, "+"))
        lines.append(cells)
    return (
        table(("method", *task.clients), lines, "cells")
        + f'<p class="note">First line: {escape(task.metric)} of local training, over splits. '
        "Others: the gain over it. Coloured: its interval lies on one side of 0.</p>"
    )


def _means(verdict: Verdict) -> list[float]:
    return [float(v) for v in mean_of_known(verdict.scores.values, axis=0)]
