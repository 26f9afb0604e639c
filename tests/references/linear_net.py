"""A two-layer linear least-squares model in NumPy, with gradients derived by hand.

    h = x W1^T + b1,   f = h w2^T + b2,   loss = |f - y|^2 / (2n)

With r = (f - y)/n:  dw2 = r^T h,  db2 = sum r,  dh = r w2,  dW1 = dh^T x,  db1 = sum dh.
Body and head are W1, b1 and w2, b2. Nothing here knows the package under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

Model = dict[str, np.ndarray]
BODY, HEAD = ("body.weight", "body.bias"), ("head.weight", "head.bias")
ALL = BODY + HEAD


def gradient(model: Model, x: np.ndarray, y: np.ndarray) -> Model:
    """The gradient of the mean loss over all samples."""
    hidden = x @ model["body.weight"].T + model["body.bias"]
    residual = (hidden @ model["head.weight"].T + model["head.bias"] - y[:, None]) / len(y)
    back = residual @ model["head.weight"]
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": residual.T @ hidden,
        "head.bias": residual.sum(0),
    }


def loss(model: Model, x: np.ndarray, y: np.ndarray) -> float:
    """The mean loss over all samples."""
    hidden = x @ model["body.weight"].T + model["body.bias"]
    prediction = hidden @ model["head.weight"].T + model["head.bias"]
    return float(((prediction[:, 0] - y) ** 2).mean() / 2)


@dataclass
class Problem:
    """Clients, start and optimizer, who takes part in each round, and batches in their order."""

    clients: list[tuple[np.ndarray, np.ndarray]]
    initial: Model
    cohorts: list[list[int]]
    steps: int
    lr: float
    momentum: float = 0.0
    weighting: str = "samples"
    keep_velocity: bool = False
    clip: float = np.inf
    batches: list[Iterator[tuple[np.ndarray, np.ndarray]]] | None = None
    velocity: dict = field(default_factory=dict)

    def descend(
        self,
        n: int,
        model: Model,
        steps: int,
        names=ALL,
        anchor: Model | None = None,
        mu=0.0,
        call=0,
    ) -> Model:
        """Heavy-ball steps on f_n + (mu/2)|w - anchor|^2: v = m v + g, w = w - lr v.

        Each is on all samples, or on the client's next batch; g is shortened to ``clip``.
        """
        model = dict(model)
        slot = (n, call)
        velocity = self.velocity.get(slot) if self.keep_velocity else None
        for _ in range(steps):
            grad = gradient(model, *(next(self.batches[n]) if self.batches else self.clients[n]))
            for name in anchor or ():
                grad[name] = grad[name] + mu * (model[name] - anchor[name])
            length = np.sqrt(sum((grad[k] ** 2).sum() for k in names))
            if length > self.clip:  # as PyTorch does, which keeps away from 0 / 0
                grad = {k: g * self.clip / (length + 1e-6) for k, g in grad.items()}
            if velocity is None:
                velocity = {k: np.zeros_like(grad[k]) for k in names}
            velocity = {k: self.momentum * velocity[k] + grad[k] for k in names}
            model.update({k: model[k] - self.lr * velocity[k] for k in names})
        self.velocity[slot] = velocity
        return model

    def pass_over(self, n: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """All samples of a client: their mean is that of its batches, which it draws for it."""
        x, y = self.clients[n]
        if self.batches:
            sum(1 for _ in islice(self.batches[n], -(-len(y) // batch)))
        return x, y

    def average(self, cohort: list[int], models: list[Model]) -> Model:
        """Sum of p_k w_k with p_k = n_k / sum n, or 1 / K."""
        sizes = [len(self.clients[k][1]) if self.weighting == "samples" else 1 for k in cohort]
        return {
            name: sum(s * m[name] for s, m in zip(sizes, models, strict=True)) / sum(sizes)
            for name in models[0]
        }


def part(model: Model, names) -> Model:
    """The entries of the given names."""
    return {name: model[name] for name in names}
