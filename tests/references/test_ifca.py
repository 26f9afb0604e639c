"""IFCA against its algorithm in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.models.networks.canonical import Canonical
from medfed.personalize.ifca import IFCA
from tests.references.ifca_loop import BATCH, ifca
from tests.references.linear_net import BODY, HEAD, Problem
from tests.references.pairing import assert_same, drawn_in, to_numpy
from tests.toys import ToyData, ToyTask, toy_federation

COUNT, ROUNDS, STEPS, LR = 3, 5, 3, 0.05
SEED = 40
SETTINGS = {
    "plain": {},
    "uniform": {"weighting": "uniform"},
    "momentum": {"momentum": 0.9},
    "half": {"fraction": 0.5},
    "minibatches-clip-momentum-half": {
        "batch": BATCH, "clip": 0.5, "momentum": 0.9, "fraction": 0.5,
    },
}  # fmt: skip


def networks(base: int = SEED) -> list[torch.nn.Module]:
    """Unlike in body and head, so that clients differ in what they choose."""
    found = []
    for k in range(COUNT):
        network = ToyTask(norm=False, dtype=torch.float64).network
        torch.manual_seed(base + k)
        with torch.no_grad():
            for tensor in network.parameters():
                tensor.copy_(torch.randn_like(tensor))
        found.append(network)
    return found


def clients() -> list[ToyData]:
    """Six of unequal size; odd ones have targets of the other sign."""
    rng = np.random.default_rng(4)
    data, slope = [], rng.normal(size=3)
    for i in range(6):
        x = rng.normal(size=(6 + 2 * i, 3))
        y = (-1) ** i * (x @ slope + 1) + 0.1 * rng.normal(size=len(x))
        data.append(ToyData(f"c{i}", torch.tensor(x), torch.tensor(y)))
    return data


def both_ways(setting: str, share_body: bool, mix: str = "outputs"):
    options = dict(SETTINGS[setting])
    nets = networks()
    if share_body:
        for net in nets[1:]:
            net.body.load_state_dict(nets[0].body.state_dict())
    starts = [to_numpy(dict(n.named_parameters())) for n in nets]
    task, batch = ToyTask(norm=False, dtype=torch.float64), options.get("batch")
    data = drawn_in(clients(), batch or 100)
    parts = ["head.*"] if share_body else ["*"]
    task.network = Canonical(copy.deepcopy(nets), parts, mix, "identity")
    algorithm = IFCA(weighting=options.get("weighting", "samples"))
    momentum = options.get("momentum", 0.0)
    _, fed, _ = toy_federation(
        algorithm,
        task,
        data,
        rounds=ROUNDS,
        steps=STEPS,
        lr=LR,
        momentum=momentum,
        clip=options.get("clip"),
        cohort=Cohort(fraction=options.get("fraction", 1.0)),
    )
    cohorts = [[fed.ids.index(c) for c in fed.members(t)] for t in range(ROUNDS)]
    pairs = [(d.x.numpy(), d.y.numpy()) for d in data]
    problem = Problem(pairs, starts[0], cohorts, STEPS, LR, momentum, algorithm.weighting)
    run_reference(fed, ROUNDS)
    if batch:
        problem.clip, problem.batches = options["clip"], [iter(d.drawn) for d in data]
    return fed, ifca(problem, starts, share_body)


def named(models, share_body: bool):
    """The loop's models under the names of a canonical model."""
    if not share_body:
        return {f"canonical.{k}.network.{n}": t for k, m in enumerate(models) for n, t in m.items()}
    heads = {f"canonical.{k}.{n}": m[n] for k, m in enumerate(models) for n in HEAD}
    return {**{f"common.{n}": models[0][n] for n in BODY}, **heads}


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
@pytest.mark.parametrize("share_body", [False, True], ids=["whole", "head"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_papers_loop(setting, share_body, mix):
    fed, expected = both_ways(setting, share_body, mix)
    assert_same(fed.server["shared"], named(expected.models, share_body), 1e-12)
    for client, chosen in zip(fed.ids, expected.chosen, strict=True):
        row = np.full(COUNT, 1 / COUNT) if chosen is None else np.eye(COUNT)[chosen]
        assert np.array_equal(fed.server["membership"][client].numpy(), row)
        assert np.array_equal(fed.personal_model(client)["membership"].numpy(), row)
    history = fed.memberships().numpy()
    assert history.shape == (ROUNDS + 1, 6, COUNT)
    for t, choice in enumerate(expected.choices):
        assert all(history[t + 1, i].argmax() == k for i, k in choice.items())


def test_clients_choose_differently_and_change_their_mind():
    """Else the loop above would not see a wrong choice."""
    changed = []
    for share_body in (False, True):
        choices = both_ways("plain", share_body)[1].choices
        assert all(len(set(choice.values())) > 1 for choice in choices)
        changed += [choices[0][i] != choices[-1][i] for i in choices[0]]
    assert any(changed)
