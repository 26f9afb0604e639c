"""Hausdorff distances in a whole run: in mm, at test alone, and read again."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from medfed.models.segmentation_meter import surface_metrics
from medfed.records.folder import Run
from medfed.reports.report import report_runs
from medfed.standalone.volumes import read_geometry
from tests.datamodules.picture_files import cohort
from tests.integration.runs import IMAGING, imaging, run


def test_distances_are_those_of_the_volumes_in_millimetres(tmp_path):
    options = ("algorithm=local", "rounds=1", "data.eval_every=1")
    summary, experiment = run(tmp_path / "run", *imaging(tmp_path), *options)
    data, module = experiment.data, experiment.module
    with (tmp_path / "run" / "cases.csv").open() as file:
        cases = list(csv.DictReader(file))
    for client, metrics in summary["clients"].items():
        module.local.model.load(module.federation.personal_model(client))
        (patient,) = data.clients[client].patients["test"]
        files = next(p.files for p in data.list_patients() if p.id == patient)
        spacing = read_geometry(files["label"]).spacing
        batches = list(data.clients[client].eval_batches("test"))
        assert batches[0]["spacing"][0].tolist() == pytest.approx(spacing)
        pred = torch.cat([experiment.task.predict(b) > 0.5 for b in batches])
        truth = torch.cat([b["label"] > 0.5 for b in batches])
        volumes = [t.permute(1, 2, 3, 0) for t in (pred, truth)]
        measured = surface_metrics(*volumes, spacing, [2.0] * len(volumes[0]))
        for name, expected in zip(("hd95", "nsd"), measured, strict=True):
            regions = [metrics[f"{name}/{r}"] for r in experiment.task.regions]
            assert regions == pytest.approx(expected.tolist(), rel=1e-6)
            assert metrics[name] == pytest.approx(expected.mean().item())
            kept = [row for row in cases if row["client"] == client]
            assert [row["patient"] for row in kept] == [patient] * len(regions)
            assert [float(row[name]) for row in kept] == regions
    # Validation has no distances: their places in the file are empty.
    history = Run(tmp_path / "run").history()
    assert all(math.isnan(r.metrics["hd95"]) for r in history)
    assert not any(summary["undefined"]["val"].values())
    report_runs([str(tmp_path / "run")], tmp_path / "out", "iou")


def test_pictures_have_no_millimetres(tmp_path, caplog):
    cohort(tmp_path / "pictures")
    options = ("data=image_masks", f"data.path={tmp_path / 'pictures'}", f"data.root={tmp_path}")
    small = (*IMAGING[1:], "partition=centre", "algorithm=local", "rounds=1")
    summary, experiment = run(tmp_path / "run", *options, *small)
    assert not experiment.config.model.surface
    assert {name.partition("/")[0] for name in summary["federation"]} == {
        *("loss", "iou", "iou_both", "dice", "dice_case")
    }
    assert "undefined" not in caplog.text
