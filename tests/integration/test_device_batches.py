"""Runs whose batches are made as on a GPU leave the hashes of ordinary runs, byte for byte."""

from __future__ import annotations

import json
import shutil

import pytest

from medfed.datamodules.client_data import ClientData
from medfed.federation.engine import batches, graphs
from medfed.federation.engine.batches import Residents
from tests import processes
from tests.federation.test_graphs import StandIn
from tests.integration.runs import CLINICAL, imaging, resume, run

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


AS_A_GPU = """
from medfed.federation.engine import batches

batches.DEVICES.add("cpu")
from medfed.commands.train import main

main()
"""


@pytest.mark.promise("two ranks")
def test_states_that_stay_change_no_hash_resumed_and_on_two_ranks(tmp_path, monkeypatch):
    words = (*CLINICAL, "local.optimizer_state=kept", "optimizer=adam", "optimizer.lr=0.01")
    run(tmp_path / "plain", *words)
    monkeypatch.setattr(batches, "DEVICES", {"cpu"})
    words, stayed, keep = (*words, "local.resident_states=true"), list[int](), Residents.keep

    def noted(self, client, size):
        keep(self, client, size)
        stayed.append(len(self.states))

    monkeypatch.setattr(Residents, "keep", noted)
    _, experiment = run(tmp_path / "straight", *words)
    assert max(stayed) == len(experiment.module.federation.ids)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    (tmp_path / "resumed" / "summary.json").unlink()
    for path in (tmp_path / "resumed" / "checkpoints").glob("*00002*"):
        path.unlink()
    resume(tmp_path / "resumed", *words)
    script = tmp_path / "train.py"
    script.write_text(AS_A_GPU)
    words = (*words, "trainer=ddp", f"hydra.run.dir={tmp_path / 'two'}")
    started = processes.ranks(script, *words, together=True)
    logs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(logs)
    hashes = {f.parent.name: f.read_text() for f in tmp_path.glob("*/hashes.json")}
    assert [*sorted(hashes)] == ["plain", "resumed", "straight", "two"]
    assert len(set(hashes.values())) == 1
