"""Images of several findings: a CSV with gaps, trained, reported, exported and across sites."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import write_manifest
from medfed.delivery.export.export import export_run
from medfed.delivery.main import open_bundle
from medfed.delivery.predict.prediction import predict
from medfed.delivery.start.pretrained import Pretrained
from medfed.reports.report import report_runs
from medfed.run.assembly import read_data, resolve_facts, task_for
from medfed.run.finished import reopen_selected
from medfed.run.onboarding import hospital_at
from medfed.standalone.errors import CheckpointError, ConfigError, DataError
from medfed.standalone.samples import pixels_of
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import across, same, site

SMALL = "{_target_: medfed.models.networks.small.SmallCNN, channels: [8], strides: [1], norm: none"
NETWORK = SMALL + ", spatial_dims: 2, in_channels: 1, out_channels: 2}"
TRAIN = (
    *("experiment=medmnist_pfednet", "data=image_table", "model=findings", "partition=auto"),
    *(
        "~model.network",
        f"+model.network={NETWORK}",
        "model.personal=[head.*]",
        "data.reader.size=[8,8]",
    ),
    *("data.reader.findings=[left,right]", "algorithm=fedavg", "rounds=3", "local.steps=30"),
    *("logger=none", "progress=false", "optimizer.lr=0.3", "data.reader.uncertain=missing"),
)


def write(folder, known=("left", "right"), only=None, cells=None):
    """Two hospitals of 40 images; a finding is a light half. Each knows one of them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for n in range(80):
        rng = np.random.default_rng(n)
        left, right = rng.random() < 0.3, rng.random() < 0.5
        grey = rng.normal(80, 10, (8, 8))
        grey[:, :4] += 90 * left
        grey[:, 4:] += 90 * right
        Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(folder / f"{n}.png")
        centre = "ab"[n // 40]
        told = {"left": int(left), "right": int(right)}
        told |= {name: "" for name in told if name != known["ab".index(centre)]}
        told |= {"right": -1} if n == 41 else {}
        told |= (cells or {}).get(n, {})
        rows.append({"image": f"{n}.png", "patient": f"p{n // 2}", "centre": centre, **told})
    rows = [row for row in rows if only in (None, row["centre"])]
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "table.csv"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("findings")
    table = write(folder / "data")
    run(folder / "run", *TRAIN, f"data.path={table}", f"data.root={folder / 'root'}")
    return folder


def read(path):
    return json.loads(path.read_text())


def test_each_hospital_learns_and_measures_what_it_knows(trained):
    summary = read(trained / "run" / "summary.json")
    clients = summary["clients"]
    assert clients["a"]["auroc/left"] > 0.9
    assert clients["b"]["auroc/right"] > 0.9
    assert math.isnan(clients["a"]["auroc/right"] or math.nan)
    assert clients["a"]["auroc"] == clients["a"]["auroc/left"]
    assert summary["pooled"]["auroc/left"] == pytest.approx(clients["a"]["auroc/left"])
    cohort = read(trained / "run" / "cohort.json")
    assert [cohort["clients"][c]["annotated"] for c in "ab"] == [["left"], ["right"]]
    assert 0.2 < cohort["clients"]["a"]["after"][0] < 0.4
    with (trained / "run" / "ledger.csv").open(newline="") as file:
        phases = [row["phase"] for row in csv.DictReader(file)]
    assert phases.count("preprocessing") == 4
    report_runs(str(trained / "run"), out=trained / "comparison")
    assert "a left, b right" in (trained / "comparison" / "report.md").read_text()


def test_weights_come_from_the_counts_of_all(trained):
    config = described([*TRAIN, f"data.path={trained / 'data' / 'table.csv'}", "folder=unused"])
    data = read_data(config)
    a, b = data.clients.values()
    assert torch.equal(a.class_weights, b.class_weights)
    labels = a.train["label"][:, 0]
    assert a.class_weights[0] == float((labels == 0).sum() / (labels == 1).sum())
    (batch, *_) = a.train_batches(0)
    assert torch.equal(batch["class_weights"][0], a.class_weights)
    task = task_for(config, data)[1]
    assert task.losses(next(iter(a.eval_batches("val")))).isfinite().all()


def test_a_bundle_answers_every_finding(trained, tmp_path):
    keys = [f"run={trained / 'run'}", "client=a", f"out={tmp_path}"]
    (bundle,) = export_run(checked(load(keys, "export")))
    facts = read(bundle / "configs" / "metadata.json")["medfed"]
    assert (facts["task"], facts["annotated"]) == ("findings", ["left"])
    keys = [f"bundle={bundle}", f"input={trained / 'data'}", f"output={tmp_path / 'out'}"]
    predict(checked(load(keys, "predict")))
    (table,) = (tmp_path / "out").glob("*.csv")
    with table.open(newline="") as file:
        row = next(csv.DictReader(file))
    assert {"probability_left", "probability_right"} <= set(row)


@pytest.mark.parametrize(
    ("keys", "cells", "sentence"),
    [
        (["data.reader.uncertain=error"], None, r"data row 42, column right: '-1' must be 1, 0 or"),
        ([], {0: {"left": "maybe"}}, r"data row 1, column left: 'maybe' must be 1, 0 or empty"),
        ([], {n: {"left": ""} for n in range(40)}, "No client annotates left; leave it out"),
        (["data.reader.findings=[lef]"], None, r"Unknown finding lef; .*did you mean left"),
        (["model=small_cnn"], None, r"need each other"),
        (["partition=dirichlet"], None, r"has no label"),
    ],
)
def test_bad_input_is_one_sentence(keys, cells, sentence, tmp_path):
    table = write(tmp_path, cells=cells)
    here = [k for k in TRAIN if keys != ["model=small_cnn"] or "model" not in k]
    config = described([*here, f"data.path={table}", f"folder={tmp_path / 'run'}", *keys])
    with pytest.raises((ConfigError, DataError), match=sentence) as caught:
        resolve_facts(config, read_data(config))
    assert "\n" not in str(caught.value)


def test_sites_agree_on_the_weights(trained, tmp_path):
    keys, sites = (*TRAIN, f"data.root={tmp_path / 'root'}"), {}
    for name in "ab":
        table = write(tmp_path / name, only=name)
        here = (*keys, f"data.path={table}")
        sites[name] = site(tmp_path / "sites", name, *here, sites=["a", "b"])
    folder = tmp_path / "run"
    across(folder, Direct(sites), ["a", "b"], *keys, f"data.path={tmp_path / 'a' / 'table.csv'}")
    assert same(trained / "run", folder) == []


def test_channel_statistics_travel_between_sites_and_stay_in_a_bundle(trained, tmp_path, capsys):
    """FedRDN: as in a simulation, beside the counts of findings; a prediction is normalised."""
    keys, sites = (*TRAIN, "data.scaling=fedrdn", f"data.root={tmp_path / 'root'}"), {}
    table = trained / "data" / "table.csv"
    run(tmp_path / "run", *keys, f"data.path={table}")
    assert "; and 3 more such statistics." in capsys.readouterr().out  # of few patients
    for name in "ab":
        here = (*keys, f"data.path={write(tmp_path / name, only=name)}")
        sites[name] = site(tmp_path / "sites", name, *here, sites=["a", "b"])
    across(tmp_path / "across", Direct(sites), ["a", "b"], *keys, f"data.path={table}")
    assert same(tmp_path / "run", tmp_path / "across") == []
    assert same(tmp_path / "run", trained / "run", ("hashes.json",)) == ["hashes.json"]

    late = hospital_at(reopen_selected(tmp_path / "run"), table)
    (first, *_), (seen, *_) = late.train_batches(0), replace(late, normalize=None).train_batches(0)
    assert not torch.equal(first["image"], seen["image"])  # by the others' statistics

    asked = [f"run={tmp_path / 'run'}", "client=a", f"out={tmp_path / 'out'}"]
    (bundle,) = export_run(checked(load(asked, "export")))
    data = read_data(described([*keys, f"data.path={table}", "folder=unused"]))
    client = data.clients["a"]
    facts = read(bundle / "configs" / "metadata.json")["medfed"]
    mean, sd = facts["normalization"]["mean"], facts["normalization"]["sd"]
    assert [*mean, *sd] == data.statistics["a"].ravel().tolist()
    model = open_bundle(bundle)
    for batch in client.eval_batches("test"):
        patients = [client.patients["test"][n] for n in batch["case"].tolist()]
        numbers = [2 * int(name[1:]) + k for name in patients[::2] for k in (0, 1)]
        pixels = np.stack([np.asarray(Image.open(table.parent / f"{n}.png")) for n in numbers])
        seen = pixels_of(pixels[:, None], "the images", model)
        assert torch.equal(seen, batch["image"])
    for source in (bundle, tmp_path / "run"):  # fine-tuning goes on with images of this kind
        adopted = Pretrained(str(source), adopt=["data"]).read().adopted
        assert adopted == {"data.scaling": "fedrdn"}
    file = bundle / "configs" / "metadata.json"
    damaged = read(file)
    damaged["medfed"]["normalization"]["sd"] = [-0.1]
    file.write_text(json.dumps(damaged))
    write_manifest(bundle)
    with pytest.raises(CheckpointError, match="normalization"):
        open_bundle(bundle)
