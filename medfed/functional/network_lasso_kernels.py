"""The ADMM iteration of the network lasso as fused loops, for tensors in main memory.

All arrays but the (M, d) iterate and the (N, d) data are blocks of some hundred columns, so that
everything between reading the iterate and writing it back happens in cache. Sums run down fixed
columns and are added in a fixed order: the bits depend on neither threads nor vector width.

An edge's row ``a`` is split as ``a = w + u`` by one number ``cut`` per row:

====  ==========================  =====================
p     scaled dual u               cut
====  ==========================  =====================
1     clip(a, -cut, cut)          tau
2     cut * a                     min(1, tau / ||a||)
inf   a - clip(a, -cut, cut)      see :func:`clip_levels`
====  ==========================  =====================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

_ROW_CHUNK = 1024


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _dual_row(row: Array, out: Array, cut: float, norm: int) -> None:
    """Writes the scaled dual part of one row block."""
    if norm == 2:
        for c in range(row.shape[0]):
            out[c] = cut * row[c]
        return
    for c in range(row.shape[0]):
        x = row[c]
        y = x if x < cut else cut
        y = y if y > -cut else -cut
        out[c] = y if norm == 1 else x - y


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _solve_block(inverse: Array, rhs: Array, z: Array) -> None:
    """``z = inverse @ rhs`` for one block of columns."""
    for i in range(rhs.shape[0]):
        out = z[i]
        for c in range(out.shape[0]):
            out[c] = inverse[i, 0] * rhs[0, c]
        for j in range(1, rhs.shape[0]):
            factor = inverse[i, j]
            row = rhs[j]
            for c in range(out.shape[0]):
                out[c] += factor * row[c]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def admm_step(
    a: Array,
    z: Array,
    v: Array,
    mass: Array,
    edges: Array,
    inverse: Array,
    rho: float,
    cut: Array,
    norm: int,
    width: int,
) -> Array:
    """One iteration: overwrites ``a`` and ``z``, returns sums for the new row norms.

    Args:
        a: ``(M, d)`` splitting plus scaled dual, updated in place.
        z: ``(N, d)`` receives Z.
        v: ``(N, d)`` the point to stay close to.
        mass: ``(N,)`` how much each node's distance from it counts.
        edges: ``(M, 2)`` node indices.
        inverse: ``(N, N)`` inverse of diag(mass) + rho L.
        rho: Penalty, a scalar of the dtype of ``a``.
        cut: ``(M,)`` one number per row, see the module docstring.
        norm: 1, 2 or 0 for infinity.
        width: Columns in a block.

    Returns:
        ``(M, width)`` float64: for p = 2 the squared norms of the rows once summed over columns.
    """
    count, d = a.shape
    dual = np.empty((count, width), a.dtype)
    rhs = np.empty((v.shape[0], width), a.dtype)
    sums = np.zeros((count, width), np.float64)
    for lo in range(0, d, width):
        n = min(width, d - lo)
        for i in range(v.shape[0]):
            for c in range(n):
                rhs[i, c] = mass[i] * v[i, lo + c]
        for e in range(count):
            row, u = a[e, lo : lo + n], dual[e, :n]
            head, tail = rhs[edges[e, 0], :n], rhs[edges[e, 1], :n]
            _dual_row(row, u, cut[e], norm)
            for c in range(n):
                push = rho * (row[c] - u[c] - u[c])
                head[c] += push
                tail[c] -= push
        _solve_block(inverse, rhs[:, :n], z[:, lo : lo + n])
        for e in range(count):
            row, u, total = a[e, lo : lo + n], dual[e, :n], sums[e]
            head, tail = z[edges[e, 0], lo : lo + n], z[edges[e, 1], lo : lo + n]
            for c in range(n):
                row[c] = head[c] - tail[c] + u[c]
            if norm == 2:
                for c in range(n):
                    x = np.float64(row[c])
                    total[c] += x * x
    return sums


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _push(head: Array, tail: Array, row: Array, factor: float) -> None:
    """Adds ``factor * row`` to one end of an edge and subtracts it from the other."""
    for c in range(row.shape[0]):
        x = factor * row[c]
        head[c] += x
        tail[c] -= x


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _edge_sums(row: Array, u: Array, head: Array, tail: Array, sums: Array) -> None:
    """Adds one edge's share of the squares of ZQ - W, ZQ and W."""
    primal, gaps, splitting = sums[0], sums[2], sums[3]
    for c in range(row.shape[0]):
        gap = np.float64(head[c] - tail[c])
        w = np.float64(row[c] - u[c])
        primal[c] += (gap - w) * (gap - w)
        gaps[c] += gap * gap
        splitting[c] += w * w


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _node_sums(v: Array, z: Array, mass: float, pull: Array, sums: Array) -> None:
    """Adds one node's share of the squares of mass (V - Z) - Omega Q^T and Omega Q^T."""
    dual, forces = sums[1], sums[4]
    for c in range(v.shape[0]):
        force = np.float64(pull[c])
        rest = np.float64(mass * (v[c] - z[c])) - force
        dual[c] += rest * rest
        forces[c] += force * force


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def residual_norms(
    a: Array,
    z: Array,
    v: Array,
    mass: Array,
    edges: Array,
    rho: float,
    cut: Array,
    norm: int,
    width: int,
) -> Array:
    """The norms in Boyd's stopping rule, in one read of the arrays.

    Args:
        a: ``(M, d)`` splitting plus scaled dual.
        z: ``(N, d)`` the Z that the last step wrote.
        v: ``(N, d)`` the point to stay close to.
        mass: ``(N,)`` how much each node's distance from it counts.
        edges: ``(M, 2)`` node indices.
        rho: Penalty, a scalar of the dtype of ``a``.
        cut: ``(M,)`` one number per row, fitting ``a``.
        norm: 1, 2 or 0 for infinity.
        width: Columns in a block.

    Returns:
        ``(5, width)`` float64: once summed over columns, the squared norms of ZQ - W,
        mass (V - Z) - Omega Q^T, ZQ, W and Omega Q^T.
    """
    count, d = a.shape
    u = np.empty(width, a.dtype)
    pull = np.empty((v.shape[0], width), a.dtype)
    sums = np.zeros((5, width), np.float64)
    for lo in range(0, d, width):
        n = min(width, d - lo)
        for i in range(v.shape[0]):
            for c in range(n):
                pull[i, c] = 0
        for e in range(count):
            i, j = edges[e, 0], edges[e, 1]
            row = a[e, lo : lo + n]
            _dual_row(row, u[:n], cut[e], norm)
            _edge_sums(row, u[:n], z[i, lo : lo + n], z[j, lo : lo + n], sums)
            _push(pull[i, :n], pull[j, :n], u[:n], rho)
        for i in range(v.shape[0]):
            _node_sums(v[i, lo : lo + n], z[i, lo : lo + n], mass[i], pull[i, :n], sums)
    return sums


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _excess(row: Array, level: float, total: Array, count: Array) -> tuple[float, float]:
    """The sum and the number of the magnitudes above ``level``."""
    for c in range(total.shape[0]):
        total[c] = count[c] = 0.0
    for lo in range(0, row.shape[0], _ROW_CHUNK):
        part = row[lo : lo + _ROW_CHUNK]
        for c in range(part.shape[0]):
            x = abs(np.float64(part[c]))
            above = x > level
            total[c] += x if above else 0.0
            count[c] += 1.0 if above else 0.0
    size = number = 0.0
    for c in range(total.shape[0]):
        size += total[c]
        number += count[c]
    return size, number


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def clip_levels(a: Array, tau: Array, levels: Array) -> None:
    """Finds for each row the level t with sum(max(|a| - t, 0)) = tau, starting from ``levels``.

    Newton's method on a convex piecewise-linear function: exact after finitely many steps from any
    start, and after one or two from the level of the previous iteration.

    Args:
        a: ``(M, d)`` rows.
        tau: ``(M,)`` float64 radii; infinity is allowed.
        levels: ``(M,)`` float64, overwritten; 0 where the row lies inside the ball.
    """
    total, count = np.empty(_ROW_CHUNK), np.empty(_ROW_CHUNK)
    for e in range(a.shape[0]):
        level = max(levels[e], 0.0)
        climbing = False
        for _ in range(200):
            size, above = _excess(a[e], level, total, count)
            new = (size - tau[e]) / above if above > 0 else -1.0
            if new <= 0.0 and level == 0.0:
                break
            # After its first step the method only climbs: a step that does not is rounding.
            if climbing and new <= level * (1 + 1e-15):
                break
            climbing = new > 0.0
            level = max(new, 0.0)
        levels[e] = level
