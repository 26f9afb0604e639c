"""A run with an agreed plan: resumed, across sites, and with the plan in its folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from medfed.common.errors import ConfigError
from medfed.common.files import digest
from medfed.config.compose import described
from medfed.delivery.start.pretrained import Pretrained
from medfed.models.segmentation import SegmentationTask
from medfed.run.experiment import reopen_selected
from medfed.run.onboarding import hospital_at
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


def test_patterns_that_leave_nothing_to_share_are_refused(planned):
    with pytest.raises(ConfigError, match="so FedPer would share nothing"):
        data_and_task(described([*planned, 'model.personal=["*_*", "*skip_layers.*"]']))
    with pytest.raises(ConfigError, match="a residual encoder has no network"):
        data_and_task(described([*planned, "data.planning.residual=M"]))
    with pytest.raises(ConfigError, match="model=planned is the network of a plan"):
        data_and_task(described([*planned, "data.planning=null", "data.batch_size=2",
                                 "data.patch_size=[16,16,8]"]))  # fmt: skip
