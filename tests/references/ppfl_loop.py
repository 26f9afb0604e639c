"""PPFL's Algorithms 1 and 3 in NumPy for a linear network with K heads, gradients by hand.

The heads are mixed: w2 = sum_k c_k w2_k. With G = df/dw2 of the linear network, df/dw2_k = c_k G
and df/dc_k = <G, w2_k>. For a linear head mixing outputs is the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.references.linear_net import BODY, HEAD, Model, gradient


@dataclass
class Setting:
    """The options of the method and of the run."""

    cohorts: list[list[int]]
    blocks: list[str]
    steps: int = 3
    lr: float = 0.05
    momentum: float = 0.0
    weighted: bool = True
    membership_lr: float = 0.5
    strength: float = 0.0
    scaled: bool = True
    affinity: np.ndarray | None = None
    start: int = 0  # rounds in which memberships rest
    asked: bool = False  # whether a client is tied only after its first reply
    batches: list[Iterator[tuple[np.ndarray, np.ndarray]]] | None = None

    def next(self, n: int, samples: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """A client's next batch; without batches all its samples."""
        return next(self.batches[n]) if self.batches else samples


def head(theta: Model, c: np.ndarray) -> Model:
    """The linear network that a membership makes."""
    mixed = {n: sum(ck * theta[f"canonical.{k}.{n}"] for k, ck in enumerate(c)) for n in HEAD}
    return {**{n: theta[f"common.{n}"] for n in BODY}, **mixed}


def gradients(
    theta: Model, c: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[Model, np.ndarray]:
    """With respect to theta and to c."""
    g = gradient(head(theta, c), x, y)
    of_theta = {f"common.{n}": g[n] for n in BODY}
    of_c = np.zeros(len(c))
    for k, ck in enumerate(c):
        for n in HEAD:
            of_theta[f"canonical.{k}.{n}"] = ck * g[n]
            of_c[k] += float((g[n] * theta[f"canonical.{k}.{n}"]).sum())
    return of_theta, of_c


def ppfl(
    clients: list[tuple[np.ndarray, np.ndarray]], theta: Model, count: int, s: Setting
) -> tuple[Model, np.ndarray]:
    """Returns theta and C after all rounds."""
    members = np.full((len(clients), count), 1 / count)
    known = set() if s.asked else set(range(len(clients)))
    for t, (cohort, block) in enumerate(zip(s.cohorts, s.blocks, strict=True)):
        size = [len(clients[i][1]) if s.weighted else 1 for i in cohort]
        p = np.array(size) / sum(size)
        scale = len(cohort) if s.scaled else 1
        pull = np.zeros_like(members)
        if s.affinity is not None:
            for i in known:
                for j in known:
                    pull[i] += 2 * s.strength * s.affinity[i, j] * (members[i] - members[j])
        new, moves = members.copy(), []
        for i, weight in zip(cohort, p, strict=True):
            if block != "shared" and t >= s.start:
                _, g = gradients(theta, members[i], *s.next(i, clients[i]))
                raised = members[i] * np.exp(-s.membership_lr * scale * (weight * g + pull[i]))
                new[i] = raised / raised.sum()
            own = dict(theta)
            speed = {n: np.zeros_like(t) for n, t in own.items()}
            for _ in range(s.steps if block != "membership" else 0):
                g, _ = gradients(own, new[i], *s.next(i, clients[i]))
                speed = {n: s.momentum * speed[n] + g[n] for n in own}
                own = {n: own[n] - s.lr * speed[n] for n in own}
            moves.append({n: own[n] - theta[n] for n in own})
        theta = {
            n: v + sum(w * m[n] for w, m in zip(p, moves, strict=True)) for n, v in theta.items()
        }
        members, known = new, known | set(cohort)
    return theta, members
