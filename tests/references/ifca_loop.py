"""IFCA's Algorithm 1 (model averaging) in NumPy: lists of whole models, no membership vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.references.linear_net import BODY, Model, Problem, loss

BATCH = 4  # where there are batches


@dataclass
class Clusters:
    """What the loop ends with."""

    models: list[Model]
    chosen: list[int | None]  # the last choice of every client
    choices: list[dict[int, int]]  # of every round


def ifca(problem: Problem, models: list[Model], share_body: bool) -> Clusters:
    """Runs all rounds.

    Line 5: j_i = argmin_j F_i(theta_j). Line 7: tau steps from theta_{j_i}. Line 10, with sizes as
    weights: theta_j = mean of those with j_i = j. With a shared body that one is averaged over all.
    """
    models, last, rounds = list(models), [None] * len(problem.clients), []
    for cohort in problem.cohorts:
        choice, ends = {}, {}
        for i in cohort:
            losses = [loss(m, *problem.pass_over(i, BATCH)) for m in models]
            choice[i] = int(np.argmin(losses))
            ends[i] = problem.descend(i, models[choice[i]], problem.steps)
            last[i] = choice[i]
        for j in range(len(models)):
            members = [i for i in cohort if choice[i] == j]
            if members:
                models[j] = problem.average(members, [ends[i] for i in members])
        if share_body:
            everyone = problem.average(cohort, [ends[i] for i in cohort])
            models = [{**m, **{n: everyone[n] for n in BODY}} for m in models]
        rounds.append(choice)
    return Clusters(models, last, rounds)
