"""A run with an agreed plan: resumed, across sites, and with the plan in its folder."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from medfed.common.untrusted import read_tensors
from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.main import export, predict
from medfed.delivery.start.pretrained import Pretrained
from medfed.federation.split import float_entries
from medfed.models.segmentation import SegmentationTask
from medfed.run.finished import reopen_selected
from medfed.run.onboarding import hospital_at
from medfed.standalone.errors import ConfigError
from medfed.standalone.files import digest
from tests.delivery.hospitals import run_by_monai, same_files
from tests.integration.runs import data_and_task, outcome, resume, run
from tests.sites.hospitals import across, direct, same

PLANNED = (
    *("experiment=nnunet", "algorithm=fedper", "rounds=2", "local.steps=2", "logger=none"),
    *("progress=false", "data.generated.hospitals=2", "data.generated.patients=4"),
    *("data.generated.shape=[28,24,12]", "data.patches_per_patient=2", "data.val_fraction=0.25"),
    *("data.planning.memory_gb=0.01", "data.planning.features=4", "model.surface=false"),
)


@pytest.fixture(scope="module")
def planned(cohort_root) -> tuple[str, ...]:
    return (*PLANNED, f"data.root={cohort_root}")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, planned) -> Path:
    folder = tmp_path_factory.mktemp("planned") / "run"
    run(folder, *planned)
    return folder


def test_the_run_folder_has_the_plan_its_hash_and_the_bytes_of_the_agreement(straight):
    kept = json.loads((straight / "plan.json").read_text())
    assert kept["sha256"] == digest(kept["plan"])
    assert kept["plan"]["configuration"] == "3d_fullres"
    for of in json.loads((straight / "preprocessing.json").read_text()).values():
        assert of["plan"] == kept["plan"]
        assert of["resampled_to"] == kept["plan"]["spacing"]
    with (straight / "ledger.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "preprocessing"]
    assert [row["direction"] for row in rows] == ["up", "up", "down", "down"]
    assert all(100 < int(row["bytes"]) < 8000 for row in rows)
    with (straight / "ledger.csv").open() as file:
        sent = {row["part"] for row in csv.DictReader(file)}
    assert sent == {"preprocessing", "shared"}  # no decoder leaves


class Killed(BaseException):
    """The end of a process."""


def test_killed_and_resumed_equals_straight(straight, planned, tmp_path, monkeypatch):
    loss, calls = SegmentationTask.data_loss, []

    def kill(task, batch):
        calls.append(1)
        if len(calls) == 1 + 2 * 2 + 2:  # the trial, a round of two clients, one step more
            raise Killed
        return loss(task, batch)

    monkeypatch.setattr(SegmentationTask, "data_loss", kill)
    with pytest.raises(Killed):
        run(tmp_path, *planned)
    monkeypatch.undo()
    assert not (tmp_path / "summary.json").exists()
    resume(tmp_path, *planned)
    assert outcome(tmp_path) == outcome(straight)


def test_across_sites_it_is_the_simulation(straight, planned, tmp_path):
    names = ["hospital_0", "hospital_1"]
    transport = direct(tmp_path / "sites", names, *planned)
    across(tmp_path / "server", transport, names, *planned)
    assert not same(straight, tmp_path / "server")
    plans = [(folder / "plan.json").read_bytes() for folder in (straight, tmp_path / "server")]
    assert plans[0] == plans[1]


def test_who_joins_later_has_the_plan_and_who_starts_from_it_is_told(straight, planned, tmp_path):
    kept = json.loads((straight / "plan.json").read_text())["plan"]
    experiment = reopen_selected(straight)
    source = experiment.data.source
    joined = hospital_at(experiment, source)
    assert joined.train["image"].shape[2:] == tuple(kept["patch_size"])
    assert joined.batch_size == kept["batch_size"]
    with pytest.raises(ConfigError, match="prepared its data by a plan"):
        Pretrained(weights=str(straight), adopt=["data"]).read()
    network = Pretrained(weights=str(straight), adopt=["network"]).read().adopted["model.network"]
    assert network["plan"] == kept


def test_a_residual_encoder_is_trained_continued_exported_and_across_sites(
    planned, tmp_path, monkeypatch, capsys
):
    """nnU-Net's own network, whose weights have several names each and count once."""
    pytest.importorskip("dynamic_network_architectures", reason="needs medfed[resenc]")
    keys = (*planned, "data.planning.residual=M", "data.normalize=zscore")
    folder, names = tmp_path / "run", ["hospital_0", "hospital_1"]
    _, experiment = run(folder, *keys)
    said = capsys.readouterr().out
    assert "3d_fullres, ResEnc M" in said
    assert "Set by you, not planned: data.normalize=zscore." in said
    network = experiment.task.network
    one, other = (read_tensors(folder / "models" / f"{name}.safetensors") for name in names)
    assert one.keys() == float_entries(network).keys()
    apart = {name.split(".")[0] for name in one if not torch.equal(one[name], other[name])}
    assert apart == {"decoder"}
    with (folder / "ledger.csv").open() as file:
        (size,) = {int(r["bytes"]) for r in csv.DictReader(file) if r["part"] == "shared"}
    shared = 4 * sum(p.numel() for p in network.encoder.parameters())
    assert shared < size < shared + 10_000
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    for path in (again / "summary.json", *(again / "checkpoints").glob("round_00001*")):
        path.unlink()
    resume(again, *keys)
    assert outcome(again) == outcome(folder)
    across(tmp_path / "server", direct(tmp_path / "sites", names, *keys), names, *keys)
    assert not same(folder, tmp_path / "server")
    (bundle,) = export(checked(load([f"run={folder}", "client=hospital_0", "onnx=true"], "export")))
    facts = read_bundle(bundle).facts
    assert facts["packages"].keys() == {"monai", "dynamic_network_architectures"}
    network.load_state_dict(one, strict=False)
    image = torch.randn(1, 1, *facts["patch_size"])
    with torch.no_grad():
        kept, trained = read_bundle(bundle).network()(image), network.eval()(image)
    torch.testing.assert_close(kept, trained, rtol=1e-6, atol=1e-6)
    scan = min(experiment.data.scans.path.rglob("imagesTr/*.nii.gz"))  # other tests made others
    keys = [f"bundle={bundle}", f"input={scan}", f"output={tmp_path / 'masks'}"]
    predict(checked(load(keys, "predict")))
    run_by_monai(bundle, scan, tmp_path / "monai", monkeypatch)
    assert same_files(tmp_path / "monai", tmp_path / "masks")


def test_patterns_that_leave_nothing_to_share_are_refused(planned):
    with pytest.raises(ConfigError, match="so FedPer would share nothing"):
        data_and_task(described([*planned, 'model.personal=["*_*", "*skip_layers.*"]']))
    adam = described([*planned, "optimizer=adam"]).model.optimizer
    assert {"momentum", "nesterov"} & {*adam} == set()  # nnU-Net's, of its own optimizer alone
    with pytest.raises(ConfigError, match="model=planned is the network of a plan"):
        data_and_task(described([*planned, "data.planning=null", "data.batch_size=2",
                                 "data.patch_size=[16,16,8]"]))  # fmt: skip
