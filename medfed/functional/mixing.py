"""Membership vectors on the simplex, and the Laplacian that couples them or models (PPFL, FedU).

Two models: what lies between them, the slopes of their cosine, and a model that is like one.

The shortest vector in a part of a convex hull: the common descent of several gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def exponentiated_gradient(membership: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Takes one step of mirror descent on the simplex: softmax(log c - step * g).

    Source: PPFL, the update of c in Algorithms 1 and 3; Kivinen and Warmuth 1997. It is computed
    in float64, from the smallest gradient up, so that no finite gradient leaves the simplex. An
    entry that has underflowed to 0 counts as the smallest number: it can come back.

    Args:
        membership: ``(..., K)`` floating tensor c, each vector in the simplex.
        gradient: ``(..., K)`` finite tensor g.
        step: Step size, 0 or more.

    Returns:
        ``(..., K)`` tensor in the dtype of ``membership``.
    """
    if not bool(torch.isfinite(gradient).all()):
        raise ValueError("The gradient of the membership holds NaN or infinity.")
    wide, g = membership.double(), gradient.double()
    largest = torch.finfo(torch.float64).max / 4
    # Halves first: the spread of a gradient may exceed what a number can hold.
    spread = (g / 2 - g.amin(-1, keepdim=True) / 2) * step * 2
    logs = wide.clamp(min=torch.finfo(membership.dtype).tiny).log()
    moved: Tensor = (logs - spread.clamp(max=largest)).softmax(-1)
    return moved.to(membership)


def cosine_affinity(rows: Tensor) -> Tensor:
    """The cosine similarity of clients' counts or sketches ``(N, s)``, 0 on the diagonal.

    Source: PPFL, W from label counts. Where a cosine is negative the affinity is 0. A client whose
    row is 0 resembles nobody.

    Example:
        >>> cosine_affinity(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("An affinity needs a row of finite numbers for each client.")
    unit = spread_rows(rows)
    upper = (unit @ unit.T).clamp(0, 1).triu(1)
    affinity: Tensor = upper + upper.T  # symmetric to the last bit
    return affinity


def laplacian(weights: Tensor) -> Tensor:
    """D - W, with D the row sums of W.

    Source: PPFL, L = D - W of its objective; w_ii drops out.

    Args:
        weights: ``(N, N)`` affinities, finite, symmetric, 0 or more.

    Returns:
        ``(N, N)`` positive semidefinite float64 tensor.
    """
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise ValueError(f"An affinity has a row and a column per client, not {weights.shape}.")
    wide = weights.double()
    for what, bad in (("not finite", ~torch.isfinite(wide)), ("negative", wide < 0)):
        if bool(bad.any()):
            i, j = bad.nonzero()[0].tolist()
            raise ValueError(f"The affinity's entry [{i}, {j}] is {what}: {float(wide[i, j]):g}.")
    if bool((uneven := wide != wide.T).any()):
        i, j = uneven.nonzero()[0].tolist()
        raise ValueError(
            f"The affinity is not symmetric: entry [{i}, {j}] is {float(wide[i, j]):g} and entry "
            f"[{j}, {i}] is {float(wide[j, i]):g}."
        )
    return torch.diag(wide.sum(1)) - wide


def laplacian_steps(weights: Tensor, steps: Sequence[float]) -> Tensor:
    """The weights of all vectors in x_k - s_k sum_l w_kl (x_k - x_l): I - diag(s) L.

    Source: T. Dinh et al. 2021 (FedU), the server's step of Algorithm 1. No s_k exceeds 1 / (the
    Laplacian's largest eigenvalue); from twice that on repeated steps would swing ever farther.

    Example:
        >>> laplacian_steps(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [0.25, 9.0]).tolist()
        [[0.75, 0.25], [0.5, 0.5]]
    """
    stiffest = float(torch.linalg.eigvalsh(laplacian(weights))[-1])
    most = 1 / stiffest if stiffest > 0 else 0.0
    s = torch.tensor(steps, dtype=torch.float64).clamp(max=most)
    rows = s.unsqueeze(1) * weights.double()
    return rows + torch.diag(1 - rows.sum(1))


def spread_rows(rows: Tensor) -> Tensor:
    """The rows U of which D - U U^T, but for its diagonal, is the Laplacian of a cosine affinity.

    So that L C needs no matrix of all pairs: see :func:`spread_coupling`.

    Args:
        rows: ``(N, s)`` finite tensor of which no two rows have a negative product, such as counts
            or second moments; a row of zeros for who resembles nobody.

    Returns:
        ``(N, s)`` float64, each row of length 1 or 0.
    """
    wide = rows.double()
    unit: Tensor = wide / wide.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return unit


def spread_coupling(unit: Tensor, memberships: Tensor, strength: float) -> Tensor:
    """As :func:`coupling` of the Laplacian of :func:`spread_rows`, in time and memory of N."""
    c = memberships.double()
    # The diagonal of U U^T drops out of D - W.
    degree = unit @ unit.sum(0)
    return 2 * strength * (degree[:, None] * c - unit @ (unit.T @ c))


def coupling(laplacian: Tensor, memberships: Tensor, strength: float) -> Tensor:
    """The gradient of (strength/2) sum_ij w_ij |c_i - c_j|^2 with respect to each c_i: 2 s L C.

    Source: PPFL, the second term of its objective, sums over ordered pairs.

    Example:
        >>> members = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> coupling(laplacian(torch.tensor([[0.0, 1.0], [1.0, 0.0]])), members, 0.5).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    return 2 * strength * (laplacian.double() @ memberships.double())


Model = Mapping[str, Tensor]


def mixed(a: Model, b: Model, share: float) -> dict[str, Tensor]:
    """Returns (1 - share) a + share b, over the names of ``b``.

    Example:
        >>> mixed({"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}, 0.25)
        {'w': tensor([1.])}
    """
    return {n: torch.lerp(a[n], t, share) for n, t in b.items()}


def shuffled(model: Model, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns the elements of each tensor in another order, drawn on the CPU.

    Example:
        >>> shuffled({"w": torch.arange(4.0)}, torch.Generator())["w"].sort().values
        tensor([0., 1., 2., 3.])
    """
    permuted = {}
    for name, tensor in model.items():
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        permuted[name] = tensor.flatten()[order].reshape(tensor.shape)
    return permuted


def cosine_slopes(a: Model, b: Model) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the gradients of cos^2(a, b), of all entries as one vector; 0 at the origin.

    Example:
        >>> a, b = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([1.0, 1.0])}
        >>> cosine_slopes(a, b)[0]["w"]
        tensor([0.0000, 0.5000])
    """
    dot = sum(float((a[n] * t).sum()) for n, t in b.items())
    square_a, square_b = (sum(float(t.square().sum()) for t in m.values()) for m in (a, b))
    product = (square_a * square_b) ** 0.5
    if product == 0:
        return tuple({n: torch.zeros_like(t) for n, t in m.items()} for m in (a, b))  # type: ignore[return-value]
    c = dot / product
    of_a = {n: 2 * c * (b[n] / product - c * t / square_a) for n, t in a.items()}
    of_b = {n: 2 * c * (a[n] / product - c * t / square_b) for n, t in b.items()}
    return of_a, of_b


Array = NDArray[np.float64]
_STEPS = 100_000


def minimum_norm(gram: Array, prior: Array, radius: float = 1.0) -> Array:
    """Weights of the shortest mean: argmin λᵀGλ over Σλ = 1, λ ≥ 0, |λ_i − λ⁰_i| ≤ ε.

    Source: Hu, Shaloudegi, Zhang, Yu: Federated learning meets multi-objective optimization, IEEE
    TNSE 2022, Equation 11. By FISTA (Beck, Teboulle 2009), restarted where it turns back.

    Args:
        gram: ``(N, N)``, the vectors' inner products G.
        prior: ``(N,)``, λ⁰, in the simplex.
        radius: ε ≥ 0; 1 leaves the whole simplex, 0 the prior alone.

    Returns:
        ``(N,)``.
    """
    low, high = np.maximum(prior - radius, 0), np.minimum(prior + radius, 1)
    step = 1 / max(float(np.linalg.norm(gram, 2)), np.finfo(float).tiny)
    estimate = ahead = prior
    pace = 1.0
    for _ in range(_STEPS):
        new = _project(ahead - step * gram @ ahead, low, high)
        if (ahead - new) @ (new - estimate) > 0:
            pace = 1.0
        faster = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        moved, ahead = new - estimate, new + (pace - 1) / faster * (new - estimate)
        estimate, pace = new, faster
        if np.abs(moved).max() < 1e-13:  # rounding may keep it from less
            break
    return estimate


def _project(point: Array, low: Array, high: Array) -> Array:
    """The nearest point of the box whose sum is 1: clip(point − t); the sum is linear in t."""
    kinks = np.sort(np.concatenate([point - high, point - low]))
    sums = np.clip(point - kinks[:, None], low, high).sum(1)
    shift = float(np.interp(1.0, sums[::-1], kinks[::-1]))
    return np.clip(point - shift, low, high)
