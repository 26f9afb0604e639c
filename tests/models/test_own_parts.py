"""Losses and metrics of a user's own: what they are given, against the libraries themselves."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from monai.losses import DiceFocalLoss, TverskyLoss
from monai.metrics import DiceMetric, HausdorffDistanceMetric
from omegaconf import OmegaConf
from sklearn.metrics import accuracy_score, average_precision_score, mean_absolute_percentage_error
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from medfed.common.scores import failed, failures_count, smaller_is_better, worst_value
from medfed.config.compose import build
from medfed.models.classification import ClassificationTask
from medfed.models.meters import CustomMetric, Volumes
from medfed.models.task import TaskModule
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
TASKS: dict[str, dict[str, Any]] = {
    "classes": {
        "_target_": "medfed.models.classification.ClassificationTask",
        "network": {"_target_": "torch.nn.Flatten"},
        "num_classes": 3,
        "personal": ["*"],
    },
    "overlapping": {
        "_target_": "medfed.models.segmentation.SegmentationTask",
        "network": {"_target_": "torch.nn.Conv2d", "in_channels": 2, "out_channels": 2}
        | {"kernel_size": 1},
        "regions": ["whole", "core"],
        "personal": ["*"],
    },
    "outcome": {
        "_target_": "medfed.models.regression.RegressionTask",
        "network": {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 1},
        "personal": ["*"],
    },
}
TASKS["exclusive"] = TASKS["overlapping"] | {"activation": "softmax", "exclusive": True}
TASKS["exclusive"]["network"] = TASKS["overlapping"]["network"] | {"out_channels": 3}
BATCH = {"label": torch.zeros(2, 2, 12, 12)}  # whose shape tells the labels' of a segmentation


def make(task: str, **keys: Any) -> TaskModule:
    node = {**TASKS[task], "optimizer": SGD, **keys}
    made: TaskModule = build(OmegaConf.create({"model": {"_convert_": "all", **node}}).model)
    made.check_parts(BATCH)
    return made


def loss_of(name: str, **keys: Any) -> dict[str, Any]:
    return {"loss": {"_target_": name, **keys}}


def masks(seed: int, size: int = 3) -> tuple[Tensor, Tensor]:
    """Logits of three outputs and exclusive masks of two regions."""
    random = torch.Generator().manual_seed(seed)
    number = torch.randint(3, (size, 12, 12), generator=random)
    label = torch.stack([number == 1, number == 2], 1).float()
    return torch.randn(size, 3, 12, 12, generator=random), label


def test_losses_are_given_what_is_said():
    logits, label = masks(0)
    tversky = make("overlapping", **loss_of("monai.losses.TverskyLoss", sigmoid=True, alpha=0.3))
    ours = tversky.criterion(logits[:, 1:], label)
    torch.testing.assert_close(ours, TverskyLoss(sigmoid=True, alpha=0.3)(logits[:, 1:], label))
    own = {"softmax": True, "include_background": False}
    focal = make("exclusive", **loss_of("monai.losses.DiceFocalLoss", **own))
    classes = torch.cat([1 - label.sum(1, keepdim=True), label], 1)
    torch.testing.assert_close(
        focal.criterion(logits, label), DiceFocalLoss(**own)(logits, classes)
    )
    cross = make("exclusive", **loss_of("torch.nn.CrossEntropyLoss"))
    expected = F.cross_entropy(logits, classes.argmax(1))
    torch.testing.assert_close(cross.criterion(logits, label), expected)
    rows, truth = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    margin = make("classes", **loss_of("torch.nn.MultiMarginLoss", p=2))
    torch.testing.assert_close(margin.criterion(rows, truth), nn.MultiMarginLoss(2)(rows, truth))
    huber = make("outcome", **loss_of("torch.nn.HuberLoss", delta=0.5))
    found = huber.criterion(rows[:, :1], torch.arange(5.0))
    torch.testing.assert_close(found, F.huber_loss(rows[:, 0], torch.arange(5.0), delta=0.5))


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], "balanced"], ids=str)
def test_class_weights_weigh_a_loss_by_sample(weights):
    each = loss_of("torch.nn.CrossEntropyLoss", reduction="none")
    logits, label = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    rows = torch.tensor([1.0, 2.0, 3.0]).expand(5, 3)
    batch = {"label": label, "class_weights": rows}
    ours, theirs = (make("classes", class_weights=weights, **own) for own in (each, {}))
    expected = theirs.training_criterion(logits, batch)
    torch.testing.assert_close(ours.training_criterion(logits, batch), expected)
    with pytest.raises(ConfigError, match="gives one number for all; add reduction: none"):
        make("classes", class_weights=weights, **loss_of("torch.nn.CrossEntropyLoss"))


REFUSED = {
    ("overlapping", "monai.losses.DiceLoss"): "by sigmoid; add sigmoid: true to it.",
    ("exclusive", "monai.losses.DiceLoss sigmoid"): "by softmax; add softmax: true to it",
    ("overlapping", "monai.losses.DiceCELoss sigmoid"): "has a cross-entropy of exclusive classes",
    ("overlapping", "torch.nn.CrossEntropyLoss"): "is of exclusive classes, but regions of these",
    ("overlapping", "torch.nn.BCELoss"): "cannot take what this task gives, logits and labels of 0",
    ("overlapping", "torch.nn.MSELoss"): "does not take logits, of which those above 0 are for a",
    ("classes", "torch.nn.NLLLoss"): "does not take logits",
    (
        "classes",
        "torch.nn.BCEWithLogitsLoss",
    ): "cannot take what this task gives, logits (B, K)",
    (
        "outcome",
        "torch.nn.PoissonNLLLoss",
    ): "is 0.7996 where predictions are right and 0.3164",
    ("outcome", "torch.nn.GaussianNLLLoss"): "cannot take what this task gives, predictions (B,)",
    ("outcome", "torch.nn.L1Loss sum"): "grows with the number of samples; add reduction: mean",
    ("outcome", "torch.nn.Identity"): "cannot take what this task gives",
}


@sweep(("task", "loss"), REFUSED)
def test_losses_that_do_not_fit_are_refused_in_a_sentence(task, loss):
    name, *more = loss.split()
    keys = {"sigmoid": {"sigmoid": True}, "sum": {"reduction": "sum"}}
    with pytest.raises(ConfigError) as caught:
        make(task, **loss_of(name, **(keys[more[0]] if more else {})))
    said = REFUSED[task, loss]
    assert said in str(caught.value)
    assert f"model.loss={name.rpartition('.')[2]}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "keys", "said"),
    [
        (
            "classes",
            {"label_smoothing": 0.1},
            "model.label_smoothing is for cross_entropy; set it",
        ),
        (
            "overlapping",
            {"dice_weight": 2.0},
            "model.dice_weight and model.ce_weight are for",
        ),
    ],
)
def test_keys_of_the_loss_that_ships_are_not_for_another(task, keys, said):
    good = {"classes": "torch.nn.CrossEntropyLoss", "overlapping": "torch.nn.BCEWithLogitsLoss"}
    with pytest.raises(ConfigError, match=said):
        make(task, **loss_of(good[task]), **keys)


def metrics_of(**metrics: dict[str, Any]) -> dict[str, Any]:
    return {"metrics": metrics}


DICE = {"_target_": "monai.metrics.DiceMetric", "direction": "max"}
DISTANCE = {"_target_": "monai.metrics.HausdorffDistanceMetric", "include_background": True}
DISTANCE |= {"direction": "min", "worst": 50.0, "percentile": 95}


def measured(task: TaskModule, logits: list[Tensor], batches: list[dict]) -> dict[str, float]:
    meter = task.measured([])
    for one, batch in zip(logits, batches, strict=True):
        meter.update(one, batch)
    return meter.compute()


@pytest.mark.filterwarnings("ignore:monai:FutureWarning")  # of its own parts, called here
def test_metrics_of_slices_are_those_of_volumes_in_mm():
    """Two patients, three slices each, in batches that cut through them."""
    task = make("overlapping", **metrics_of(mean_dice=DICE, distance=DISTANCE))
    logits, label = masks(1, 6)
    logits, case, mm = logits[:, 1:], torch.tensor([0, 0, 0, 1, 1, 1]), [2.0, 1.0, 5.0]
    spacing = torch.tensor(mm).expand(6, 3)
    cut = [slice(0, 2), slice(2, 5), slice(5, 6)]
    batches = [{"label": label[c], "case": case[c], "spacing": spacing[c]} for c in cut]
    found = measured(task, [logits[c] for c in cut], batches)
    dice = DiceMetric()
    distance = HausdorffDistanceMetric(include_background=True, percentile=95)
    for first in (0, 3):
        volumes = [(t[first : first + 3] > 0).permute(1, 2, 3, 0)[None] for t in (logits, label)]
        dice(*volumes)
        distance(*volumes, spacing=mm)
    assert found["mean_dice"] == pytest.approx(dice.aggregate().item())
    assert found["distance"] == pytest.approx(distance.aggregate().item())
    assert (smaller_is_better("distance"), smaller_is_better("mean_dice")) == (True, False)
    assert found == measured(task, [logits[c] for c in cut], batches)  # nothing is left of before


def test_metrics_of_samples_against_scikit_learn():
    name = "torchmetrics.classification.MulticlassAveragePrecision"
    own = {"ap": {"_target_": name, "num_classes": 3, "direction": "max"}}
    task = make("classes", **metrics_of(**own), selection=["ap", "max"])
    logits, label = torch.randn(30, 3), torch.arange(30) % 3
    cut = [slice(0, 20), slice(20, 30)]
    found = measured(task, [logits[c] for c in cut], [{"label": label[c]} for c in cut])
    truth = F.one_hot(label).numpy()
    exact = average_precision_score(truth, logits.softmax(1).numpy(), average="macro")
    assert found["ap"] == pytest.approx(exact, rel=1e-5)
    name = "torchmetrics.regression.MeanAbsolutePercentageError"
    task = make("outcome", **metrics_of(mape={"_target_": name, "direction": "min"}))
    outcomes, predictions = np.linspace(1, 2, 7), np.linspace(1.5, 1.2, 7)
    batch = {"label": torch.tensor(outcomes)}
    found = measured(task, [torch.tensor(predictions)[:, None]], [batch])
    assert found["mape"] == pytest.approx(mean_absolute_percentage_error(outcomes, predictions))


def test_what_is_undefined_is_nan_and_what_has_failed_the_worst():
    task = make("overlapping", **metrics_of(mean_dice=DICE, distance=DISTANCE))
    logits, label = masks(2)
    empty = measured(task, [logits[:, 1:]], [{"label": 0 * label}])
    assert math.isnan(empty["mean_dice"])  # of which MONAI's own mean is 0
    assert all(math.isnan(v) for v in measured(task, [], []).values())
    # A mask that is empty has an infinite distance: the worst, but the model has not failed.
    lost = measured(task, [torch.full_like(label, -9.0)], [{"label": label}])
    assert lost["distance"] == worst_value("distance") == 50.0
    assert failed({"a": lost}) == []
    assert failures_count(lost) == lost
    some = torch.where(torch.arange(3).reshape(3, 1, 1, 1) == 1, -9.0, 18 * label - 9)
    half = measured(task, [some], [{"label": label}])
    assert half["distance"] == pytest.approx(50 / 3)  # one case of three, the others exact
    broken = measured(task, [logits[:, 1:] * math.nan], [{"label": label}])
    assert (broken["distance"], broken["mean_dice"], broken["loss"]) == (50.0, -math.inf, math.inf)
    area = {"_target_": "torchmetrics.classification.BinaryAUROC", "direction": "max"}
    one_sided = {"ranked": {**area, "_target_": "torchmetrics.classification.MulticlassAUROC"}}
    one_sided["ranked"]["num_classes"] = 3
    task = make("classes", **metrics_of(**one_sided))
    alone = measured(task, [torch.randn(4, 3)], [{"label": torch.zeros(4, dtype=torch.long)}])
    assert math.isnan(alone["ranked"])  # TorchMetrics warns, and gives 0


WRONG = {
    "direction: max or min": {"a": {"_target_": DICE["_target_"]}},
    "must be one of|is unknown": {"a": {**DICE, "direction": "up"}},
    "so its direction is not min": {"a": {**DICE, "direction": "min"}},
    "it gives 2 numbers, and must give one": {"a": {**DICE, "reduction": "none"}},
    "model.metrics.iou cannot be called so": {"iou": DICE},
    r"model.metrics.a/b cannot be called so": {"a/b": DICE},
    "add include_background: true": {
        "a": {"_target_": "monai.metrics.HausdorffDistanceMetric", "direction": "min"}
    },
    "model.metrics.a cannot evaluate the task's predictions": {
        "a": {"_target_": "torchmetrics.regression.PearsonCorrCoef", "direction": "max"}
    },
    "must have _target_, and direction": {"a": "dice"},
}


@sweep("said", WRONG)
def test_metrics_that_do_not_fit_are_refused_in_a_sentence(said):
    with pytest.raises(ConfigError, match=said) as caught:
        make("overlapping", metrics=WRONG[said])
    assert "\n" not in str(caught.value)


def right(probabilities, label):
    return (probabilities.argmax(1) == label).double()


class Gathers:
    """A metric as TorchMetrics has them, and no function."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.every = []

    def update(self, probabilities, label):
        self.every.append(right(probabilities, label))

    def compute(self):
        return torch.cat(self.every).mean()


class NeverEmptied(Gathers):
    """It counts the cases of the last split, too."""

    def reset(self):
        self.every = getattr(self, "every", [])


class Remembers:
    """A function that counts all cases so far, as a running mean does."""

    def __init__(self):
        self.every = []

    def __call__(self, probabilities, label):
        self.every.append(right(probabilities, label))
        return torch.cat(self.every).mean()


def changes(probabilities, label):
    value = right(probabilities, label).mean()
    probabilities.zero_()
    label.zero_()
    return value


ACCURACIES = {
    "tensor": lambda p, y: right(p, y).mean(),
    "float": lambda p, y: float(right(p, y).mean()),
    "NumPy": lambda p, y: np.mean(right(p, y).numpy()),
    "of scikit-learn": lambda p, y: accuracy_score(y.numpy(), p.argmax(1).numpy()),
    "in a list": lambda p, y: [right(p, y).mean()],
    "an object": Gathers(),
    "with a gradient": lambda p, y: right(p, y).requires_grad_().mean(),
    "changes its inputs": changes,
}


def with_metrics(**metrics: object) -> TaskModule:
    own = {name: CustomMetric(one, "max") for name, one in metrics.items()}
    task = ClassificationTask(
        nn.Flatten(), partial(torch.optim.SGD, lr=0.1), num_classes=3, metrics=own
    )
    task.check_parts({})
    return task


@pytest.mark.parametrize("kind", ACCURACIES)
def test_a_metric_may_give_its_number_in_any_type(kind):
    """It has all its digits, and a metric beside it gets the data unchanged."""
    task = with_metrics(mine=ACCURACIES[kind], other=lambda p, y: right(p, y).mean())
    logits, label = torch.randn(7, 3), torch.arange(7) % 3
    before = label.clone()
    found = measured(task, [logits], [{"label": label}])
    assert found["mine"] == found["other"] == (logits.argmax(1) == before).double().mean().item()
    assert torch.equal(label, before)


NO_METRICS = {
    "keeps, as a function": (Remembers(), "is 1, then 0.6667 for the same predictions, so it keep"),
    "keeps, as an object": (NeverEmptied(), "so it keeps something between calls; give it update"),
    "a text": (lambda p, y: "0.5", "it gives str, no number"),
    "nothing": (lambda p, y: None, "it gives NoneType, no number"),
    "per case": (right, "it gives 6 numbers, and must give one"),
    "two classes": (BinaryAUROC(), r"predictions of shape \[6, 3\] and labels of shape \[6\]: "),
}


@pytest.mark.parametrize(("metric", "says"), NO_METRICS.values(), ids=NO_METRICS)
def test_what_is_no_metric(metric, says):
    with pytest.raises(ConfigError, match=says):
        with_metrics(mine=metric)


def test_a_metric_that_draws_gives_the_same_again():
    assert with_metrics(mine=lambda p, y: right(p, y).mean() - 1e-6 * torch.rand(()))


def test_a_selection_follows_the_direction():
    assert make("overlapping", metrics={"a": DICE}, selection=["a", "max"]).selection[0] == "a"
    with pytest.raises(ConfigError, match=r"selection=\[a,min\] must be \[a,max\]"):
        make("overlapping", metrics={"a": DICE}, selection=["a", "min"])


@pytest.mark.parametrize(
    ("shape", "scans", "spacing", "expected"),
    [
        ((1, 4, 4), [(7, 0)] * 3 + [(7, 1)], (1.0, 2.0, 3.0), [(1, 4, 4, 3), (1, 4, 4)]),
        ((1, 4, 4, 2), [(7, 0)] * 2, (1.0, 2.0, 3.0), [(1, 4, 4, 2)] * 2),
        ((1, 4, 4), [None] * 2, None, [(1, 4, 4)] * 2),
    ],
    ids=["slices", "volumes of one patient", "images by themselves"],
)
def test_slices_become_volumes_and_volumes_stay(shape, scans, spacing, expected):
    found = []
    volumes = Volumes(lambda scan, mm, p, t: found.append((scan, mm, p, t)))
    images = torch.rand(len(scans), *shape)
    for scan, image in zip(scans, images, strict=True):
        volumes.add(scan, spacing, image, image > 0.5)
    volumes.close()
    assert [tuple(p.shape) for _, _, p, _ in found] == expected
    assert {scan for scan, *_ in found} == {*scans}
    for _, mm, p, t in found:
        assert mm is None or mm == spacing[: p.ndim - 1]
        assert torch.equal(t, p > 0.5)
    if expected[0][-1] == 3:
        assert torch.equal(found[0][2], images[:3].permute(1, 2, 3, 0))
