"""Several organs from CT, end to end: trained, exported, predicted on the grid of the scan."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.standalone.volumes import read_volume
from tests.delivery.hospitals import run_by_monai
from tests.integration.runs import run

SMALL = (
    *("rounds=2", "local.steps=2", "logger=none", "progress=false"),
    *("data.generated.hospitals=2", "data.generated.patients=4", "data.generated.shape=[28,24,12]"),
    *("data.patches_per_patient=4", "data.batch_size=4", "data.val_fraction=0.25"),
)
UNET = ("experiment=organs_pfednet", "model.network.channels=[4,8]", "model.network.strides=[2]")
KINDS = {
    "planned": (
        *("experiment=nnunet", "data.planning.memory_gb=0.01", "data.planning.features=4"),
        *("algorithm=ditto", "model.overlap=0.25"),
    ),
    "volumes": (
        *(*UNET, "data.spatial_dims=3", "data.patch_size=[16,16,8]", "data.spacing=[10,10,14]"),
        *("data.crop_foreground=true", "data.memory_gb=1"),
    ),
    "slices": (*UNET, "data.patch_size=[16,16]", "data.slices=3", "data.spacing=[9,9]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_from_training_to_a_mask(kind, tmp_path, monkeypatch):
    options = (f"data.root={tmp_path}", *SMALL, *KINDS[kind])
    summary, experiment = run(tmp_path / "run", *options)
    task, data = experiment.task, experiment.data
    assert task.activation == "softmax"
    assert experiment.config.facts.out_channels == len(task.regions) + 1
    assert {"hd95", "nsd", f"nsd/{task.regions[0]}"} <= set(summary["federation"])
    with (tmp_path / "run" / "cases.csv").open() as file:
        rows = list(csv.DictReader(file))
    client, patient = rows[0]["client"], rows[0]["patient"]
    keys = {"run": tmp_path / "run", "out": tmp_path / "bundles", "client": client}
    keys |= {"onnx": "true", "bits": 32}
    (bundle,) = export_run(checked(load([f"{k}={v}" for k, v in keys.items()], "export")))
    assert read_bundle(bundle).facts["activation"] == "softmax"

    (case,) = data.scans.cases_of(data.patients[patient])
    source = case.files["image"]
    masks = {}
    for backend in ("torch", "onnx"):
        masks[backend] = tmp_path / f"{backend}.nii.gz"
        named = {"bundle": bundle, "input": source, "output": masks[backend], "backend": backend}
        predict(checked(load([f"{k}={v}" for k, v in named.items()], "predict")))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.nii.gz").write_bytes(Path(source).read_bytes())
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    masks["monai"] = tmp_path / "monai" / "a.nii.gz"
    found = {name: read_volume(path).voxels[0].numpy() for name, path in masks.items()}
    np.testing.assert_array_equal(nib.load(masks["torch"]).affine, nib.load(source).affine)
    assert found["torch"].shape == nib.as_closest_canonical(nib.load(source)).shape
    for name in ("onnx", "monai"):
        assert (found[name] != found["torch"]).mean() < 1e-3

    module = experiment.module
    module.local.model.load(module.federation.personal_model(client))
    block = data.evaluation_block(case.id, 0, data.plans[client])
    probabilities = task.predict(block)
    classes = torch.cat([1 - probabilities.sum(1, keepdim=True), probabilities], 1).argmax(1)
    facts = json.loads((bundle / "configs" / "metadata.json").read_text())["medfed"]
    values = [0, *(facts["input"]["regions"][name][0] for name in facts["labels"])]
    expected = torch.tensor(values)[classes].numpy()
    # Of slices, those that show the body; the others are background.
    own = found["torch"][None] if kind != "slices" else np.moveaxis(found["torch"], -1, 0)
    if kind == "slices":
        shown = own.any((1, 2))
        own, expected = own[shown], expected[expected.any((1, 2))]
    np.testing.assert_array_equal(own, expected)
    counted = [row for row in rows if row["patient"] == patient]
    for row in counted:
        value = facts["input"]["regions"][row["region"]][0]
        assert (found["torch"] == value).sum() == int(float(row["predicted"]))
