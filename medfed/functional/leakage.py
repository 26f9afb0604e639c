"""Attacks on messages and models, by which an audit measures what they give away.

Rows in a gradient: neuron i of a linear layer W x + b with input x has the gradients dL/dW_i =
sum_n d_in x_n and dL/db_i = sum_n d_in over the rows n of a batch, so a neuron that only one row
excites gives this row as their quotient (L. T. Phong et al., "Privacy-preserving deep learning via
additively homomorphic encryption", IEEE TIFS 2018). A step of SGD is a multiple of the gradient.

Membership: LiRA compares how sure a model is of a record with models that were trained with and
without it (N. Carlini et al., "Membership inference attacks from first principles", IEEE S&P 2022).
As few models are trained, the two variances are those over all records.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.functional.scores import Floats, area
from medfed.functional.statistics import LEVEL, draws, percentiles

Bools = NDArray[np.bool_]
RESAMPLES = 200
_CHUNK = 20  # resamples at a time, as each weighs all scores


def rows_in_update(weight: Tensor, bias: Tensor, rows: Tensor, tolerance: float) -> Tensor:
    """Finds the rows that follow from the change of a first linear layer.

    Args:
        weight: (H, F) change of its weight, or the gradient.
        bias: (H,) change of its bias.
        rows: (N, F) what the layer may have read.
        tolerance: Largest distance to a row, as a share of the row's norm.

    Returns:
        (N,) bool, which rows are reproduced.
    """
    known = bias.abs() > 1e-9 * bias.abs().max()
    if not bool(known.any()):
        return torch.zeros(len(rows), dtype=torch.bool)
    leaked = (weight[known] / bias[known, None]).double().cpu()
    rows = rows.double().cpu()
    # Not by matrix products, which lose the digits of a small distance.
    nearest = torch.cdist(rows, leaked, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    return torch.le(nearest, tolerance * rows.norm(dim=1).clamp(min=1e-12))


def confidence(losses: Floats) -> Floats:
    """Returns log(p / (1 - p)) of losses -log p, which is nearly normal over models.

    Example:
        >>> confidence(np.array([np.log(2.0), 0.1])).round(3).tolist()
        [-0.0, 2.252]
    """
    with np.errstate(over="ignore"):
        small = -np.log(np.expm1(np.clip(losses, 1e-12, 30.0)))
    return np.where(losses > 30.0, -losses, small)


def lira(shadows: Floats, inside: Bools, target: Floats, without: bool = False) -> Floats:
    """Scores how much likelier a model was trained with a record than without it.

    Args:
        shadows: (S, N) the confidence of S models in N records.
        inside: (S, N) which records each of them was trained with: of each, some and not all.
        target: (N,) the confidence of the attacked model.
        without: Whether to compare with the models without a record alone, if none can be trained
            with some of the records.

    Returns:
        (N,) log-likelihood ratios, or standard scores.
    """
    mean_out, spread_out = _normal(shadows, ~inside)
    out = (target - mean_out) / spread_out
    if without:
        return out
    mean_in, spread_in = _normal(shadows, inside)
    within = (target - mean_in) / spread_in
    return np.asarray((out**2 - within**2) / 2 + math.log(spread_out / spread_in))


def _normal(values: Floats, used: Bools) -> tuple[Floats, float]:
    """The mean of each record over the models that are used, and the spread common to all."""
    count = used.sum(0)
    with np.errstate(invalid="ignore"):
        mean = np.where(used, values, 0.0).sum(0) / count
    squares = np.where(used, values - mean, 0.0) ** 2
    free = int((count - 1)[count > 1].sum())
    return mean, max(math.sqrt(float(squares.sum()) / max(free, 1)), 1e-6)


def in_turn(shadows: Floats, inside: Bools) -> Floats:
    """Attacks each model by the others, (S, N) scores; see :func:`lira`."""
    others = [np.arange(len(shadows)) != s for s in range(len(shadows))]
    return np.stack([lira(shadows[o], inside[o], t) for o, t in zip(others, shadows, strict=True)])


def auc(scores: Floats, members: Bools, seed: int = 0) -> tuple[float, float, float]:
    """Returns the area under an attack's ROC curve, scores (S, N), and its interval over patients.

    Example:
        >>> auc(np.array([0.1, 0.2, 0.8, 0.9]), np.array([False, False, True, True]))
        (1.0, 1.0, 1.0)
    """
    scores, members = np.atleast_2d(scores), np.atleast_2d(members)
    weights = draws(scores.shape[1], RESAMPLES, seed).astype(np.float64)
    every = np.vstack([np.ones((1, scores.shape[1])), weights])
    parts = np.split(every, range(_CHUNK, len(every), _CHUNK))
    areas = [area(scores.ravel(), members.ravel(), np.tile(p, len(scores))) for p in parts]
    values = np.concatenate(areas)
    return float(values[0]), *percentiles(values[1:])


def hits(scores: Floats, members: Bools, rate: float = 0.01) -> tuple[float, int]:
    """Returns the share of members above a threshold that few others exceed.

    Args:
        scores: Of any shape.
        members: Of the same shape.
        rate: Share of the non-members that may exceed it.

    Returns:
        The share, and how many non-members may exceed it: none if there are fewer than 1 / rate.

    Example:
        >>> hits(np.array([0.1, 0.5, 0.4, 0.9]), np.array([False, False, True, True]))
        (0.5, 0)
    """
    others = np.sort(scores[~members])[::-1]
    allowed = int(rate * len(others) + 1e-9)
    return float((scores[members] > others[allowed]).mean()), allowed


def exact_interval(share: float, count: float) -> tuple[float, float]:
    """Returns Clopper and Pearson's interval of a share of `count` independent cases.

    Example:
        >>> [round(end, 3) for end in exact_interval(0.0, 30)]
        [0.0, 0.116]
    """
    from scipy.stats import beta

    right, tail = share * count, (1 - LEVEL) / 2
    low = 0.0 if share <= 0 else float(beta.ppf(tail, right, count - right + 1))
    high = 1.0 if share >= 1 else float(beta.ppf(1 - tail, right + 1, count - right))
    return low, high


def recognised(first: Tensor, second: Tensor) -> float:
    """Returns how often a client's vector is nearest to another vector of the same client.

    Example:
        >>> recognised(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.1], [-0.5]]))
        0.5
    """
    exact = "donot_use_mm_for_euclid_dist"
    gaps = torch.cdist(first.double(), second.double(), compute_mode=exact)
    near = gaps <= gaps.min(1, keepdim=True).values * (1 + 1e-9)
    return float((near.diagonal().double() / near.sum(1)).mean())
