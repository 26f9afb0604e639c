"""What the models of a task look like: contours, graphs and clusters, memberships."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from typing import Any

from medfed.common.names import evenly
from medfed.reports.benchmark.pictures import Picture, by_mean
from medfed.reports.benchmark.plots import shares
from medfed.reports.benchmark.scores import Task
from medfed.reports.benchmark.verdicts import Verdict, ceiling_of
from medfed.reports.benchmark.words import best_of

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
    from medfed.run.benchmark.looks import unpacked

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
