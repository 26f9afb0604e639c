"""LG-FedAvg, FedAlt, FedSim and FedBABU against the papers' loops in NumPy, on minibatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np
import pytest

from medfed.common.tensors import digest
from medfed.personalize.fedalt import FedAlt
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbabu import FedBABU
from medfed.personalize.fedper import FedPer
from medfed.personalize.fedrep import FedRep
from medfed.personalize.fedsim import FedSim
from medfed.personalize.lgfedavg import LGFedAvg
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.references.linear_net import ALL, BODY, HEAD, Model, gradient, part
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches

ROUNDS = 5
SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "lr": 0.01},
    "half": {"fraction": 0.5},
}
Train = Callable[[int, Model], Model]


def steps(p: Minibatches, n: int, w: Model, count: int, rates: Mapping[str, float]) -> Model:
    """Heavy-ball steps of the named tensors, each with its own step size."""
    velocity = {k: np.zeros_like(w[k]) for k in rates}
    for x, y in islice(p.batches[n], count):
        g = gradient(w, x, y)
        velocity = {k: p.momentum * velocity[k] + g[k] for k in rates}
        w = {**w, **{k: w[k] - rates[k] * velocity[k] for k in rates}}
    return w


def rounds(p: Minibatches, shared, train: Train, number: int = ROUNDS) -> tuple[Model, list[Model]]:
    """The shared tensors' means, and what each client keeps of the others."""
    w, rest = part(p.initial, shared), [k for k in ALL if k not in shared]
    own = [part(p.initial, rest) for _ in p.batches]
    for cohort in p.cohorts[:number]:
        ends = {n: train(n, {**w, **own[n]}) for n in cohort}
        present = sum(p.shares[n] for n in cohort)
        w = {k: sum(p.shares[n] * ends[n][k] for n in cohort) / present for k in shared}
        for n in cohort:
            own[n] = part(ends[n], rest)
    return w, own


def rates(p: Minibatches, names, scale: float = 1.0) -> dict[str, float]:
    return dict.fromkeys(names, scale * p.lr)


def lgfedavg(p: Minibatches):
    return rounds(p, HEAD, lambda n, w: steps(p, n, w, p.steps, rates(p, ALL)))


def fedalt(p: Minibatches):
    def train(n: int, w: Model) -> Model:
        w = steps(p, n, w, 2, rates(p, HEAD, 3.0))
        return steps(p, n, w, p.steps - 2, rates(p, BODY))

    return rounds(p, BODY, train)


def fedsim(p: Minibatches):
    both = {**rates(p, HEAD, 0.2), **rates(p, BODY)}
    return rounds(p, BODY, lambda n, w: steps(p, n, w, p.steps, both))


METHODS = {
    "lgfedavg": (LGFedAvg(), lgfedavg),
    "fedalt": (FedAlt(personal_share=0.4, personal_rate=3.0), fedalt),
    "fedsim": (FedSim(personal_rate=0.2), fedsim),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_papers_loop(method, setting):
    algorithm, solve = METHODS[method]
    federation, problem = run_on_minibatches(algorithm, rounds=ROUNDS, **SETTINGS[setting])
    w, own = solve(problem)
    assert_same(federation.server["shared"], w, 1e-10)
    for client, rest in zip(federation.ids, own, strict=True):
        assert_same(federation.personal_model(client), {**w, **rest}, 1e-10)


@pytest.mark.parametrize("setting", SETTINGS)
def test_fedbabu_moves_the_body_alone_until_everyone_fine_tunes(setting):
    algorithm = FedBABU(local_share=0.4, rounds=ROUNDS)
    federation, p = run_on_minibatches(algorithm, rounds=ROUNDS, **SETTINGS[setting])
    w, own = rounds(p, BODY, lambda n, m: steps(p, n, m, p.steps, rates(p, BODY)), 3)
    assert all((o[k] == p.initial[k]).all() for o in own for k in HEAD)
    models = [{**w, **o} for o in own]
    for cohort in p.cohorts[3:]:
        for n in cohort:
            models[n] = steps(p, n, models[n], p.steps, rates(p, ALL))
    assert_same(federation.server["shared"], w, 1e-10)
    for client, model in zip(federation.ids, models, strict=True):
        assert_same(federation.personal_model(client), model, 1e-10)
    with pytest.raises(ConfigError, match=r"local_share must be in \(0, 1\], not 0"):
        FedBABU(local_share=0)


@pytest.mark.parametrize(
    ("method", "limit"),
    [
        (LGFedAvg(personal="all"), Local()),
        (LGFedAvg(personal="none"), FedAvg()),
        (FedAlt(), FedRep()),
        (FedSim(personal_rate=1.0), FedPer()),
    ],
)
def test_is_another_method_in_the_limit(method, limit):
    ends = [run_on_minibatches(m, rounds=2, momentum=0.9)[0] for m in (method, limit)]
    for client in ends[0].ids:
        assert digest(ends[0].personal_model(client)) == digest(ends[1].personal_model(client))
