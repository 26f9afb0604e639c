"""The matrices of a graph and its components."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components as scipy_components
from torch import Tensor


def graph_laplacian(n: int, edges: Tensor) -> Tensor:
    """``QQ^T``, the degrees minus the adjacency.

    Args:
        n: Number of nodes.
        edges: ``(M, 2)`` long tensor; a repeated edge counts as often as it occurs.

    Returns:
        ``(n, n)`` float64 tensor.

    Example:
        >>> graph_laplacian(2, torch.tensor([[0, 1]])).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    q = incidence(n, edges)
    return q @ q.T


def incidence(n: int, edges: Tensor) -> Tensor:
    """Q, with +1 at the first and -1 at the second end of every edge.

    Args:
        n: Number of nodes.
        edges: ``(M, 2)`` long tensor.

    Returns:
        ``(n, M)`` float64 tensor.

    Example:
        >>> incidence(2, torch.tensor([[0, 1]])).tolist()
        [[1.0], [-1.0]]
    """
    q = torch.zeros(n, edges.shape[0], dtype=torch.float64)
    columns = torch.arange(edges.shape[0])
    q[edges[:, 0], columns] = 1.0
    q[edges[:, 1], columns] = -1.0
    return q


def connected_components(n: int, edges: Tensor) -> Tensor:
    """Numbers the components in the order of their first node.

    Args:
        n: Number of nodes.
        edges: ``(M, 2)`` long tensor.

    Returns:
        ``(n,)`` long tensor, the component of every node.

    Example:
        >>> connected_components(4, torch.tensor([[1, 3]])).tolist()
        [0, 1, 2, 1]
    """
    ends = edges.reshape(-1, 2).cpu().numpy()
    ones = torch.ones(len(ends)).numpy()
    graph = coo_array((ones, (ends[:, 0], ends[:, 1])), shape=(n, n))
    found: Sequence[int] = scipy_components(graph, directed=False)[1].tolist()
    order = {label: i for i, label in enumerate(dict.fromkeys(found))}
    return torch.tensor([order[label] for label in found], dtype=torch.long)


def consensus(v: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The component means, and the smallest dual that would hold all points there.

    Z = V - Omega Q^T at the optimum, with each row of Omega inside the dual ball of radius weight.
    Where the smallest Omega that reaches the means fits, the means are the exact solution.

    Args:
        v: ``(N, d)`` tensor.
        edges: ``(M, 2)`` long tensor on the CPU.

    Returns:
        The means ``(N, d)``, constant on each component, and Omega ``(M, d)``.

    Example:
        >>> means, omega = consensus(torch.tensor([[1.0], [5.0]]), torch.tensor([[0, 1]]))
        >>> means.tolist(), omega.tolist()
        ([[3.0], [3.0]], [[-2.0]])
    """
    n = v.shape[0]
    label = connected_components(n, edges)
    same = (label.unsqueeze(0) == label.unsqueeze(1)).double()
    average = same / same.sum(1, keepdim=True)
    center = average.to(v) @ v
    inverse = torch.linalg.inv(graph_laplacian(n, edges) + average)
    return center, (incidence(n, edges).T @ inverse).to(v) @ (v - center)


def initial_rho(n: int, edges: Tensor) -> float:
    """The penalty that balances the slowest and the fastest mode of the graph.

    Modes of eigenvalue l contract by 1 / (1 + rho l) where edges are fused and by
    rho l / (1 + rho l) where they are not; rho = 1 / sqrt(l_min l_max) is fair to both.

    Example:
        >>> initial_rho(2, torch.tensor([[0, 1]]))
        0.5
    """
    spectrum = torch.linalg.eigvalsh(graph_laplacian(n, edges))
    positive = spectrum[spectrum > 1e-9 * spectrum[-1]]
    return round(float(1.0 / torch.sqrt(positive[0] * positive[-1])), 12)
