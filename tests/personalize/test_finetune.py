"""Fine-tuning: its limits, what travels, who gets the model when, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.common.tensors import digest
from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.finetune import FineTune
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.references import loops
from tests.references.pairing import assert_same, run_both_ways
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

MINIBATCHES = {"steps": 4, "momentum": 0.9, "kept": True, "cohort": Cohort(fraction=0.5)}


def run(algorithm, rounds=4, start=0, federation=None, **changes):
    if federation is None:
        data = toy_data(4, dtype=torch.float64, batch=4)
        task = ToyTask(dtype=torch.float64)
        _, federation, _ = toy_federation(algorithm, task, data, **{**MINIBATCHES, **changes})
    return run_reference(federation, rounds, start=start)


def models(federation) -> list[str]:
    return [digest(federation.personal_model(c)) for c in federation.ids]


def test_without_local_rounds_it_is_fedavg():
    """Bit for bit, and byte for byte."""
    tuned, fedavg = run(FineTune(local_share=0.0, rounds=4)), run(FedAvg())
    assert tuned.digests() == fedavg.digests()
    assert tuned.ledger.to_csv() == fedavg.ledger.to_csv()


def test_with_local_rounds_alone_it_is_local_training():
    everyone = {"cohort": None}
    tuned, local = run(FineTune(local_share=1.0, rounds=4), **everyone), run(Local(), **everyone)
    assert models(tuned) == models(local)
    assert tuned.ledger.to_csv() == local.ledger.to_csv()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_equals_fedavg_and_then_descent_in_numpy(fraction):
    """Clients come to the local rounds one after the other where cohorts are halves."""
    algorithm = FineTune(local_share=0.5, rounds=6)
    federation, problem = run_both_ways(algorithm, rounds=6, fraction=fraction)
    local_rounds = problem.cohorts[3:]
    problem.cohorts = problem.cohorts[:3]
    server, expected = loops.fedavg(problem)
    for cohort in local_rounds:
        for k in cohort:
            expected[k] = problem.descend(k, expected[k], problem.steps)
    assert_same(federation.server["shared"], server, 1e-12)
    for client, model in zip(federation.ids, expected, strict=True):
        assert_same(federation.personal_model(client), model, 1e-12)
    flat = [np.concatenate([t.ravel() for t in m.values()]) for m in expected]
    assert np.abs(flat[0] - flat[1]).max() > 1e-2


def test_what_travels():
    """The model comes once more when the local rounds begin, and nothing after."""
    federation = run(FineTune(local_share=0.5, rounds=4), cohort=None)
    by_round = [
        {(e.direction, e.part) for e in federation.ledger.entries if e.round == t and e.bytes}
        for t in range(4)
    ]
    both = {("down", "shared"), ("up", "shared")}
    assert by_round == [both, both, {("down", "shared"), ("down", "scalars")}, set()]
    for client in federation.ids:
        assert not federation.algorithm.broadcast(federation.server, client).parts


@pytest.mark.parametrize(("steps", "expected"), [(4, [16] * 4), (None, [8, 8, 12, 12])], ids=str)
def test_the_budget_is_that_of_all_rounds(steps, expected):
    """One epoch is 6, 8, 10 and 12 samples in batches of 4."""
    federation = run(FineTune(local_share=0.5, rounds=4), cohort=None, steps=steps)
    assert [federation.clients[c].steps_done for c in federation.ids] == expected


def test_some_of_the_model_may_be_personal_before():
    federation = run(FineTune(personal="head.*", local_share=0.25, rounds=4))
    assert set(federation.server["shared"]) == {
        n for n in federation.clients["c0"].weights if not n.startswith("head.")
    }
    assert len(set(models(federation))) == 4


@sweep(("share", "first"), [(0, 10), (0.01, 9), (0.2, 8), (0.95, 0), (1, 0)])
def test_any_share_is_a_round_at_least(share, first):
    assert FineTune(local_share=share, rounds=10).first_local == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_share": 1.5}, r"algorithm\.local_share must be in \[0, 1\], not 1\.5"),
        ({"local_share": float("nan")}, r"algorithm\.local_share must be in"),
        ({"rounds": 0}, r"algorithm\.rounds must be 1 or more"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        FineTune(**options)
