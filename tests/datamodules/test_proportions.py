"""Thinning against exhaustive search."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medfed.datamodules.partitions.by_label import apportion, largest_fit, thin
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

POSITIVE = [Fraction(n, d) for d in (2, 3, 5, 8) for n in range(d + 1)]


def best_of_two(available, positive):
    """The largest size whose positives, rounded half up, and negatives both suffice."""
    fitting = [
        (negatives, positives)
        for negatives, positives in itertools.product(*(range(n + 1) for n in available))
        if positives == int((negatives + positives) * positive + Fraction(1, 2))
    ]
    return max(fitting, key=sum)


def nearest(size, shares):
    """The whole numbers of the given sum that lie nearest to their shares, by enumeration."""
    candidates = [
        (*head, size - sum(head))
        for head in itertools.product(range(size + 1), repeat=len(shares) - 1)
        if sum(head) <= size
    ]
    return min(candidates, key=lambda c: sum(abs(n - size * s) for n, s in zip(c, shares)))  # noqa: B905


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.sampled_from(POSITIVE))
def test_two_classes_keep_as_many_as_any_subset(available, positive):
    shares = (float(1 - positive), float(positive))
    labels = np.repeat([0, 1], available)
    kept = labels[thin(labels, shares, seed=1)]
    assert (int((kept == 0).sum()), int(kept.sum())) == best_of_two(available, positive)


@given(st.integers(0, 2**32 - 1))
def test_three_classes_keep_as_many_as_any_subset(case):
    rng = np.random.default_rng(case)
    shares, available = rng.dirichlet([1, 1, 1]), rng.integers(0, 7, size=3)
    options = (nearest(size, shares) for size in range(int(available.sum()), -1, -1))
    expected = next(c for c in options if all(n <= a for n, a in zip(c, available, strict=True)))
    assert largest_fit(available.tolist(), shares.tolist()) == expected


def test_decimal_shares_are_not_misled_by_binary_fractions():
    assert apportion(100, (0.93, 0.07)) == (93, 7)
    assert apportion(10, (0.1,) * 10) == (1,) * 10
    assert largest_fit((930, 70), (0.93, 0.07)) == (930, 70)


def test_kept_samples_are_sorted_seeded_and_evenly_drawn():
    labels = torch.tensor([0, 1] * 20 + [0] * 60)
    kept = thin(labels, (0.5, 0.5), seed=3)
    assert kept.dtype == np.int64
    assert (np.diff(kept) > 0).all()
    assert np.array_equal(kept, thin(labels.numpy(), (0.5, 0.5), seed=3))
    assert not np.array_equal(kept, thin(labels, (0.5, 0.5), seed=4))
    drawn = np.bincount(np.concatenate([thin(labels, (0.5, 0.5), s) for s in range(400)]))
    assert (drawn[1:40:2] == 400).all()  # every positive, always
    negatives = np.concatenate([drawn[0:40:2], drawn[40:]])  # each with probability 1/4
    assert abs(negatives - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)


def test_nothing_fits_and_nothing_given():
    assert thin(np.zeros(9, np.int64), (0.5, 0.5), seed=0).size == 0
    assert thin(np.zeros(0, np.int64), (0.5, 0.5), seed=0).size == 0
    assert thin(np.zeros(9, np.int64), (1.0, 0.0), seed=0).tolist() == list(range(9))


@sweep(
    ("labels", "shares", "message"),
    [
        ([0, 2], (0.5, 0.5), "Label 2 has no class share; 2 shares stand for the classes 0 to 1"),
        ([0, -1], (0.5, 0.5), "Label -1 has no class share"),
        ([0, 1], (0.5, 0.6), "sum to 1; got: 0.5, 0.6"),
        ([0, 1], (1.5, -0.5), "must be non-negative"),
        ([0, 1], (float("nan"), 1.0), "got: nan, 1"),
        ([], (), "got: none"),
    ],
)
def test_bad_shares(labels, shares, message):
    with pytest.raises(ConfigError, match=message):
        thin(np.array(labels, dtype=np.int64), shares, seed=0)
