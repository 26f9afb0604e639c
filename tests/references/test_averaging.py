"""FedAvg, its relatives and Local against the papers' update rules in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedprox import FedProx
from medfed.personalize.fedrep import FedRep
from medfed.personalize.local import Local
from tests.references import loops
from tests.references.linear_net import ALL, gradient, loss
from tests.references.pairing import assert_same, run_both_ways
from tests.sweeps import sweep

METHODS = {
    "local": (Local, {}, lambda p: loops.local(p)),
    "fedavg": (FedAvg, {}, lambda p: loops.fedavg(p)),
    "fedprox": (FedProx, {"mu": 0.7}, lambda p: loops.fedprox(p, mu=0.7)),
    "fedper": (FedPer, {}, lambda p: loops.fedper(p)),
    "fedrep": (FedRep, {"head_share": 0.4}, lambda p: loops.fedrep(p, head_steps=2)),
    "ditto": (Ditto, {"strength": 0.6}, lambda p: loops.ditto(p, 0.6, global_steps=2)),
}
SETTINGS = {
    "plain": {},
    "uniform": {"weighting": "uniform"},
    "momentum": {"momentum": 0.9},
    "kept-momentum": {"momentum": 0.9, "kept": True},
    "half": {"fraction": 0.5, "rounds": 5},
    "half-uniform-kept": {
        "fraction": 0.5, "rounds": 5, "weighting": "uniform", "momentum": 0.5, "kept": True,
    },
    "minibatches": {"batch": 4},
    "clip": {"clip": 0.3},
    "minibatches-clip-momentum-half": {
        "batch": 4, "clip": 0.5, "momentum": 0.9, "kept": True, "fraction": 0.5, "rounds": 5,
    },
}  # fmt: skip


@sweep("setting", SETTINGS)
@sweep("method", METHODS)
def test_equals_the_papers_loop(method, setting):
    kind, options, solve = METHODS[method]
    changes = dict(SETTINGS[setting])
    weighting = changes.pop("weighting", "samples")
    federation, problem = run_both_ways(kind(weighting=weighting, **options), **changes)
    server, models = solve(problem)
    assert_same(federation.server.get("shared", {}), server, 1e-12)
    for client, expected in zip(federation.ids, models, strict=True):
        assert_same(federation.personal_model(client), expected, 1e-12)
    if "fraction" in changes:
        members = [set(c) for c in problem.cohorts]
        assert all(len(c) == 2 for c in members)
        assert len({frozenset(c) for c in members}) > 1


def test_the_settings_lead_to_different_models():
    """Else a setting that is ignored on both sides would pass above."""
    ends = []
    for setting in SETTINGS.values():
        changes = dict(setting)
        weighting = changes.pop("weighting", "samples")
        federation, _ = run_both_ways(FedAvg(weighting=weighting), **changes)
        ends.append(federation.server["shared"])
    flat = [np.concatenate([e[n].numpy().ravel() for n in ALL]) for e in ends]
    gaps = [np.abs(a - b).max() for i, a in enumerate(flat) for b in flat[:i]]
    assert min(gaps) > 1e-3


def test_gradient_by_finite_differences():
    rng = np.random.default_rng(3)
    model = {
        "body.weight": rng.normal(size=(4, 3)),
        "body.bias": rng.normal(size=4),
        "head.weight": rng.normal(size=(1, 4)),
        "head.bias": rng.normal(size=1),
    }
    x, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    for name, grad in gradient(model, x, y).items():
        for place in np.ndindex(grad.shape):
            step = np.zeros_like(grad)
            step[place] = 1e-6
            up = loss({**model, name: model[name] + step}, x, y)
            down = loss({**model, name: model[name] - step}, x, y)
            assert (up - down) / 2e-6 == pytest.approx(grad[place], abs=1e-8)
