"""Runs the package on the same numbers as a NumPy loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medfed.federation.algorithm import Algorithm, Cohort
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel
from tests.references.linear_net import Model, Problem
from tests.toys import ToyData, ToyTask, toy_data, toy_federation


def run_both_ways(
    algorithm: Algorithm,
    *,
    rounds: int = 4,
    steps: int = 5,
    lr: float = 0.05,
    momentum: float = 0.0,
    kept: bool = False,
    fraction: float = 1.0,
    clients: int = 4,
    batch: int | None = None,
    clip: float | None = None,
    channel: Channel | None = None,
) -> tuple[Federation, Problem]:
    """Returns the finished federation, and the problem that the NumPy loop has yet to solve.

    The clients hold 6, 8, 10, ... samples in batches of ``batch`` or all in one, in double
    precision.
    """
    data = toy_data(clients, dtype=torch.float64)
    if batch is not None:
        data = drawn_in(data, batch)
    _, federation, local = toy_federation(
        algorithm,
        ToyTask(norm=False, dtype=torch.float64),
        data,
        rounds=rounds,
        steps=steps,
        lr=lr,
        momentum=momentum,
        kept=kept,
        clip=clip,
        cohort=Cohort(fraction=fraction),
        channel=channel,
    )
    initial = to_numpy(local.model.initial())
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(rounds)]
    problem = Problem(
        [(d.x.numpy(), d.y.numpy()) for d in data],
        initial,
        cohorts,
        steps,
        lr,
        momentum,
        algorithm.weighting,
        kept,
        np.inf if clip is None else clip,
    )
    run_reference(federation, rounds)
    if batch is not None:
        problem.batches = [iter(d.drawn) for d in data]
    return federation, problem


class Drawn(ToyData):
    """Remembers the batches that training drew, so that a reference takes the same ones."""

    def train_batches(self, seed):
        for batch in super().train_batches(seed):
            self.drawn.append((batch["image"].numpy(), batch["label"].numpy()))
            yield batch


def drawn_in(data: list[ToyData], batch: int) -> list[Drawn]:
    """The same clients in batches of ``batch``, each of which is remembered."""
    clients = [Drawn(d.id, d.x, d.y, batch_size=batch) for d in data]
    for client in clients:
        client.drawn = []
    return clients


def run_on_minibatches(
    algorithm: Algorithm, *, rounds: int = 4, fraction: float = 1.0, **changes: Any
) -> tuple[Federation, Minibatches]:
    """Returns the finished federation, and what a NumPy loop needs to do the same.

    The clients hold 6, 8, 10, ... samples in batches of 4, in double precision.
    """
    data = drawn_in(toy_data(4, dtype=torch.float64), 4)
    settings = {"steps": 5, "lr": 0.05, "momentum": 0.0, **changes}
    task, cohort = ToyTask(norm=False, dtype=torch.float64), Cohort(fraction=fraction)
    _, federation, local = toy_federation(
        algorithm, task, data, rounds=rounds, cohort=cohort, **settings
    )
    initial = to_numpy(local.model.initial())
    run_reference(federation, rounds)
    cohorts = [[federation.ids.index(c) for c in federation.members(t)] for t in range(rounds)]
    sizes = [d.num_samples if algorithm.weighting == "samples" else 1 for d in data]
    return federation, Minibatches(
        initial, cohorts, np.array(sizes) / sum(sizes), [iter(d.drawn) for d in data], **settings
    )


@dataclass
class Minibatches:
    """Start, cohorts, shares p_n of the clients, and the batches of each in order."""

    initial: Model
    cohorts: list[list[int]]
    shares: np.ndarray
    batches: list[Iterator[tuple[np.ndarray, np.ndarray]]]
    steps: int
    lr: float
    momentum: float


def to_numpy(tensors: Mapping[str, torch.Tensor]) -> Model:
    return {n: t.detach().numpy().copy() for n, t in tensors.items()}


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """The same names, and numbers that differ by no more than ``tolerance``."""
    assert set(actual) == set(expected)
    for name in expected:
        gap = np.abs(np.asarray(actual[name]) - np.asarray(expected[name])).max()
        assert gap <= tolerance, f"{name} differs by {gap}"
