"""The report as one page that opens without a network: on a phone, in the dark, and in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from medfed.common.console import size
from medfed.reports.benchmark import svg
from medfed.reports.benchmark.findings import Told
from medfed.reports.benchmark.scores import Task
from medfed.reports.benchmark.verdicts import REFERENCES, Verdict, ceiling_of, floor_of
from medfed.run.benchmark.cells import libraries
from medfed.run.benchmark.methods import CEILINGS

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1e;--soft:#6b6b70;--line:#d9d9de;--paper:#fff;
--dot:#0072b2;--good:#00725a;--bad:#b34700}
@media(prefers-color-scheme:dark){:root{--ink:#ececf0;--soft:#a0a0a8;--line:#3a3a40;--paper:#161618;
--dot:#56b4e9;--good:#4cc9a6;--bad:#ff9d5c}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--line:#bbb;--paper:#fff;--dot:#0072b2}
section{break-inside:avoid}details{display:none}}
body{margin:0 auto;padding:1rem;max-width:68rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.5rem;border-top:1px solid var(--line);
padding-top:1rem}h3{font-size:1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;
font-variant-numeric:tabular-nums}th,td{padding:.25rem .6rem;text-align:right;
border-bottom:1px solid var(--line);white-space:nowrap}th:first-child,td:first-child{
text-align:left;position:sticky;left:0;background:var(--paper)}th{cursor:pointer;color:var(--soft);font-weight:600}
td.better{color:var(--good)}td.worse{color:var(--bad)}.soft,figcaption{color:var(--soft);
font-size:.85rem}figure{margin:1rem 0;overflow-x:auto}svg{width:100%;min-width:30rem;
max-width:44rem;height:auto;font:12px system-ui,sans-serif;fill:var(--ink)}
svg .grid{stroke:var(--line);stroke-width:1}svg .mark{stroke:var(--soft);stroke-dasharray:3 3}
svg .interval{stroke:var(--dot);stroke-width:2}svg .dot{fill:var(--dot)}
svg .name{text-anchor:end}svg .tick,svg .note{text-anchor:middle;fill:var(--soft)}
pre{overflow-x:auto;font-size:.8rem}
"""
# A click on a head sorts a table by that column: numbers as numbers.
_SCRIPT = """
for(const h of document.querySelectorAll("th"))h.onclick=()=>{const b=h.closest("table").tBodies[0],
i=h.cellIndex,d=h.dataset.d=h.dataset.d==="1"?"-1":"1",v=r=>r.cells[i].dataset.v??
r.cells[i].textContent;[...b.rows].sort((p,q)=>{const x=v(p),y=v(q),n=x-y;return d*(isNaN(n)?
x.localeCompare(y):n)}).forEach(r=>b.append(r))};
"""


def page(told: Told) -> str:
    """Returns the page.

    Args:
        told: What a benchmark found.

    Returns:
        HTML in which nothing is fetched from anywhere.
    """
    body = [
        "<h1>Benchmark</h1>",
        "<ul>" + "".join(f"<li>{escape(s)}</li>" for s in told.sentences) + "</ul>",
        *(_task(task, verdicts) for task, verdicts in told.tasks),
        *_dials(told),
        _ranks(told),
        _settings(told),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Benchmark</title><style>{_STYLE}</style></head><body>{''.join(body)}"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _task(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    ordered = sorted(verdicts.items(), key=lambda item: -item[1].mean.mean)
    lines = {"floor": task.raw(floor_of(task)[1]), "ceiling": task.raw(ceiling_of(task)[1])}
    rows = []
    for name, v in ordered:
        low, high = sorted((task.raw(v.mean.low), task.raw(v.mean.high)))
        rows.append((name, task.raw(v.mean.mean), low, high))
    sent = {n: (sum(v.scores.sent), task.raw(v.mean.mean)) for n, v in ordered if n not in CEILINGS}
    splits = len(next(iter(verdicts.values())).scores.values)
    better = "smaller" if task.falls else "larger"
    return "".join(
        [
            f"<section><h2>{escape(task.name)}</h2>",
            f'<p class="soft">{escape(task.metric)}, {better} is better; {splits} splits, '
            f"{len(task.clients)} hospitals, {task.patients} tested patients.</p>",
            _figure(
                svg.forest(rows, lines, task.metric),
                "Mean over hospitals, and its 95 % interval over splits; floor: the best constant "
                "predictor, ceiling: all patients in one place.",
            ),
            _table(task, ordered),
            _figure(
                svg.scatter(sent, "bytes sent, up and down, of all hospitals", task.metric),
                "What was reached for what travelled.",
            ),
            _hospitals(task, verdicts),
            "</section>",
        ]
    )


def _table(task: Task, ordered: Sequence[tuple[str, Verdict]]) -> str:
    head = (
        *("method", "mean", "worst hospital", "worst decile", "− local", "seen from", "− FedAvg"),
        *("seen from", "harmed", "sent", "passes"),
    )
    lines = []
    for name, v in ordered:
        cells = [f"<td>{escape(name)}</td>"]
        cells += [_number(task.raw(x)) for x in (v.mean.mean, v.worst, v.decile)]
        for reference in REFERENCES:
            a = v.against.get(reference)
            if a is None:
                cells += ["<td></td>"] * 2
                continue
            kind = a.verdict if a.verdict in ("better", "worse") else "soft"
            d = a.difference
            told = f"[{d.low:+.4f}, {d.high:+.4f}], p = {a.p:.3g} (Holm), {a.verdict}"
            cells.append(
                f'<td class="{kind}" data-v="{d.mean}" title="{escape(told)}">{d.mean:+.4f}</td>'
            )
            cells.append(_number(d.visible))
        if v.harm is None:
            cells.append("<td></td>")
        else:
            names = escape(", ".join(v.harm.clients) or "nobody", quote=True)
            ends = "" if math.isnan(v.harm.low) else f" [{v.harm.low:.0%}, {v.harm.high:.0%}]"
            cells.append(
                f'<td data-v="{v.harm.share}" title="{names}">{v.harm.share:.0%}{ends}</td>'
            )
        bytes_ = sum(v.scores.sent)
        cells.append(f'<td data-v="{bytes_}">{size(round(bytes_))}</td>')
        cells.append(_number(v.scores.passes, 2))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    return (
        f'<div class="wide"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
        '<p class="soft">Coloured: told apart. Seen from: the smallest difference that could have '
        "been seen. Harmed: hospitals that would be better off alone. Passes: a share of the "
        "budget.</p>"
    )


def _hospitals(task: Task, verdicts: Mapping[str, Verdict]) -> str:
    """Each hospital's mean over splits, by method."""
    names = [*verdicts]
    head = "".join(f"<th>{escape(n)}</th>" for n in ("hospital", *names))
    lines = []
    for i, client in enumerate(task.clients):
        cells = []
        for name in names:
            column = [float(v) for v in verdicts[name].scores.values[:, i]]
            known = [v for v in column if not math.isnan(v)]
            harm = verdicts[name].harm
            kind = ' class="worse"' if harm is not None and client in harm.surely else ""
            mean = sum(known) / len(known) if known else math.nan
            cells.append(_number(task.raw(mean), kind=kind))
        lines.append(f"<tr><td>{escape(client)}</td>{''.join(cells)}</tr>")
    return (
        "<details><summary>Hospital by hospital</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody>'
        "</table></div></details>"
    )


def _dials(told: Told) -> list[str]:
    found = []
    for suite, dial in told.dials.items():
        where = "; ".join(
            f"{pair} at {', '.join(f'{x:g}' for x in at)}" for pair, at in dial["crossings"].items()
        )
        metric = next(task.metric for task, _ in told.tasks if task.suite == suite)
        picture = svg.curves(dial["at"], dial["curves"], dial["dial"], metric)
        caption = f"Crossings: {where}." if where else "No two curves cross."
        found.append(
            f"<section><h2>{escape(suite)}: the dial</h2>{_figure(picture, caption)}</section>"
        )
    return found


def _ranks(told: Told) -> str:
    if not told.ranks:
        return ""
    ranks = sorted(told.ranks["ranks"].items(), key=lambda item: float(item[1]))
    half = told.ranks["critical_difference"] / 2
    rows = [(n, r, r - half, r + half) for n, r in ranks]
    caption = (
        f"Mean ranks over {told.ranks['blocks']} blocks of suite and split; intervals that do not "
        f"overlap differ by more than the critical difference. {told.ranks['remark']}"
    )
    return f"<section><h2>Ranks</h2>{_figure(svg.forest(rows, {}, 'mean rank'), caption)}</section>"


def _settings(told: Told) -> str:
    lines = [
        f"<tr><td>{escape(task.name)}</td><td>{escape(name)}</td><td>"
        + escape(" ".join(f"{k}={v:g}" for k, v in verdict.scores.setting.items()) or "defaults")
        + "</td></tr>"
        for task, verdicts in told.tasks
        for name, verdict in verdicts.items()
    ]
    versions = " ".join(f"{name} {number}" for name, number in libraries().items())
    return (
        "<section><h2>Settings</h2><div class='wide'><table><thead><tr><th>task</th><th>method</th>"
        f"<th>tuned</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f'<p class="soft">{escape(versions)}</p></section>'
    )


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _number(value: float, digits: int = 4, kind: str = "") -> str:
    if math.isnan(value):
        return f"<td{kind}>–</td>"
    return f'<td{kind} data-v="{value}">{value:.{digits}f}</td>'


def latex(told: Told) -> str:
    r"""Returns a table for a paper, of booktabs: a line per method, best first, for each task.

    Args:
        told: What a benchmark found.
    """
    lines = []
    for task, verdicts in told.tasks:
        lines += [
            f"% {task.name}: {task.metric}",
            r"\begin{tabular}{lrrrrr}",
            r"\toprule",
            r"method & mean & worst & $-$ local & $-$ FedAvg & harmed \\",
            r"\midrule",
        ]
        for name, v in sorted(verdicts.items(), key=lambda item: -item[1].mean.mean):
            cells = [name.replace("_", r"\_"), f"{task.raw(v.mean.mean):.4f}"]
            cells.append(f"{task.raw(v.worst):.4f}")
            for reference in REFERENCES:
                a = v.against.get(reference)
                star = "" if a is None or a.verdict not in ("better", "worse") else "*"
                cells.append("" if a is None else f"${a.difference.mean:+.4f}${star}")
            cells.append("" if v.harm is None else f"{v.harm.share:.0%}".replace("%", r"\%"))
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)
