"""Federations of least-squares problems: strongly convex, and their optima are a linear solve."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from medfed.federation.algorithm import Algorithm, Cohort
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.federation import Federation
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense

FEATURES, CLIENTS = 3, 4


class Quadratics:
    """f_i(w) = |X_i w - y_i|^2 / (2 n_i) of clients that disagree.

    Attributes:
        hessians: A_i = X_i^T X_i / n_i, ``(N, d, d)``.
        linear: b_i = X_i^T y_i / n_i, ``(N, d)``; the gradient is A_i w - b_i.
        sizes: n_i.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.sizes = [6 + 2 * i for i in range(CLIENTS)]
        self.x = []
        for n in self.sizes:
            # Curvatures between 0.7 and 2, in directions of each client's own.
            axes = np.linalg.qr(rng.normal(size=(n, FEATURES)))[0] * np.sqrt(n)
            turned = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
            self.x.append(axes * np.sqrt(np.linspace(0.7, 2.0, FEATURES)) @ turned)
        self.y = [x @ rng.normal(size=FEATURES) * 2 + i for i, x in enumerate(self.x)]
        pairs = list(zip(self.x, self.y, strict=True))
        self.hessians = np.array([x.T @ x / len(x) for x, _ in pairs])
        self.linear = np.array([x.T @ y / len(x) for x, y in pairs])

    def shares(self, weighting: str = "samples") -> np.ndarray:
        sizes = np.array(self.sizes if weighting == "samples" else [1] * CLIENTS, float)
        return sizes / sizes.sum()

    def gradient(self, i: int, w: np.ndarray) -> np.ndarray:
        return self.hessians[i] @ w - self.linear[i]

    def optimum(self, weighting: str = "samples") -> np.ndarray:
        """argmin sum p_i f_i."""
        p = self.shares(weighting)
        return np.linalg.solve(np.tensordot(p, self.hessians, 1), p @ self.linear)

    def run(
        self,
        algorithm: Algorithm,
        rounds: int,
        *,
        steps: int = 5,
        lr: float = 0.15,
        momentum: float = 0.0,
        fraction: float = 1.0,
        channel: Channel | None = None,
        optimizer: Any = None,
    ) -> Federation:
        """Trains from 0 on full batches, in double precision."""
        network = nn.Linear(FEATURES, 1, bias=False).double()
        nn.init.zeros_(network.weight)
        clients = [
            ArrayClient(f"c{i}", torch.tensor(x), torch.tensor(y), len(x))
            for i, (x, y) in enumerate(zip(self.x, self.y, strict=True))
        ]
        federation, _ = assemble(
            algorithm,
            network,
            lambda b: (network(b["image"]).squeeze(-1) - b["label"]).square().mean() / 2,
            clients,
            optimizer=optimizer or partial(torch.optim.SGD, lr=lr, momentum=momentum),
            rounds=rounds,
            budget=LocalBudget(steps),
            channel=lambda _: channel or Channel(Dense("float64"), Dense("float64")),
            cohort=Cohort(fraction=fraction),
        )
        return run_reference(federation, rounds)


def global_model(federation: Federation) -> np.ndarray:
    return federation.server["shared"]["weight"].numpy().ravel()


def own_models(federation: Federation) -> np.ndarray:
    return np.array(
        [federation.personal_model(c)["weight"].numpy().ravel() for c in federation.ids]
    )
