"""Clients with quadratic losses, f_i(w) = w' A_i w / 2 - b_i' w, whose optima are linear systems.

One linear layer and the squared error: A_i and b_i are means over the samples of x x' and y x, with
a 1 appended to x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from medfed.common.tensors import Tensors
from medfed.federation.algorithm import Algorithm, Cohort
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from tests.toys import ToyData, ToyTask, toy_federation


class Linear(ToyTask):
    """One linear layer, at zero."""

    personal = ("layer.*",)

    def __init__(self):
        super().__init__(norm=False, dtype=torch.float64)
        self.network = nn.Sequential()
        self.network.add_module("layer", nn.Linear(3, 1, dtype=torch.float64))
        for tensor in self.network.parameters():
            nn.init.zeros_(tensor)


@dataclass
class Quadratics:
    """A_i (N, 4, 4), b_i (N, 4), and the clients' data that they are of."""

    a: np.ndarray
    b: np.ndarray
    data: list[ToyData]

    @classmethod
    def drawn(cls, slopes: np.ndarray, samples: int = 12, noise: float = 0.3) -> Quadratics:
        """A client per row (w, bias) of ``slopes``, of 12, 14, 16, ... samples.

        Eigenvalues of A_i are within [0.6, 1.4], so that steps of 1 converge in a few rounds.
        """
        rng = np.random.default_rng(3)
        a, b, data = [], [], []
        for i, slope in enumerate(slopes):
            count = samples + 2 * i
            basis = np.linalg.qr(np.column_stack([np.ones(count), rng.normal(size=(count, 3))]))[0]
            turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
            x = np.sqrt(count) * basis[:, 1:] * np.sqrt(rng.uniform(0.6, 1.4, size=3)) @ turn
            rows = np.column_stack([x, np.ones(count)])
            y = rows @ slope + noise * rng.normal(size=count)
            a.append(rows.T @ rows / count)
            b.append(rows.T @ y / count)
            data.append(ToyData(f"c{i}", torch.tensor(x), torch.tensor(y)))
        return cls(np.array(a), np.array(b), data)

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """g_i at row i of w (N, 4), or at the same w (4,)."""
        return np.einsum("nij,nj->ni", self.a, np.broadcast_to(w, self.b.shape)) - self.b

    def best(self, members: list[int] | None = None) -> np.ndarray:
        """The minimum of the members' sum, of all by default."""
        chosen = range(len(self.a)) if members is None else members
        return np.linalg.solve(sum(self.a[i] for i in chosen), sum(self.b[i] for i in chosen))

    def run(self, algorithm: Algorithm, rounds: int, **changes: Any) -> Federation:
        """Full batches and plain gradient steps, unless other settings are given."""
        settings = {"steps": 1, "lr": 0.8, **changes}
        cohort = Cohort(fraction=settings.pop("fraction", 1.0))
        _, federation, _ = toy_federation(
            algorithm, Linear(), self.data, rounds=rounds, cohort=cohort, **settings
        )
        return run_reference(federation, rounds)


def spread(clients: int = 5) -> Quadratics:
    """Clients that all differ."""
    return Quadratics.drawn(np.random.default_rng(8).normal(size=(clients, 4)))


def two_groups(gap: float = 4.0) -> Quadratics:
    """Clients 0, 2, 4 and clients 1, 3, 5: near each other within a group, far apart between."""
    rng = np.random.default_rng(9)
    ends = np.array([[1.0, -1.0, 0.5, 0.0], [-1.0, 1.0, -0.5, 0.0]]) * gap / 2
    slopes = np.array([ends[i % 2] + 0.05 * rng.normal(size=4) for i in range(6)])
    return Quadratics.drawn(slopes, noise=0.05)


def vector(tensors: Tensors) -> np.ndarray:
    """Weight and bias as one vector (4,)."""
    return np.concatenate([t.numpy().ravel() for t in tensors.values()])


def personal(federation: Federation) -> np.ndarray:
    """(N, 4), every client's personal model."""
    return np.stack([vector(federation.personal_model(c)) for c in federation.ids])
