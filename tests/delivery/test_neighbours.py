"""Models that remember training cases: from the run to the bundle, and where they do not go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from medfed.config.allowed import CONFIG_DIR
from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.config.sections import Section
from medfed.delivery.bundle.bundle import CARD, page, read_bundle
from medfed.delivery.bundle.networks import build_network
from medfed.delivery.bundle.onnx_file import ONNX, OnnxNetwork
from medfed.delivery.export.export import export_run
from medfed.delivery.export.run_record import RunRecord
from medfed.delivery.start.pretrained import _read_run
from medfed.records.folder import RunFolder
from medfed.run.evaluation import evaluate_run, measure_across
from medfed.run.train import train
from medfed.standalone.errors import CheckpointError, ConfigError
from medfed.standalone.networks import load as load_alone
from medfed.studies.plan import read_plan

KEYS = ("experiment=digits_pfednet", "algorithm=knnper", "model.network.channels=[4,4,4]")
KEYS += ("partition=label_groups", "partition.num_clients=4", "rounds=1")
CLIENT = "group_0_hospital_0"
QUIET = ("local.steps=2", "logger=none", "progress=false", "threads=1", "pictures.format=none")


def exported(folder: Path, *keys: str) -> Path:
    where = [f"run={folder}", f"out={folder.parent / 'out'}", f"client={CLIENT}"]
    (bundle,) = export_run(checked(load([*where, *keys], "export")))
    return bundle


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("knnper") / "run"
    train(described([*KEYS, *QUIET, f"folder={folder}"]))
    return folder


@pytest.fixture(scope="module")
def weights(run):
    return safetensors.torch.load_file(run / "models" / f"{CLIENT}.safetensors")


def test_the_run_records_the_cases_and_the_bytes_that_its_models_hold(run, weights):
    summary = json.loads((run / "summary.json").read_text())
    stored = [t for n, t in weights.items() if "neighbours" in n]
    assert len(stored) == 3
    patients = json.loads((run / "splits.json").read_text())["clients"][CLIENT]["train"]
    size = {"cases": len(patients), "bytes": sum(t.nbytes for t in stored)}
    assert summary["remembered"][CLIENT] == size
    assert summary["remembered"].keys() == summary["clients"].keys()


@pytest.mark.parametrize(
    ("keys", "ways"),
    [
        ((), ("set patients_features=true",)),
        (("bits=4",), ("set patients_features=true", "leave out bits and layers")),
        (("patients_features=true", "bits=4"), ("leave out bits and layers",)),
        (("patients_features=true", "bits=[32,2]"), ("leave out bits and layers",)),
        (("patients_features=true", "layers={body.*:8}"), ("leave out bits and layers",)),
    ],
    ids=["as it is", "bits", "agreed, bits", "agreed, widths", "agreed, layers"],
)
def test_features_leave_only_where_the_hospitals_say_so(keys, ways, run):
    """Every model is looked at before a file is written, those of no training case among them."""
    summary = json.loads((run / "summary.json").read_text())["remembered"]
    with pytest.raises(ConfigError) as refused:
        exported(run, "client=all", *keys)
    text = str(refused.value)
    for client, held in summary.items():
        entry = f"{client} ({held['cases']} training samples, {held['bytes']:,} bytes)"
        assert (entry in text) == (held["cases"] > 0)
    for way in ("set patients_features=true", "leave out bits and layers"):
        assert (way in text) == (way in ways)
    assert not (run.parent / "out").exists()


def test_a_line_warns_of_features_in_bundles_and_the_table_lies_beside_them(run, caplog):
    table = run / "export.csv"
    table.write_text("of an earlier export\n")
    folder = exported(run, "patients_features=true", f"out={run.parent / 'second'}")
    assert f"patients are in the models of {CLIENT} (" in caplog.text
    assert [r.levelname for r in caplog.records if "whoever gets" in r.message] == ["WARNING"]
    assert table.read_text() == "of an earlier export\n"
    lines = (folder.parent / "export.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["client", CLIENT]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("measure", [evaluate_run, measure_across], ids=lambda m: m.__name__)
def test_metrics_of_remembered_cases_are_doubted(measure, split, run, caplog):
    measure(run, split)
    said = "remember these training cases, so metrics of them mean nothing"
    assert (said in caplog.text) == (split == "train")


@pytest.mark.parametrize("patients", ["all", "test"])
def test_a_study_doubts_numbers_of_remembered_cases(patients, run, tmp_path, caplog):
    bundle = exported(run, "patients_features=true")
    caplog.clear()
    path = tmp_path / "plan.yaml"
    path.write_text(f"bundles: [{{name: new, path: {bundle}}}]\npatients: {patients}\n")
    read_plan(path)
    assert ("The model new remembers cases" in caplog.text) == (patients == "all")


@torch.no_grad()
def test_the_bundle_answers_as_the_run(run, weights):
    pytest.importorskip("onnxruntime")
    folder = exported(run, "patients_features=true", "onnx=true")
    network = RunFolder(run).model(CLIENT)
    image = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    answers = network(image)
    torch.testing.assert_close(read_bundle(folder).network()(image), answers)
    alone = load_alone(build_network(read_bundle(folder).facts["network"]), folder)
    torch.testing.assert_close(alone(image), answers)
    onnx = OnnxNetwork(folder / ONNX)(image)
    np.testing.assert_allclose(np.asarray(onnx), answers.numpy(), atol=1e-5)
    card = (folder / "docs" / "model_card.md").read_text()
    assert "training samples are in this bundle" in card
    assert "Predictions of these samples are too good" in card
    assert "Personal part: features of its training cases, which vote.\n" in card


@pytest.mark.parametrize(
    ("method", "keeps"),
    [
        ("ditto", "a model"),
        ("fedadam", "nothing"),
        ("fedavg", "nothing"),
        ("local", "everything"),
        ("perfedavg", "one step from the shared model"),
    ],
)
def test_the_card_calls_personal_what_a_method_keeps(method, keeps, run):
    """Methods without a personal part of the weights may keep whole models."""
    facts = read_bundle(exported(run, "patients_features=true")).facts
    record = RunRecord.read(run)
    algorithm = yaml.safe_load((CONFIG_DIR / "algorithm" / f"{method}.yaml").read_text())
    record.__dict__["config"] = Section({**record.config.plain(), "algorithm": algorithm})
    facts |= {"card": record.card(CLIENT)}
    assert f"- Personal part: {keeps}.\n" in page(CARD, facts)


def test_another_run_starts_from_the_weights_alone(run):
    names = _read_run(run, CLIENT).tensors
    assert names
    assert not any("neighbours" in name for name in names)


@pytest.mark.parametrize("name", ["nowhere", "head"])
def test_a_store_that_does_not_fit_is_refused(name, run):
    folder = exported(run, "patients_features=true")
    bundle = read_bundle(folder)
    (found,) = [n for n in bundle.state if n.endswith("neighbours_features")]
    store = bundle.state.pop(found)
    wrong = {f"{name}.neighbours_features": store if name == "nowhere" else store.flatten()}
    with pytest.raises(CheckpointError, match="has no place for a store"):
        replace(bundle, state={**bundle.state, **wrong}).network()
