"""PPFL against its algorithms in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.personalize.ppfl import PPFL
from medfed.personalize.similarity import Affinity
from tests.references.linear_net import loss
from tests.references.pairing import assert_same, drawn_in, to_numpy
from tests.references.ppfl_loop import Setting, gradients, head, ppfl
from tests.toys import canonical_toy, toy_data, toy_federation

COUNT = 3
WEIGHTS = [[0, 1, 0, 2], [1, 0, 0.5, 0], [0, 0.5, 0, 1], [2, 0, 1, 0]]
GIVEN = Affinity(kind="given", weights=WEIGHTS)
# Options of the algorithm, options of the run.
CASES = {
    "plain": ({}, {}),
    "literal": ({"membership_step": "literal"}, {}),
    "uniform": ({"weighting": "uniform"}, {}),
    "momentum": ({}, {"momentum": 0.9}),
    "coupled": ({"strength": 0.15, "affinity": GIVEN}, {}),
    "coupled-literal": ({"strength": 0.15, "affinity": GIVEN, "membership_step": "literal"}, {}),
    "coupled-labels": ({"strength": 0.2}, {}),
    "half": ({"strength": 0.15, "affinity": GIVEN}, {"fraction": 0.5}),
    "half-labels": ({"strength": 0.2}, {"fraction": 0.5}),
    "delayed": ({"membership_start": 2}, {}),
    "delayed-coupled": ({"membership_start": 1, "strength": 0.15, "affinity": GIVEN}, {}),
    "random": ({"blocks": "random", "strength": 0.15, "affinity": GIVEN}, {"rounds": 8}),
    "random-delayed": ({"blocks": "random", "membership_start": 2, "seed": 2}, {"rounds": 7}),
    "minibatches": ({}, {"batch": 4}),
    "minibatches-half": ({"strength": 0.2}, {"batch": 4, "momentum": 0.9, "fraction": 0.5}),
    "random-half": ({"blocks": "random", "strength": 0.2}, {"fraction": 0.5, "rounds": 8}),
}


def run(options, changes, mix="outputs"):
    algorithm = PPFL(**{"strength": 0.0, "membership_lr": 0.4, **options})
    changes = dict(changes)
    cohort, rounds = Cohort(fraction=changes.pop("fraction", 1.0)), changes.pop("rounds", 4)
    batch = changes.pop("batch", None)
    data = drawn_in(toy_data(4, dtype=torch.float64), batch or 100)
    _, federation, local = toy_federation(
        algorithm, canonical_toy(COUNT, mix), data, rounds=rounds, steps=3, cohort=cohort, **changes
    )
    theta = to_numpy(local.model.initial())
    theta.pop("membership")
    setting = Setting(
        cohorts=[[federation.ids.index(c) for c in federation.members(t)] for t in range(rounds)],
        blocks=[algorithm.phases(t)[0] for t in range(rounds)],
        momentum=changes.get("momentum", 0.0),
        weighted=algorithm.weighting == "samples",
        membership_lr=algorithm.membership_lr,
        strength=algorithm.strength,
        start=algorithm.membership_start,
        scaled=algorithm.membership_step == "scaled",
        affinity=np.array(WEIGHTS),
    )
    if algorithm.strength and algorithm.affinity.kind == "label":
        # The shares travel in single precision.
        counts = np.stack([d.label_counts.numpy() for d in data]).astype(float)
        shares = (counts / counts.sum(1, keepdims=True)).astype(np.float32).astype(float)
        unit = shares / np.linalg.norm(shares, axis=1, keepdims=True)
        setting.affinity, setting.asked = unit @ unit.T, True
    clients = [(d.x.numpy(), d.y.numpy()) for d in data]
    run_reference(federation, rounds)
    if batch:
        setting.batches = [iter(d.drawn) for d in data]
    return federation, clients, theta, setting


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_papers_loop(case, mix):
    federation, clients, start, setting = run(*CASES[case], mix=mix)
    theta, members = ppfl(clients, start, COUNT, setting)
    assert_same(federation.server["shared"], theta, 1e-12)
    kept = {c: federation.server["membership"][c] for c in federation.ids}
    assert_same(kept, dict(zip(federation.ids, members, strict=True)), 1e-12)
    for client, row in zip(federation.ids, members, strict=True):
        model = federation.personal_model(client)
        assert_same(model, {**theta, "membership": row}, 1e-12)
    assert np.ptp(members, axis=0).max() > 1e-2  # the memberships have parted
    if "random" in case:
        assert set(setting.blocks) == {"shared", "membership"}


def test_the_cases_lead_to_different_models():
    """Else an option that is ignored on both sides would pass above."""
    ends = [run(*case)[0].server["membership"]["c2"].numpy() for case in CASES.values()]
    gaps = [np.abs(a - b).max() for i, a in enumerate(ends) for b in ends[:i]]
    assert min(gaps) > 1e-5


def test_gradients_by_finite_differences():
    _, clients, theta, _ = run({}, {"rounds": 1})
    c, (x, y) = np.array([0.5, 0.3, 0.2]), clients[1]
    of_theta, of_c = gradients(theta, c, x, y)
    for k in range(COUNT):
        step = 1e-6 * np.eye(COUNT)[k]
        ends = [loss(head(theta, c + s * step), x, y) for s in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(of_c[k], abs=1e-7)
    for name in ("canonical.1.head.weight", "common.body.bias"):
        for place in np.ndindex(theta[name].shape):
            ends = []
            for sign in (1, -1):
                moved = theta[name].copy()
                moved[place] += sign * 1e-6
                ends.append(loss(head({**theta, name: moved}, c), x, y))
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(of_theta[name][place], abs=1e-7)
