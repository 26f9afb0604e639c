"""Survival: curves and metrics against lifelines, torchsurv, plain loops, and their limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.functional.scores import area
from medfed.functional.survival import (
    between,
    histogram,
    kaplan_meier,
    quantile_cuts,
    survival_scores,
)
from medfed.models.survival import cox_loss, hazard_loss

CUTS = [5.0, 12.0, 20.0]


def patients(seed, size=60, ties=True, censored=0.4):
    rng = np.random.default_rng(seed)
    time = rng.exponential(10, size) + 0.5
    event = (rng.random(size) >= censored).astype(float)
    alive = np.sort(rng.random((3, size)), axis=0)[::-1]
    risk = rng.normal(size=size)
    if ties:
        time, risk = np.ceil(time), risk.round(1)
    columns = {f"survival/{cut:g}": row for cut, row in zip(CUTS, alive, strict=True)}
    return {"time": time, "event": event, "risk": risk, **columns}


def known(shift):
    """24 patients of whom other libraries' results are known."""
    k = np.arange(24)
    time = (7 * k * k + 3 * k) % 29 + 1 + shift * k
    risk = np.sin(3 * k).round(1)
    alive = np.exp(-np.exp(risk) * np.array([[0.1], [0.4], [0.9]]))
    columns = {f"survival/{cut:g}": row for cut, row in zip(CUTS, alive, strict=True)}
    return {"time": time, "event": (k * 5 % 7 < 4).astype(float), "risk": risk, **columns}


def plainly(cases, horizon=12.0):
    """The metrics by loops over pairs, from their definitions."""
    time, event, risk = cases["time"], cases["event"], cases["risk"]

    def uncensored(until, strictly):
        share = 1.0
        for t in np.unique(time[event == 0]):
            if t < until or (t == until and not strictly):
                at_risk = (time > t).sum() + ((time == t) & (event == 0)).sum()
                share *= 1 - ((time == t) & (event == 0)).sum() / at_risk
        return share

    right = pairs = uno_right = uno_pairs = 0.0
    for i in np.flatnonzero(event):
        for j in range(len(time)):
            if time[i] < time[j] or (time[i] == time[j] and not event[j]):
                order = (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
                pairs, right = pairs + 1, right + order
                if time[i] <= CUTS[-1]:
                    weight = uncensored(time[i], True) ** -2
                    uno_pairs, uno_right = uno_pairs + weight, uno_right + weight * order
    alive = between(
        np.stack([np.ones(len(time)), *[cases[f"survival/{c:g}"] for c in CUTS]]), CUTS, horizon
    )
    brier = top = bottom = 0.0
    for i in range(len(time)):
        if time[i] <= horizon and event[i]:
            weight = 1 / uncensored(time[i], True)
            brier += weight * alive[i] ** 2
            later = time > horizon
            order = (risk[i] > risk[later]) + 0.5 * (risk[i] == risk[later])
            top, bottom = top + weight * order.sum(), bottom + weight * later.sum()
        elif time[i] > horizon:
            brier += (1 - alive[i]) ** 2 / uncensored(horizon, False)
    values = right / pairs, pairs, uno_right / uno_pairs, top / bottom, brier / len(time)
    return dict(zip(("cindex", "pairs", "cindex/uno", "auroc/12", "brier/12"), values, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_plain_loops(seed):
    cases = patients(seed)
    scores = survival_scores(cases, np.ones((1, 60)), CUTS)
    expected = plainly(cases)
    assert list(scores) == list(expected)
    assert {n: v[0] for n, v in scores.items()} == pytest.approx(expected, rel=1e-12)


def test_weights_are_repeated_patients():
    cases, rng = patients(4), np.random.default_rng(5)
    weights = rng.integers(0, 3, (4, 60)).astype(float)
    scores = survival_scores(cases, weights, CUTS)
    for w, row in enumerate(weights):
        some = {n: np.repeat(v, row.astype(int)) for n, v in cases.items()}
        alone = survival_scores(some, np.ones((1, int(row.sum()))), CUTS)
        # A patient is no pair with his copies: both have the event at the same time.
        assert {n: v[w] for n, v in scores.items()} == pytest.approx(
            {n: v[0] for n, v in alone.items()}
        )


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        # lifelines 0.30.3: C, Kaplan-Meier at 5, 12 and 20, log-likelihood of Cox's model with
        # Efron's ties; torchsurv 0.2.0: Cox's loss at the risks, with both kinds of ties.
        (0.0, [0.4507042, 0.8639520, 0.7036713, 0.1759178, -29.1887939, 35.8931236, 36.2937393]),
        (0.01, [0.4405594, 0.9126984, 0.7020757, 0.1684982, -29.0291487, 35.7201157, 35.7201157]),
    ],
)
def test_concordance_curves_and_cox_are_those_of_other_libraries(shift, expected):
    cases, k = known(shift), np.arange(24)
    c = survival_scores(cases, np.ones((1, 24)), CUTS)["cindex"][0]
    times, _, curve = kaplan_meier(cases["time"], cases["event"], np.ones((1, 24)))
    curves = [curve[0][np.searchsorted(times, cut, side="right") - 1] for cut in CUTS]
    label = torch.tensor(np.stack([cases["time"], cases["event"]], 1))
    features = torch.tensor(np.stack([np.sin(3 * k), np.cos(5 * k)], 1))
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100)

    def closure():
        optimizer.zero_grad()
        loss = cox_loss(features @ weights, label)
        loss.backward()
        return loss

    optimizer.step(closure)
    risk = torch.tensor(cases["risk"])
    losses = [cox_loss(risk, label, ties).item() * 24 for ties in ("efron", "breslow")]
    assert [c, *curves, -closure().item() * 24, *losses] == pytest.approx(expected, rel=1e-6)


def test_metrics_with_weights_are_those_of_torchsurv():
    """Without ties: with them it takes the weights after, not before, an event."""
    scores = survival_scores(known(0.01), np.ones((1, 24)), CUTS)
    expected = {"cindex/uno": 0.4512022, "auroc/12": 0.3216017, "brier/12": 0.3117556}
    assert {n: scores[n][0] for n in expected} == pytest.approx(expected, rel=1e-6)


def test_without_censoring_metrics_are_the_usual_ones():
    cases = patients(9, censored=0.0)
    scores = {n: v[0] for n, v in survival_scores(cases, np.ones((1, 60)), CUTS).items()}
    happened = cases["time"] <= 12
    auroc = area(cases["risk"], happened, np.ones((1, 60)))[0]
    brier = np.mean((cases["survival/12"] - ~happened) ** 2)
    assert scores["auroc/12"] == pytest.approx(auroc)
    assert scores["brier/12"] == pytest.approx(brier)
    alone = {n: cases[n] for n in ("time", "event", "risk")}
    everything = survival_scores(alone, np.ones((1, 60)), [12.0, 1e9])
    assert everything["cindex/uno"] == pytest.approx(everything["cindex"])


def test_one_interval_is_a_logistic_regression():
    cases = patients(10, censored=0.0)
    label = torch.tensor(np.stack([cases["time"], cases["event"]], 1))
    logits = torch.tensor(cases["risk"])[:, None]
    happened = (label[:, :1] <= 12).double()
    usual = torch.nn.functional.binary_cross_entropy_with_logits(logits, happened)
    assert hazard_loss(logits, label, [12.0]).item() == pytest.approx(usual.item(), rel=1e-12)


def test_the_hazard_loss_is_the_likelihood_of_the_curve():
    cases, rng = patients(11), np.random.default_rng(0)
    label = torch.tensor(np.stack([cases["time"], cases["event"]], 1))
    logits = torch.tensor(rng.normal(size=(60, 3)))
    alive = np.concatenate([np.ones((60, 1)), (1 - logits.sigmoid()).cumprod(1).numpy()], axis=1)
    total = 0.0
    for (time, event), curve in zip(label.tolist(), alive, strict=True):
        at = int(np.searchsorted(CUTS, time))
        if event and at < 3:
            total -= np.log(curve[at] - curve[at + 1])
        else:
            total -= np.log(curve[int(np.searchsorted(CUTS, time, side="right"))])
    assert hazard_loss(logits, label, CUTS).item() == pytest.approx(total / 60, rel=1e-12)


def test_few_events_have_no_concordance_and_hospitals_are_not_compared():
    cases = patients(12)
    few = {**cases, "event": np.where(np.arange(60) < 4, 1.0, 0.0)}
    assert np.isnan(survival_scores(few, np.ones((1, 60)), CUTS)["cindex"][0])
    halves = [{n: v[part] for n, v in cases.items()} for part in (slice(30), slice(30, 60))]
    parts = [survival_scores(half, np.ones((1, 30)), CUTS, least=1) for half in halves]
    both = {**cases, "hospital": np.repeat([0, 1], 30)}
    pooled = survival_scores(both, np.ones((1, 60)), CUTS)
    pairs = sum(p["pairs"][0] for p in parts)
    assert pooled["pairs"][0] == pairs
    right = sum(p["pairs"][0] * p["cindex"][0] for p in parts)
    assert pooled["cindex"][0] == pytest.approx(right / pairs)


def test_cuts_divide_the_events_and_are_nobodys_times():
    times = np.exp(np.random.default_rng(3).normal(6, 1, 4000))
    cuts = quantile_cuts(histogram(times, np.ones(4000)), 10)
    counts = np.histogram(times, [0, *cuts])[0]
    assert counts.sum() == 4000
    assert (np.diff(cuts) > 0).all()
    assert counts[:-1] == pytest.approx(400, rel=0.3)
    assert sum(histogram(np.array([0.0, 1e9, 3.0]), np.array([1, 1, 0]))) == 2


@pytest.mark.parametrize("last", [4.0, 11.9, 12.0, 12.1, 30.0])
@pytest.mark.parametrize("horizon", [3.0, 12.0])
def test_a_brier_score_needs_somebody_followed_beyond_the_horizon(last, horizon):
    """Else the weights of those who were censored are lost, whatever is predicted."""
    cases = patients(7, 200, ties=False)
    late = cases["time"] > last
    time, event = np.minimum(cases["time"], last), np.where(late, 0, cases["event"])
    weights = np.random.default_rng(1).integers(0, 3, (4, 200)).astype(float)
    scores = survival_scores({**cases, "time": time, "event": event}, weights, CUTS, horizon)
    defined = np.array([time[row > 0].max() > horizon for row in weights])
    for name in (f"brier/{horizon:g}", f"auroc/{horizon:g}"):
        assert np.isfinite(scores[name]).tolist() == defined.tolist()
    nobody = {n: np.zeros(200) for n in cases if n.startswith("survival/")}
    lost = survival_scores({**cases, "time": time, "event": event, **nobody}, weights, CUTS)
    assert not (lost["brier/12"] < 0.1).any()


def test_a_brier_score_is_defined_where_all_had_the_event():
    cases = {**patients(8, 40), "event": np.ones(40)}
    cases["time"] = np.minimum(cases["time"], 9.0)
    scores = survival_scores(cases, np.ones((1, 40)), CUTS)
    alive = cases["survival/12"]
    assert scores["brier/12"][0] == pytest.approx(np.mean(alive**2), rel=1e-12)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("apart", [1.0, 80.0, 600.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_cox_is_that_of_a_loop_however_far_risks_are_apart(ties, apart, dtype):
    cases = patients(3, 30)
    time, event = cases["time"].round(-1), cases["event"]
    risk = apart * cases["risk"]
    total = 0.0
    for at in np.unique(time[event == 1]):
        died = np.flatnonzero((time == at) & (event == 1))
        for before in range(len(died)):
            share = np.ones(30)
            share[died] -= before / len(died) * (ties == "efron")
            among = time >= at
            total += np.logaddexp.reduce(risk[among] + np.log(share[among]))
        total -= risk[died].sum()
    score = torch.tensor(risk, dtype=dtype, requires_grad=True)
    loss = cox_loss(score, torch.tensor(np.stack([time, event], 1)), ties)
    assert loss.item() == pytest.approx(total / 30, rel=1e-5 if dtype == torch.float32 else 1e-12)
    loss.backward()
    assert score.grad.isfinite().all()
