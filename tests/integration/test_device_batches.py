"""Runs whose batches are made as on a GPU leave the hashes of ordinary runs, byte for byte."""

from __future__ import annotations

import json

import pytest

from medfed.datamodules.client_data import ClientData
from medfed.federation.engine import batches, graphs
from tests.federation.test_graphs import StandIn
from tests.integration.runs import CLINICAL, imaging, run

DIGITS = (
    *("experiment=digits_pfednet", "rounds=2", "local.steps=2", "logger=none", "progress=false"),
    *("model.network.channels=[4,4,4]", "partition.num_clients=8", "evaluation.every=2"),
)
RUNS = {
    "digits": lambda root: DIGITS,
    "brats": lambda root: (*imaging(root), "evaluation.every=2"),
}


@pytest.mark.parametrize("name", RUNS)
def test_samples_on_the_device_change_no_hash(name, tmp_path, monkeypatch):
    words, moved, hashes = RUNS[name](tmp_path / "data"), list[str](), dict[str, str]()
    move = ClientData.resident_on

    def counted(self, device):
        moved.append(self.id)
        return move(self, device)

    monkeypatch.setattr(ClientData, "resident_on", counted)
    for kind, devices in {"plain": {"cuda"}, "resident": {"cpu", "cuda"}}.items():
        monkeypatch.setattr(batches, "DEVICES", devices)
        _, experiment = run(tmp_path / kind, *words)
        hashes[kind] = json.loads((tmp_path / kind / "hashes.json").read_text())
        assert experiment.module.local.residents.size == 0
        assert (
            len(moved)
            == len(set(moved))
            == (0 if kind == "plain" else len(experiment.module.federation.ids))
        )
    assert hashes["plain"] == hashes["resident"]


def test_prefetched_batches_change_no_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "DEVICES", {"cpu"})
    words, made = (*imaging(tmp_path / "data"), "augment=light"), list[object]()
    make = batches.ThreadPoolExecutor

    def counted(*args):
        made.append(args)
        return make(*args)

    monkeypatch.setattr(batches, "ThreadPoolExecutor", counted)
    hashes = []
    for kind in ("false", "true"):
        assert not made
        run(tmp_path / kind, *words, f"local.prefetch={kind}")
        hashes.append((tmp_path / kind / "hashes.json").read_text())
    assert hashes[0] == hashes[1]
    assert len(made) == 2 * 2 * 2  # a thread for each phase of two clients in two rounds


def test_steps_as_graphs_change_no_hash(tmp_path, monkeypatch):
    made = StandIn()
    monkeypatch.setattr(graphs, "record", made)
    monkeypatch.setattr(batches, "DEVICES", {"cpu"})
    words = (*CLINICAL, "local.optimizer_state=kept", "optimizer=adam", "optimizer.lr=0.01")
    hashes = []
    for kind in ("auto", "true"):
        assert not made.replayed
        run(tmp_path / kind, *words, f"local.graphs={kind}")
        hashes.append((tmp_path / kind / "hashes.json").read_text())
    assert hashes[0] == hashes[1]
    assert made.replayed
