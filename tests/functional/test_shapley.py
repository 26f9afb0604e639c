"""Shapley values against the mean over all orders, and in games whose values are known."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

from medfed.functional.statistics import shapley

NAMES = ("a", "b", "c", "d", "e")
SETS = [frozenset(some) for size in range(6) for some in combinations(NAMES, size)]


@pytest.mark.parametrize("seed", range(3))
def test_they_are_means_over_all_orders(seed):
    worth = {some: np.random.default_rng(seed).normal(size=4) * len(some) for some in SETS}
    found = shapley(worth)
    orders = [*permutations(NAMES)]
    for name in NAMES:
        gains = []
        for order in orders:
            before = frozenset(order[: order.index(name)])
            gains.append(worth[before | {name}] - worth[before])
        np.testing.assert_allclose(found[name], np.mean(gains, axis=0), atol=1e-12)
    whole = worth[frozenset(NAMES)] - worth[frozenset()]
    np.testing.assert_allclose(sum(found.values()), whole, atol=1e-12)


def test_in_an_additive_game_each_gets_what_it_adds():
    adds = dict(zip(NAMES, (0.5, -0.2, 0.0, 0.1, 0.3), strict=True))
    worth = {some: np.array([0.4 + sum(adds[name] for name in some)]) for some in SETS}
    assert {n: v.item() for n, v in shapley(worth).items()} == pytest.approx(adds)
