"""Linear, BatchNorm, linear: least squares in NumPy, with the gradient derived by hand.

Over a batch of n with mean m and biased variance s2 of u = x W1^T + b1:

    c = (u - m) / sqrt(s2 + eps),   h = gamma c + beta,   f = h w2^T + b2

    du = (dc - mean dc - c mean(c dc)) / sqrt(s2 + eps),   dc = gamma dh

and running <- 0.9 running + 0.1 (m, s2 n/(n-1)). Frozen statistics take the place of m and s2, and
du = dc / sqrt(s2 + eps). Ioffe and Szegedy 2015.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

Model = dict[str, np.ndarray]
PARAMETERS = (
    "body.weight", "body.bias", "norm.weight", "norm.bias", "head.weight", "head.bias",
)  # fmt: skip
STATISTICS = ("norm.running_mean", "norm.running_var")
EPS = 1e-5


def forward(model: Model, x: np.ndarray, frozen: bool) -> dict[str, np.ndarray]:
    """All values on the way to the prediction."""
    u = x @ model["body.weight"].T + model["body.bias"]
    mean, var = (model[s] for s in STATISTICS) if frozen else (u.mean(0), u.var(0))
    centred = (u - mean) / np.sqrt(var + EPS)
    h = model["norm.weight"] * centred + model["norm.bias"]
    f = (h @ model["head.weight"].T + model["head.bias"])[:, 0]
    return {"u": u, "mean": mean, "var": var, "c": centred, "h": h, "f": f}


def loss(model: Model, x: np.ndarray, y: np.ndarray, frozen: bool) -> float:
    """The mean loss over the batch."""
    return float(((forward(model, x, frozen)["f"] - y) ** 2).mean() / 2)


def gradient(model: Model, x: np.ndarray, y: np.ndarray, frozen: bool) -> Model:
    """The gradient of the mean loss with respect to every parameter."""
    v = forward(model, x, frozen)
    residual = (v["f"] - y)[:, None] / len(y)
    dh = residual @ model["head.weight"]
    dc = dh * model["norm.weight"]
    if not frozen:
        dc = dc - dc.mean(0) - v["c"] * (v["c"] * dc).mean(0)
    du = dc / np.sqrt(v["var"] + EPS)
    return {
        "body.weight": du.T @ x,
        "body.bias": du.sum(0),
        "norm.weight": (dh * v["c"]).sum(0),
        "norm.bias": dh.sum(0),
        "head.weight": residual.T @ v["h"],
        "head.bias": residual.sum(0),
    }


def descend(
    model: Model,
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    steps: int,
    lr: float,
    frozen: bool,
    momentum: float = 0.0,
) -> Model:
    """Heavy-ball steps, a batch each; the running statistics follow unless they are frozen."""
    model = dict(model)
    velocity = dict.fromkeys(PARAMETERS, 0.0)
    for x, y in islice(batches, steps):
        v, grad = forward(model, x, frozen), gradient(model, x, y, frozen)
        if not frozen:
            batch = (v["mean"], v["var"] * len(y) / (len(y) - 1))
            model |= {s: 0.9 * model[s] + 0.1 * b for s, b in zip(STATISTICS, batch, strict=True)}
        velocity = {n: momentum * velocity[n] + grad[n] for n in PARAMETERS}
        model |= {n: model[n] - lr * velocity[n] for n in PARAMETERS}
    return model
