"""The papers' algorithms as plain NumPy loops: (server's weights, each client's personal model)."""

from __future__ import annotations

from tests.references.linear_net import ALL, BODY, HEAD, Model, Problem, part

Result = tuple[Model, list[Model]]


def local(problem: Problem) -> Result:
    """Every client alone: w_k <- w_k - lr grad f_k(w_k)."""
    models = [problem.initial for _ in problem.clients]
    for cohort in problem.cohorts:
        for k in cohort:
            models[k] = problem.descend(k, models[k], problem.steps)
    return {}, models


def fedprox(problem: Problem, mu: float) -> Result:
    """Li et al. 2020, Algorithm 2: w_k minimises h_k(w) = F_k(w) + (mu/2)|w - w^t|^2 inexactly."""
    w = problem.initial
    for cohort in problem.cohorts:
        ends = [problem.descend(k, w, problem.steps, anchor=w, mu=mu) for k in cohort]
        w = problem.average(cohort, ends)
    return w, [w for _ in problem.clients]


def fedavg(problem: Problem) -> Result:
    """McMahan et al. 2017, Algorithm 1: w_{t+1} = sum_k (n_k/n) w_k_{t+1}."""
    w = problem.initial
    for cohort in problem.cohorts:
        w = problem.average(cohort, [problem.descend(k, w, problem.steps) for k in cohort])
    return w, [w for _ in problem.clients]


def fedper(problem: Problem) -> Result:
    """Arivazhagan et al. 2019, Algorithms 1 and 2: joint steps on (W_B, W_Pk), mean of W_B."""
    base, heads = (
        part(problem.initial, BODY),
        [part(problem.initial, HEAD) for _ in problem.clients],
    )
    for cohort in problem.cohorts:
        ends = [problem.descend(k, {**base, **heads[k]}, problem.steps) for k in cohort]
        base = problem.average(cohort, [part(e, BODY) for e in ends])
        for k, end in zip(cohort, ends, strict=True):
            heads[k] = part(end, HEAD)
    return base, [{**base, **h} for h in heads]


def fedrep(problem: Problem, head_steps: int) -> Result:
    """Collins et al. 2021, Algorithm 1: tau_h steps of h_k at fixed phi, then phi at fixed h_k."""
    phi, heads = part(problem.initial, BODY), [part(problem.initial, HEAD) for _ in problem.clients]
    for cohort in problem.cohorts:
        bodies = []
        for k in cohort:
            adapted = problem.descend(k, {**phi, **heads[k]}, head_steps, HEAD, call=0)
            heads[k] = part(adapted, HEAD)
            end = problem.descend(k, adapted, problem.steps - head_steps, BODY, call=1)
            bodies.append(part(end, BODY))
        phi = problem.average(cohort, bodies)
    return phi, [{**phi, **h} for h in heads]


def ditto(problem: Problem, strength: float, global_steps: int) -> Result:
    """Li et al. 2021, Algorithm 1: v_k <- v_k - lr (grad F_k(v_k) + lambda (v_k - w^t))."""
    w, personal = problem.initial, [problem.initial for _ in problem.clients]
    for cohort in problem.cohorts:
        ends = [problem.descend(k, w, global_steps, ALL, call=0) for k in cohort]
        for k in cohort:
            rest = problem.steps - global_steps
            personal[k] = problem.descend(k, personal[k], rest, ALL, w, strength, call=1)
        w = problem.average(cohort, ends)
    return w, personal
