"""The tables of a page: methods, who is harmed, hospital by hospital."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from medfed.common.console import size
from medfed.common.scores import mean_of_known
from medfed.reports.benchmark.pictures import by_mean
from medfed.reports.benchmark.scores import Task
from medfed.reports.benchmark.verdicts import REFERENCES, Verdict
from medfed.run.benchmark.methods import CEILINGS


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
