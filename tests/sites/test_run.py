"""A run across sites leaves what the ordinary run leaves, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medfed.run.finished import Run
from tests.integration.runs import CLINICAL, run
from tests.sites.hospitals import across, direct, same


@pytest.mark.parametrize("method", ["fedavg", "pfednet"])
def test_equal_to_the_ordinary_run(method, tmp_path: Path):
    overrides = (*CLINICAL, f"algorithm={method}", "partition.num_clients=3")
    expected, experiment = run(tmp_path / "simulation", *overrides)
    names = list(experiment.data.clients)
    transport = direct(tmp_path / "sites", names, *overrides)
    summary = across(tmp_path / "server", transport, names, *overrides)
    assert not same(tmp_path / "simulation", tmp_path / "server")
    equal = ("clients", "federation", "bytes", "savings", "steps", "selected_round")
    assert {k: summary[k] for k in equal} == {k: expected[k] for k in equal}
    found = Run(tmp_path / "server")
    assert list(found.clients) == names
    assert not (tmp_path / "server" / "models").exists()
    assert not (tmp_path / "server" / "absences.json").exists()
    splits = json.loads((tmp_path / "server" / "splits.json").read_text())
    assert splits["clients"] == {c: {} for c in names}  # no patient's name left a site
