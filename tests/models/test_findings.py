"""Several findings per image, of which some are unknown: loss and metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from medfed.models.findings import FindingsMeter, finding_loss

NAN = math.nan
LABEL = torch.tensor([[1, NAN, 0], [0, NAN, NAN], [1, NAN, 1], [0, NAN, 1]], dtype=torch.float64)


def test_unknown_findings_have_no_loss_and_no_gradient():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.tensor([2.0, 5.0, 0.5], dtype=torch.float64)
    p, y = 1 / (1 + np.exp(-logits.numpy())), LABEL.numpy()
    cells = [
        -(y[n, k] * weight[k].item() * np.log(p[n, k]) + (1 - y[n, k]) * np.log(1 - p[n, k]))
        for n, k in zip(*np.nonzero(~np.isnan(y)), strict=True)
    ]
    logits.requires_grad_()
    loss = finding_loss(logits, LABEL, weight.expand(4, 3))
    assert loss.item() == pytest.approx(np.mean(cells), rel=1e-12)
    loss.backward()
    assert torch.equal(logits.grad != 0, ~LABEL.isnan())
    all_known = LABEL.nan_to_num()
    usual = torch.nn.functional.binary_cross_entropy_with_logits(logits, all_known)
    assert finding_loss(logits, all_known).item() == pytest.approx(usual.item(), rel=1e-12)
    assert finding_loss(logits, LABEL * NAN).item() == 0


def test_a_finding_is_measured_where_it_is_known():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    meter = FindingsMeter(["a", "b", "c"])
    for part in (slice(0, 1), slice(1, 4)):
        meter.update(logits[part], {"label": LABEL[part].float(), "case": torch.arange(4)[part]})
    scores = meter.compute()
    for k, name in ((0, "a"), (2, "c")):
        known = ~LABEL[:, k].isnan()
        expected = roc_auc_score(LABEL[known, k], logits[known, k])
        assert scores[f"auroc/{name}"] == pytest.approx(expected)
    assert math.isnan(scores["auroc/b"])
    assert scores["auroc"] == pytest.approx((scores["auroc/a"] + scores["auroc/c"]) / 2)
    rows = meter.cases()
    assert len(rows) == 7
    assert {(r["case"], r["finding"]) for r in rows} >= {(0, "a"), (3, "c")}
    empty = FindingsMeter(["a"]).compute()
    assert all(math.isnan(value) for value in empty.values())
