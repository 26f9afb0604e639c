"""What a cell keeps is what the run has: how validation went, and what PPFL recovered."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from medfed.config.compose import described
from medfed.config.description import written
from medfed.federation.lightning.module import FederatedModule
from medfed.run.cell import run_cell
from tests.integration.runs import run

KEYS = ("experiment=synthetic_ppfl", "data.clients=4", "data.samples=60", "rounds=2")
SHORT = ("local.steps=2", "evaluation.every=1", "logger=none", "progress=false")


def test_a_cell_has_the_numbers_of_the_same_run(tmp_path):
    summary, experiment = run(tmp_path / "run", *KEYS, *SHORT)
    cell = run_cell(written(described([*KEYS, *SHORT, "folder=nowhere"])), "final")
    ledger, evaluation = experiment.module.federation.ledger, experiment.evaluation
    course = cell["course"]
    assert [row["round"] for row in course] == [1, 2]
    assert [row["passes"] for row in course] == [0.5, 1.0]
    until = np.cumsum([ledger.total(round=n) for n in range(2)])
    assert [row["bytes"] for row in course] == until.tolist()
    metric, mode = evaluation.selection
    for number, row in enumerate(course):
        values = [r.metrics[metric] for r in evaluation.history if r.round == number]
        sign = 1 if mode == "max" else -1
        assert row["score"] == pytest.approx(sign * np.mean(values))
    assert cell["memberships"] == summary["memberships"]
    assert cell["clients"] == experiment.evaluation.test
    assert "half_l1" in cell["memberships"]


def test_cells_do_not_pile_up_in_memory():
    """Python alone collects what refers to itself so seldom that 80 cells held 6 GB of pictures."""
    config = written(described([*KEYS, *SHORT, "folder=nowhere"]))
    gc.disable()
    of_other_tests = [id(o) for o in gc.get_objects() if type(o) is FederatedModule]
    try:
        run_cell(config, "tune")
        here = [o for o in gc.get_objects() if type(o) is FederatedModule]
        seen = [weakref.ref(o) for o in here if id(o) not in of_other_tests]
        del here
        run_cell(config, "tune")
        left = [one for one in seen if one() is not None]
    finally:
        gc.enable()
    assert seen
    assert not left
