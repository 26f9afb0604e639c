"""Thresholds of regions: chosen on validation cases, kept in records and bundles, used by masks."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim import SGD

from medfed.config.compose import described, load
from medfed.config.description import checked
from medfed.delivery.bundle.bundle import read_bundle
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.functional.points import RegionChooser
from medfed.models.segmentation import SegmentationTask
from medfed.models.segmentation_meter import counts_above, iou_and_dice, overlap_counts
from medfed.run.evaluation import evaluate_run
from medfed.run.experiment import chooser_of
from medfed.run.results import metric_table, remarks
from tests.datamodules.picture_files import cohort, write_index
from tests.integration.runs import run
from tests.sites.direct import Direct
from tests.sites.hospitals import across, same, site

LEVELS = [k / 20 for k in range(1, 20)]
SMALL = (
    *("experiment=retina_pfednet", "partition=centre", "rounds=2", "local.steps=6"),
    *("evaluation.every=2", "logger=none", "progress=false", "data.patch_size=[16,16]"),
    *("data.patches_per_patient=4", "model.network.channels=[4,8]", "model.network.strides=[2]"),
    *("model.network.num_res_units=0", "optimizer.lr=0.02", "pictures.format=none"),
    *("model.threshold=0.9", "data.val_fraction=0.4", "model.surface=false"),
)


def test_overlaps_at_all_levels_are_those_of_each():
    random = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 3, 7, 5, generator=random).mul(20).round().div(20)  # with ties
    truth = torch.rand(2, 3, 7, 5, generator=random) > 0.6
    above = counts_above(probabilities, truth, LEVELS)
    for g, level in enumerate(LEVELS):
        assert (
            above[:, :, g].tolist()
            == overlap_counts(probabilities > level, truth)[..., :2].tolist()
        )


def rows_of(seed, shift, cases, region="a", voxels=200):
    """Cases whose voxels' odds are right, but for a shift of the hospital and noise of the case."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(cases):
        odds = random.normal(-1, 2, voxels)
        truth = random.random(voxels) < 1 / (1 + np.exp(-odds))
        seen = 1 / (1 + np.exp(-odds - shift - random.normal(0, 0.5)))
        counts = [[int((truth & (seen > t)).sum()), int((seen > t).sum())] for t in LEVELS]
        rows.append({"region": region, "labelled": int(truth.sum()), "counts": counts})
    return rows


def gain(rows, level):
    """What a threshold adds to the mean Dice of cases."""

    def dice(at):
        counts = torch.tensor([[*row["counts"][LEVELS.index(at)], row["labelled"]] for row in rows])
        return iou_and_dice(counts)[1].mean().item()

    return dice(level) - dice(0.5)


CHOOSER = RegionChooser(["a"], 0.5, lambda cases, weights: {})


@pytest.mark.parametrize(
    ("shift", "cases", "least"),
    [(0.0, 6, -0.001), (-0.5, 6, -0.001), (-1.5, 6, 0.02), (-1.5, 30, 0.05), (-1.5, 4, 0.0)],
    ids=["noise", "nearly noise", "few cases", "many cases", "too few"],
)
def test_a_threshold_is_chosen_by_what_validation_can_tell(shift, cases, least):
    gains, levels = [], []
    for seed in range(60):
        point = CHOOSER.choose(rows_of(seed, shift, cases))
        levels.append(point.get("threshold/a", 0.5))
        gains.append(gain(rows_of(1000 + seed, shift, 50), levels[-1]))
    assert np.mean(gains) >= least
    assert (set(levels) == {0.5}) == (cases < 5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thresholds")
    rows = cohort(folder / "data", patients=16)
    summary, _ = run(folder / "run", *SMALL, f"data.path={folder / 'data'}")
    return folder, summary, rows


def test_a_run_chooses_and_says_the_thresholds(trained):
    folder, summary, _ = trained
    with (folder / "run" / "cases.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for client, point in summary["points"].items():
        mine = [row for row in rows if row["client"] == client]
        assert 0 < point["threshold/vessel"] < 0.9
        columns = ("true_positive/point", "predicted/point", "labelled")
        counts = torch.tensor([[float(row[n]) for n in columns] for row in mine])
        metrics = summary["clients"][client]
        assert metrics["dice_case/point"] == pytest.approx(iou_and_dice(counts)[1].mean().item())
        assert metrics["dice/vessel/point"] == pytest.approx(iou_and_dice(counts.sum(0))[1].item())
        assert metrics["dice/point"] > metrics["dice"]
    assert "dice/point" in summary["intervals"]["mean"]
    assert "thresholds" in [*metric_table(summary).columns[0].cells]
    (said,) = [line for line in remarks(summary)[1] if "thresholds that validation" in line]
    level = summary["points"]["centre_0"]["threshold/vessel"]
    mean = summary["federation"]["dice/point"]["mean"]
    assert f"centre_0 vessel {level:g}" in said
    assert said.endswith(f"to {mean:.4f}.")


def test_an_evaluation_anew_gives_the_same(trained, tmp_path):
    folder, summary, _ = trained
    again = evaluate_run(shutil.copytree(folder / "run", tmp_path / "run"))
    assert again["clients"] == summary["clients"]


def test_a_bundle_decides_by_the_chosen_threshold(trained, tmp_path):
    folder, summary, _ = trained
    keys = [f"run={folder / 'run'}", "client=centre_0", f"out={tmp_path / 'bundles'}"]
    (bundle,) = export_run(checked(load(keys, "export")))
    level = summary["points"]["centre_0"]["threshold/vessel"]
    assert read_bundle(bundle).facts["threshold"] == level
    card = (bundle / "docs" / "model_card.md").read_text()
    assert f"Thresholds, chosen on validation cases: vessel {level:g}." in card
    scan = folder / "data" / "centre_0" / "0L.png"
    keys = (f"bundle={bundle}", f"input={scan}", f"output={tmp_path / 'x.png'}")
    predict(checked(load([*keys, "probabilities=true"], "predict")))
    found = np.asarray(Image.open(tmp_path / "x_vessel_probability.tif"))
    mask = np.asarray(Image.open(tmp_path / "x.png"))
    np.testing.assert_array_equal(mask > 0, found > np.float32(level))


def test_thresholds_of_regions_are_one_for_each(tmp_path):
    from medfed.standalone.inference import RegionInference

    inference = RegionInference(threshold=(0.2, 0.8))
    probabilities = torch.full((1, 2, 3, 3), 0.5)
    assert inference.masks(probabilities).flatten(2).all(2).tolist() == [[True, False]]
    drawn = inference.outlines(probabilities[0])
    assert (drawn > 0.5).flatten(1).all(1).tolist() == [True, False]


def test_sites_choose_the_same(trained, tmp_path):
    folder, *_ = trained
    sites, clients = {}, ["centre_0", "centre_1"]
    for name in clients:
        place = tmp_path / name
        shutil.copytree(folder / "data" / name, place / name)
        write_index(place, [row for row in trained[2] if row["centre"] == name])
        sites[name] = site(tmp_path / "sites", name, *SMALL, f"data.path={place}", sites=clients)
    across(tmp_path / "run", Direct(sites), clients, *SMALL, f"data.path={tmp_path / 'centre_0'}")
    assert same(folder / "run", tmp_path / "run") == []
    points = json.loads((tmp_path / "run" / "summary.json").read_text())["points"]
    assert points == json.loads((folder / "run" / "summary.json").read_text())["points"]


class OwnMeter(SegmentationTask):
    """A user's task, whose meter counts at no thresholds."""

    def meter(self, *, test=False):
        return super().meter(test=test)


CHOOSING = {
    "regions that overlap": (SegmentationTask, ["a", "b"], "sigmoid", [], True),
    "exclusive ones": (SegmentationTask, ["a", "b"], "softmax", [], False),
    "by wish": (SegmentationTask, ["a"], "sigmoid", ["evaluation.operating_point=null"], False),
    "a region of that name": (SegmentationTask, ["a", "point"], "sigmoid", [], False),
    "a user's meter": (OwnMeter, ["a"], "sigmoid", [], False),
}


@pytest.mark.parametrize("case", CHOOSING.values(), ids=CHOOSING)
def test_which_tasks_choose_thresholds(case):
    kind, regions, activation, keys, chooses = case
    task = kind(torch.nn.Conv2d(1, 1, 1), SGD, regions=regions, activation=activation)
    assert bool(chooser_of(described(["experiment=brats_pfednet", *keys]), task)) == chooses
