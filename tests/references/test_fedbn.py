"""FedBN, and FedAvg under each buffer policy, against a network with BatchNorm in NumPy.

Li et al. 2021, Algorithm 1: w_k <- SGD(w_k) at every client; then w_k,l <- sum_j p_j w_j,l for
every layer l that is no normalisation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.other_state import OTHER
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbn import FedBN
from tests.references import batch_norm
from tests.references.pairing import assert_same, drawn_in, to_numpy
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

ROUNDS, STEPS, LR = 4, 3, 0.1
EVERYTHING = batch_norm.PARAMETERS + batch_norm.STATISTICS
NORM = tuple(n for n in EVERYTHING if n.startswith("norm."))


def fedbn_loop(batches, sizes, initial, cohorts, *, own, weighted, frozen, momentum):
    """The clients' models: mean over a cohort of all entries but ``own``, sent to all."""
    models = [dict(initial) for _ in sizes]
    shared = [n for n in EVERYTHING if n not in own]
    for cohort in cohorts:
        for k in cohort:
            models[k] = batch_norm.descend(models[k], batches[k], STEPS, LR, frozen, momentum)
        p = np.array([float(sizes[k]) if weighted else 1.0 for k in cohort])
        p /= p.sum()
        mean = {n: sum(w * models[k][n] for w, k in zip(p, cohort, strict=True)) for n in shared}
        if {*batch_norm.STATISTICS} <= {*shared}:  # the variance of all samples
            of, var = batch_norm.STATISTICS
            pairs = [(w, models[k]) for w, k in zip(p, cohort, strict=True)]
            mean[var] = sum(w * (m[var] + m[of] ** 2) for w, m in pairs) - mean[of] ** 2
        models = [{**m, **mean} for m in models]
    return models


def build(algorithm, policy, fraction=1.0, batch=None, momentum=0.0):
    task = ToyTask(norm=True, dtype=torch.float64)
    with torch.no_grad():  # unlike the usual start, in which gamma, beta and the mean drop out
        task.network.norm.weight.copy_(torch.tensor([1.5, 0.5, 1.0, 2.0]))
        task.network.norm.bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
        task.network.norm.running_mean.copy_(torch.tensor([0.1, 0.2, -0.3, 0.4]))
        task.network.norm.running_var.copy_(torch.tensor([0.8, 1.2, 1.0, 0.6]))
    data = drawn_in(toy_data(4, dtype=torch.float64), batch or 100)
    _, federation, local = toy_federation(
        algorithm,
        task,
        data,
        steps=STEPS,
        lr=LR,
        momentum=momentum,
        buffers=policy,
        cohort=Cohort(fraction=fraction),
    )
    return federation, local, data


@sweep("run", [{}, {"batch": 4, "momentum": 0.9}])
@sweep("fraction", [1.0, 0.5])
@sweep("weighting", ["samples", "uniform"])
@sweep("policy", ["averaged", "local", "frozen"])
@sweep("kind", [FedBN, FedAvg])
def test_equals_the_papers_loop(kind, policy, weighting, fraction, run):
    federation, local, clients = build(kind(weighting=weighting), policy, fraction, **run)
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(ROUNDS)]
    initial = to_numpy(local.model.initial())
    stays = batch_norm.STATISTICS if policy != "averaged" else ()
    run_reference(federation, ROUNDS)
    expected = fedbn_loop(
        [iter(d.drawn) for d in clients],
        [d.num_samples for d in clients],
        initial,
        cohorts,
        own=NORM if kind is FedBN else stays,
        weighted=weighting == "samples",
        frozen=policy == "frozen",
        momentum=run.get("momentum", 0.0),
    )
    for client, model in zip(federation.ids, expected, strict=True):
        found = federation.personal_model(client)
        found.pop(OTHER, None)  # the counter of batches
        assert_same(found, model, 1e-12)


@pytest.mark.parametrize(
    ("kind", "policy", "sent"),
    [
        (FedBN, "averaged", 16 + 5),
        (FedBN, "local", 16 + 5),
        (FedAvg, "averaged", 16 + 5 + 8 + 8),
        (FedAvg, "local", 16 + 5 + 8),
        (FedAvg, "frozen", 16 + 5 + 8),
    ],
)
def test_statistics_that_stay_do_not_travel(kind, policy, sent):
    """Linear 3 -> 4 has 16 numbers, the head 5, gamma and beta 8, the running statistics 8."""
    federation, _, _ = build(kind(), policy)
    run_reference(federation, 1)
    sizes = {e.bytes for e in federation.ledger.entries}
    assert sizes == {12 + 8 * sent}
    assert ("norm.running_mean" in federation.server["shared"]) == (sent == 37)


def test_running_statistics_stay_local_and_differ():
    federation, _, _ = build(FedBN(), "averaged")
    run_reference(federation, ROUNDS)
    for name in NORM:
        models = [federation.personal_model(c)[name] for c in federation.ids]
        gaps = [(a - b).abs().max() for i, a in enumerate(models) for b in models[:i]]
        assert min(gaps) > 1e-3


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_by_finite_differences(frozen):
    _, local, clients = build(FedAvg(), "averaged")
    model, x, y = to_numpy(local.model.initial()), clients[1].x.numpy(), clients[1].y.numpy()
    for name, grad in batch_norm.gradient(model, x, y, frozen).items():
        for place in np.ndindex(grad.shape):
            step = np.zeros_like(grad)
            step[place] = 1e-6
            up = batch_norm.loss({**model, name: model[name] + step}, x, y, frozen)
            down = batch_norm.loss({**model, name: model[name] - step}, x, y, frozen)
            assert (up - down) / 2e-6 == pytest.approx(grad[place], abs=1e-8)
