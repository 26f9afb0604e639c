"""Losses against NumPy, SciPy and MONAI."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from monai.losses import DiceCELoss, FocalLoss
from scipy.special import expit, log_softmax
from sklearn.utils.class_weight import compute_class_weight

from medfed.datamodules.client_data import ClientData
from medfed.models.classification import focal_loss
from medfed.models.segmentation import dice_bce_loss, dice_ce_loss
from medfed.standalone.errors import ConfigError
from tests.models.tiny import make_task
from tests.sweeps import sweep


@pytest.fixture
def classes():
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(17, 3, generator=g, dtype=torch.float64)
    return logits, torch.randint(3, (17,), generator=g)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 0.5]])
def test_focal_loss_is_its_formula(classes, gamma, weight):
    logits, target = classes
    log_p = log_softmax(logits.numpy(), axis=1)[np.arange(17), target.numpy()]
    w = np.ones(17) if weight is None else np.array(weight)[target.numpy()]
    expected = np.mean(-w * (1 - np.exp(log_p)) ** gamma * log_p)
    given = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    assert focal_loss(logits, target, gamma=gamma, weight=given).item() == pytest.approx(expected)


def test_focal_loss_is_monai_times_classes(classes):
    logits, target = classes
    monai = FocalLoss(gamma=2.0, use_softmax=True, to_onehot_y=True)(logits, target[:, None])
    assert focal_loss(logits, target).item() == pytest.approx(3 * monai.item(), rel=1e-6)


def test_focal_loss_without_focus_is_cross_entropy(classes):
    assert torch.isclose(focal_loss(*classes, gamma=0.0), F.cross_entropy(*classes))


@pytest.mark.parametrize("spatial", [(6, 5), (4, 3, 5)])
def test_dice_bce_is_its_formula(spatial):
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3, *spatial, generator=g, dtype=torch.float64)
    target = (torch.rand(2, 3, *spatial, generator=g) > 0.6).double()
    z, y = logits.numpy(), target.numpy()
    p, axes = expit(z), (0, *range(2, z.ndim))
    dice = 1 - (2 * (p * y).sum(axes) + 1e-5) / ((p + y).sum(axes) + 1e-5)
    bce = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    loss = dice_bce_loss(logits, target, dice_weight=0.7, ce_weight=1.3)
    assert loss.item() == pytest.approx(0.7 * dice.mean() + 1.3 * bce, rel=1e-6)


def test_dice_bce_accepts_integer_labels_and_extreme_logits():
    logits = torch.tensor([[[[300.0, -300.0]]]], requires_grad=True)
    loss = dice_bce_loss(logits, torch.tensor([[[[1, 0]]]]))
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-5)
    assert logits.grad.isfinite().all()


def test_class_weights_follow_sklearn_convention(classes):
    logits, target = classes
    task = make_task("classification", num_classes=3, class_weights=[1.0, 4.0, 0.0])
    log_p = log_softmax(logits.numpy(), axis=1)[np.arange(17), target.numpy()]
    w = np.array([1.0, 4.0, 0.0])[target.numpy()]
    assert task.criterion(logits, target).item() == pytest.approx(-(w * log_p).sum() / w.sum())
    assert not [name for name in task.state_dict() if "weights" in name]


def client_of(label: torch.Tensor, classes: int, balanced: bool = True) -> ClientData:
    counts = torch.bincount(label, minlength=classes).float()
    block = {"image": torch.zeros(len(label), 1), "label": label}
    parts = {"train": [], "val": [], "test": []}
    present = torch.ones(1, dtype=torch.bool)
    return ClientData("a", block, {}, present, counts, parts, 8, balanced=balanced)


@sweep("smoothing", [0.0, 0.1])
@sweep("absent", [(), (1,)])
def test_balanced_weights_are_those_of_scikit_learn_in_pytorchs_loss(smoothing, absent):
    g = torch.Generator().manual_seed(7)
    label = torch.randint(4, (40,), generator=g).clamp(max=2)
    label[torch.isin(label, torch.tensor(absent))] = 0
    present = np.unique(label.numpy())
    expected = torch.zeros(3)
    weights = compute_class_weight("balanced", classes=present, y=label.numpy())
    expected[present] = torch.tensor(weights).float()
    data = client_of(label, 3)
    assert torch.allclose(data.class_weights, expected)
    options = {"num_classes": 3, "class_weights": "balanced", "label_smoothing": smoothing}
    task = make_task("classification", **options)
    loss = torch.nn.CrossEntropyLoss(weight=expected, label_smoothing=smoothing)
    for batch in data.train_batches(0):
        logits = torch.randn(len(batch["label"]), 3, generator=g)
        ours = task.training_criterion(logits, batch)
        assert torch.allclose(ours, loss(logits, batch["label"]))
        assert task.criterion(logits, batch["label"]) != ours  # that of evaluation has no weights


def test_balanced_focal_loss_weighs_each_sample(classes):
    logits, target = classes
    data = client_of(target, 3)
    options = {"num_classes": 3, "class_weights": "balanced", "loss": "focal"}
    task = make_task("classification", **options)
    batch = {"label": target, "class_weights": data.class_weights.expand(17, 3)}
    expected = focal_loss(logits, target, weight=data.class_weights.double())
    assert torch.allclose(task.training_criterion(logits, batch), expected)


def test_batches_without_weights_are_refused_where_they_are_needed(classes):
    task = make_task("classification", num_classes=3, class_weights="balanced")
    with pytest.raises(ConfigError, match="needs batches with class_weights"):
        task.training_criterion(classes[0], {"label": classes[1]})
    with pytest.raises(ConfigError, match="class_weights='equal' is unknown"):
        make_task("classification", class_weights="equal")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dice_bce_sums_half_precision_in_single(dtype):
    logits = torch.randn(4, 1, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = (logits > 0.5).float()
    assert torch.equal(dice_bce_loss(logits, target), dice_bce_loss(logits.float(), target))


def exclusive(spatial: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(6)
    logits = torch.randn(2, 4, *spatial, generator=g, dtype=torch.float64)
    index = torch.randint(4, (2, *spatial), generator=g)
    return logits, F.one_hot(index, 4).movedim(-1, 1)[:, 1:].float()


@pytest.mark.parametrize("spatial", [(6, 5), (4, 3, 5)])
def test_dice_ce_is_its_formula_and_monai(spatial):
    logits, target = exclusive(spatial)
    z, y = logits.numpy(), target.numpy()
    log_p, axes = log_softmax(z, axis=1), (0, *range(2, z.ndim))
    p = np.exp(log_p[:, 1:])
    dice = 1 - (2 * (p * y).sum(axes) + 1e-5) / ((p + y).sum(axes) + 1e-5)
    whole = np.concatenate([1 - y.sum(1, keepdims=True), y], axis=1)
    ce = -(whole * log_p).sum(1).mean()
    loss = dice_ce_loss(logits, target, dice_weight=0.7, ce_weight=1.3).item()
    assert loss == pytest.approx(0.7 * dice.mean() + 1.3 * ce, rel=1e-6)
    monai = DiceCELoss(
        include_background=False, softmax=True, batch=True, lambda_dice=0.7, lambda_ce=1.3
    )
    assert loss == pytest.approx(monai(logits, torch.tensor(whole).double()).item(), rel=1e-6)


def test_dice_ce_sums_half_precision_in_single():
    logits, target = exclusive((32, 32))
    half = logits.to(torch.bfloat16)
    assert torch.equal(dice_ce_loss(half, target), dice_ce_loss(half.float(), target))
