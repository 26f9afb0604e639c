"""pFedNet reaches its stated objective, whatever the local steps: against a convex solver."""

from __future__ import annotations

from functools import partial

import cvxpy as cp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import medfed
from medfed.federation.client import Batch
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph

STRENGTH, DECAY, SIZES = 0.04, 0.02, (40, 24, 32, 16, 48)
EDGES = [(i, (i + 1) % 5) for i in range(5)]


def clients(batch_size: int = 100) -> list[medfed.ArrayClient]:
    """Five logistic regressions of unequal sizes whose true weights drift apart."""
    g = torch.Generator().manual_seed(3)
    base, found = torch.randn(4, generator=g, dtype=torch.float64), []
    for i, n in enumerate(SIZES):
        x = torch.randn(n, 4, generator=g, dtype=torch.float64)
        own = base + 0.8 * torch.randn(4, generator=g, dtype=torch.float64)
        chance = torch.rand(n, generator=g, dtype=torch.float64)
        y = (torch.sigmoid(x @ own) > chance).double()[:, None]
        found.append(medfed.ArrayClient(f"site_{i}", x, y, batch_size))
    return found


def loss(network: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Ridge, so that the optimum is one point."""
    ridge = DECAY / 2 * network.weight.square().sum()
    return F.binary_cross_entropy_with_logits(network(batch["image"]), batch["label"]) + ridge


def objective(z: np.ndarray, norm: float) -> float:
    """(1/N) sum f_n(z_n) + lambda sum |z_i - z_j|."""
    total = 0.0
    for row, client in zip(z, clients(), strict=True):
        x, y = client.inputs.numpy(), client.labels.numpy()[:, 0]
        total += np.mean(np.logaddexp(0, x @ row) - y * (x @ row)) + DECAY / 2 * row @ row
    gaps = [np.linalg.norm(z[i] - z[j], norm) for i, j in EDGES]
    return total / len(z) + STRENGTH * sum(gaps)


def optimum(norm: float) -> float:
    """By an interior-point solver."""
    z = cp.Variable((5, 4))
    terms = []
    for n, client in enumerate(clients()):
        x, y = client.inputs.numpy(), client.labels.numpy()[:, 0]
        data = cp.sum(cp.logistic(x @ z[n]) - cp.multiply(y, x @ z[n])) / len(y)
        terms.append((data + DECAY / 2 * cp.sum_squares(z[n])) / 5)
    kind = "inf" if norm == np.inf else norm
    terms += [STRENGTH * cp.norm(z[i] - z[j], kind) for i, j in EDGES]
    problem = cp.Problem(cp.Minimize(sum(terms)))
    problem.solve(solver="CLARABEL")
    assert objective(z.value, norm) == pytest.approx(problem.value, abs=1e-6)
    return float(problem.value)


FAST, SGD = partial(torch.optim.SGD, lr=0.3), partial(torch.optim.SGD, lr=0.05)
HEAVY = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
CASES = {  # steps, optimizer, samples per batch, rounds, options
    "E=1": (1, FAST, 100, 60, {}),
    "E=10": (10, SGD, 100, 40, {}),
    "E=10, momentum": (10, HEAVY, 100, 40, {}),
    "E=10, literal": (10, SGD, 100, 140, {"z_step": "literal"}),
    "E=10, p=1": (10, SGD, 100, 40, {"p": 1.0}),
    "E=10, p=inf": (10, SGD, 100, 60, {"p": np.inf}),
}


def ends(steps, optimizer, batch_size, rounds, **options) -> np.ndarray:
    """Z after so many rounds."""
    method = PFedNet(
        personal="all",
        shared_rounds=0,
        strength=STRENGTH,
        graph=SimilarityGraph(kind="ring"),
        tolerance=1e-9,
        max_iter=5000,
        **options,
    )
    network = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        network.weight.zero_()
    made = clients(batch_size)
    done = medfed.federate(
        method, network, loss, made, rounds=rounds, steps=steps, optimizer=optimizer
    )
    return np.stack([done.weights(c.id)["weight"].numpy()[0] for c in made])


@pytest.mark.parametrize("case", CASES)
def test_the_stated_objective_is_reached(case):
    *setting, options = CASES[case]
    norm = options.get("p", 2.0)
    assert objective(ends(*setting, **options), norm) - optimum(norm) < 5e-4


def test_a_coupling_of_the_step_size_alone_is_weaker_by_the_steps():
    """What the bare step size in the proximal weight would come to: lambda / E."""
    steps, optimizer, _, rounds, _ = CASES["E=10"]
    method = partial(PFedNet, personal="all", shared_rounds=0, graph=SimilarityGraph(kind="ring"))
    weak = medfed.federate(
        method(strength=STRENGTH / 10),
        torch.nn.Linear(4, 1, bias=False, dtype=torch.float64),
        loss,
        clients(),
        rounds=rounds,
        steps=steps,
        optimizer=optimizer,
    )
    z = np.stack([weak.weights(c.id)["weight"].numpy()[0] for c in clients()])
    assert objective(z, 2.0) - optimum(2.0) > 1e-2


def test_clients_with_other_numbers_of_steps_share_the_objective():
    """An epoch is one to six steps here; a step must not buy a client more of a say."""
    z = ends(None, partial(torch.optim.SGD, lr=0.02), 8, 200)
    assert objective(z, 2.0) - optimum(2.0) < 1e-4


def test_adams_steps_are_measured_along_the_gradient():
    """No theorem, but near: a proximal weight of N E eta would be far off."""
    z = ends(5, partial(torch.optim.Adam, lr=0.01), 100, 60)
    assert objective(z, 2.0) - optimum(2.0) < 2e-2
