"""The page of evidence says what its script finds in the stored results."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/evidence/evidence.py"))


def test_the_page_counts_the_answers_that_the_script_gives():
    """After a benchmark: ``python benchmarks/evidence/evidence.py --collect …``."""
    tasks = json.loads((ROOT / "docs" / "evidence.json").read_text("utf-8"))["benchmark"]["tasks"]
    rows = [line.strip("| ").split(" | ") for line in SCRIPT["of_claims"](tasks)[2:]]
    answers = Counter(row[-1] for row in rows)
    assert len(rows) == answers.total() > 20
    page = " ".join((ROOT / "docs" / "evidence.md").read_text("utf-8").split())
    told = ", ".join(f"{answers[a]} {a}" for a in ("yes", "no", "cannot tell"))
    assert f"get {len(rows)} answers: {told}" in page


def test_the_page_has_the_dice_of_kept_and_of_estimated_statistics():
    """After a measurement: ``evidence.py --collect-normalization …``."""
    found = json.loads((ROOT / "docs" / "evidence.json").read_text("utf-8"))["normalization"]
    cases = ["local", "fedavg", "fedbn", "fedavg_often", "fedavg_often_moments", "fedbn_often"]
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    table = page.partition("| Dice, two divisions")[2].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 7
    for line, case in zip(table, [*cases, "fedbn_often_moments"], strict=True):
        for cell, suite in zip(line.split("|")[2:4], ("retina_centres", "lgg"), strict=True):
            if cell.strip():
                both = [found[f"{suite}/{case}/{split}"] for split in (0, 1)]
                means = [
                    np.mean([one[kind]["dice"] for one in both]) for kind in ("kept", "reestimated")
                ]
                assert cell.strip() == f"{means[0]:.3f}, **{means[1]:.3f}**", case


def test_federations_are_dealt_alike_in_size():
    rng = np.random.default_rng(0)
    sizes = {f"h{n}": int(rng.integers(20, 300)) for n in range(60)}
    groups = SCRIPT["deal"](sizes, 60, 250, 5)
    chosen = Counter(name for group in groups for name in group)
    assert set(chosen.values()) == {1}
    assert {len(group) for group in groups} == {5}
    assert all(60 <= sizes[name] <= 250 for name in chosen)
    means = [np.mean([sizes[name] for name in group]) for group in groups]
    assert max(means) - min(means) < 30


def test_the_page_has_the_scores_of_newer_methods():
    """After a benchmark of newer methods: ``evidence.py --collect-newer …``."""
    stored = json.loads((ROOT / "docs" / "evidence.json").read_text("utf-8"))["newer"]["tasks"]
    methods = stored["stroke/hospitals"]["methods"]
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    section = page.partition("## Newer methods on strokes")[2]
    rows = [line.strip("| ").split(" | ") for line in section.split("\n\n")[2].splitlines()[2:]]
    named = {"recalibrated FedAvg": "recalibrated", "kNN-Per": "knnper"}
    for name, mean, alone, brier, gain, _ in rows[:-1]:
        one = methods[named.get(name, name.lower())]
        assert mean == f"{one['mean']['mean']:.3f}", name
        gap = one["against"]["local"]
        ends = (f"{gap[end]:+.3f}".replace("-", "−") for end in ("mean", "low", "high"))
        assert alone == "{} [{}, {}]".format(*ends), name
        assert brier.strip("*") == f"{one['brier']['mean']:.3f}", name
        shown = one["brier"]["says"]["fedavg"] == "better"
        assert gain == f"{one['brier']['against']['fedavg']['mean']:.3f}{' *' * shown}", name
    assert len(rows) == 10
    surely = [n for n, one in methods.items() if one["brier"]["says"].get("local") == "better"]
    assert surely == ["fedpac"]
    assert not any(one["harmed"]["surely"] for one in methods.values() if one["harmed"])
