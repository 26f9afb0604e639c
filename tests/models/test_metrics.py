"""Metrics against scikit-learn, SciPy and NumPy."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from monai.metrics import DiceMetric
from sklearn import metrics as sk

from medfed.functional.scores import CLASS_SCORES
from medfed.models.classification import classification_metrics
from medfed.models.regression import regression_metrics
from medfed.models.segmentation import SegmentationMeter, dice_bce_loss
from medfed.standalone.inference import margins
from tests.models.tiny import make_batch, make_task
from tests.sweeps import sweep


@sweep("k", [2, 4])
@sweep("seed", range(3))
def test_classification_metrics_agree_with_sklearn(k, seed):
    g = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(200, k, generator=g)).softmax(1)
    label = torch.randint(k, (200,), generator=g)
    scores = classification_metrics(probs, label)
    p, y = probs.double().numpy(), label.numpy()
    auroc = np.mean([sk.roc_auc_score(y == c, p[:, c]) for c in range(k)])
    assert scores["accuracy"] == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert scores["balanced_accuracy"] == pytest.approx(
        sk.balanced_accuracy_score(y, p.argmax(1)), abs=1e-6
    )
    assert scores["auroc"] == pytest.approx(auroc, abs=1e-6)
    assert scores["log_loss"] == pytest.approx(
        sk.log_loss(y, p / p.sum(1, keepdims=True)), rel=1e-6
    )
    sure = p / p.sum(1, keepdims=True)
    brier = sk.brier_score_loss(y, sure, labels=range(k), scale_by_half=True)
    assert scores["brier"] == pytest.approx(brier, abs=1e-6)
    which = {"pos_label": 1} if k == 2 else {"average": "macro"}
    found, truth = p.argmax(1), y
    assert scores["sensitivity"] == pytest.approx(sk.recall_score(truth, found, **which))
    assert scores["f1"] == pytest.approx(sk.f1_score(truth, found, **which))
    tables = sk.multilabel_confusion_matrix(truth, found)[-1 if k == 2 else slice(None)]
    (tn, fp), _ = np.moveaxis(tables.reshape(-1, 2, 2), 0, -1)
    assert scores["specificity"] == pytest.approx(np.mean(tn / (tn + fp)))


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
    assert math.isfinite(scores["log_loss"])


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
    assert set(scores) == {"loss", *CLASS_SCORES}
    scores |= SegmentationMeter(dice_bce_loss, ["a"], positive, [1.0]).compute()
    assert all(math.isnan(v) for v in scores.values())


@pytest.mark.parametrize("spatial", [(9, 7), (5, 6, 4)])
def test_overlap_is_pooled_and_per_case(spatial):
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 2, *spatial, generator=g)
    truth = (torch.rand(6, 2, *spatial, generator=g) > 0.7).float()
    case = torch.tensor([7, 7, 3, 7, 3, 9])
    meter = SegmentationMeter(dice_bce_loss, ["whole", "core"], positive)
    for part in (slice(0, 4), slice(4, 6)):
        meter.update(logits[part], {"label": truth[part], "case": case[part]})
    scores = meter.compute()
    p, t = (logits > 0).numpy(), truth.numpy() > 0.5
    for r, name in enumerate(("whole", "core")):
        a, b = p[:, r].ravel(), t[:, r].ravel()
        assert scores[f"iou/{name}"] == pytest.approx(sk.jaccard_score(b, a))
        assert scores[f"dice/{name}"] == pytest.approx(sk.f1_score(b, a))
        both = sk.jaccard_score(b, a, average="micro", labels=[0, 1])
        assert scores[f"iou_both/{name}"] == pytest.approx(both)
        cases = [sk.f1_score(t[m, r].ravel(), p[m, r].ravel()) for m in masks(case)]
        assert scores[f"dice_case/{name}"] == pytest.approx(np.mean(cases))
    assert scores["iou"] == pytest.approx((scores["iou/whole"] + scores["iou/core"]) / 2)


def positive(logits: torch.Tensor) -> torch.Tensor:
    return logits > 0


def masks(case: torch.Tensor) -> list[np.ndarray]:
    return [(case == c).numpy() for c in case.unique()]


def test_without_case_each_image_is_one():
    truth = torch.zeros(2, 1, 4, 4)
    truth[0, :, :2], truth[1, :, :1] = 1, 1
    meter = SegmentationMeter(dice_bce_loss, ["a"], positive)
    for i in (0, 1):  # the first is found, the second missed
        meter.update((truth[i : i + 1] * (1 - i)) * 20 - 10, {"label": truth[i : i + 1]})
    scores = meter.compute()
    assert scores["dice_case"] == 0.5
    assert scores["dice"] == pytest.approx(2 * 8 / (8 + 12))


def test_dice_of_cases_agrees_with_monai():
    g = torch.Generator().manual_seed(1)
    pred, truth = ((torch.rand(6, 2, 8, 7, generator=g) > 0.6).float() for _ in range(2))
    pred[0, 0] = truth[0, 0] = 0  # rightly empty
    pred[1, 1] = 0  # missed
    truth[2, 0] = 0  # falsely found
    meter = SegmentationMeter(dice_bce_loss, ["a", "b"], positive)
    meter.update(pred * 20 - 10, {"label": truth})
    found = meter.compute()
    dice = DiceMetric(reduction="none", ignore_empty=False)(pred, truth).double()
    expected = dice.mean(0).tolist()
    assert [found["dice_case/a"], found["dice_case/b"]] == pytest.approx(expected, rel=1e-6)


def test_the_loss_is_the_mean_over_images_whatever_their_batches():
    g = torch.Generator().manual_seed(3)
    logits, truth = torch.randn(5, 1, 4, 4, generator=g), torch.ones(5, 1, 4, 4)
    each = [dice_bce_loss(z[None], y[None]).item() for z, y in zip(logits, truth, strict=True)]
    alone = SegmentationMeter(dice_bce_loss, ["a"], positive)
    uneven = SegmentationMeter(lambda z, y: (z**2).mean(), ["a"], positive)
    for z, y in zip(logits, truth, strict=True):
        alone.update(z[None], {"label": y[None]})
    for some in torch.arange(5).split([4, 1]):
        uneven.update(logits[some], {"label": truth[some]})
    assert alone.compute()["loss"] == pytest.approx(np.mean(each))
    assert uneven.compute()["loss"] == pytest.approx((logits**2).mean().item())


def test_of_exclusive_classes_the_likeliest_is_predicted():
    g = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 4, 9, 8, generator=g)
    index = torch.randint(4, (4, 9, 8), generator=g)
    label = torch.nn.functional.one_hot(index, 4).movedim(-1, 1)[:, 1:]
    task = make_task("classes", regions=["a", "b", "c"])
    meter = task.meter()
    meter.update(logits, {"label": label})
    scores, found = meter.compute(), logits.argmax(1)
    pooled = {"average": None, "labels": [1, 2, 3]}
    for name, score in (("iou", sk.jaccard_score), ("dice", sk.f1_score)):
        expected = score(index.ravel(), found.ravel(), **pooled)
        assert [scores[f"{name}/{r}"] for r in "abc"] == pytest.approx(expected)
    each = [sk.f1_score(i.ravel(), f.ravel(), **pooled) for i, f in zip(index, found, strict=True)]
    assert [scores[f"dice_case/{r}"] for r in "abc"] == pytest.approx(np.mean(each, axis=0))
    probabilities = task.probabilities(logits)
    assert torch.allclose(probabilities, logits.softmax(1)[:, 1:])
    drawn = torch.stack([margins(p) > 0.5 for p in probabilities])  # contours show the same
    assert torch.equal(drawn, task.inference.masks(probabilities))


def test_a_meter_keeps_what_every_case_gave():
    g = torch.Generator().manual_seed(9)
    logits = torch.randn(5, 2, 6, 6, generator=g)
    truth = (torch.rand(5, 2, 6, 6, generator=g) > 0.6).float()
    case = torch.tensor([4, 4, 1, 1, 4])
    meter = SegmentationMeter(dice_bce_loss, ["a", "b"], positive)
    meter.update(logits, {"label": truth, "case": case})
    found, scores = meter.cases(), meter.compute()
    assert [(row["case"], row["region"]) for row in found] == [(c, r) for c in (4, 1) for r in "ab"]
    for r, region in enumerate("ab"):
        p, t = logits[case == 4, r] > 0, truth[case == 4, r] > 0.5
        assert [found[r]["predicted"], found[r]["labelled"]] == [p.sum(), t.sum()]
        assert found[r]["dice"] == pytest.approx(sk.f1_score(t.ravel(), p.ravel()))
        mean = np.mean([row["dice"] for row in found if row["region"] == region])
        assert scores[f"dice_case/{region}"] == pytest.approx(mean)


def test_every_case_of_a_model_that_has_failed_is_the_worst():
    batch = make_batch("segmentation") | {"spacing": torch.ones(8, 3)}
    task = make_task("segmentation")
    torch.nn.init.constant_(next(task.network.parameters()), math.nan)
    rows = task.measured([batch], test=True).cases()
    worst = {"iou": 0.0, "dice": 0.0, "hd95": math.inf, "nsd": 0.0}
    assert [{n: row[n] for n in worst} for row in rows] == [worst] * 4
