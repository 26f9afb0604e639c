"""A small benchmark end to end: tuned, tested, killed, repeated, reported; and what it refuses."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import time
from html import escape
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import ttest_rel

from medfed.benchmark import runner
from medfed.benchmark.main import benchmark
from medfed.records import cells
from medfed.reports.verdicts import LEAST_SPLITS
from medfed.standalone.errors import CheckpointError
from medfed.standalone.files import digest
from tests import processes

SUITE = """
title: Two hospitals
experiment: clinical_pfednet
overrides: ["model.selection=[auroc,max]", partition.num_clients=2]
lr: [0.01, 1.0]
splits: folds
dial: δ
variants:
  one: {dial: 1, overrides: [partition.delta=1]}
  four: {dial: 4, overrides: [partition.delta=4]}
sizes:
  smoke: {splits: 2, trials: 2, overrides: [rounds=1, local.steps=2]}
  small: {splits: 2, trials: 2, overrides: [rounds=1, local.steps=2]}
  full: {splits: 2, trials: 2, overrides: [rounds=1, local.steps=2]}
arms:
  apart: {method: ditto, overrides: [algorithm.strength=0], splits: 1}
"""
SAME = "four: {dial: 4, overrides: [partition.delta=1]}"
KILLED = """
from pathlib import Path
from medfed.benchmark.main import benchmark
benchmark("two", ["ditto"], size="smoke", workers=0, out=Path({out!r}), plugins=[{plugins!r}])
"""
REPORT = ("table.csv", "clients.csv", "findings.json", "report.md")


def run(plugins, out, **own):
    usual = {"size": "smoke", "workers": 0, "figures": False}
    given = {**usual, "plugins": [str(plugins)], **own}
    return benchmark("two", ["ditto"], out=out, **given)


def written(out):
    return {name: (out / "report" / name).read_text() for name in REPORT}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "suites").mkdir()
    (folder / "suites" / "two.yaml").write_text(SUITE)
    return folder


@pytest.fixture(scope="module")
def done(plugins, tmp_path_factory):
    out = tmp_path_factory.mktemp("benchmark")
    return out, run(plugins, out)


def test_all_methods_are_tuned_alike_and_tested_on_fresh_splits(done):
    out, told = done
    files = sorted(p.name.rpartition("-")[0] for p in (out / "cells/two/one/ditto").iterdir())
    trial = files[0].split("_")[2]
    assert files == [
        *(f"final_trial_{trial}_split_{n}" for n in (0, 1)),
        *(f"tune_trial_{n}_split_1000" for n in (0, 1)),
    ]
    # What the ceiling trains on from is tuned once.
    assert not list((out / "cells/two/one/pooled_finetuned").glob("tune*"))
    _, verdicts = told.tasks[0]
    assert list(verdicts) == ["local", "fedavg", "pooled", "pooled_finetuned", "ditto"]
    for path in (out / "cells").rglob("tune*.json"):
        assert "clients" not in json.loads(path.read_text())["result"]  # no test patient was read


def test_what_is_reported_is_what_the_cells_say(done):
    out, told = done
    (task, verdicts), *_ = told.tasks
    values = {
        name: [
            np.mean([c["auroc"] for c in r["clients"].values()])
            for r in (
                json.loads(p.read_text())["result"]
                for p in sorted((out / f"cells/two/one/{name}").glob("final*"))
            )
        ]
        for name in verdicts
    }
    for name, verdict in verdicts.items():
        assert verdict.mean.mean == pytest.approx(np.mean(values[name]))
    d = verdicts["ditto"].against["fedavg"]
    assert d.difference.mean == pytest.approx(np.mean(values["ditto"]) - np.mean(values["fedavg"]))
    plain = ttest_rel(values["ditto"], values["fedavg"]).pvalue
    assert d.difference.p >= plain  # splits of the same patients are surer than they should be
    assert task.overlap == pytest.approx(0.25, abs=0.03)
    assert 0 <= task.floor["constant"].mean() <= 0.5
    rows = list(csv.DictReader(written(out)["table.csv"].splitlines()))
    assert [r["method"] for r in rows] == list(verdicts)
    assert float(rows[-1]["mean"]) == pytest.approx(np.mean(values["ditto"]), rel=1e-5)
    text = (out / "report" / "report.md").read_text()
    assert "size=smoke only shows that the benchmark runs" in text
    assert json.loads((out / "report" / "findings.json").read_text())["tasks"]["two/one"]


def test_nothing_is_run_twice(done, plugins, monkeypatch):
    out, _ = done
    before = written(out)

    def never(*_):
        raise AssertionError("a cell was run again")

    monkeypatch.setattr(runner, "run_cell", never)
    run(plugins, out)
    assert written(out) == before


def test_arms_are_measured_beside_and_are_no_methods_of_the_table(done, plugins, tmp_path):
    before, out = written(done[0]), tmp_path / "out"
    shutil.copytree(done[0], out)
    run(plugins, out, arms=True)
    (path,) = (out / "cells/two/one/apart").iterdir()
    assert path.name.startswith("final_trial_")
    assert written(out)["table.csv"] == before["table.csv"]


@pytest.mark.long
def test_killed_at_random_the_report_is_the_same(done, plugins, tmp_path):
    straight, _ = done
    out, script = tmp_path / "out", tmp_path / "killed.py"
    for method in ("local", "fedavg", "pooled"):  # the others are to be run, and killed
        shutil.copytree(straight / "cells/two/one" / method, out / "cells/two/one" / method)
    script.write_text(KILLED.format(out=str(out), plugins=str(plugins)))
    rng, kills = random.Random(0), 0
    for _ in range(2):
        started = processes.Started(script, cwd=tmp_path)
        had = len(list(out.rglob("*.json")))
        while started.poll() is None and len(list(out.rglob("*.json"))) < had + 1:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        if started.poll() is None:
            started.kill()
            started.wait(240)
            kills += 1
    assert kills
    for path in out.rglob("cells/**/*.json"):
        json.loads(path.read_text())  # whole
    run(plugins, out)
    assert written(out) == written(straight)
    assert not list(out.rglob("cells/**/.partial-*"))


def test_stale_cells_are_named_and_not_reported(done, plugins, monkeypatch, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    monkeypatch.setattr(cells, "libraries", lambda: {"torch": "0"})
    with pytest.raises(CheckpointError, match=r"nothing to report.*Stale.*two/one/local/tune"):
        run(plugins, out, report_only=True)


def test_a_cell_that_was_changed_is_refused_by_name(done, plugins, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    path = next((out / "cells/two/one/ditto").glob("final*split_1*"))
    content = json.loads(path.read_text())
    content["result"]["clients"]["hospital_0"]["auroc"] = 1.0
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{path.name} has changed since the benchmark"):
        run(plugins, out, report_only=True)
    path.write_text(path.read_text()[:100])
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        run(plugins, out, report_only=True)


def test_cells_of_different_data_are_no_table(done, plugins, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    path = next((out / "cells/two/one/ditto").glob("final*split_1*"))
    content = json.loads(path.read_text())
    content["result"]["data"] = "0"
    content["sha256"] = digest(content["result"])
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"two/one/ditto/final.*have other patients"):
        run(plugins, out, report_only=True)


def test_a_method_that_exceeds_a_budget_is_left_out_by_name(done, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "two.yaml").write_text(SUITE + "passes: 0.9\n")
    # Of a suite only the runs that it asks for are part of a cell.
    run(tmp_path, out, report_only=True)
    text = (out / "report" / "report.html").read_text()
    for method in ("local", "fedavg", "ditto"):
        assert f"{method} is left out of two/one: it cannot keep the budget of 2 gradient" in text
    assert "pooled is left out" not in text  # no budget holds what all patients in one place reach


def test_the_page_is_one_file_and_says_what_the_table_says(done, plugins):
    out, told = done
    text = (out / "report" / "report.html").read_text()
    # Nothing is fetched: links are to places of the page, and pictures are in it.
    assert not re.search(r'(?:src|href)="(?!#|data:image/)|@import|url\((?!#)', text)
    for anchor in re.findall(r'href="#([^"]+)"', text):
        assert f'id="{anchor}"' in text
    assert "prefers-color-scheme:dark" in text
    for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawn)
    task, verdicts = told.tasks[0]
    for name, verdict in verdicts.items():
        assert f"<td>{name}</td><td" in text
        several = task.splits >= LEAST_SPLITS  # fewer have no interval over splits
        assert (f">{verdict.mean.mean:.4f} <small>[" in text) == several
        assert f">{verdict.mean.mean:.4f}" in text
    for sentence in (*(s for found in told.answers.values() for s in found), *told.notes):
        assert escape(sentence) in text
    for client in task.clients:
        assert f"<th>{client}</th>" in text
    tex = (out / "report" / "tables.tex").read_text()
    rows = {row.partition(" & ")[0]: row for row in tex.splitlines()}
    assert f"${verdicts['pooled_finetuned'].mean.mean:.4f}" in rows[r"pooled\_finetuned"]
    assert f"auroc, {task.splits} splits" in tex
    shown = [a.verdict != "undecided" for v in verdicts.values() for a in v.against.values()]
    assert sum(shown) == tex.partition(r"\end{tabular}")[0].count(r"\mathbf")


def test_the_dial_is_drawn(done, tmp_path):
    """The cells of another variant that is the same are the same."""
    out = tmp_path / "out"
    shutil.copytree(done[0], out)
    (tmp_path / "suites").mkdir()
    same = SUITE.replace("four: {dial: 4, overrides: [partition.delta=4]}", SAME)
    (tmp_path / "suites" / "two.yaml").write_text(same)
    shutil.copytree(out / "cells/two/one", out / "cells/two/four")
    for path in (out / "cells/two/four").rglob("*.json"):
        path.write_text(path.read_text().replace("two/one/", "two/four/"))
    told = run(tmp_path, out, variants="all", report_only=True)
    dial = told.dials["two"]
    assert dial["at"] == [1, 4]
    assert not dial["crossings"]  # level curves
    for (task, verdicts), place in zip(told.tasks, (0, 1), strict=True):
        for name, verdict in verdicts.items():
            assert dial["curves"][name][place] == pytest.approx(verdict.mean.mean)
        assert task.variant == ("one", "four")[place]
    assert "two: the dial" in (out / "report" / "report.html").read_text()
