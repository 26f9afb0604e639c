"""Hospitals that annotate different regions: from files to metrics, bundles and sites."""

from __future__ import annotations

import csv
import json
import math
import shutil

import numpy as np
import pytest

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.reports.findings import report_on
from medfed.run.assembly import read_data
from medfed.standalone.errors import ConfigError, DataError
from tests.datamodules.brats_layouts import save
from tests.integration.runs import IMAGING, run
from tests.sites.direct import Direct
from tests.sites.hospitals import across, same, site

TRAIN = (
    *IMAGING,
    *("data=datalist", "algorithm=fedavg", "partition=auto", "augment=none", "rounds=4"),
    *("local.steps=20", "data.patches_per_patient=16", "pictures.format=none", "optimizer.lr=0.02"),
    "data.background_share=0.5",
)
ANNOTATED = "data.annotated={a: [light], b: [dark]}"


def write(folder, entries=None):
    """Four cases of each hospital, a light and a dark square in each; all masks have both."""
    listed = []
    for n in range(8):
        rng = np.random.default_rng(n)
        image, mask = rng.normal(3, 0.1, (24, 24, 3)), np.zeros((24, 24, 3), np.uint8)
        for value, grey in ((1, 6.0), (2, 0.5)):
            x, y = rng.integers(2, 8, 2) + (value - 1) * 8
            mask[x : x + 6, y : y + 6], image[x : x + 6, y : y + 6] = value, grey
        save(folder / f"image_{n}.nii.gz", image.astype(np.float32), np.eye(4))
        save(folder / f"mask_{n}.nii.gz", mask, np.eye(4))
        more = {} if entries is None else entries(n)
        listed.append({"image": f"image_{n}.nii.gz", "label": f"mask_{n}.nii.gz", **more})
        listed[-1] = {"centre": "ab"[n // 4], **listed[-1]}
    labels = {"0": "background", "1": "light", "2": "dark"}
    index = {"modality": {"0": "MR"}, "labels": labels, "training": listed}
    (folder / "dataset.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    data = write(folder / "data")
    run(folder / "run", *TRAIN, ANNOTATED, f"data.path={data}", f"data.root={folder / 'root'}")
    return folder


def read(path):
    return json.loads(path.read_text())


def check_learnt(folder):
    """Each region is learnt from the one hospital that annotates it, and measured there only."""
    clients = read(folder / "summary.json")["clients"]
    assert clients["a"]["dice/light"] > 0.7
    assert clients["b"]["dice/dark"] > 0.7
    for client, region in (("a", "dark"), ("b", "light")):
        for metric in ("iou", "dice", "dice_case", "hd95", "nsd"):
            value = clients[client][f"{metric}/{region}"]
            assert value is None or math.isnan(value)
    assert clients["a"]["dice"] == clients["a"]["dice/light"]
    with (folder / "cases.csv").open(newline="") as file:
        regions = {(row["client"], row["region"]) for row in csv.DictReader(file)}
    assert regions == {("a", "light"), ("b", "dark")}


def test_both_regions_are_learnt(trained, tmp_path, caplog):
    check_learnt(trained / "run")
    keys = (ANNOTATED, f"data.path={trained / 'data'}", f"data.root={tmp_path}")
    run(tmp_path / "run", *TRAIN, *keys, "model.activation=sigmoid", "algorithm=fedper")
    check = read(tmp_path / "run" / "summary.json")["clients"]
    assert check["a"]["dice/light"] > 0.7
    assert "do not use these outputs: a (dark), b (light)." in caplog.text


def test_records_say_who_annotates_what(trained):
    cohort = read(trained / "run" / "cohort.json")
    assert [cohort["clients"][c]["annotated"] for c in "ab"] == [["light"], ["dark"]]
    assert not any(cohort["clients"]["a"]["missing"].values())
    assert any("a client's mean is over its labels" in line for line in cohort["remarks"])
    partition = read(trained / "run" / "splits.json")["partition"]
    assert partition["b"]["annotated"] == ["dark"]
    notes = report_on([trained / "run"]).notes
    assert "Annotated labels: a light, b dark. A client's means are over its labels alone." in notes
    keys = [f"run={trained / 'run'}", "client=a", f"out={trained / 'bundles'}"]
    (bundle,) = export_run(checked(load(keys, "export")))
    assert read(bundle / "configs" / "metadata.json")["medfed"]["annotated"] == ["light"]
    assert "Annotated there: light." in (bundle / "docs" / "model_card.md").read_text()


def planned(folder, *keys):
    return read_data(described([*TRAIN, f"data.path={folder}", f"folder={folder / 'run'}", *keys]))


def test_the_list_may_say_it(tmp_path):
    data = planned(write(tmp_path, lambda n: {"annotated": ["light"]} if n < 4 else {}))
    assert [data.plans[c].annotated for c in "ab"] == [("light",), ("light", "dark")]
    for split in ("train", "val", "test"):
        (batch, *_) = data.clients["a"].eval_batches(split)
        assert batch["annotated"].tolist() == [[True, False]] * len(batch["image"])
        assert not batch["label"][:, 1].any()
    assert data.clients["a"].label_counts[2] == 0


@pytest.mark.parametrize(
    ("keys", "entries", "sentence"),
    [
        (["data.annotated={c: [light]}"], None, r"data\.annotated='c' is unknown; choose a or b"),
        (["data.annotated={a: [lihgt]}"], None, r"Unknown label lihgt; .*did you mean light"),
        (["data.annotated={a: [dark], b: [dark]}"], None, "No client annotates light; leave it"),
        ([], lambda n: {"annotated": ["light", "dark"][n % 2]}, r"cases that annotate different"),
        ([], lambda _: {"annotated": ["green"]}, r"has annotated \['green'\]; list one or more of"),
    ],
)
def test_bad_input_is_one_sentence(keys, entries, sentence, tmp_path):
    with pytest.raises((ConfigError, DataError), match=sentence) as caught:
        planned(write(tmp_path, entries), *keys)
    assert "\n" not in str(caught.value)


def test_a_loss_that_cannot_leave_labels_out_is_refused(trained, tmp_path):
    loss = "model.loss={_target_: monai.losses.DiceLoss, softmax: true}"
    keys = (ANNOTATED, f"data.path={trained / 'data'}", f"data.root={tmp_path}", loss)
    with pytest.raises(ConfigError, match="only the default loss"):
        run(tmp_path / "run", *TRAIN, *keys)


def test_sites_may_differ_in_labels(trained, tmp_path):
    keys, sites = (*TRAIN, f"data.root={tmp_path / 'root'}"), {}
    for name, label in (("a", "light"), ("b", "dark")):
        place = shutil.copytree(trained / "data", tmp_path / name)
        index = read(place / "dataset.json")
        index["training"] = [
            {**entry, "annotated": [label]}
            for entry in index["training"]
            if entry["centre"] == name
        ]
        (place / "dataset.json").write_text(json.dumps(index))
        here = (*keys, f"data.path={place}")
        sites[name] = site(tmp_path / "sites", name, *here, sites=["a", "b"])
    folder = tmp_path / "run"
    across(folder, Direct(sites), ["a", "b"], *keys, f"data.path={tmp_path / 'a'}")
    assert same(trained / "run", folder) == []
