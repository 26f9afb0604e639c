"""Runs the package on the same numbers as a NumPy loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from medfed.federation.algorithm import Algorithm
from medfed.federation.cohort import Cohort
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from tests.references.linear_net import Model, Problem
from tests.toys import ToyTask, toy_data, toy_federation


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
) -> tuple[Federation, Problem]:
    """Returns the finished federation, and the problem that the NumPy loop has yet to solve.

    The clients hold 6, 8, 10, ... samples, each its one batch, in double precision.
    """
    data = toy_data(clients, dtype=torch.float64)
    _, federation, local = toy_federation(
        algorithm,
        ToyTask(norm=False, dtype=torch.float64),
        data,
        rounds=rounds,
        steps=steps,
        lr=lr,
        momentum=momentum,
        kept=kept,
        cohort=Cohort(fraction=fraction),
    )
    initial = to_numpy(local.initial())
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
    )
    return run_reference(federation, rounds), problem


def to_numpy(tensors: Mapping[str, torch.Tensor]) -> Model:
    return {n: t.detach().numpy().copy() for n, t in tensors.items()}


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """The same names, and numbers that differ by no more than ``tolerance``."""
    assert set(actual) == set(expected)
    for name in expected:
        gap = np.abs(np.asarray(actual[name]) - np.asarray(expected[name])).max()
        assert gap <= tolerance, f"{name} differs by {gap}"
