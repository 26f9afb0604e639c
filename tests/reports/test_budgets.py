"""Whether rounds were enough, and how many splits a question needs: said in a report's notes."""

from __future__ import annotations

import numpy as np
from scipy.stats import nct
from scipy.stats import t as student

from medfed.functional.statistics import difference
from medfed.reports.sentences import notes_on
from medfed.reports.tasks import Scores, Task, rise_of
from medfed.reports.verdicts import judge

RNG = np.random.default_rng(0)


def scores(method, values, rise=None):
    return Scores(method, values, np.zeros((len(values), 0, 2)), (0.0, 0.0), 1.0, 0, {}, rise=rise)


def power(target, spread, splits, overlap, level):
    """How often the corrected t-test finds a true difference."""
    error = spread * np.sqrt(1 / splits + overlap)
    critical = student.ppf(1 - level / 2, splits - 1)
    return nct.sf(critical, splits - 1, target / error)


def test_the_number_of_splits_is_the_least_with_the_power():
    values = RNG.normal(0.7, 0.01, (6, 2))
    better = values + RNG.normal(0.0, 0.01, (6, 2))
    task = Task("trial", "x", "auroc", clients=("a", "b"), overlap=0.05)
    task.scores = {"local": scores("local", values), "fedavg": scores("fedavg", better)}
    task.target = 0.008
    (sentence,) = notes_on(task, judge(task))
    spread = float(np.std((better - values).mean(1), ddof=1))
    least = next(n for n in range(2, 999) if power(0.008, spread, n, 0.05, 0.05) >= 0.8)
    assert least > 6
    assert sentence.endswith(f"by the spread of 6 splits: fedavg against local {least}.")
    task.target = 0.0005
    (never,) = notes_on(task, judge(task))
    assert never.endswith("fedavg against local more than 1000.")


def test_validation_that_still_rises_is_told_and_noise_is_not():
    rounds = np.arange(12)
    rising = [0.5 + 0.02 * rounds + RNG.normal(0, 0.001, 12) for _ in range(5)]
    flat = [0.7 + (-1) ** n * 0.01 * (rounds > 8) for n in range(4)]  # the splits disagree
    found = rise_of(rising, 0.25)
    expected = difference([float(c[9:].mean() - c[6:9].mean()) for c in rising], 0.25)
    assert found == expected
    assert abs(found.mean - 0.06) < 0.002
    assert rise_of([[0.1, 0.2, 0.3]]) is None
    values = np.full((5, 2), 0.7)
    task = Task("trial", "x", "auroc", clients=("a", "b"))
    task.scores = {"ditto": scores("ditto", values, rise_of(flat))}
    assert notes_on(task, judge(task)) == [
        "trial/x: validation is not shown to rise at the end with any method."
    ]
    task.scores["apfl"] = scores("apfl", values, found)
    (sentence,) = notes_on(task, judge(task))
    assert f"still rose with apfl ({found.mean:+.4f} in the last quarter)" in sentence
    assert "ditto" not in sentence
    task.scores = {"ditto": scores("ditto", values)}
    assert notes_on(task, judge(task)) == []
