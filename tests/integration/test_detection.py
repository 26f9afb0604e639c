"""Nodules in whole scans: a run, continued and compared; a client without lesions."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from medfed.common.untrusted import read_rows, read_tensors
from medfed.config.compose import described
from medfed.functional.detection import ALARM, SCAN
from medfed.records.folder import Run
from medfed.reports.tasks import resampled_of
from medfed.run.assembly import read_data, task_for
from tests.integration.runs import outcome, resume, run

QUICK = (
    *("experiment=luna16_detection", "rounds=2", "local.steps=2", "evaluation.every=1"),
    *("data.generated.hospitals=2", "data.generated.patients=4", "data.generated.shape=[64,64,24]"),
    *("data.val_fraction=0.25", "data.test_fraction=0.25", "data.batch_size=4"),
    *("data.patches_per_patient=4", "model.network.channels=[4,8]", "algorithm=fedper"),
    *("logger=none", "progress=false"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detection")
    keys = (*QUICK, f"data.root={folder / 'root'}")
    _, experiment = run(folder / "run", *keys, "pictures.format=pdf")
    return folder, keys, experiment


def test_a_run_continues_after_its_first_round(trained):
    """As if it had been killed in the second: the same bits."""
    folder, keys, _ = trained
    again = folder / "again"
    shutil.copytree(folder / "run", again)
    for path in (again / "summary.json", *(again / "checkpoints").glob("round_00001*")):
        path.unlink()
    assert list((again / "checkpoints").glob("round_*.ckpt"))
    resume(again, *keys)
    straight, continued = outcome(folder / "run"), outcome(again)
    for what in ("hashes", "models", "metrics"):
        assert straight[what] == continued[what]


def test_the_heads_are_personal_and_all_lesions_count(trained):
    folder, _, experiment = trained
    models = sorted((folder / "run" / "models").glob("*.safetensors"))
    one, other = map(read_tensors, models)
    apart = {name.split(".")[0] for name in one if not (one[name] == other[name]).all()}
    assert apart == {"classification_head", "regression_head"}
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["selection"] == ["lesion_cpm", "max"]
    for client, metrics in summary["clients"].items():
        data = experiment.data.clients[client]
        rows = experiment.task.measured(data.eval_batches("test")).cases()
        lesions = sum(p.counts[0] for i, p in experiment.data.patients.items()
                      if i in data.patients["test"])  # fmt: skip
        assert sum(row["lesions"] for row in rows) == lesions > 0
        assert 0 <= metrics["lesion_cpm"] <= metrics["lesions_found"] <= 1
        assert set(summary["intervals"]["clients"][client]) >= {"lesion_cpm", "lesions_found"}
    # LUNA16's own columns: every hit lies within the radius of a nodule of the annotations.
    annotated = read_rows(experiment.data.scans.path / "annotations.csv", ["seriesuid"])
    rows = read_rows(folder / "run" / "cases.csv", ["patient"])
    cases = [row for row in rows if int(row["found"]) != SCAN]
    places = read_rows(folder / "run" / "detections.csv", ["probability"])
    assert len(places) == len(cases) > 0
    hits = 0
    for case, place in zip(cases, places, strict=True):
        assert place["seriesuid"] == case["patient"]
        near = [
            math.dist(*([float(row[f"coord{axis}"]) for axis in "XYZ"] for row in (place, nodule)))
            <= float(nodule["diameter_mm"]) / 2 + 1e-3
            for nodule in annotated
            if nodule["seriesuid"] == place["seriesuid"]
        ]
        assert any(near) == (int(case["found"]) != ALARM)
        hits += any(near)
    assert hits
    for name in ("froc", "detections"):
        assert (folder / "run" / "pictures" / f"{name}.png").stat().st_size > 5000
    resampled = resampled_of(Run(folder / "run"), "lesion_cpm", list(summary["clients"]), 0)
    assert resampled.shape[0] == 1000


def test_a_client_without_lesions_trains_and_says_so(trained, tmp_path, caplog):
    """The annotations of one hospital are taken away: its scores are undefined, its loss is not."""
    experiment = trained[2]
    source = experiment.data.scans.path
    for name in ("subset0", "subset1", "subset2", "subset3", "subset4", "subset5", "subset6",
                 "subset7", "centres.json"):  # fmt: skip
        if (source / name).exists():
            (tmp_path / name).symlink_to(source / name)
    centres = json.loads((source / "centres.json").read_text())
    header, *rows = (source / "annotations.csv").read_text().splitlines()
    kept = [row for row in rows if centres[row.split(",")[0]] == "hospital_0"]
    (tmp_path / "annotations.csv").write_text("\n".join([header, *kept]) + "\n")
    keys = (*QUICK, f"data.path={tmp_path}", f"data.root={tmp_path / 'root'}")
    config = described([*keys, f"folder={tmp_path / 'run'}"])
    data = read_data(config)
    assert "hospital_1 trains without a nodule" in caplog.text
    client = data.clients["hospital_1"]
    batch = next(client.train_batches(0))
    assert not batch["label"].any()
    task = task_for(config, data)[1]
    assert task.loss(batch).isfinite()
    metrics = task.evaluate(client.eval_batches("test"))
    assert np.isnan(metrics["lesion_cpm"])
    assert np.isfinite(metrics["loss"])
