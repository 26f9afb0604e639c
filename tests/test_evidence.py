"""The page of evidence holds what its script prints from the stored results."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/evidence/evidence.py"))


def test_the_page_has_the_tables_that_the_script_prints():
    """After a benchmark: ``python benchmarks/evidence.py --collect …``; its output is the page."""
    stored = json.loads((ROOT / "docs" / "evidence.json").read_text("utf-8"))
    page = (ROOT / "docs" / "evidence_tables.md").read_text("utf-8")
    lines = [line for line in SCRIPT["pages"](stored) if line]
    assert len(lines) > 20
    assert [line for line in lines if line not in page.splitlines()] == []
    assert len((ROOT / "docs" / "evidence.md").read_text("utf-8").split()) <= 1500


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
