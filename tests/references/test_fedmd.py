"""FedMD against a NumPy loop over networks that are really narrow."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from medfed.common.seeding import torch_rng
from medfed.personalize.fedmd import FedMD
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import gradient
from tests.references.minibatch_steps import descend
from tests.references.pairing import assert_same, run_on_minibatches
from tests.references.test_heterofl import narrow


def outputs(w, x):
    return ((x @ w["body.weight"].T + w["body.bias"]) @ w["head.weight"].T + w["head.bias"])[:, 0]


@pytest.mark.parametrize("changes", [{}, {"fraction": 0.5, "momentum": 0.9, "lr": 0.01}])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_equals_narrow_networks(weighting, changes):
    """Hidden widths 4, 2, 4, 2; the slope of Huber's term is the loss's with clipped residuals."""
    method = FedMD(widths=[1.0, 0.5], strength=0.7, inputs=5, seed=3, weighting=weighting)
    federation, p = run_on_minibatches(method, rounds=6, **changes)
    x0 = torch.randn(5, 3, generator=torch_rng(3, "common inputs")).double().numpy()
    own = {n: narrow(p.initial, hidden) for n, hidden in enumerate([4, 2, 4, 2])}
    aim = None
    for cohort in p.cohorts:
        answers = {}
        for n in cohort:

            def term(w, n=n, aim=aim, answers=answers):
                answers[n] = outputs(w, x0)  # of the last step's start in the end
                far = 0 if aim is None else np.clip(answers[n] - aim, -1, 1)
                return {k: 0.7 * g for k, g in gradient(w, x0, answers[n] - far).items()}

            own[n] = descend(dataclasses.replace(p, initial=own[n]), n, own[n], term)
        shares = np.array([p.shares[n] for n in cohort])
        aim = sum(s * answers[n] for s, n in zip(shares, cohort, strict=True)) / shares.sum()
    np.testing.assert_allclose(federation.server["outputs"]["outputs"][:, 0], aim, atol=1e-10)
    for n, client in enumerate(federation.ids):
        found = {k: t.numpy() for k, t in federation.personal_model(client).items()}
        hidden = len(own[n]["body.bias"])
        if any(n in cohort for cohort in p.cohorts):
            assert_same(narrow(found, hidden), own[n], 1e-10)
            assert not found["body.weight"][hidden:].any()
    assert {e.part for e in federation.ledger.entries} <= {"outputs", "scalars"}


def test_without_the_term_it_is_local_training():
    limit, _ = run_on_minibatches(FedMD(strength=0.0), fraction=0.5)
    alone, _ = run_on_minibatches(Local(), fraction=0.5)
    for client in limit.ids:
        found = {k: t.numpy() for k, t in limit.personal_model(client).items()}
        expected = {k: t.numpy() for k, t in alone.personal_model(client).items()}
        assert_same(found, expected, 0.0)


def test_bad_values():
    with pytest.raises(ConfigError, match=r"algorithm\.strength must not be negative"):
        FedMD(strength=-1.0)
