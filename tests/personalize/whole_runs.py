"""Whole runs whose personal models are compared: where one method becomes another."""

from __future__ import annotations

import numpy as np
import torch

from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from tests.toys import ToyTask, toy_data, toy_federation

ROUNDS = 3


def run(algorithm, data=None, **changes) -> Federation:
    """Full batches in double precision, four unequal clients unless others are given."""
    task = ToyTask(norm=False, dtype=torch.float64)
    data = data or toy_data(4, dtype=torch.float64)
    _, federation, _ = toy_federation(algorithm, task, data, **{"steps": 4, **changes})
    return run_reference(federation, ROUNDS)


def models(federation: Federation) -> np.ndarray:
    """A row per client: its personal model."""
    return np.stack(
        [
            torch.cat([t.flatten() for t in federation.personal_model(c).values()]).numpy()
            for c in federation.ids
        ]
    )


def gap(a: Federation, b: Federation) -> float:
    """The largest difference between the personal models of two runs."""
    return float(np.abs(models(a) - models(b)).max())


def assert_one_sentence(error: BaseException) -> None:
    """What a user reads is a line that ends."""
    assert "\n" not in str(error)
    assert str(error).rstrip().endswith(".")
