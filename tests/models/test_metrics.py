"""Metrics against scikit-learn, SciPy and NumPy."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from monai.metrics import DiceMetric
from scipy.ndimage import binary_erosion
from scipy.spatial.distance import cdist
from sklearn import metrics as sk

from medfed.models.classification import CLASSIFICATION_METRICS, classification_metrics
from medfed.models.regions import hausdorff95
from medfed.models.regression import regression_metrics
from medfed.models.segmentation import SegmentationMeter, dice_bce_loss
from tests.models.tiny import make_task


def numpy_ece(probs: np.ndarray, label: np.ndarray, bins: int) -> float:
    confidence, hit = probs.max(1), probs.argmax(1) == label
    edges, total = np.linspace(0, 1, bins + 1), 0.0
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - hit[inside].mean())
    return total


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_classification_metrics_agree_with_sklearn(k, seed):
    g = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(200, k, generator=g)).softmax(1)
    label = torch.randint(k, (200,), generator=g)
    scores = classification_metrics(probs, label, n_bins=10)
    p, y = probs.double().numpy(), label.numpy()
    auroc = np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in range(k)])
    assert scores["accuracy"] == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert scores["balanced_accuracy"] == pytest.approx(
        sk.balanced_accuracy_score(y, p.argmax(1)), abs=1e-6
    )
    assert scores["auroc"] == pytest.approx(auroc, abs=1e-6)
    assert scores["ece"] == pytest.approx(numpy_ece(probs.numpy(), y, 10), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_regression_metrics_agree_with_sklearn(seed):
    true, found = np.random.default_rng(seed).normal(size=(2, 50)) * 40 + 150
    scores = regression_metrics(torch.tensor(found), torch.tensor(true))
    assert scores["rmse"] == pytest.approx(sk.root_mean_squared_error(true, found), rel=1e-12)
    assert scores["mae"] == pytest.approx(sk.mean_absolute_error(true, found), rel=1e-12)
    assert scores["r2"] == pytest.approx(sk.r2_score(true, found), rel=1e-12)


@pytest.mark.parametrize("outcomes", [[2.0], [2.0, 2.0, 2.0]])
def test_equal_outcomes_have_no_r2_and_raise_no_warning(outcomes):
    true = torch.tensor(outcomes)
    scores = regression_metrics(true + 1, true)
    assert scores["rmse"] == scores["mae"] == 1
    assert math.isnan(scores["r2"])


def test_one_class_has_no_auroc_and_raises_no_warning():
    probs = torch.tensor([[0.3, 0.7], [0.6, 0.4]])
    scores = classification_metrics(probs, torch.tensor([1, 1]))
    assert math.isnan(scores["auroc"])
    assert math.isnan(scores["balanced_accuracy"])
    assert scores["accuracy"] == 0.5
    assert math.isfinite(scores["ece"])


def test_balanced_accuracy_ignores_classes_that_are_only_predicted():
    probs = torch.eye(3)[[0, 1, 2, 1]]
    y = torch.tensor([0, 1, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn mentions the class without a true sample
        expected = sk.balanced_accuracy_score(y.numpy(), probs.argmax(1).numpy())
    assert classification_metrics(probs, y)["balanced_accuracy"] == pytest.approx(expected)


def test_meters_do_not_depend_on_batches():
    g = torch.Generator().manual_seed(0)
    logits, label = torch.randn(20, 2, generator=g), torch.randint(2, (20,), generator=g)
    results = []
    for size in (20, 7, 1):
        meter = make_task("classification").meter()
        for z, y in zip(logits.split(size), label.split(size), strict=True):
            meter.update(z, {"label": y})
        results.append(meter.compute())
    assert results[0] == results[1] == results[2]


def test_empty_meters_are_nan():
    scores = make_task("classification").meter().compute()
    assert set(scores) == {"loss", *CLASSIFICATION_METRICS}
    scores |= SegmentationMeter(dice_bce_loss, ["a"], hausdorff=True).compute()
    assert all(math.isnan(v) for v in scores.values())


@pytest.mark.parametrize("spatial", [(9, 7), (5, 6, 4)])
def test_overlap_is_pooled_and_per_case(spatial):
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 2, *spatial, generator=g)
    truth = (torch.rand(6, 2, *spatial, generator=g) > 0.7).float()
    case = torch.tensor([7, 7, 3, 7, 3, 9])
    meter = SegmentationMeter(dice_bce_loss, ["whole", "core"])
    for part in (slice(0, 4), slice(4, 6)):
        meter.update(logits[part], {"label": truth[part], "case": case[part]})
    scores = meter.compute()
    p, t = (logits > 0).numpy(), truth.numpy() > 0.5
    for r, name in enumerate(("whole", "core")):
        a, b = p[:, r].ravel(), t[:, r].ravel()
        assert scores[f"iou/{name}"] == pytest.approx(sk.jaccard_score(b, a))
        assert scores[f"dice/{name}"] == pytest.approx(sk.f1_score(b, a))
        cases = [sk.f1_score(t[m, r].ravel(), p[m, r].ravel()) for m in masks(case)]
        assert scores[f"dice_case/{name}"] == pytest.approx(np.mean(cases))
    assert scores["iou"] == pytest.approx((scores["iou/whole"] + scores["iou/core"]) / 2)


def masks(case: torch.Tensor) -> list[np.ndarray]:
    return [(case == c).numpy() for c in case.unique()]


def test_without_case_each_image_is_one():
    truth = torch.zeros(2, 1, 4, 4)
    truth[0, :, :2], truth[1, :, :1] = 1, 1
    meter = SegmentationMeter(dice_bce_loss, ["a"])
    for i in (0, 1):  # the first is found, the second missed
        meter.update((truth[i : i + 1] * (1 - i)) * 20 - 10, {"label": truth[i : i + 1]})
    scores = meter.compute()
    assert scores["dice_case"] == 0.5
    assert scores["dice"] == pytest.approx(2 * 8 / (8 + 12))


@pytest.mark.parametrize(
    ("found", "overlap", "distance"),
    [(False, 1.0, 0.0), (True, 0.0, math.hypot(4 * 2.0, 4 * 1.5))],
    ids=["rightly empty", "falsely found"],
)
def test_a_region_that_is_nowhere_follows_brats(found, overlap, distance):
    truth, pred = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    truth[:, 0] = pred[:, 0] = 1
    pred[:, 1, 0, 0] = found
    meter = SegmentationMeter(dice_bce_loss, ["here", "nowhere"], hausdorff=True)
    meter.update(pred * 20 - 10, {"label": truth, "spacing": torch.tensor([[2.0, 1.5, 9.0]])})
    scores = meter.compute()
    for name in ("iou", "dice", "dice_case"):
        assert scores[f"{name}/nowhere"] == overlap
        assert scores[name] == (1 + overlap) / 2
    assert scores["hd95/here"] == 0
    assert scores["hd95/nowhere"] == pytest.approx(distance)
    assert scores["hd95"] == pytest.approx(distance / 2)


def edges(mask: np.ndarray) -> np.ndarray:
    return np.argwhere(mask & ~binary_erosion(mask))


@pytest.mark.parametrize("spatial", [(20, 18), (12, 11, 10)])
def test_hausdorff_agrees_with_all_pairs(spatial):
    grid = torch.stack(torch.meshgrid(*(torch.arange(n) for n in spatial), indexing="ij"))
    centre = torch.tensor([n // 2 for n in spatial]).view(-1, *(1,) * len(spatial))
    truth = ((grid - centre).square().sum(0) < 14)[None, None]
    pred = ((grid - centre - 1).square().sum(0) < 9)[None, None]
    d = cdist(edges(pred[0, 0].numpy()), edges(truth[0, 0].numpy()))
    expected = max(np.percentile(d.min(1), 95), np.percentile(d.min(0), 95))
    assert hausdorff95(pred, truth).item() == pytest.approx(expected, rel=1e-5)


def test_hausdorff_of_a_region_that_one_mask_alone_has_is_the_diagonal():
    some = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    some[..., 1, 1] = True
    none = torch.zeros_like(some)
    assert hausdorff95(none, some).item() == hausdorff95(some, none).item() == 5.0
    assert hausdorff95(some, none, spacing=(1.0, 1.0)).item() == 5.0
    assert hausdorff95(some, none, spacing=(4.0, 1.25)).item() == 13.0
    assert hausdorff95(none, none).item() == hausdorff95(some, some).item() == 0.0


def test_the_diagonal_of_a_brats_volume_is_that_of_the_challenge():
    some = torch.zeros(1, 1, 240, 240, 155, dtype=torch.bool)
    some[..., 100, 100, 100] = True
    assert hausdorff95(some & False, some).item() == pytest.approx(373.128664, abs=1e-6)


@pytest.mark.parametrize("spacing", [(0.5, 0.5, 5.0), (1.0, 2.0, 0.7)])
def test_distances_of_volumes_and_of_their_slices_are_in_millimetres(spacing):
    g = torch.Generator().manual_seed(2)
    truth = torch.zeros(2, 1, 9, 10, 6)
    truth[0, :, 2:6, 3:8, 1:4] = 1
    truth[1, :, 4:6, 2:5, 2:5] = 1
    pred = truth.roll((1, -2, 1), (2, 3, 4)) * (torch.rand(truth.shape, generator=g) > 0.1)
    mm = np.array(spacing)
    expected = []
    for p, t in zip(pred[:, 0].numpy() > 0, truth[:, 0].numpy() > 0, strict=True):
        d = cdist(edges(p) * mm, edges(t) * mm)
        expected.append(max(np.percentile(d.min(1), 95), np.percentile(d.min(0), 95)))
    volumes, slices = (SegmentationMeter(dice_bce_loss, ["a"], hausdorff=True) for _ in range(2))
    step = torch.tensor([spacing])
    case = torch.arange(2)
    batch = {"label": truth, "case": case, "spacing": step.expand(2, 3)}
    volumes.update(pred * 20 - 10, batch)
    flat = [t.permute(0, 4, 1, 2, 3).flatten(0, 1) for t in (pred, truth)]  # 2 x 6 slices
    for some in torch.arange(12).split(5):  # batches that span two cases
        label = {"label": flat[1][some], "case": case.repeat_interleave(6)[some]}
        slices.update(flat[0][some] * 20 - 10, label | {"spacing": step.expand(len(some), 3)})
    assert volumes.compute()["hd95"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert slices.compute()["hd95"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_without_spacing_there_is_no_distance():
    truth = torch.ones(1, 1, 4, 4)
    meter = SegmentationMeter(dice_bce_loss, ["a"], hausdorff=True)
    meter.update(truth, {"label": truth})
    assert math.isnan(meter.compute()["hd95"])


def test_dice_of_cases_agrees_with_monai():
    g = torch.Generator().manual_seed(1)
    pred, truth = ((torch.rand(6, 2, 8, 7, generator=g) > 0.6).float() for _ in range(2))
    pred[0, 0] = truth[0, 0] = 0  # rightly empty
    pred[1, 1] = 0  # missed
    truth[2, 0] = 0  # falsely found
    meter = SegmentationMeter(dice_bce_loss, ["a", "b"])
    meter.update(pred * 20 - 10, {"label": truth})
    found = meter.compute()
    dice = DiceMetric(reduction="none", ignore_empty=False)(pred, truth).double()
    expected = dice.mean(0).tolist()
    assert [found["dice_case/a"], found["dice_case/b"]] == pytest.approx(expected, rel=1e-6)


def test_the_loss_is_the_mean_over_images_whatever_their_batches():
    g = torch.Generator().manual_seed(3)
    logits, truth = torch.randn(5, 1, 4, 4, generator=g), torch.ones(5, 1, 4, 4)
    each = [dice_bce_loss(z[None], y[None]).item() for z, y in zip(logits, truth, strict=True)]
    alone = SegmentationMeter(dice_bce_loss, ["a"])
    uneven = SegmentationMeter(lambda z, y: (z**2).mean(), ["a"])
    for z, y in zip(logits, truth, strict=True):
        alone.update(z[None], {"label": y[None]})
    for some in torch.arange(5).split([4, 1]):
        uneven.update(logits[some], {"label": truth[some]})
    assert alone.compute()["loss"] == pytest.approx(np.mean(each))
    assert uneven.compute()["loss"] == pytest.approx((logits**2).mean().item())
