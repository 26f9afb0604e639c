"""Runs whose numbers could look right and are not: failed models, data that define no metric."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from medfed.common.scores import worst_value
from medfed.federation.federation import Federation
from medfed.federation.lightning.checkpoint import seal
from medfed.functional.scores import CLASS_SCORES
from medfed.records.folder import Run
from medfed.reports.report import report_runs
from medfed.run.evaluation import evaluate_run
from medfed.standalone.errors import CheckpointError, NonFiniteError
from tests.integration.runs import CLINICAL, left_in, resume, run

ALONE = (*CLINICAL, "algorithm=local", "pictures.format=png")  # such numbers must be drawn, too
UNDEFINED = ["balanced_accuracy", "auroc", "sensitivity", "f1"]  # where all are healthy


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("medfed")]


def test_a_run_that_diverges_everywhere_has_no_result(tmp_path):
    with pytest.raises(NonFiniteError, match="In every evaluated round the loss is not finite or"):
        run(tmp_path / "run", *ALONE, "rounds=1", "local.steps=1", "optimizer.lr=1e29")
    record = json.loads((tmp_path / "run" / "unusual.json").read_text())
    assert len(record["diverged"]["0"]) == 5
    assert not (tmp_path / "run" / "summary.json").exists()


def test_models_that_fail_do_not_look_like_results(tmp_path, caplog, capsys, monkeypatch):
    model = Federation.personal_model

    def personal_model(self, client, split="test"):
        weights = model(self, client, split)
        lost = client != self.ids[-1]
        return {n: t * math.nan for n, t in weights.items()} if lost else weights

    monkeypatch.setattr(Federation, "personal_model", personal_model)
    summary, _ = run(tmp_path / "run", *ALONE, "rounds=1", "local.steps=1")
    *clients, _ = summary["clients"]
    assert summary["failed"] == {"val": {c: [0] for c in clients}, "test": clients}
    points = ("sensitivity/point", "specificity/point", "brier/calibrated", "log_loss/calibrated")
    names = ("loss", *CLASS_SCORES, *points)
    for metrics in (summary["clients"][client] for client in clients):
        assert metrics == {name: worst_value(name) for name in names}
        assert (metrics["loss"], metrics["auroc"], metrics["brier"]) == (math.inf, 0.0, 1.0)
    assert summary["federation"]["loss"]["mean"] == math.inf
    assert summary["federation"]["accuracy"]["worst"] == 0.0
    assert [s for s in warned(caplog) if "not finite" in s] == [
        f"Round 1: The loss or the predictions of {c} on its validation data are not finite; "
        f"{c} gets the worst possible values."
        for c in clients
    ]
    assert f"predictions of {clients[0]} on its test data are not finite" in capsys.readouterr().out
    text = (tmp_path / "run" / "summary.json").read_text()
    json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are Python's alone
    read = Run(tmp_path / "run").summary
    assert json.loads(text)["federation"]["loss"] == read["federation"]["loss"] | {"sd": None}
    assert math.isnan(read["federation"]["loss"]["sd"])
    assert {**read, "federation": 0} == {**summary, "federation": 0}


@pytest.mark.parametrize(("round", "selected"), [(2, 1), (1, 2)])
def test_a_round_in_which_one_client_fails_is_not_its_mean_over_the_others(
    tmp_path, caplog, monkeypatch, round, selected
):
    """The loss falls, and without the failed client it would fall more; and the run goes on."""
    model, failing = Federation.personal_model, "hospital_3"  # the one of the largest loss

    def personal_model(self, client, split="test"):
        weights = model(self, client, split)
        now = client == failing and self.clients[client].steps_done == round + 1
        return {n: t * math.nan for n, t in weights.items()} if now else weights

    monkeypatch.setattr(Federation, "personal_model", personal_model)
    options = ("local.steps=1", "model.selection=[loss,min]", "evaluation.patience=3")
    summary, experiment = run(tmp_path / "run", *ALONE, *options)
    assert (summary["rounds"], summary["selected_round"]) == (3, selected)
    assert summary["failed"]["val"] == {failing: [round]}
    assert len([s for s in warned(caplog) if failing in s]) == 1
    rows = [r for r in Run(tmp_path / "run").history() if r.round == round]
    failed = next(r.metrics for r in rows if r.client == failing)
    assert (failed["loss"], failed["balanced_accuracy"]) == (math.inf, 0.0)
    assert experiment.evaluation.score(round) == -math.inf


def test_clients_of_one_class_are_named_and_left_out_of_every_round(tmp_path, caplog, capsys):
    summary, experiment = run(tmp_path / "run", *ALONE, "partition=shards")
    left_out = dict.fromkeys(("hospital_0", "hospital_2"), UNDEFINED)
    tested = {client: [*names, "sensitivity/point"] for client, names in left_out.items()}
    assert summary["undefined"] == {"val": left_out, "test": tested}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["undefined"]["val"]
    told = [s for s in warned(caplog) if "undefined" in s]
    assert told == [
        "The validation data of hospital_0, hospital_2 leave balanced_accuracy, auroc, "
        "sensitivity, f1 undefined; their statistics omit these clients."
    ]
    for number in range(3):
        values = [r for r in experiment.evaluation.history if r.round == number]
        nan = [r.client for r in values if math.isnan(r.metrics["balanced_accuracy"])]
        assert nan == list(left_out)
    known = [m["auroc"] for c, m in summary["clients"].items() if c not in left_out]
    assert summary["federation"]["auroc"]["mean"] == pytest.approx(sum(known) / 3)
    capsys.readouterr()
    again = evaluate_run(tmp_path / "run", "val")
    assert again["undefined"] == {"val": tested}
    report_runs([str(tmp_path / "run")], tmp_path / "out")
    assert "The test data of hospital_0, hospital_2 leave" in capsys.readouterr().out
    assert "| – |" in (tmp_path / "out" / "report.md").read_text()


def test_without_validation_patients_it_is_said_that_nothing_selects(tmp_path, caplog):
    summary, _ = run(tmp_path / "run", *ALONE, "rounds=2", "data.val_fraction=0")
    assert summary["selected_round"] == 1
    (told,) = (s for s in warned(caplog) if "no round can be selected" in s)
    assert "auroc" in told
    assert "the last one will be; set model.selection" in told


def test_where_no_client_has_two_classes_the_loss_selects(tmp_path, caplog):
    one_each = ("partition=label_groups", "partition.groups=[[0],[1]]", "partition.num_clients=4")
    summary, experiment = run(tmp_path / "run", *ALONE, *one_each, "evaluation.patience=2")
    (told,) = (s for s in warned(caplog) if "no round can be selected" in s)
    assert "leave auroc undefined at every client" in told
    assert "the smallest loss selects" in told
    assert summary["selection"] == ["loss", "min"]
    rounds = {r.round for r in experiment.evaluation.history}
    means = {
        n: np.mean([r.metrics["loss"] for r in experiment.evaluation.history if r.round == n])
        for n in rounds
    }
    assert summary["selected_round"] == min(means, key=means.__getitem__)
    assert evaluate_run(tmp_path / "run")["selection"] == ["loss", "min"]


@pytest.mark.parametrize(
    ("spoil", "words"), [(lambda saved: saved.pop("passes"), "passes is missing")]
)
def test_a_checkpoint_whose_counts_would_be_wrong(tmp_path: Path, spoil, words):
    folder = tmp_path / "run"
    run(folder, *ALONE, "rounds=2")
    (folder / "summary.json").unlink()
    path = folder / "checkpoints" / "round_00001.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    spoil(checkpoint["federation"])
    torch.save(checkpoint, tmp_path / "spoilt")
    seal(tmp_path / "spoilt", path)
    before = left_in(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        resume(folder, *ALONE, "rounds=2")
    assert "\n" not in str(caught.value)
    assert left_in(folder) == before
