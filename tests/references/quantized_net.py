"""A chain of linear layers in NumPy, and the papers' loops of quantised training on it.

    h_0 = x,  h_k = h_{k-1} W_k^T + b_k,  loss = |h_L - y|^2 / (2n)

The proximal maps are found by trying every point at which their piecewise objective can have its
minimum. Nothing here knows the package under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Model = dict[str, np.ndarray]
LAYERS = ("body", "middle", "head")
QUANTIZED = "middle.weight"


def gradient(model: Model, x: np.ndarray, y: np.ndarray) -> Model:
    """The gradient of the mean loss over all samples."""
    values = [x]
    for layer in LAYERS:
        values.append(values[-1] @ model[f"{layer}.weight"].T + model[f"{layer}.bias"])
    back = (values[-1] - y[:, None]) / len(y)
    found = {}
    for layer, value in zip(reversed(LAYERS), reversed(values[:-1]), strict=True):
        found[f"{layer}.weight"] = back.T @ value
        found[f"{layer}.bias"] = back.sum(0)
        back = back @ model[f"{layer}.weight"]
    return found


def nearest(x: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """The index of the nearest centre; none of the tests has a tie."""
    return np.abs(x[..., None] - centers).argmin(-1)


def prox_weights(y: np.ndarray, centers: np.ndarray, tau: float) -> np.ndarray:
    """The minimiser of |x - y|^2 / 2 + tau min_z |x - z|: at a centre, or at y -+ tau."""
    tried = np.stack([np.broadcast_to(c, y.shape) for c in centers] + [y - tau, y + tau], -1)
    distance = np.abs(tried[..., None] - centers).min(-1)
    value = (tried - y[..., None]) ** 2 / 2 + tau * distance
    return np.take_along_axis(tried, value.argmin(-1)[..., None], -1)[..., 0]


def prox_centers(mu: np.ndarray, x: np.ndarray, centers: np.ndarray, tau: float) -> np.ndarray:
    """The minimiser of (c - mu_j)^2 / 2 + tau sum_i |c - x_i| for each j, assignments fixed."""
    found = mu.copy()
    for j in range(len(mu)):
        own = x[nearest(x, centers) == j]
        tried = np.concatenate([own, mu[j] + tau * (len(own) - 2.0 * np.arange(len(own) + 1))])
        value = (tried - mu[j]) ** 2 / 2 + tau * np.abs(tried[:, None] - own).sum(1)
        found[j] = tried[value.argmin()]
    return found


def center_gradient(gradient: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """The sum of the gradients over the weights of each centre."""
    return np.array([gradient[index == j].sum() for j in range(count)])


@dataclass
class Settings:
    """The hyper-parameters of a quantised method."""

    steps: int
    lr: float
    momentum: float = 0.0
    strength: float = 0.0
    center_lr: float = 0.0
    proximity: float = 0.0
    global_lr: float = 0.0
    sign: float = 1.0  # -1: the step of w as it is printed


@dataclass
class Client:
    """One client's data, model x, copy of w and centres (``None``: nothing is quantised).

    With batches, the data are those of the step: all of its gradients are on the same.
    """

    x: np.ndarray
    y: np.ndarray
    model: Model
    centers: np.ndarray | None
    batches: Iterator[tuple[np.ndarray, np.ndarray]] | None = None

    def draw(self) -> None:
        """Begins a step."""
        if self.batches is not None:
            self.x, self.y = next(self.batches)

    def gradient(self, model: Model) -> Model:
        return gradient(model, self.x, self.y)

    def quantized(self) -> Model:
        """The model that is evaluated."""
        if self.centers is None:
            return self.model
        weight = self.centers[nearest(self.model[QUANTIZED], self.centers)]
        return {**self.model, QUANTIZED: weight}

    def main_phase(self, w: Model, s: Settings) -> Model:
        """Algorithm 2's local steps on x, c and w; returns w."""
        w, velocity = dict(w), dict.fromkeys(self.model, 0.0)
        for _ in range(s.steps):
            self.draw()
            g = self.gradient(self.model)
            g = {n: g[n] + s.proximity * (self.model[n] - w[n]) for n in g}
            velocity = {n: s.momentum * velocity[n] + g[n] for n in g}
            self.model = {n: t - s.lr * velocity[n] for n, t in self.model.items()}
            if self.centers is not None:
                self.move(s)
            w = {
                n: t - s.sign * s.global_lr * s.proximity * (t - self.model[n])
                for n, t in w.items()
            }
        return w

    def move(self, s: Settings) -> None:
        """The proximal maps of x and of the centres."""
        c = self.centers
        x = prox_weights(self.model[QUANTIZED], c, s.strength * s.lr / 2)
        self.model = {**self.model, QUANTIZED: x}
        at = self.gradient({**self.model, QUANTIZED: c[nearest(x, c)]})[QUANTIZED]
        h = center_gradient(at, nearest(x, c), len(c))
        tau = s.strength * s.center_lr / 2
        self.centers = np.sort(prox_centers(c - s.center_lr * h, x, c, tau))

    def fine_tune(self, s: Settings) -> None:
        """Weights on their centres; unquantised parameters and centres follow the gradient."""
        if self.centers is None:
            codes, self.centers = np.full(self.model[QUANTIZED].shape, -1), np.zeros(0)
        else:
            codes = nearest(self.model[QUANTIZED], self.centers)
            self.model = self.quantized()
        for _ in range(s.steps):
            self.draw()
            g = self.gradient(self.model)
            self.centers = self.centers - s.center_lr * center_gradient(
                g[QUANTIZED], codes, len(self.centers)
            )
            model = {n: t - s.lr * g[n] for n, t in self.model.items()}
            if len(self.centers):
                model[QUANTIZED] = self.centers[codes]
            self.model = model
        self.centers = self.centers if len(self.centers) else None


def qupel_round(w: Model, clients: list[Client], weights: list[float], s: Settings) -> Model:
    """One round: local steps from w at every client, then the mean of their w_i."""
    ends = [c.main_phase(w, s) for c in clients]
    total = sum(weights)
    return {n: sum(p * e[n] for p, e in zip(weights, ends, strict=True)) / total for n in w}


def relaxed_steps(client: Client, free: np.ndarray, lam: float, s: Settings) -> np.ndarray:
    """BinaryRelax, Algorithm 1, one bit: returns y; x = (lambda Q(y) + y) / (lambda + 1)."""
    for _ in range(s.steps):
        client.draw()
        g = client.gradient(client.model)
        free = free - s.lr * g[QUANTIZED]
        binary = np.abs(free).mean() * np.where(free > 0, 1.0, -1.0)
        x = binary if np.isinf(lam) else (lam * binary + free) / (lam + 1)
        client.model = {**{n: t - s.lr * g[n] for n, t in client.model.items()}, QUANTIZED: x}
        client.centers = np.array([-1.0, 1.0]) * np.abs(free).mean()
    return free
