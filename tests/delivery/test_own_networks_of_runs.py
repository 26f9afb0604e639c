"""Networks of anybody's from training to a hospital: exported with few bits, run by MONAI, too."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from medfed.config.compose import load
from medfed.config.description import checked, describe
from medfed.config.spelling import with_plugins
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.onnx_file import ONNX, OnnxNetwork
from medfed.delivery.export.export import export_run
from medfed.delivery.export.run_record import RunRecord
from medfed.delivery.predict.prediction import predict
from medfed.run.train import train
from tests.delivery.hospitals import run_by_monai
from tests.integration.test_own_networks import METHODS, Tied, composed, each
from tests.toys import assert_alike

CASES = {
    "segresnet": "pfednet",
    "dynunet": "ppfl",
    "swin_unetr": "qupel",
    "resnet": "fedrep",
    "tied": "ppfl",
}
# As a user writes it, in a file of its own.
OWN = f"from torch import Tensor, nn\n\n\n{inspect.getsource(Tied)}"


@pytest.mark.promise("a bundle of a network of one's own")
@pytest.mark.filterwarnings("ignore")  # of MONAI's own making
@pytest.mark.parametrize("name", each((name,) for name in CASES))
def test_trained_exported_and_predicted(name, tmp_path, monkeypatch):
    if name == "swin_unetr":
        pytest.importorskip("einops")
    method = CASES[name]
    if name == "tied":
        (tmp_path / "own_tied.py").write_text(OWN)
        with_plugins([f"plugins={tmp_path}"])
    config = composed(name, tmp_path / "data", *METHODS[method], f"folder={tmp_path / 'run'}")
    config.rounds = 1
    if name == "tied":
        config.model.network._target_ = "own_tied.Tied"
    train(describe(config))
    run = RunRecord.read(tmp_path / "run")
    client = run.clients[0]
    width = "null" if method == "qupel" else "4"
    options = [f"run={run.folder}", f"client={client}", f"bits={width}", "onnx=true"]
    (folder,) = export_run(checked(load([*options, "finetune_steps=2"], "export")))
    bundle = read_bundle(folder)
    facts = bundle.facts
    assert facts["bits"]
    network = bundle.network()
    shape = (
        2,
        len(facts["channels"]),
        *(facts["patch_size"] or facts["input"].get("size", (32, 32))),
    )
    image = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        expected = network(image)
    assert expected.isfinite().all()
    if (folder / ONNX).is_file():
        assert_alike(OnnxNetwork(folder / ONNX)(image), expected)
    (tmp_path / "in").mkdir()
    if facts["task"] == "segmentation":
        check_masks(run, client, folder, tmp_path, monkeypatch)
        return
    for i, one in enumerate(image):
        values = ((one + 1) * 8).round().numpy().astype(np.uint8)
        np.save(tmp_path / "in" / f"{i}.npy", values)
    run_by_monai(folder, tmp_path / "in", tmp_path / "out", monkeypatch)
    keys = {"bundle": folder, "input": tmp_path / "in", "output": tmp_path / "own.csv"}
    predict(checked(load([f"{k}={v}" for k, v in keys.items()], "predict")))
    table = (tmp_path / "out" / "predictions.csv").read_bytes()
    assert table == (tmp_path / "own.csv").read_bytes()


def check_masks(run, client, folder: Path, tmp_path: Path, patch) -> None:
    splits = json.loads((run.folder / "splits.json").read_text())
    patient = splits["clients"][client]["test"][0]
    file = next(f for f in splits["files"] if patient in f and "images" in f)
    (tmp_path / "in" / "a.nii.gz").symlink_to(file)
    run_by_monai(folder, tmp_path / "in", tmp_path / "out", patch)
    keys = {"bundle": folder, "input": file, "output": tmp_path / "own.nii.gz"}
    predict(checked(load([f"{k}={v}" for k, v in keys.items()], "predict")))
    assert (tmp_path / "out" / "a.nii.gz").read_bytes() == (tmp_path / "own.nii.gz").read_bytes()
