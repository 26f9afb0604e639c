"""From training to a hospital's prediction: learned centres, mixed outputs, continuous outcomes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.datasets import load_diabetes

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.bundle.onnx_file import ONNX, OnnxNetwork
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.models.networks.canonical import Canonical
from medfed.records.folder import RunFolder
from medfed.records.tasks import build_task
from medfed.run.train import train
from tests.delivery.hospitals import run_by_monai
from tests.toys import assert_alike

QUIET = ("local.steps=2", "logger=none", "progress=false", "threads=1", "pictures.format=none")
CNN = ("model.network.channels=[4,4,4]",)


def run(folder: Path, *overrides: str) -> Path:
    train(described([*overrides, *QUIET, f"folder={folder}"]))
    return folder


def export(folder: Path, *overrides: str):
    """Exports the first client; returns the bundle, and the run's network with its model."""
    client = next(iter(json.loads((folder / "summary.json").read_text())["clients"]))
    (bundle,) = export_run(
        checked(load([f"run={folder}", f"client={client}", *overrides], "export"))
    )
    config = RunFolder(folder).config
    network = build_task(config.model, config.chosen("canonical"), config.seed).network
    state = safetensors.torch.load_file(folder / "models" / f"{client}.safetensors")
    counters = {n: t for n, t in network.state_dict().items() if not t.is_floating_point()}
    network.load_state_dict({**counters, **state})
    return read_bundle(bundle), network.eval()


def pictures() -> torch.Tensor:
    return 2 * torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 1


@pytest.mark.parametrize("method", ["shift", "platt"])
def test_the_threshold_and_calibration_of_the_run_are_in_the_bundle(method, tmp_path):
    sizes = ("rounds=1", "partition.num_clients=3", f"evaluation.calibration={method}")
    folder = run(tmp_path / "run", "experiment=clinical_pfednet", *sizes)
    bundle, _ = export(folder)
    point = next(iter(RunFolder(folder).summary["points"].values()))
    assert bundle.facts["threshold"] == point["threshold"]
    assert bundle.facts["calibration"] == [point["slope"], point["shift"]]
    card = (bundle.folder / "docs" / "model_card.md").read_text()
    assert f"from a probability of {point['threshold']:.4g} on" in card
    assert "| sensitivity/point | " in card


@torch.no_grad()
def test_learned_centres_survive(tmp_path, caplog):
    sizes = ("rounds=2", "partition.num_clients=3", "algorithm.bits=2")
    folder = run(tmp_path / "run", "experiment=qupel_digits", *CNN, *sizes)
    bundle, network = export(folder)
    assert bundle.facts["quantization"]["method"] == "learned"
    centers = safetensors.torch.load_file(
        folder / "centers" / f"{bundle.facts['client']}.safetensors"
    )
    assert set(bundle.facts["bits"]) == set(centers) != set()
    for name, values in centers.items():
        assert len(values) == 4
        assert bundle.facts["bits"][name] == 2
        assert set(bundle.state[name].unique().tolist()) <= set(values.tolist())
    assert_alike(bundle.network()(pictures()), network(pictures()))
    pytest.importorskip("onnxruntime")
    caplog.set_level("INFO", "medfed")
    integers, _ = export(folder, "onnx=int8")
    assert "computes with 8-bit integers; validation balanced_accuracy " in caplog.text
    expected = network(pictures())
    found = OnnxNetwork(integers.folder / ONNX)(pictures())
    apart = float(((found - expected).abs().max() / expected.abs().max()).detach())
    assert 1e-4 < apart < 0.2, apart  # integers, and no others than those of this network
    assert b"QuantizeLinear" in (integers.folder / ONNX).read_bytes()


@torch.no_grad()
def test_mixed_outputs_as_trained_and_quantised(tmp_path):
    sizes = ("rounds=1", "partition.num_clients=4", "canonical.count=2")
    folder = run(tmp_path / "run", "experiment=digits_ppfl", *CNN, *sizes)
    bundle, network = export(folder)
    assert isinstance(network, Canonical)
    assert bundle.facts["network"]["count"] == 2
    expected = network(pictures())
    assert_alike(bundle.network()(pictures()), expected)
    membership = bundle.state["membership"]
    packed, _ = export(folder, "bits=3", "finetune_steps=2", "finetune_lr=1e-2")
    assert set(packed.facts["bits"].values()) == {3}
    assert torch.equal(packed.state["membership"], membership)
    assert packed.facts["test_metrics"] != packed.facts["run_test_metrics"]
    for name, bits in packed.facts["bits"].items():
        assert len(packed.state[name].unique()) <= 2**bits
    assert not torch.equal(packed.network()(pictures()), expected)


@pytest.mark.filterwarnings("ignore")  # of MONAI's own making
@torch.no_grad()
def test_a_continuous_outcome_is_predicted_in_its_unit(tmp_path, monkeypatch):
    overrides = ("experiment=diabetes_pfednet", "rounds=1", "partition.num_clients=2")
    folder = run(tmp_path / "run", *overrides)
    bundle, network = export(folder)
    facts = bundle.facts
    assert (facts["task"], facts["labels"]) == ("regression", ["progression"])
    assert facts["test_metrics"]["rmse"] > 10
    rng, scaling = np.random.default_rng(0), facts["normalization"]
    low, high = np.array(scaling["minimum"]), np.array(scaling["maximum"])
    rows = rng.uniform(low, high, (4, len(low)))
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        header = ["patient", *facts["input"]["features"]]
        csv.writer(file).writerows([header, *([f"p{i}", *r] for i, r in enumerate(rows.tolist()))])
    predict(
        checked(load([f"bundle={bundle.folder}", f"input={source}", f"output={output}"], "predict"))
    )
    with output.open(newline="") as file:
        names, *found = csv.reader(file)
    assert names == ["row", "patient", "warning", "prediction"]
    scaled = torch.from_numpy(2 * (rows - low) / (high - low) - 1).float()
    # The network answers in standard units: of all training rows, and of no others.
    (mean, deviation), rows_of = facts["outcome_scale"], load_diabetes()
    splits = json.loads((folder / "splits.json").read_text())["clients"].values()
    trained = [int(name.rpartition("_")[2]) for own in splits for name in own["train"]]
    assert len(trained) < len(rows_of.target)
    assert mean == pytest.approx(rows_of.target[trained].mean(), rel=1e-12)
    assert deviation == pytest.approx(rows_of.target[trained].std(), rel=1e-12)
    expected = network(scaled).squeeze(1) * deviation + mean
    assert expected.std() > 1e-3
    predictions = torch.tensor([float(row[-1]) for row in found])
    assert_alike(predictions, expected, 1e-6)
    # What MONAI runs without medfed writes the same numbers.
    run_by_monai(bundle.folder, source, tmp_path / "eval", monkeypatch)
    assert (tmp_path / "eval" / "predictions.csv").read_bytes() == output.read_bytes()
