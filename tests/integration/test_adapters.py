"""A run with low-rank adapters: resumed, evaluated, exported as the plain network that it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.export.export import export_run
from medfed.federation.split import float_entries
from medfed.models.networks.adapters import Adapters, attach
from medfed.records.folder import Run
from medfed.run.evaluation import evaluate_run
from medfed.run.start import base_entries
from medfed.standalone.errors import ConfigError
from tests.integration.runs import outcome, resume, run
from tests.toys import ToyTask, assert_alike

DIGITS = (
    *("experiment=digits_pfednet", "partition=round_robin", "partition.num_clients=2"),
    *("rounds=2", "local.steps=3", "logger=none", "progress=false"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of adapters on what another run has learnt; what it printed is beside it."""
    root = tmp_path_factory.mktemp("adapters")
    run(root / "first", *DIGITS, "algorithm=fedavg", "local.steps=20")
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medfed.run.start.say", lambda _, *lines: said.extend(lines))
        run(root / "run", *overrides(root))
    (root / "said").write_text("\n".join(said))
    return root / "run"


def overrides(root: Path) -> tuple[str, ...]:
    start = f"init.weights={root / 'first'}"
    return (*DIGITS, "algorithm=ditto", "adapters=lora", "adapters.rank=2", start)


def test_what_travels_is_told_and_counted(folder):
    said = (folder.parent / "said").read_text()
    said = said[said.index("Adapters of rank 2: ") :]
    trained, frozen = (int(s.replace(",", "")) for s in (said.split()[4], said.split()[7]))
    entries = Run(folder).ledger.entries
    base = [(e.round, e.client, e.bytes) for e in entries if e.part == "base"]
    assert base == [(0, client, 4 * frozen + 12) for client in Run(folder).clients]
    fits = {e.bytes for e in entries if e.phase == "fit" and e.direction == "up"}
    assert fits == {4 * trained + 12}
    record = json.loads((folder / "start.json").read_text())
    assert record["shares"]["matched"] == 1
    before = safetensors.torch.load_file(folder / "start.safetensors")
    assert sum(t.numel() for t in before.values()) < trained + frozen  # of the plain network


def test_resumed_and_evaluated_it_is_the_same(folder, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(folder, again)
    for path in (again / "checkpoints").glob("round_00001*"):
        path.unlink()
    resume(again, *overrides(folder.parent))
    assert outcome(again) == outcome(folder)
    assert evaluate_run(again)["clients"] == Run(folder).summary["clients"]


def test_what_is_kept_and_exported_is_the_plain_network(folder):
    (folder.parent / "first").rename(folder.parent / "elsewhere")
    done = Run(folder)
    client = done.clients[0]
    network = done.model(client)
    start = safetensors.torch.load_file(folder / "start.safetensors")
    moved = {n for n, t in float_entries(network).items() if not torch.equal(t, start[n])}
    assert {n.rpartition(".")[2] for n in moved} == {"weight", "bias"}
    assert "head.bias" in moved
    assert not [n for n in moved if n.endswith("bias") and n != "head.bias"]
    export_run(checked(load([f"run={folder}", f"client={client}"], "export")))
    image = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        exported = read_bundle(folder / "bundles" / client).network()(image)
        assert_alike(exported, network(image), 1e-6)


@pytest.mark.parametrize(
    ("more", "counted"),
    [((), True), (("adapters.base=known",), False), (("init.weights=null",), False)],
    ids=["sent", "known", "of-the-seed"],
)
def test_a_base_is_counted_where_hospitals_cannot_have_it(more, counted):
    task = ToyTask()
    told = attach(task.network, Adapters(rank=1))
    given = ["experiment=digits_pfednet", "adapters=lora", f"init.weights={__file__}"]
    config = described([*given, *more])
    entries = base_entries(config, task, ["a", "b"])
    wanted = [("a", 4 * told.frozen + 12), ("b", 4 * told.frozen + 12)] if counted else []
    assert [(e.client, e.bytes) for e in entries] == wanted


def test_personal_adapters_need_a_method_that_keeps_them(tmp_path):
    with pytest.raises(ConfigError, match=r"adapters\.part=personal is for methods that keep"):
        run(tmp_path, *DIGITS, "algorithm=fedavg", "adapters=lora", "adapters.part=personal")
