"""The report as one page that opens without a network: on a phone, in the dark, and in print.

How the page of a report looks, and the little that it does: sorting, unfolding for print.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape

from medfed.common.scores import label_of
from medfed.reports.charts import Row, curves, forest, style
from medfed.reports.claims import section as claims_section
from medfed.reports.findings import Report, colours_of
from medfed.reports.sentences import details, ends_of
from medfed.reports.task_pictures import (
    Picture,
    folded,
    harmed_table,
    hospitals_table,
    looks_of,
    methods_table,
    pictures_of,
    table,
    words,
)
from medfed.reports.tasks import Task
from medfed.reports.verdicts import Verdict

_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:72rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2.5rem 0 .5rem;
border-top:1px solid var(--line);padding-top:1rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--c0)}dt{font-weight:600;margin-top:.8rem}dd{margin:0;max-width:48rem}
p,li{max-width:48rem}.note,figcaption{color:var(--soft);font-size:.85rem}
.pictures{columns:23rem 2;column-gap:2rem}
figure{margin:0 0 1.5rem;break-inside:avoid;display:inline-block;width:100%}
figure svg{display:block;width:100%;max-width:31rem;height:auto}
figure img{display:block;width:100%;max-width:31rem;height:auto;background:#fff}
figcaption{max-width:31rem}
.wide{overflow-x:auto;max-height:85vh}table{border-collapse:separate;border-spacing:0;
font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .55rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{position:sticky;top:0;background:var(--paper);z-index:1;cursor:pointer;
color:var(--soft);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper);
max-width:11rem;overflow:hidden;text-overflow:ellipsis}
thead th:first-child{z-index:2}th.words{text-align:left}
td.words{text-align:left;white-space:normal;min-width:7rem}
.list th,.list td{text-align:left;white-space:normal}td small{color:var(--soft)}
.better{color:var(--good)}.worse{color:var(--bad)}b.better,b.worse{font-weight:600}
.cells td{padding:.15rem .35rem;font-size:.78rem}
summary{cursor:pointer;margin:.6rem 0;color:var(--c0)}
pre{white-space:pre-wrap;font-size:.8rem}code{font-size:.85em;overflow-wrap:anywhere}
@media(max-width:30rem){body{padding:.7rem}td:first-child,th:first-child{max-width:7.5rem}}
@media print{body{max-width:none;padding:0;font-size:11px}.wide{overflow:visible;max-height:none}
thead th,td:first-child,th:first-child{position:static}table{font-size:8px}
.cells td{font-size:6px;padding:.05rem .12rem}th,td{padding:.1rem .25rem}figure{width:100%}
h2,h3{break-after:avoid}tr{break-inside:avoid}a{color:inherit;text-decoration:none}}
"""
STYLE = style() + _RULES.replace("\n", "")
# A click on a head sorts a table by that column, numbers as numbers; print shows what is folded.
SCRIPT = """
for(const h of document.querySelectorAll("thead th"))h.onclick=()=>{
const b=h.closest("table").tBodies[0],
i=h.cellIndex,d=h.dataset.d=h.dataset.d==="1"?"-1":"1",v=r=>r.cells[i].dataset.v??
r.cells[i].textContent.replace("−","-");[...b.rows].sort((p,q)=>{const x=v(p),y=v(q),n=x-y;
return d*(isNaN(n)?x.localeCompare(y):n)}).forEach(r=>b.append(r))};
const folded=()=>document.querySelectorAll("details:not([open])");
onbeforeprint=()=>folded().forEach(d=>{d.dataset.p=1;d.open=true});
onafterprint=()=>document.querySelectorAll("details[data-p]").forEach(d=>{d.open=false;
delete d.dataset.p});
const unfold=()=>{for(let e=document.getElementById(decodeURIComponent(location.hash.slice(1)));e;
e=e.parentElement)if(e.tagName==="DETAILS")e.open=true};onhashchange=unfold;unfold();
"""


GENERATOR = '<meta name="generator" content="medfed">'


def page(report: Report) -> str:
    """Returns the page.

    Args:
        report: The report.

    Returns:
        HTML in which nothing is fetched from anywhere.
    """
    body = "".join(section(report) for section in SECTIONS)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def place(name: str) -> str:
    """Returns the anchor of a part of the page.

    Example:
        >>> place("brats/lack_flair")
        'brats-lack_flair'
    """
    return re.sub(r"[^\w.-]+", "-", name)


def answers(report: Report) -> str:
    """The verdict of each task in words, then what is to be noted."""
    suites = dict.fromkeys(task.suite for task, _ in report.tasks)
    parts = [f"<h1>{escape(report.title)}</h1>"]
    if report.remark:
        parts.append(f"<p><b>{escape(report.remark)}</b></p>")
    for suite in suites:
        own = [task for task, _ in report.tasks if task.suite == suite]
        listed = [_answer(report, task) for task in own]
        parts.append(f"<dl>{listed[0]}</dl>")
        if listed[1:]:
            names = ", ".join(task.variant for task in own[1:])
            parts.append(folded(f"{suite} otherwise: {names}", f"<dl>{''.join(listed[1:])}</dl>"))
    if report.notes:
        listed = [f"<li>{escape(note)}</li>" for note in report.notes]
        parts.append(f"<h3>To be noted</h3><ul>{''.join(listed)}</ul>")
    return "".join(parts)


def _answer(report: Report, task: Task) -> str:
    sentences = escape(" ".join(report.answers[task.name]))
    link = f'<a href="#{place(task.name)}">{escape(task.name)}</a>'
    about = f' <span class="note">{escape(task.title)}</span>' if task.title else ""
    return f"<dt>{link}{about}</dt><dd>{sentences}</dd>"


def tasks(report: Report) -> str:
    """Each task; of a suite the first is open, those at other settings are folded."""
    parts, seen = [], set()
    for task, verdicts in report.tasks:
        body = _task(report, task, verdicts)
        if task.suite in seen:
            head = f'<details id="{place(task.name)}"><summary>{escape(task.name)}</summary>'
            parts.append(f"{head}{body}</details>")
        else:
            head = f'<section id="{place(task.name)}"><h2>{escape(task.name)}</h2>'
            parts.append(f"{head}{body}</section>")
        seen.add(task.suite)
    return "".join(parts)


def _task(report: Report, task: Task, verdicts: Mapping[str, Verdict]) -> str:
    better = "smaller" if task.falls else "larger"
    count = "1 split" if task.single else f"{task.splits} splits"
    facts = (
        f"{task.title}. "
        * bool(task.title)
        + f"{label_of(task.metric)}, {better} is better; {count}, "
        f"{len(task.clients)} hospitals, {task.patients} patients tested over all splits. "
        f"{ends_of(task)}"
    )
    long = "".join(f"<li>{escape(s)}</li>" for s in (*details(task, verdicts), *task.notes))
    drawn = "".join(p.html() for p in pictures_of(task, verdicts).values())
    return "".join(
        [
            f'<p class="note">{escape(facts)}</p>',
            f"<p>{escape(' '.join(report.answers[task.name]))}</p>",
            f'<div class="pictures">{drawn}{looks_of(task, verdicts)}</div>',
            methods_table(task, verdicts),
            folded("Who would be better off alone, by method", harmed_table(task, verdicts)),
            folded(
                "Hospital by hospital: what each gains with each method",
                hospitals_table(task, verdicts),
            ),
            folded("Which methods are better, worse, not report apart", f"<ul>{long}</ul>"),
        ]
    )


def dials(report: Report) -> str:
    """The curves over the dials of suites, their crossings marked."""
    return "".join(
        f'<section id="{place(suite)}-dial"><h2>{escape(suite)}: the dial</h2>{picture.html()}'
        "</section>"
        for suite, picture in dial_pictures(report).items()
    )


def dial_pictures(report: Report) -> dict[str, Picture]:
    """Draws the dials.

    Args:
        report: The report.

    Returns:
        By suite.
    """
    found, colours = {}, colours_of(report.dials)
    for suite, dial in report.dials.items():
        metric = next(task.metric for task, _ in report.tasks if task.suite == suite)
        lines = {n: list(zip(dial["at"], c, strict=True)) for n, c in dial["curves"].items()}
        where = "; ".join(
            f"{pair} at {', '.join(f'{x:.3g}' for x in at)}"
            for pair, at in dial["crossings"].items()
        )
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


def claims(report: Report) -> str:
    """What papers claim, and what was found."""
    return claims_section(report.claims)


def ranks(report: Report) -> str:
    """Mean ranks over blocks of suite and split."""
    if not report.ranks:
        return ""
    return f'<section id="ranks"><h2>Ranks</h2>{ranks_picture(report).html()}</section>'


def ranks_picture(report: Report) -> Picture:
    """Draws mean ranks, each with half of the critical difference to both sides."""
    ordered = sorted(report.ranks["ranks"].items(), key=lambda item: float(item[1]))
    half = report.ranks["critical_difference"] / 2
    rows = [Row(n, r, r - half, r + half) for n, r in ordered]
    return Picture(
        forest(rows, {}, "mean rank"),
        f"Mean ranks over {report.ranks['blocks']} blocks of suite and split; intervals that do "
        f"not overlap differ by more than the critical difference. {report.ranks['remark']}",
    )


def settings(report: Report) -> str:
    """What was tuned, the hashes of the cells, libraries, and the commands that repeat it."""
    lines = [
        [
            f"<td>{escape(task.name)}</td>",
            words(name),
            words(" ".join(f"{k}={v:g}" for k, v in verdict.scores.setting.items()) or "defaults"),
            words(" ".join(k[:12] if len(k) == 64 else k for k in verdict.scores.keys)),
        ]
        for task, verdicts in report.tasks
        for name, verdict in verdicts.items()
    ]
    versions = ", ".join(f"{name} {number}" for name, number in report.libraries.items())
    again = escape("\n".join(report.commands))
    head = ("task", "method", "setting", "cells, by split")
    return (
        '<section id="settings"><h2>Settings</h2>'
        + (f"<p>This repeats it:</p><pre>{again}</pre>" if again else "")
        + f'<p class="note">{escape(versions)}</p>'
        + folded("Settings that were used, and the hashes of cells", table(head, lines))
        + "</section>"
    )


# What the page has, in order: functions from the report to HTML, empty where there is nothing.
Section = Callable[[Report], str]
SECTIONS: tuple[Section, ...] = (answers, dials, claims, tasks, ranks, settings)
