"""The page as a browser lays it out: nothing wider than the window, no words upon words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from medfed.common.console import caption
from medfed.common.scores import Record
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.models.contours import Case, contour_grid
from medfed.reports.charts import COLOURS, Row, curves, forest, hospitals, scatter, svg
from medfed.reports.findings import judged
from medfed.reports.report import page
from medfed.reports.task_pictures import looks_of, pictures_of
from medfed.run.pictures import bytes_per_client, metric_curves
from tests.pages import hovers
from tests.reports.test_verdicts import many_methods

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
LOOK = """
<script>onload=()=>{const told=[];for(const f of document.querySelectorAll("iframe")){
const d=f.contentDocument,near=(p,q)=>Math.min(p.right,q.right)-Math.max(p.left,q.left)>1&&
Math.min(p.bottom,q.bottom)-Math.max(p.top,q.top)>4,upon=[];
for(const s of d.querySelectorAll("svg")){const words=[...s.querySelectorAll("text")].map(
t=>[t.textContent,t.getBoundingClientRect()]);
words.forEach(([a,p],i)=>words.slice(i+1).forEach(([b,q])=>{if(near(p,q))upon.push(a+" | "+b)}))}
const box=t=>t.closest(".wide").getBoundingClientRect();
told.push({width:f.clientWidth,scroll:d.documentElement.scrollWidth,upon,
dark:getComputedStyle(d.body).backgroundColor,nav:d.querySelector("nav").getBoundingClientRect().top,
outside:[...d.querySelectorAll("table")].filter(t=>box(t).right>f.clientWidth+1).length})}
document.title=JSON.stringify(told)}</script>
"""


def test_each_method_has_one_pair_of_colour_and_marker():
    """Beyond eight methods, too; each colour is legible on paper and in the dark."""
    looks = looks_of(judged([many_methods()]))
    assert len(looks) == len(set(looks.values())) == 12
    for n in (0, 1):
        paper = luminance(COLOURS["paper"][n])
        for look in looks.values():
            ends = sorted((paper, luminance(COLOURS[look.colour][n])))
            assert (ends[1] + 0.05) / (ends[0] + 0.05) >= 3  # WCAG 2.1, graphical objects


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def ledger(parts):
    kept = Ledger()
    for part in parts:
        kept.add(Entry(0, "fit", "a hospital", "up", part, 10, 10))
    return kept


PICTURES = {
    "contours of one method": lambda names: contour_grid(
        {
            "a": Case(
                torch.rand(1, 8, 8),
                torch.zeros(len(names), 8, 8),
                {"m": torch.rand(len(names), 8, 8)},
            )
        },
        names,
    ),
    "bytes of a run": lambda names: bytes_per_client(ledger(names)),
    "rounds of a run": lambda names: metric_curves(
        [Record(r, name, {"auroc": 0.5}) for r in (0, 1) for name in names], "auroc", 1
    ),
    "hospitals": lambda names: hospitals(["a"], {n: [(0.5, 0.4, 0.6)] for n in names}, "AUC", {}),
    "curves": lambda names: curves({n: [(0, 0.5), (1, 0.6)] for n in names}, "x", "y", {}),
    "bytes and scores": lambda names: scatter(dict.fromkeys(names, (1000.0, 0.5)), [], "y", {}),
}


@pytest.mark.parametrize("what", PICTURES)
@pytest.mark.parametrize("length", [2, 24, 56])
def test_legends_are_whole(what, length):
    names = [
        f"{n} pfednet strength=0.001 bits=8 client_bits=32 up.gamma=10"[:length] for n in range(8)
    ]
    figure = PICTURES[what](names)
    FigureCanvasAgg(figure).draw()
    (shown,) = figure.legends
    texts = [re.sub("^predicted |, to server$", "", text.get_text()) for text in shown.texts]
    kept = 24 if what in ("rounds of a run", "contours of one method") else 60
    assert {caption(name, kept) for name in names} <= {*texts}
    box, whole = shown.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    for axes in figure.axes:
        assert not box.overlaps(axes.get_window_extent())


def drawn_and_named(figure):
    """The methods of the markers of a picture, and those of its legend."""
    drawn = {re.split(": ", dot)[0].rpartition(", ")[2] for dot in hovers(figure)}
    return drawn, {text.get_text() for shown in figure.legends for text in shown.texts}


def test_every_method_is_in_the_legend_of_each_picture():
    report = judged([many_methods()])
    ((task, verdicts),) = report.tasks
    pictures = pictures_of(task, verdicts, looks_of(report))
    for name in ("bytes", "gains", "rounds", "passes", "sent"):
        drawn, named = drawn_and_named(pictures[name].figure)
        assert drawn == named
    assert drawn_and_named(pictures["bytes"].figure)[1] == {*task.scores} - {"pooled"}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.001, 3.0], ids=["level", "alike", "one far apart"])
def test_a_caption_names_what_is_drawn_and_nothing_else(pooled, constant, spread):
    task = many_methods()
    if not pooled:
        del task.scores["pooled"]
    if constant:
        task.floor["constant"] = np.full((6, 20), 0.5)
    for k, (name, scores) in enumerate(task.scores.items()):
        noise = np.linspace(-1, 1, 6)[:, None] * (spread if spread < 1 or name == "apfl" else 0.01)
        values = 0.7 + 0.01 * k * (spread > 0) + noise * np.ones((1, 20))
        task.scores[name] = replace(scores, values=values)
    report = judged([task])
    picture = pictures_of(task, report.tasks[0][1], looks_of(report))["forest"]
    (axes,) = picture.figure.axes
    words = {text.get_text() for text in axes.texts}
    told = picture.caption
    assert ("▲" in told) == ("▲" in words)
    assert ("▼" in told) == ("▼" in words)
    assert (
        ("all patients in one place" in told) == any("in one place" in w for w in words) == pooled
    )
    assert ("constant" in told) == any("a constant" in w for w in words) == constant
    cut = [line for line in axes.lines if line.get_marker() in ("<", ">")]
    assert ("Arrows:" in told) == bool(cut)
    assert len(cut) <= 2  # alike intervals are whole; one that is far wider is cut


def test_a_row_without_a_value_says_so():
    nothing = (float("nan"),) * 3
    figure = hospitals(["a", "b"], {"m": [(0.5, 0.4, 0.6), nothing]}, "AUC", {})
    assert [text.get_text() for text in figure.axes[0].texts] == ["no value"]
    figure = forest([Row("m", 0.5, 0.4, 0.6), Row("n", *nothing)], {}, "AUC")
    assert "no value" in [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("name", ['St. "Mary" & <b>', "St. Mary's $a$", "_医院"])
def test_hovering_shows_any_name(name):
    drawn = ElementTree.fromstring(svg(forest([Row(name, 0.5, 0.4, 0.6)], {}, "AUC"), name))
    assert drawn.attrib["aria-label"] == name
    assert {t.text for t in drawn.iter("title")} == {f"{name}: 0.5000 [0.4000, 0.6000]"}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_or_covered(dark, tmp_path):
    text = page(judged([many_methods()])).replace(
        "</body>", "<script>scrollTo(0,900)</script></body>"
    )
    frames = "".join(
        f'<iframe width="{width}" height="800" style="border:0" srcdoc="{escape(text)}"></iframe>'
        for width in (1280, 390)
    )
    (tmp_path / "look.html").write_text(f"<!doctype html>{frames}{LOOK}", encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
    ]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom"]
    run = subprocess.run(
        [*command, "--window-size=1400,900", f"file://{tmp_path}/look.html"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    for seen in json.loads(re.search(r"<title>(\[.*?\])</title>", run.stdout)[1]):
        assert seen["scroll"] <= seen["width"]
        assert seen["upon"] == []
        assert seen["outside"] == 0
        assert seen["nav"] == 0  # it stays
        assert seen["dark"] == ("rgb(22, 22, 24)" if dark else "rgb(255, 255, 255)")
