"""Losses and metrics of regions that not every client annotates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from medfed.models.segmentation import dice_bce_loss, dice_ce_loss
from medfed.models.segmentation_meter import SegmentationMeter, overlap_scores

SMOOTH = 1e-5
ANNOTATED = torch.tensor([[True, False, True], [True, False, False]])


def samples(classes):
    """Logits (2, classes, 3, 3) and exclusive masks of 3 regions, in double precision."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, classes, 3, 3, generator=random, dtype=torch.float64)
    number = torch.randint(4, (2, 3, 3), generator=random)
    return logits, torch.stack([number == r + 1 for r in range(3)], 1).double()


def dice_by_hand(probabilities, target):
    """The mean over regions of one minus Dice, voxels of samples that annotate it together."""
    terms = []
    for r in range(3):
        held = [b for b in range(2) if ANNOTATED[b, r]]
        if held:
            p, y = (
                np.concatenate([t[b, r].ravel() for b in held]) for t in (probabilities, target)
            )
            terms.append(1 - (2 * (p * y).sum() + SMOOTH) / (p.sum() + y.sum() + SMOOTH))
    return sum(terms) / len(terms)


def test_sigmoid_leaves_out_what_is_not_annotated():
    logits, target = samples(3)
    z, y = logits.numpy(), target.numpy()
    p = 1 / (1 + np.exp(-z))
    voxels = [
        -(y[b, r] * np.log(p[b, r]) + (1 - y[b, r]) * np.log(1 - p[b, r])).ravel()
        for b in range(2)
        for r in range(3)
        if ANNOTATED[b, r]
    ]
    expected = 0.7 * dice_by_hand(p, y) + 1.3 * np.concatenate(voxels).mean()
    logits.requires_grad_()
    weights = {"dice_weight": 0.7, "ce_weight": 1.3}
    loss = dice_bce_loss(logits, target, annotated=ANNOTATED, **weights)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert not logits.grad[~ANNOTATED].any()
    assert logits.grad[ANNOTATED].all()


def test_softmax_adds_the_probabilities_of_what_is_not_annotated():
    logits, target = samples(4)
    z, y = logits.numpy(), target.numpy()
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    terms = []
    for b, i, j in np.ndindex(2, 3, 3):
        known = [r for r in range(3) if ANNOTATED[b, r] and y[b, r, i, j]]
        rest = p[b, 0, i, j] + sum(p[b, r + 1, i, j] for r in range(3) if not ANNOTATED[b, r])
        terms.append(-np.log(p[b, known[0] + 1, i, j] if known else rest))
    outlined = target * ANNOTATED[..., None, None]  # as data modules give it
    expected = dice_by_hand(p[:, 1:], y) + np.mean(terms)
    loss = dice_ce_loss(logits, outlined, annotated=ANNOTATED)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("loss", "classes"), [(dice_bce_loss, 3), (dice_ce_loss, 4)])
def test_all_annotated_is_the_full_loss(loss, classes):
    logits, target = samples(classes)
    gradients = []
    for annotated in (None, torch.ones(2, 3, dtype=torch.bool)):
        free = logits.clone().requires_grad_()
        value = loss(free, target, annotated=annotated)
        value.backward()
        gradients.append((value.detach(), free.grad))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    nothing = loss(logits, 0 * target, annotated=torch.zeros(2, 3, dtype=torch.bool))
    assert math.isfinite(nothing)


def test_metrics_are_undefined_where_nobody_annotates():
    def meter():
        return SegmentationMeter(dice_bce_loss, ["a", "b", "c"], lambda z: z > 0, [1.0] * 3)

    logits, target = samples(3)
    batch = {"label": target, "case": torch.tensor([0, 1]), "spacing": torch.ones(2, 3)}
    whole, partly, alone = meter(), meter(), meter()
    whole.update(logits, batch)
    partly.update(logits, {**batch, "annotated": ANNOTATED})
    alone.update(logits[:1], {name: values[:1] for name, values in batch.items()})
    full, some, first = whole.compute(), partly.compute(), alone.compute()
    for metric in ("iou", "dice", "dice_case", "hd95", "nsd"):
        assert some[f"{metric}/a"] == full[f"{metric}/a"]
        assert math.isnan(some[f"{metric}/b"])
        assert some[f"{metric}/c"] == first[f"{metric}/c"]
        assert some[metric] == pytest.approx((some[f"{metric}/a"] + some[f"{metric}/c"]) / 2)
    rows = partly.cases()
    assert [(row["case"], row["region"]) for row in rows] == [(0, "a"), (0, "c"), (1, "a")]
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    scores = overlap_scores(columns, ["a", "b", "c"], np.ones((1, 3)))
    for name, values in scores.items():
        assert values[0] == pytest.approx(some[name], nan_ok=True)
