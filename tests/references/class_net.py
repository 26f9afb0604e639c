"""Three classes in NumPy: linear body, linear head, cross-entropy; patients of two samples each.

z = x W1^T + b1,   o = z W2^T + b2,   loss = mean of -log softmax(o)_y
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from medfed.federation.algorithm import Algorithm
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from tests.references.linear_net import Model
from tests.references.pairing import Drawn, to_numpy
from tests.references.test_fedrod import Classes
from tests.toys import toy_federation

STEPS, LR, ROUNDS, K = 5, 0.1, 4, 3
# Samples of each class; the second hospital lacks class 1, and the third has few of class 2.
COUNTS = ((10, 14, 8), (12, 0, 8), (10, 8, 2), (6, 12, 10))
LEAST = 3
"""Patients of a class: the third hospital has one of class 2."""


class TwoEach(Drawn):
    """Training samples in two evaluation batches; samples 2p and 2p + 1 are patient p's."""

    def eval_batches(self, split: str):
        for rows in torch.arange(len(self.x)).split(2 * (len(self.x) // 4)):
            yield {"image": self.x[rows], "label": self.y[rows], "case": rows // 2}


def clients(counts: Sequence[Sequence[int]] = COUNTS, seed: int = 2) -> list[TwoEach]:
    """Clusters around a point of each class, which differ a little among hospitals."""
    rng = np.random.default_rng(seed)
    centers, every = 2 * rng.normal(size=(K, 3)), []
    for n, numbers in enumerate(counts):
        y = np.repeat(np.arange(K), numbers)
        x = centers[y] + rng.normal(size=(len(y), 3)) + 0.5 * rng.normal(size=3)
        data = TwoEach(f"c{n}", torch.tensor(x), torch.tensor(y), 7)
        data.label_counts, data.drawn = torch.tensor(numbers), []
        every.append(data)
    return every


def finished(
    method: Algorithm, data: list[TwoEach], rounds: int = ROUNDS, **changes
) -> tuple[Federation, Model]:
    """The run, and the weights with which it began."""
    settings = {"steps": STEPS, "lr": LR, **changes}
    _, federation, local = toy_federation(method, Classes(), data, rounds=rounds, **settings)
    initial = to_numpy(local.model.initial())
    return run_reference(federation, rounds), initial


def cohorts(federation: Federation, rounds: int = ROUNDS) -> list[list[int]]:
    """The numbers of each round's clients."""
    return [[federation.ids.index(c) for c in federation.members(t)] for t in range(rounds)]


def features(w: Model, x: np.ndarray) -> np.ndarray:
    return x @ w["body.weight"].T + w["body.bias"]


def logits(w: Model, x: np.ndarray) -> np.ndarray:
    return features(w, x) @ w["head.weight"].T + w["head.bias"]


def pulled(w: Model, x: np.ndarray, slope: np.ndarray) -> Model:
    """Gradient of a term of the features, given its slope (n, d) there."""
    none = {k: np.zeros_like(v) for k, v in w.items()}
    return {**none, "body.weight": slope.T @ x, "body.bias": slope.sum(0)}


def present(data: TwoEach) -> list[int]:
    """The classes with enough patients, counted anew."""
    who = [(int(y), row // 2) for row, y in enumerate(data.y)]
    return [k for k in range(K) if len({p for y, p in who if y == k}) >= LEAST]
