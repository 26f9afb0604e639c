"""FedBN, SiloBN, AdaBN and FedAvg under each buffer policy, against a network with BatchNorm.

Li et al. 2021, Algorithm 1: w_k <- SGD(w_k) at every client; then w_k,l <- sum_j p_j w_j,l for
every layer l that is no normalisation. SiloBN leaves out the running statistics only; AdaBN
averages all, and then takes the statistics of each client's inputs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.other_state import OTHER
from medfed.federation.reference import run_reference
from medfed.personalize.adabn import AdaBN
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbn import FedBN
from medfed.personalize.silobn import SiloBN
from medfed.standalone.errors import ConfigError
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


def build(algorithm, policy, fraction=1.0, batch=None, momentum=0.0, eps=1e-5):
    task = ToyTask(norm=True, dtype=torch.float64)
    task.network.norm.eps = eps
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
@sweep("kind", [FedBN, FedAvg, SiloBN])
def test_equals_the_papers_loop(kind, policy, weighting, fraction, run):
    federation, local, clients = build(kind(weighting=weighting), policy, fraction, **run)
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(ROUNDS)]
    initial = to_numpy(local.model.initial())
    local_statistics = policy != "averaged" or kind is SiloBN
    stays = batch_norm.STATISTICS if local_statistics else ()
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
        (SiloBN, "averaged", 16 + 5 + 8),
        (AdaBN, "averaged", 16 + 5 + 8 + 8),
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


def models_of(federation, wanted):
    federation.clients[federation.ids[0]].trainer.normalization = wanted
    run_reference(federation, ROUNDS)
    found = [to_numpy(federation.personal_model(c)) for c in federation.ids]
    return [{n: model[n] for n in EVERYTHING} for model in found]


@pytest.mark.parametrize("wanted", ["kept", "reestimated"])
def test_adabn_has_the_statistics_of_each_clients_inputs(wanted):
    """Whatever the run wants for other methods; its weights are FedAvg's."""
    federation, _, clients = build(AdaBN(), "averaged")
    plain = models_of(build(FedAvg(), "averaged")[0], "kept")
    for model, of_fedavg, data in zip(models_of(federation, wanted), plain, clients, strict=True):
        inner = data.x.numpy() @ model["body.weight"].T + model["body.bias"]
        own = dict(zip(batch_norm.STATISTICS, (inner.mean(0), inner.var(0, ddof=1)), strict=True))
        assert_same(model, of_fedavg | own, 1e-12)


def test_the_run_decides_on_statistics_of_no_other_method():
    """SiloBN keeps those of training; where the run estimates again, AdaBN is FedAvg."""
    kept, again = (models_of(build(SiloBN(), "averaged")[0], w) for w in ("kept", "reestimated"))
    for one, other in zip(kept, again, strict=True):
        assert all(np.array_equal(one[n], other[n]) for n in EVERYTHING)
    fedavg, adabn = (
        models_of(build(kind(), "averaged")[0], "reestimated") for kind in (FedAvg, AdaBN)
    )
    for one, other in zip(fedavg, adabn, strict=True):
        assert all(np.array_equal(one[n], other[n]) for n in EVERYTHING)


def test_adabn_removes_gain_and_offset_of_a_scanner():
    """Where the first layers are affine and normalised, outputs for turned-up inputs are equal."""
    federation, local, _ = build(AdaBN(), "averaged", eps=1e-14)
    run_reference(federation, 1)
    client = federation.clients["c1"]
    outputs = []
    for gain, offset in ((1.0, 0.0), (3.0, -2.0)):
        scanned = gain * client.data.x + offset
        kept, client.data.x = client.data.x, scanned
        local.model.load(federation.personal_model("c1"))
        client.data.x = kept
        outputs.append(local.network.eval()(scanned).detach())
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [SiloBN, AdaBN])
def test_a_network_without_statistics_is_refused(kind):
    with pytest.raises(ConfigError, match=rf"{kind.__name__} needs running statistics"):
        toy_federation(kind(), ToyTask(norm=False))
