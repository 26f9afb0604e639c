"""The page as a browser lays it out: nothing wider than the window, no words upon words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from xml.etree import ElementTree

import pytest

from medfed.reports.charts import COLOURS, Row, forest, svg
from medfed.reports.findings import judged
from medfed.reports.report import page
from medfed.reports.task_pictures import looks_of
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
