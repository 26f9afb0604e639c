"""Photographs with masks from training to a hospital's mask, as a user has them."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
from PIL import Image

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.pictures import resized, rows_from_top
from tests.datamodules.picture_files import cohort
from tests.delivery.hospitals import run_by_monai, same_files
from tests.integration.runs import run

SMALL = (
    *("experiment=retina_pfednet", "partition=centre", "rounds=2", "local.steps=4"),
    *("evaluation.every=1", "logger=none", "progress=false", "data.patch_size=[16,16]"),
    *("data.patches_per_patient=4", "model.network.channels=[4,8]", "model.network.strides=[2]"),
    *("model.network.num_res_units=0", "optimizer.lr=0.02"),
)


def ask(**keys):
    predict(checked(load([f"{k}={v}" for k, v in keys.items()], "predict")))


def pixels(file):
    with Image.open(file) as picture:
        return np.asarray(picture)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    cohort(folder / "data", patients=4)
    summary, experiment = run(folder / "run", *SMALL, f"data.path={folder / 'data'}")
    return folder, summary, experiment


@pytest.fixture(scope="module")
def bundle(trained):
    settings = [f"run={trained[0] / 'run'}", "client=centre_0"]
    return export_run(checked(load(settings, "export")))[0]


def test_two_rounds_are_measured_by_hospital(trained):
    folder, summary, experiment = trained
    assert list(summary["clients"]) == ["centre_0", "centre_1"]
    assert all(0 <= m["dice"] <= 1 for m in summary["clients"].values())
    with (folder / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["split"] for row in rows} == {"val", "train", "test"}
    assert experiment.config.facts.patch_size == [16, 16]  # pictures of any size, window by window


def test_a_mask_is_that_of_the_evaluation_at_the_size_of_the_picture(trained, bundle, tmp_path):
    _, _, experiment = trained
    data, (patient, *_) = experiment.data, experiment.data.plans["centre_0"].patients["test"]
    batch = data.evaluation_block(patient, 0, data.plans["centre_0"])
    experiment.module.local.model.load(experiment.module.federation.personal_model("centre_0"))
    expected = experiment.task.predict(batch)
    files = list(data.patients[patient].files.values())[::2]
    for n, file in enumerate(files):
        mask = tmp_path / f"{n}.png"
        ask(bundle=bundle, input=file, output=mask, probabilities="true", picture="true")
        height, width = pixels(file).shape[:2]
        found = pixels(tmp_path / f"{n}_vessel_probability.tif")
        peer = resized(rows_from_top(expected[n].numpy()), (height, width))[0]
        np.testing.assert_allclose(found, peer, atol=1e-5)
        assert peer.std() > 1e-3
        drawn = pixels(mask)
        assert drawn.shape == (height, width)
        np.testing.assert_array_equal(drawn, 255 * (found > 0.5))
        assert pixels(tmp_path / f"{n}_contours.png").shape[1] > 100


def test_the_bundle_run_by_monai_gives_the_same_masks(trained, bundle, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for name in ("0L", "1R"):
        shutil.copy(trained[0] / "data" / "centre_0" / f"{name}.png", tmp_path / "in")
    ask(bundle=bundle, input=tmp_path / "in", output=tmp_path / "own", threshold=0.5)
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    assert same_files(tmp_path / "monai", tmp_path / "own") == ["0L.png", "1R.png"]
    for name in ("0L", "1R"):
        assert set(np.unique(pixels(tmp_path / "own" / f"{name}.png"))) <= {0, 255}


def test_without_data_the_sentence_says_where_they_come_from():
    with pytest.raises(ConfigError, match=r"data\.path=VALUE \(.*DRIVE.*CHASE.*images\.csv"):
        run(None, "experiment=retina_pfednet")


def test_exclusive_regions_keep_their_label_values(tmp_path, monkeypatch):
    rows = cohort(tmp_path / "data", patients=3, eyes=1)
    for row in rows:
        file = tmp_path / "data" / row["mask"]
        values = pixels(file).astype(np.uint8) * 3
        values[:, 10:20][values[:, 10:20] == 0] = 7
        Image.fromarray(values).save(file)
    regions = "data.reader.regions={vessel: [3], disc: [7]}"
    place = (f"data.path={tmp_path / 'data'}", "data.reader.scale=0.6")
    plain = ("data=image_masks", "algorithm=fedavg", "model=unet", "optimizer=adam", *SMALL[1:])
    run(tmp_path / "run", *plain, *place, regions, "rounds=1")
    (bundle,) = export_run(checked(load([f"run={tmp_path / 'run'}", "client=centre_0"], "export")))
    name = rows[0]["image"].removeprefix("centre_0/")
    (tmp_path / "in").mkdir()
    shutil.copy(tmp_path / "data" / rows[0]["image"], tmp_path / "in")
    ask(bundle=bundle, input=tmp_path / "in" / name, output=tmp_path / name, picture="true")
    own = pixels(tmp_path / name)
    assert own.shape == pixels(tmp_path / "in" / name).shape[:2]
    assert 1 < len(np.unique(own)) <= 3
    assert set(np.unique(own)) <= {0, 3, 7}
    run_by_monai(bundle, tmp_path / "in", tmp_path / "monai", monkeypatch)
    assert (tmp_path / "monai" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_what_cannot_be_predicted_is_one_sentence(bundle, tmp_path):
    pages = [Image.new("RGB", (20, 16), c) for c in ("red", "blue")]
    pages[0].save(tmp_path / "two.tif", save_all=True, append_images=pages[1:])
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8))
    picture.save(tmp_path / "good.png")
    (tmp_path / "empty").mkdir()
    cases = [
        ({"input": tmp_path / "none.png", "output": tmp_path / "m.png"}, "does not exist; name a"),
        ({"input": tmp_path / "empty", "output": tmp_path / "m"}, "has no pictures"),
        ({"input": tmp_path / "good.png", "output": tmp_path / "m.jpg"}, "or a file of .png where"),
        ({"input": tmp_path / "two.tif", "output": tmp_path / "m.png"}, "has 2 pages"),
        ({"input": tmp_path, "output": tmp_path}, "is the input; choose another"),
        ({"input": tmp_path / "good.png", "output": tmp_path / "good.png"}, "is the input"),
    ]
    before = sorted(tmp_path.iterdir())
    for keys, message in cases:
        with pytest.raises((ConfigError, DataError), match=message):
            ask(bundle=bundle, **keys)
    assert sorted(tmp_path.iterdir()) == before
    assert read_bundle(bundle).facts["input"]["regions"] == {"vessel": [255]}
