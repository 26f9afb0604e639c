"""Graphs whose solutions are known: stars and rings."""

from __future__ import annotations

import torch
from torch import Tensor

from medfed.functional.graph import undirected_edges


def star_edges(n: int) -> Tensor:
    """The first client joined to every other.

    Example:
        >>> star_edges(3).tolist()
        [[0, 1], [0, 2]]
    """
    others = torch.arange(1, n)
    return torch.stack([torch.zeros_like(others), others], dim=1)


def ring_edges(n: int) -> Tensor:
    """Every client joined to the next, and the last to the first."""
    nodes = torch.arange(n if n > 1 else 0)
    return undirected_edges(torch.stack([nodes, (nodes + 1) % max(n, 1)], dim=1))
