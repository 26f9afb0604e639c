"""pFedNet, Algorithm 5, in NumPy; the Z step is solved by cvxpy, not by an ADMM.

    x <- x - sum_n p_n (x - x_n),  x_n after E local steps on x from y_n = (x, z_n)
    V_n = z_n - s (z_n - z_n'),  z_n' after E local steps on z;  V_n = z_n if absent
    Z <- argmin s N T lambda sum_{(i,j) in E} |z_i - z_j|_p + |Z - V|_F^2 / 2

s is 1 (scaled) or 1/N (literal). T is what E steps go along a constant unit gradient: heavy ball
goes eta (1 - m^k) / (1 - m) in its k-th step, and eta / (1 - m) once its velocity is old. Interior
points reach 1e-12 where the problem is a quadratic programme (p = 1, inf), but only 1e-6 for p = 2:
there the pairs that coincide are read from that solution, and a root finder solves the smooth
equations that remain.
"""

from __future__ import annotations

import warnings

import cvxpy as cp
import numpy as np
from scipy.optimize import root

from tests.references.linear_net import BODY, HEAD, Model, Problem, part

FUSED = 1e-4


def z_step(v: np.ndarray, edges: list[tuple[int, int]], weight: float, p: float) -> np.ndarray:
    """The minimiser of weight sum |z_i - z_j|_p + |Z - V|^2 / 2."""
    if weight == 0 or not edges:
        return v.copy()
    z = cp.Variable(v.shape)
    coupling = sum(cp.norm(z[i] - z[j], p) for i, j in edges)
    problem = cp.Problem(cp.Minimize(weight * coupling + cp.sum_squares(z - v) / 2))
    tight = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "may be inaccurate": p = 2 is polished below
        problem.solve(solver="CLARABEL", **(tight if p != 2 else {}))
    return polish(z.value, v, edges, weight) if p == 2 else z.value


def polish(
    start: np.ndarray, v: np.ndarray, edges: list[tuple[int, int]], weight: float
) -> np.ndarray:
    """Solves the optimality equations of p = 2 given which neighbours coincide."""
    group = list(range(len(v)))
    for i, j in edges:
        if np.linalg.norm(start[i] - start[j]) < FUSED:
            group = [group[i] if g == group[j] else g for g in group]
    names = sorted(set(group))
    member = np.array([[float(g == n) for n in names] for g in group])
    size = member.sum(0)
    apart = [(names.index(group[i]), names.index(group[j])) for i, j in edges]

    def optimality(flat: np.ndarray) -> np.ndarray:
        u = flat.reshape(len(names), -1)
        out = size[:, None] * u - member.T @ v
        for a, b in apart:
            if a != b:
                pull = weight * (u[a] - u[b]) / np.linalg.norm(u[a] - u[b])
                out[a] += pull
                out[b] -= pull
        return out.ravel()

    mean = (member.T @ start) / size[:, None]
    found = root(optimality, mean.ravel(), tol=1e-13)
    assert np.abs(optimality(found.x)).max() < 1e-10
    return member @ found.x.reshape(mean.shape)


def to_row(model: Model) -> np.ndarray:
    """z as one vector."""
    return np.concatenate([model[n].ravel() for n in HEAD])


def to_head(row: np.ndarray) -> Model:
    """z as named parameters; 4 weights and a bias."""
    return {"head.weight": row[None, :4], "head.bias": row[4:]}


def reach(problem: Problem, steps: int) -> float:
    """T."""
    m = problem.momentum
    share = [1.0 if problem.keep_velocity else 1 - m**k for k in range(1, steps + 1)]
    return problem.lr * sum(share) / (1 - m)


def pfednet(
    problem: Problem,
    edges: list[tuple[int, int]],
    strength: float,
    p: float,
    schedule: tuple[list[int], list[int]],
    scaled: bool = True,
) -> tuple[Model, np.ndarray, list[float]]:
    """Returns x, Z, and for each Z step how far coupling moved Z from V.

    Args:
        problem: Clients, start and optimizer.
        edges: Pairs of positions.
        strength: lambda.
        p: The norm.
        schedule: The local steps of each x-round and of each z-round of an outer iteration.
        scaled: Whether s = 1.
    """
    count = len(problem.clients)
    x = part(problem.initial, BODY)
    z = np.stack([to_row(problem.initial)] * count)
    scale = 1.0 if scaled else 1 / count
    moved = []
    for cohort in problem.cohorts:
        for steps in schedule[0]:
            ends = [
                problem.descend(n, {**x, **to_head(z[n])}, steps, BODY, call="x") for n in cohort
            ]
            x = problem.average(cohort, [part(e, BODY) for e in ends])
        for steps in schedule[1]:
            v = z.copy()
            for n in cohort:
                end = problem.descend(n, {**x, **to_head(z[n])}, steps, HEAD, call="z")
                v[n] -= scale * (z[n] - to_row(end))
            z = z_step(v, edges, scale * count * reach(problem, steps) * strength, p)
            moved.append(float(np.abs(z - v).max()))
    return x, z, moved
