"""Compiled loops over flat arrays in main memory; imported on first use, as Numba takes a while.

**On a line**: the two dynamic programmes of the fused lasso and of k-means.

The fused lasso: Johnson 2013, "A dynamic programming algorithm for the fused lasso and
L0-segmentation", with the end condition w_{d+1} = 0 of CER added.

After element i the derivative of the best cost of the elements up to i, as a function of their last
value t, is ``f_i(t) = clip(f_{i-1}(t), -gamma, gamma) + t - g_i``: increasing and piecewise linear.
Clipping cuts off both ends and leaves a knot at each cut, ``low_i`` and ``high_i``. Backwards,
``w_i = clip(w_{i+1}, low_i, high_i)``.

======  ====================================================================================
symbol  here
======  ====================================================================================
knots   ``(position, a, b)`` with positions in increasing order from ``first`` to ``last``;
        the derivative gains the line ``a t + b`` to the right of a knot
low     where ``slope t + level``, the piece at that place plus gamma, is 0
high    where ``fall t + height``, gamma minus the piece at that place, is 0
======  ====================================================================================

Heights are kept relative to the bound that they are cut at, so gamma enters once and a large one
does not swallow g. A knot that is passed is dropped for good, hence linear time on any input.

K-means: Wang and Song, The R Journal 3, 2011, divided and conquered, in O(m n log n).

**The ADMM iteration of the network lasso.**

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

**Quantisation.**

The index of the nearest centre is the number of ``cuts`` that an element lies above. Chunks are
compared with one cut after the other: many simple comparisons that run side by side are faster
than a search with branches, for up to some hundred centres.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from medfed.common.compiling import compiled

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
# Places for knots at first. Random data has a dozen knots at a time: they stay in cache.
_START = 4096
# Elements that are compared at a time: with what is found they stay in the nearest cache.
_CHUNK = 1024


@compiled()
def _recentred(knots: Array, first: int, last: int) -> tuple[Array, int, int]:
    """The knots from ``first`` to ``last`` in the middle of their room, or of one twice as large.

    It is called where a knot touches an end of the room. At most half of the new room is filled,
    so a quarter of it in steps passes before the next call: linear time in all.
    """
    count, room = last - first + 1, knots.shape[0]
    moved = np.empty((2 * room if 2 * count > room else room, 3))
    start = (moved.shape[0] - count) // 2
    moved[start : start + count] = knots[first : last + 1]
    return moved, start, start + count - 1


@compiled(error_model="numpy")
def _forward(g: Array, gamma: float, low: Array, high: Array) -> None:
    """Writes the bounds that each element has towards its right neighbour."""
    # One row per knot: position, slope, level. Read together, they lie together.
    knots = np.empty((min(_START, 2 * g.shape[0] + 2), 3))
    first = knots.shape[0] // 2 - 1
    last = first + 1
    y = np.float64(g[0])
    knots[first, 0], knots[first, 1], knots[first, 2] = y - gamma, 1.0, gamma - y
    knots[last, 0], knots[last, 1], knots[last, 2] = y + gamma, -1.0, y + gamma
    low[0], high[0] = y - gamma, y + gamma
    for i in range(1, g.shape[0]):
        if first == 0 or last == knots.shape[0] - 1:
            knots, first, last = _recentred(knots, first, last)
        y = np.float64(g[i])
        slope, level, left = 1.0, -y, first
        while left <= last and slope * knots[left, 0] + level <= 0.0:
            slope += knots[left, 1]
            level += knots[left, 2]
            left += 1
        fall, height, right = -1.0, y, last
        while right >= left and fall * knots[right, 0] + height <= 0.0:
            fall += knots[right, 1]
            height += knots[right, 2]
            right -= 1
        if right < left:
            # One line is cut twice. Stated, not summed, so that rounding does not build up.
            fall, height = -slope, 2.0 * gamma - level
            lower, upper = -level / slope, height / slope
        else:
            lower = min(-level / slope, knots[left, 0])
            upper = max(-height / fall, knots[right, 0])
        first, last = left - 1, right + 1
        knots[first, 0], knots[first, 1], knots[first, 2] = lower, slope, level
        knots[last, 0], knots[last, 1], knots[last, 2] = upper, fall, height
        low[i], high[i] = lower, upper


@compiled()
def _backward(w: Array, high: Array) -> None:
    """Turns the lower bounds in ``w`` into the solution, from the last element to the first."""
    value = w.dtype.type(0)
    for i in range(w.shape[0] - 1, -1, -1):
        # A value goes on bit by bit until a bound cuts it, so fused neighbours are equal floats.
        # Selected, not branched on: which bound cuts is as random as the data.
        value = w[i] if value < w[i] else value
        value = high[i] if value > high[i] else value
        w[i] = value


@compiled()
def solve_chain(g: Array, gamma: float, out: Array) -> None:
    """Writes the minimiser of ``||w - g||^2 / 2 + gamma (sum_i |w_i - w_{i+1}| + |w_d|)``.

    The bounds are computed in float64 and kept in the dtype of ``out``: rounding keeps order, so
    clipping rounded bounds is rounding the clipped value. `g` is ``(d,)`` finite float32 or float64
    array, d at least 1. `gamma`: above 0 and finite. `out` is ``(d,)`` array of the same dtype,
    overwritten.
    """
    high = np.empty_like(out)
    _forward(g, gamma, out, high)
    _backward(out, high)


@compiled()
def _error(sums: Array, i: int, j: int) -> float:
    """The squared error of the points i to j - 1 around their mean."""
    w, wx, wxx = sums[0, j] - sums[0, i], sums[1, j] - sums[1, i], sums[2, j] - sums[2, i]
    error: float = max(wxx - wx * wx / w, 0.0)
    return error


@compiled()
def partition(sums: Array, m: int) -> Array:
    """Splits sorted points into the ``m`` intervals with the least squared error.

    ``least[j]`` is the error of the first j points in k intervals. The best begin of the last one
    never falls as j grows, so each is searched for between two that are known: O(m n log n). `sums`
    is ``(3, n + 1)`` sums over the first j points of w, w x and w x^2, w being weights. `m`:
    intervals, 1 to n, none of them empty. Returns ``(m,)`` int64 begins, in ascending order.
    """
    n = sums.shape[1] - 1
    begins = np.zeros((m, n + 1), np.int64)
    least = np.zeros(n + 1)
    for j in range(1, n + 1):
        least[j] = _error(sums, 0, j)
    width = 1
    while width <= n:
        width *= 2
    for k in range(1, m):
        fewer, least = least, np.full(n + 1, np.inf)
        stride = width
        while stride > 1:
            half = stride // 2
            for j in range(half, n + 1, stride):
                last = j - 1 if j + half > n else min(j - 1, begins[k, j + half])
                for i in range(max(k, begins[k, j - half]), last + 1):
                    error = fewer[i] + _error(sums, i, j)
                    if error < least[j]:
                        least[j], begins[k, j] = error, i
            stride = half
    starts = np.zeros(m, np.int64)
    end = n
    for k in range(m - 1, 0, -1):
        end = starts[k] = begins[k, end]
    return starts


@compiled()
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


@compiled()
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


@compiled()
def _improve(
    mass: Array, scale: Array, edges: Array, rho: float, rhs: Array, z: Array, rest: Array
) -> None:
    """Takes Z nearer to the solution of ``(diag(mass) + rho L) z = rhs``, in a block of columns."""
    for _ in range(3):
        for i in range(z.shape[0]):
            for c in range(z.shape[1]):
                rest[i, c] = rhs[i, c] - mass[i] * z[i, c]
        for e in range(edges.shape[0]):
            i, j = edges[e, 0], edges[e, 1]
            head, tail, at_head, at_tail = z[i], z[j], rest[i], rest[j]
            for c in range(z.shape[1]):
                push = rho * (head[c] - tail[c])
                at_head[c] -= push
                at_tail[c] += push
        for i in range(z.shape[0]):
            for c in range(z.shape[1]):
                z[i, c] += rest[i, c] * scale[i]


@compiled()
def admm_step(
    arrays: Arrays, system: Arrays, rho: float, cut: Array, norm: int, width: int
) -> Array:
    """One iteration: overwrites ``a`` and ``z``, returns sums for the new row norms.

    `arrays` is ``(M, d)`` splitting plus scaled dual and ``(N, d)`` Z, both updated in place; ``(N,
    d)`` V, the point to stay close to; ``(N,)`` masses, how much each node's distance from it
    counts; ``(M, 2)`` node indices of the edges. `system` is ``(N, N)`` inverse of diag(mass) + rho
    L, empty where N is large, and ``(N,)`` 1 / (mass + 2 rho degree), the lengths of the gradient
    steps. `cut` is ``(M,)`` one number per row, see the module docstring. `norm`: 1, 2 or 0 for
    infinity. Returns ``(M, width)`` float64: for p = 2 the squared norms of the rows once summed
    over columns.
    """
    (a, z, v, mass, edges), (inverse, scale) = arrays, system
    count, d = a.shape
    dual = np.empty((count, width), a.dtype)
    rhs, rest = np.empty((v.shape[0], width), a.dtype), np.empty((v.shape[0], width), a.dtype)
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
        if len(inverse):
            _solve_block(inverse, rhs[:, :n], z[:, lo : lo + n])
        else:
            _improve(mass, scale, edges, rho, rhs[:, :n], z[:, lo : lo + n], rest[:, :n])
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


@compiled()
def _push(head: Array, tail: Array, row: Array, factor: float) -> None:
    """Adds ``factor * row`` to one end of an edge and subtracts it from the other."""
    for c in range(row.shape[0]):
        x = factor * row[c]
        head[c] += x
        tail[c] -= x


@compiled()
def _edge_sums(row: Array, u: Array, head: Array, tail: Array, sums: Array) -> None:
    """Adds one edge's share of the squares of ZQ - W, ZQ and W."""
    primal, gaps, splitting = sums[0], sums[2], sums[3]
    for c in range(row.shape[0]):
        gap = np.float64(head[c] - tail[c])
        w = np.float64(row[c] - u[c])
        primal[c] += (gap - w) * (gap - w)
        gaps[c] += gap * gap
        splitting[c] += w * w


@compiled()
def _node_sums(v: Array, z: Array, mass: float, pull: Array, sums: Array) -> None:
    """Adds one node's share of the squares of mass (V - Z) - Omega Q^T and Omega Q^T."""
    dual, forces = sums[1], sums[4]
    for c in range(v.shape[0]):
        force = np.float64(pull[c])
        rest = np.float64(mass * (v[c] - z[c])) - force
        dual[c] += rest * rest
        forces[c] += force * force


@compiled()
def residual_norms(arrays: Arrays, rho: float, cut: Array, norm: int, width: int) -> Array:
    """The norms in Boyd's stopping rule, in one read of the arrays.

    `cut` is ``(M,)`` one number per row, fitting ``a``. `norm`: 1, 2 or 0 for infinity. Returns
    ``(5, width)`` float64: once summed over columns, the squared norms of ZQ - W, mass (V - Z) -
    Omega Q^T, ZQ, W and Omega Q^T.
    """
    a, z, v, mass, edges = arrays
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


@compiled()
def _excess(row: Array, level: float, total: Array, count: Array) -> tuple[float, float]:
    """The sum and the number of the magnitudes above ``level``."""
    for c in range(total.shape[0]):
        total[c] = count[c] = 0.0
    for lo in range(0, row.shape[0], _CHUNK):
        part = row[lo : lo + _CHUNK]
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


@compiled()
def clip_levels(a: Array, tau: Array, levels: Array) -> None:
    """Finds for each row the level t with sum(max(|a| - t, 0)) = tau, starting from ``levels``.

    Newton's method on a convex piecewise-linear function: exact after finitely many steps from any
    start, and after one or two from the level of the previous iteration. `a` is ``(M, d)`` rows.
    `tau` is ``(M,)`` float64 radii; infinity is allowed. `levels` is ``(M,)`` float64, overwritten;
    0 where the row lies inside the ball.
    """
    total, count = np.empty(_CHUNK), np.empty(_CHUNK)
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


@compiled()
def _locate(x: Array, cuts: Array, index: Array) -> None:
    """Writes the index of the nearest centre of each element of a chunk; 0 for NaN."""
    for c in range(x.shape[0]):
        index[c] = 0
    for j in range(cuts.shape[0]):
        cut, beyond = cuts[j], index.dtype.type(j + 1)
        for c in range(x.shape[0]):
            index[c] = beyond if x[c] > cut else index[c]


@compiled()
def _round(x: Array, cuts: Array, values: Array, out: Array) -> None:
    """Writes the nearest centre of each element of a chunk; NaN stays."""
    first = values[0]
    for c in range(x.shape[0]):
        out[c] = first
    for j in range(cuts.shape[0]):
        cut, beyond = cuts[j], values[j + 1]
        for c in range(x.shape[0]):
            out[c] = beyond if x[c] > cut else out[c]
    for c in range(x.shape[0]):
        out[c] = out[c] if x[c] == x[c] else x[c]


@compiled()
def round_all(x: Array, cuts: Array, values: Array, out: Array) -> None:
    """Writes the nearest centre of each element.

    `x` is ``(n,)`` float32 or float64. `values` is ``(m,)`` centres, in the same dtype. `out` is
    ``(n,)`` of the same dtype, overwritten; not x itself.
    """
    for lo in range(0, x.shape[0], _CHUNK):
        _round(x[lo : lo + _CHUNK], cuts, values, out[lo : lo + _CHUNK])


@compiled()
def locate_all(x: Array, cuts: Array, out: Array) -> bool:
    """Writes the index of each element's nearest centre; returns whether there is no NaN.

    `x` is ``(n,)`` float32 or float64. `out` is ``(n,)`` int64, overwritten.
    """
    index = np.empty(_CHUNK, np.int32)
    missing = 0
    for lo in range(0, x.shape[0], _CHUNK):
        part = x[lo : lo + _CHUNK]
        _locate(part, cuts, index)
        for c in range(part.shape[0]):
            missing += part[c] != part[c]
            out[lo + c] = index[c]
    return missing == 0


@compiled()
def shrink_all(y: Array, cuts: Array, values: Array, tau: float, x: Array, nearest: Array) -> None:
    """Writes the proximal map of the distance to the nearest centre, and that centre.

    `y` is ``(n,)`` float32 or float64. `values` is ``(m,)`` centres, in the same dtype. `x` is
    ``(n,)`` of the same dtype, overwritten; may be y itself. `nearest` is ``(n,)`` of the same
    dtype, overwritten.
    """
    for lo in range(0, y.shape[0], _CHUNK):
        part, out, q = y[lo : lo + _CHUNK], x[lo : lo + _CHUNK], nearest[lo : lo + _CHUNK]
        _round(part, cuts, values, q)
        for c in range(part.shape[0]):
            gap = part[c] - q[c]
            moved = part[c] - tau if gap > 0 else part[c] + tau
            out[c] = q[c] if abs(gap) <= tau else moved
