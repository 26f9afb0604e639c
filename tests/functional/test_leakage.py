"""Attacks: beside scikit-learn, SciPy and loops in NumPy, and on plain networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn

from medfed.functional.leakage import (
    auc,
    confidence,
    exact_interval,
    hits,
    in_turn,
    lira,
    recognised,
    rows_in_update,
)


def network_at(seed, features=20, hidden=256):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def changes(batch, steps=1, seed=0):
    """How much each parameter of a small network changes over SGD steps on a batch."""
    network = network_at(seed)
    before = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch), torch.arange(len(batch)) % 2).backward()
        optimizer.step()
    after = (p.detach() for p in network.parameters())
    return [new - old for new, old in zip(after, before, strict=True)]


@pytest.mark.parametrize(("size", "least"), [(1, 10), (4, 40), (16, 1)])
def test_rows_of_ten_batches_follow_where_a_neuron_has_one_row(size, least):
    torch.manual_seed(1)
    rows, found = torch.randn(10, size + 100, 20), 0
    for seed, (batch, others) in enumerate(r.split([size, 100]) for r in rows):
        weight, bias, *_ = changes(batch, seed=seed)
        hit = rows_in_update(weight, bias, torch.cat([batch, others]), 0.01)
        assert not hit[size:].any()
        active = network_at(seed)[0](batch) > 0
        alone = active[:, active.sum(0) == 1].any(1)
        assert hit[:size].tolist() == alone.tolist()
        found += int(hit.sum())
    assert least <= found <= 10 * size


def test_several_steps_half_precision_and_silence():
    torch.manual_seed(1)
    row = torch.randn(1, 20)
    weight, bias, *_ = changes(row, steps=5)  # all steps are of the same row
    assert rows_in_update(weight, bias, row, 0.01).all()
    assert rows_in_update(weight.half().float(), bias.half().float(), row, 0.01).all()
    assert not rows_in_update(weight, torch.zeros_like(bias), row, 0.01).any()
    noise = torch.randn_like(weight) * weight.abs().max()
    assert not rows_in_update(weight + noise, bias, row, 0.01).any()


def test_confidence_is_the_logit_of_the_loss():
    p = np.array([1e-6, 0.2, 0.5, 0.999])
    assert confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    losses = np.array([0.0, 1e-300, 1.0, 29.9, 30.1, 1e6])
    assert np.isfinite(confidence(losses)).all()
    assert (np.diff(confidence(losses)) <= 0).all()


def planted(effect, seed=0, shadows=12, records=80):
    """Confidences of models that know half of the records each, and who knows which."""
    rng = np.random.default_rng(seed)
    half = rng.permuted(np.tile(np.arange(records) % 2 == 0, (shadows // 2, 1)), axis=1)
    inside = np.stack([half, ~half], axis=1).reshape(shadows, records)
    level = rng.normal(0, 3, records)  # how easy a record is, which the attack must not use
    return level + effect * inside + rng.normal(0, 1, (shadows, records)), inside


def test_likelihood_ratios_beside_a_loop():
    shadows, inside = planted(0.7)
    target = shadows[0] + 0.1
    variance = {}
    for known in (True, False):
        squares, free = 0.0, 0
        for n in range(shadows.shape[1]):
            values = shadows[inside[:, n] == known, n]
            squares += sum((v - values.mean()) ** 2 for v in values)
            free += len(values) - 1
        variance[known] = squares / free
    for n in range(shadows.shape[1]):
        logs = {}
        for known in (True, False):
            mean = np.mean(shadows[inside[:, n] == known, n])
            error = (target[n] - mean) ** 2 / variance[known]
            logs[known] = -error / 2 - math.log(variance[known]) / 2
        assert lira(shadows, inside, target)[n] == pytest.approx(logs[True] - logs[False])
        mean = np.mean(shadows[~inside[:, n], n])
        score = (target[n] - mean) / math.sqrt(variance[False])
        assert lira(shadows, inside, target, without=True)[n] == pytest.approx(score)
    others = np.arange(len(shadows)) != 3
    expected = lira(shadows[others], inside[others], shadows[3])
    assert in_turn(shadows, inside)[3] == pytest.approx(expected)


def test_a_planted_effect_is_found_and_none_where_there_is_none():
    shadows, inside = planted(1.5)
    area, low, _ = auc(in_turn(shadows, inside), inside)
    assert area > 0.7
    assert low > 0.6
    assert hits(in_turn(shadows, inside), inside)[0] > 0.05
    covered = 0
    for seed in range(40):
        shadows, inside = planted(0.0, seed)
        _, low, high = auc(in_turn(shadows, inside), inside, seed)
        covered += low <= 0.5 <= high
    assert covered >= 34


def test_area_and_hits_beside_scikit_learn():
    rng = np.random.default_rng(2)
    members = rng.random((4, 300)) < 0.5
    scores = np.round(rng.normal(0, 1, (4, 300)) + members, 1)  # with ties
    area, low, high = auc(scores, members)
    assert area == pytest.approx(roc_auc_score(members.ravel(), scores.ravel()))
    assert low < area < high
    wrong, right, _ = roc_curve(members.ravel(), scores.ravel(), drop_intermediate=False)
    share, allowed = hits(scores, members, 0.05)
    assert share == pytest.approx(right[wrong <= 0.05].max())
    assert allowed == int(0.05 * (~members).sum())
    assert hits(scores[0, :90], members[0, :90])[1] == 0


@pytest.mark.parametrize(("right", "count"), [(0, 30), (7, 30), (30, 30)])
def test_the_interval_of_a_share_beside_scipy(right, count):
    expected = binomtest(right, count).proportion_ci(0.95, method="exact")
    assert exact_interval(right / count, count) == pytest.approx((expected.low, expected.high))


def test_vectors_that_point_to_their_client_and_ties():
    torch.manual_seed(0)
    places = 10 * torch.randn(8, 5)
    first, second = (places + 0.01 * torch.randn(8, 5) for _ in range(2))
    assert recognised(first, second) == 1
    assert recognised(first, second.roll(1, 0)) == 0
    assert recognised(torch.ones(8, 5), torch.ones(8, 5)) == 1 / 8
