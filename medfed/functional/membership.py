"""Membership vectors on the simplex, and the Laplacian that couples them or models (PPFL, FedU)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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

    Raises:
        ValueError: If a shape differs, the step is negative or the gradient is not finite.

    Example:
        >>> c = torch.tensor([0.5, 0.5])
        >>> exponentiated_gradient(c, torch.tensor([0.0, 1.0]), step=1.0)
        tensor([0.7311, 0.2689])
        >>> exponentiated_gradient(c, torch.tensor([3e38, -3e38]), step=1e6)
        tensor([0., 1.])
    """
    if membership.shape != gradient.shape or not step >= 0:
        raise ValueError(
            f"A step of {step} for memberships {tuple(membership.shape)} with a gradient "
            f"{tuple(gradient.shape)}: shapes must agree and the step must not be negative."
        )
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
    """The cosine similarity of clients' counts or sketches, 0 on the diagonal.

    Source: PPFL, W from label counts. Where a cosine is negative the affinity is 0. A client whose
    row is 0 resembles nobody.

    Args:
        rows: ``(N, s)`` finite tensor, a row per client.

    Returns:
        ``(N, N)`` symmetric float64 tensor in [0, 1].

    Raises:
        ValueError: If the shape is wrong or an entry is not finite.

    Example:
        >>> cosine_affinity(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if rows.ndim != 2 or not bool(torch.isfinite(rows).all()):
        raise ValueError("An affinity needs a row of finite numbers for each client.")
    wide = rows.double()
    unit = wide / wide.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    cosine = unit @ unit.T
    upper = cosine.clamp(0, 1).triu(1)
    affinity: Tensor = upper + upper.T  # symmetric to the last bit
    return affinity


def laplacian(weights: Tensor) -> Tensor:
    """D - W, with D the row sums of W.

    Source: PPFL, L = D - W of its objective; w_ii drops out.

    Args:
        weights: ``(N, N)`` affinities, finite, symmetric, 0 or more.

    Returns:
        ``(N, N)`` positive semidefinite float64 tensor.

    Raises:
        ValueError: If the shape is wrong or an entry cannot be used; it is named, from 0.

    Example:
        >>> laplacian(torch.tensor([[0.0, 2.0], [2.0, 0.0]])).tolist()
        [[2.0, -2.0], [-2.0, 2.0]]
        >>> laplacian(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        Traceback (most recent call last):
        ...
        ValueError: The affinity is not symmetric: entry [0, 1] is 2 and entry [1, 0] is 1.
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

    Args:
        weights: ``(N, N)`` affinities, finite, symmetric, 0 or more.
        steps: s, 0 or more, one per vector.

    Returns:
        ``(N, N)`` float64 tensor; rows sum to 1.

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
    """As :func:`coupling` of the Laplacian of :func:`spread_rows`, in time and memory of N.

    Args:
        unit: ``(N, s)``.
        memberships: ``(N, K)``.
        strength: lambda.

    Returns:
        ``(N, K)`` float64.

    Example:
        >>> counts = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
        >>> members = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
        >>> dense = coupling(laplacian(cosine_affinity(counts)), members, 0.5)
        >>> torch.allclose(spread_coupling(spread_rows(counts), members, 0.5), dense)
        True
    """
    c = memberships.double()
    # The diagonal of U U^T drops out of D - W.
    degree = unit @ unit.sum(0)
    return 2 * strength * (degree[:, None] * c - unit @ (unit.T @ c))


def coupling(laplacian: Tensor, memberships: Tensor, strength: float) -> Tensor:
    """The gradient of (strength/2) sum_ij w_ij |c_i - c_j|^2 with respect to each c_i: 2 s L C.

    Source: PPFL, the second term of its objective, sums over ordered pairs.

    Args:
        laplacian: ``(N, N)`` tensor L.
        memberships: ``(N, K)`` tensor C, a row per client.
        strength: lambda.

    Returns:
        ``(N, K)`` float64 tensor.

    Example:
        >>> members = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> coupling(laplacian(torch.tensor([[0.0, 1.0], [1.0, 0.0]])), members, 0.5).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    return 2 * strength * (laplacian.double() @ memberships.double())
