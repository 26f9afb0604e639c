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
