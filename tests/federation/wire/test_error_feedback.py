"""What memory is for: on a strongly convex federation whose optimum is known exactly."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from medfed.federation.algorithm import ClientInfo
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.stc import STC
from medfed.personalize.fedavg import FedAvg
from tests.federation.wire.codecs.cases import CASES
from tests.sweeps import sweep
from tests.toys import ToyData, ToyTask

D = 100


def clients_that_differ(spread: float, clients: int = 2) -> tuple[list[ToyData], np.ndarray]:
    """Least squares with Hessians near the identity, and the minimiser of their mean."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(clients):
        q, _ = np.linalg.qr(rng.normal(size=(D, D)))
        x = q * math.sqrt(D) * np.linspace(0.95, 1.05, D)
        rows.append((x, x @ (1 + spread * rng.normal(size=D))))
    x, y = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    optimum = np.linalg.lstsq(x, y, rcond=None)[0]
    data = [ToyData(f"c{i}", *map(torch.tensor, row)) for i, row in enumerate(rows)]
    return data, optimum


def distance(
    up: Link, rounds: int, rate: float, decay: float = 1.0, spread: float = 1.0, down: Link = None
) -> float:
    """Gradient descent by FedAvg with one full step; the relative distance to the optimum."""
    data, optimum = clients_that_differ(spread)
    task = ToyTask(features=D)
    task.network = nn.Sequential(nn.Linear(D, 1, bias=False, dtype=torch.float64))
    nn.init.zeros_(task.network[0].weight)
    algorithm = FedAvg()
    split = algorithm.split(task.network, (), "averaged")
    local = LocalTrainer(
        task.network,
        task.loss,
        split,
        partial(torch.optim.SGD, lr=rate),
        partial(LambdaLR, lr_lambda=lambda r: decay ** (r / rounds)),
        rounds,
        LocalBudget(steps=1),
    )
    weights, infos = local.model.initial(), [ClientInfo(d.id, d.num_samples) for d in data]
    server, state = algorithm.init(weights, split, infos)
    clients = {d.id: LocalClient(d, local, weights, state) for d in data}
    channel = Channel(up, down or Dense("float64"))
    federation = Federation(algorithm, server, clients, infos, local, channel)
    run_reference(federation, rounds)
    end = federation.server["shared"]["0.weight"].numpy().ravel()
    return float(np.linalg.norm(end - optimum) / np.linalg.norm(optimum))


def test_plain_descent_reaches_the_optimum() -> None:
    assert distance(Link(Dense("float64")), rounds=60, rate=0.5) < 1e-12


@pytest.mark.long
def test_one_percent_by_stc_needs_the_residual() -> None:
    """Each client sends 1 of 100 numbers; the step falls tenfold, or the residuals would not."""
    assert distance(Link(STC(0.01)), rounds=1200, rate=0.01, decay=0.1, spread=0.03) < 1e-3
    # As far in sum, by fewer and longer steps.
    plain = Link(STC(0.01), feedback=False)
    assert distance(plain, rounds=300, rate=0.04, decay=0.1, spread=0.03) > 0.1


NOISY = {n: c for n, c in CASES.items() if c.unbiased and 1 <= c.error_bound(D) <= 2}


@sweep("shift", [0.2, "auto"])
@sweep("codec", NOISY.values())
def test_shifts_remove_the_noise(codec, shift) -> None:
    assert distance(Link(codec, shift=shift), rounds=100, rate=0.3) < 1e-6
    assert distance(Link(codec), rounds=100, rate=0.3) > 0.03


def test_lossy_both_ways() -> None:
    """Weights by STC, too: their differences need no residual to arrive."""
    up = Link(QSGD(levels=4), shift="auto")
    assert distance(up, rounds=120, rate=0.2, down=Link(STC(0.3))) < 1e-6


LOSSY = {n: c for n, c in CASES.items() if not c.lossless and not c.cast}


@sweep("mode", ["state", "update"])
@sweep("codec", LOSSY.values())
def test_with_memory_every_codec_arrives(codec, mode) -> None:
    """RandomK(0.01) multiplies what it sends by 100: fed back unscaled, that explodes."""
    link, rng = Link(codec, feedback=True), np.random.default_rng(0)
    layout, target = (("w", (D,), "float32"),), torch.ones(D)
    # What is left, of a contraction as it is, and of an unbiased codec scaled by the link.
    bound = codec.error_bound(D)
    left = bound / (1 + bound) if codec.unbiased else bound
    memory, total, rounds = None, torch.zeros(D), 400 if left > 0.9 else 80
    for _ in range(rounds):
        _, received, memory = link.encode(target, layout, mode, memory, rng)
        total += received.values
    if mode == "state":
        reached, allowed = received.values, left ** (rounds / 2)
    else:
        reached, allowed = total / rounds, 2 / (1 - left) / rounds
    assert (reached - target).norm() / target.norm() <= 1.5 * allowed + 1e-6
