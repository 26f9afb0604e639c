"""medfed export on runs: quantised at export, with learned centres, with canonical parts."""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import CARD, README, page, read_bundle
from medfed.delivery.bundle.weights import with_codebooks
from medfed.delivery.export.client_model import choose_bits, collapse, quantise
from medfed.delivery.export.export import export_run
from medfed.delivery.export.finetuning import STAGES
from medfed.delivery.export.run_record import RunRecord
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.small import LogisticRegression
from medfed.models.networks.unet import basic_unet
from medfed.records.folder import save_tensors
from medfed.run.train import train
from medfed.standalone.errors import CheckpointError, ConfigError
from medfed.standalone.files import sha256
from tests.toys import assert_alike

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "experiment=digits_pfednet",
    "rounds=1",
    "local.steps=2",
    "logger=none",
    "progress=false",
    "pictures.format=none",
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    train(described([*SMALL, "model.network.channels=[4,4,4]", f"folder={folder}"]))
    return folder


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def export(run: Path, *overrides: str) -> list[Path]:
    return export_run(checked(load([f"run={run}", *overrides], "export")))


def first_client(run: Path) -> str:
    return next(iter(json.loads((run / "summary.json").read_text())["clients"]))


def test_only_folders_with_code_are_to_be_named(run, tmp_path):
    """A run of an experiment's yaml holds all that the yaml said."""
    plugins, config = tmp_path / "mine", run / "config.yaml"
    (plugins / "configs").mkdir(parents=True)
    (plugins / "configs" / "mine.yaml").write_text("a: 1\n")
    config.write_text(config.read_text().replace("plugins: null", f"plugins: [{plugins}]"))
    assert read_bundle(*export(run, f"client={first_client(run)}", f"out={tmp_path / 'a'}"))
    (plugins / "mine.py").write_text("")
    with pytest.raises(ConfigError, match=rf"only run if you name it: add plugins=\[{plugins}\]"):
        export(run, f"out={tmp_path / 'b'}")


def test_models_as_trained(run):
    summary = json.loads((run / "summary.json").read_text())
    assert [*RunRecord.read(run).clients] == list(summary["clients"])
    two = list(summary["clients"])[:2]
    folders = export(run, f"client=[{','.join(two)}]")
    assert [f.name for f in folders] == two
    for folder in folders:
        bundle = read_bundle(folder)
        saved = safetensors.torch.load_file(run / "models" / f"{folder.name}.safetensors")
        assert all(torch.equal(bundle.state[n], t) for n, t in saved.items())
        assert bundle.facts["client"] == folder.name
        assert bundle.facts["test_metrics"] == summary["clients"][folder.name]
        assert bundle.facts["bits"] == {}


def test_onnx_file_beside_the_weights(run):
    pytest.importorskip("onnx")
    client = first_client(run)
    (folder,) = export(run, f"client={client}", "bits=2", "finetune_steps=0", "onnx=true")
    bundle, file = read_bundle(folder), folder / "models" / "model.onnx"
    assert bundle.facts["sizes"]["onnx"] == file.stat().st_size
    assert "models/model.onnx" in bundle.hashes


def test_two_bits_and_fine_tuning(run, capsys):
    client = first_client(run)
    (folder,) = export(run, f"client={client}", "bits=2", "finetune_steps=3", "finetune_lr=1e-3")
    facts = read_bundle(folder).facts
    scores = facts["quantization"]["validation"]
    assert set(facts["bits"].values()) == {2}
    assert scores.pop("statistics") is None  # group normalisation keeps none
    assert all(0 <= score <= 1 for score in scores.values())
    least = min(scores["kmeans"], scores["trained"] - 0.02)
    good = [s for s in ("kmeans", "finetuned") if scores[s] >= least]
    assert facts["quantization"]["kept"] == good[-1]
    assert facts["quantization"]["finetune_steps"] == (3 if good[-1] == "finetuned" else 0)
    # Of the quantised model, not of the one that was trained.
    assert set(facts["test_metrics"]) == set(facts["run_test_metrics"])
    assert facts["test_metrics"] != facts["run_test_metrics"]
    said = capsys.readouterr().out
    assert "Exported bundles, sizes of files" in said
    assert "fp32" in said
    assert "Test metrics" in (folder / "docs" / "README.md").read_text()


def test_an_undefined_metric_is_written_as_none(run, monkeypatch):
    monkeypatch.setattr("medfed.delivery.export.finetuning._Bench.score", lambda *_: math.nan)
    (folder,) = export(run, f"client={first_client(run)}", "bits=2", "finetune_steps=1")
    scores = read_bundle(folder).facts["quantization"]["validation"]
    assert scores == dict.fromkeys(STAGES)
    assert read_bundle(folder).facts["quantization"]["kept"] == "kmeans"


def test_the_table_has_a_line_for_each_bundle_of_earlier_exports(run):
    one, other = [*RunRecord.read(run).clients][:2]
    table = run / "export.csv"
    table.write_text("client,bits\nlost,32\n")  # of an older version
    export(run, f"client={one}")
    export(run, f"client={other}")
    export(run, f"client={other}", "bits=[32,1]", "finetune_steps=0")
    export(run, f"client={other}", "bits=1", "finetune_steps=0")
    shutil.rmtree(run / "bundles" / "32_bits" / other)
    export(run, f"client={one}")
    with table.open(newline="") as file:
        rows = [(row["bundle"], row["client"], row["bits"]) for row in csv.DictReader(file)]
    bundles = {file.parents[1] for file in (run / "bundles").rglob("manifest.json")}
    assert {name for name, *_ in rows} == {
        b.relative_to(run / "bundles").as_posix() for b in bundles
    }
    assert rows == [(one, one, "32"), (other, other, "1"), (f"1_bits/{other}", other, "1")]


def test_several_widths_in_one_table(run, capsys, monkeypatch):
    """A bundle each; what is worse by more than the tolerance is said in one line."""
    monkeypatch.setenv("COLUMNS", "400")
    clients = [*RunRecord.read(run).clients][:2]
    names = f"client=[{','.join(clients)}]"
    folders = export(run, names, "bits=[32,1]", "finetune_steps=0", "tolerance=0.001")
    assert folders == [run / "bundles" / f"{b}_bits" / c for c in clients for b in (32, 1)]
    said = " ".join(capsys.readouterr().out.split())
    assert "\\n" not in said
    assert f"val {RunRecord.read(run).summary['selection'][0]} k-means" in said
    with (run / "export.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    pairs, metric = {}, RunRecord.read(run).summary["selection"][0]
    for folder, row in zip(folders, rows, strict=True):
        facts = read_bundle(folder).facts
        pair = [facts[f][metric] for f in ("run_test_metrics", "test_metrics")]
        assert [float(row[f"test_{n}"]) for n in ("trained", "bundle")] == pair
        assert (row["client"], row["bits"]) == (facts["client"], folder.parent.name.split("_")[0])
        pairs[folder.parent.name, facts["client"]] = pair
    lost = {k: v for k, v in pairs.items() if v[0] - v[1] > 0.001}
    assert any(bits == "1_bits" for bits, _ in lost)
    warning = said[said.index(f"warning: test {metric} is worse") :]
    for (bits, client), (before, after) in pairs.items():
        line = f"{client} ({bits.split('_')[0]} bits) {before:.4f} to {after:.4f}"
        assert (line in warning) == ((bits, client) in lost)
    for bits in ("32", "1"):
        own = [v for (b, _), v in pairs.items() if b == f"{bits}_bits"]
        for name, take in (("mean", np.mean), ("worst", np.min)):
            row = said[said.index("Exported bundles") :].split(f"({name}) {bits} ")[1]
            found = [float(cell) for cell in row.split()[:2]]
            np.testing.assert_allclose(found, take(own, axis=0), atol=6e-5)


def test_without_data_the_centres_are_those_of_k_means(run, caplog):
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("val_fraction: 0.2", "val_fraction: 0.3"))
    client = first_client(run)
    with caplog.at_level(logging.WARNING):
        (folder,) = export(run, f"client={client}", "bits=2")
    assert "do not give the splits" in caplog.text
    bundle = read_bundle(folder)
    assert bundle.facts["test_metrics"] is None
    assert "before quantisation" in (folder / "docs" / "README.md").read_text()
    record = RunRecord.read(run)
    weights = record.client_model(client).weights
    books = quantise(weights, choose_bits(record.task().network, 2))
    for name, tensor in with_codebooks(weights, books).items():
        assert torch.equal(bundle.state[name], tensor)


def test_learned_centres_are_exported_as_they_are(run):
    client = first_client(run)
    record = RunRecord.read(run)
    weights = record.client_model(client).weights
    books = quantise(weights, choose_bits(record.task().network, 3))
    save_tensors(run / "models" / f"{client}.safetensors", with_codebooks(weights, books))
    save_tensors(
        run / "centers" / f"{client}.safetensors", {n: b.centers for n, b in books.items()}
    )
    (folder,) = export(run, f"client={client}")
    bundle = read_bundle(folder)
    assert bundle.facts["quantization"]["method"] == "learned"
    assert set(bundle.facts["bits"].values()) == {3}
    assert torch.equal(bundle.state[next(iter(books))], next(iter(books.values())).dense())
    with pytest.raises(ConfigError, match="learned centres, which layers cannot change"):
        export(run, "layers={head.*:2}")
    safetensors.torch.save_file(
        {n: torch.zeros(1) for n in books}, run / "centers" / f"{client}.safetensors"
    )
    with pytest.raises(CheckpointError, match="none of its parameter's centres"):
        export(run, f"client={client}")


@pytest.mark.parametrize("parts", [["upcat_*", "final_conv.*"], ["*"]])
def test_mixed_parameters_are_one_network(parts):
    torch.manual_seed(0)
    sizes = {"features": (4, 4, 4, 4, 4, 4)}
    network = Canonical([basic_unet(2, 1, 1, **sizes) for _ in range(3)], parts, "parameters")
    with torch.no_grad():
        network.membership.copy_(torch.tensor([0.2, 0.5, 0.3]))
    plain = basic_unet(2, 1, 1, **sizes).eval()
    counters = {n: t for n, t in plain.state_dict().items() if not t.is_floating_point()}
    plain.load_state_dict({**counters, **collapse(network)})
    image = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        assert_alike(plain(image), network.eval()(image), 1e-6)


def test_a_whole_canonical_model_of_one_layer():
    nets = [LogisticRegression(3, 2, spread=1.0) for _ in range(2)]
    mean = torch.stack([n.linear.weight.detach() for n in nets]).mean(0)
    state = collapse(Canonical(nets, ["*"], "parameters"))
    assert list(state) == ["linear.weight", "linear.bias"]
    torch.testing.assert_close(state["linear.weight"], mean)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["client=nobody"], "has no client nobody"),
        (["bits=9"], "bits=9 must be a whole number from 1 to 8"),
        (["bits=2", "layers={upcat.*:2}"], "matches no weight"),
        (["bits=2", "finetune_steps=-1"], "finetune_steps must be"),
        (["bits=2", "finetune_lr=-1"], "finetune_lr must be positive, not -1"),
        (["layers=3"], "layers must be a map or null, not 3"),
        (["bits=[2,9]"], "bits=9 must be a whole number from 1 to 8"),
        (["bits=all"], "bits must be a whole number or a list or null, not 'all'"),
        (["bits=2", "finetune_lr=null"], "finetune_lr must be a number, not None"),
        (["bits=[]"], r"bits=\[\] names no width"),
        (["bits=2", "tolerance=-1"], "tolerance must be a number of at least 0.0, not -1"),
        (["largest_part=all"], "largest_part is for segmentation of volumes"),
    ],
)
def test_options_that_cannot_be(run, overrides, message):
    with pytest.raises(ConfigError, match=message):
        export(run, *overrides)
    assert not (run / "bundles").exists()


def test_runs_that_cannot_be(run):
    model = run / "models" / f"{first_client(run)}.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(run)
    model.unlink()
    with pytest.raises(CheckpointError, match="is missing; repeat the run"):
        export(run)
    (run / "preprocessing.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessing.json is missing"):
        export(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "run has no value yet; set it by run=VALUE"), (["run=x", "bit=2"], "did you mean bits")],
)
def test_the_script_answers_in_one_sentence(arguments, message, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "export.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_model_card_says_what_is_recorded(run):
    client = first_client(run)
    (folder,) = export(run, f"client={client}", "bits=2", "finetune_steps=0")
    card = (folder / "docs" / "model_card.md").read_text()
    summary = json.loads((run / "summary.json").read_text())
    splits = json.loads((run / "splits.json").read_text())
    facts = read_bundle(folder).facts
    train, test = (len(splits["clients"][client][s]) for s in ("train", "test"))
    low, high = summary["intervals"]["clients"][client]["accuracy"]
    before, after = (facts[f]["accuracy"] for f in ("run_test_metrics", "test_metrics"))
    mean = summary["federation"]["accuracy"]["mean"]
    row = f"| accuracy | {before:.4f} | {low:.4f} to {high:.4f} | {after:.4f} | {mean:.4f} |"
    for part in (
        f"Patients: {train} for training",
        f"{test} for the test below",
        row,
        "Round: 1 of 1",
        "do not use it for diagnosis",
        f"Classes without a training sample: {', '.join(facts['card']['missing'])}.",
        sha256(run / "models" / f"{client}.safetensors"),
        sha256(run / "config.yaml"),
        facts["data_hash"],
    ):
        assert part in card, part
    assert facts["card"]["missing"]
    for patient in splits["clients"][client]["train"]:
        assert patient not in card
        assert patient not in json.dumps(facts)


def test_a_name_brings_no_html_link_or_line_into_the_pages(run):
    (folder,) = export(run, f"client={first_client(run)}", "bits=2", "finetune_steps=0")
    odd = "A</h1><script>alert(1)</script>![x](http://y)\n# B"
    facts = {**read_bundle(folder).facts, "client": odd, "method": odd, "labels": [odd, "b"]}
    facts |= {"channels": [odd], "present": [odd], "test_metrics": {odd: 0.5}}
    for text in (page(README, facts), page(CARD, facts)):
        assert text.count("A&lt;/h1>&lt;script>alert(1)&lt;/script>![x]&#40;http://y)\\n# B") > 3
        assert "<script" not in text
        assert "](http" not in text
        assert "\n# B" not in text


def test_the_benchmark_prints_what_the_exports_measure(run, capsys, monkeypatch):
    """benchmarks/evidence/finetuning.py, on a run that is there, at two bits."""
    spec = importlib.util.spec_from_file_location(
        "bench", ROOT / "benchmarks/evidence/finetuning.py"
    )
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "BITS", (2,))
    monkeypatch.setattr(bench, "STEPS", {"k-means": 0, "fine-tuned": 2})
    two = [*RunRecord.read(run).clients][:2]
    monkeypatch.setattr(RunRecord, "clients", two)
    monkeypatch.setattr(RunRecord, "chosen", lambda *_: two)
    monkeypatch.setattr(sys, "argv", ["x", "--runs", str(run), "--metric", "loss"])
    bench.main()
    printed = capsys.readouterr().out
    (folder, _) = export(run, "bits=2", "finetune_steps=2")
    facts = read_bundle(folder).facts
    row = next(line for line in printed.splitlines() if line.startswith(f"| run, {two[0]}"))
    first, *_, last = (float(cell) for cell in row.split("|")[2:-1])
    assert first == pytest.approx(facts["run_test_metrics"]["loss"], abs=6e-5)
    assert last == pytest.approx(facts["test_metrics"]["loss"], abs=6e-5)
