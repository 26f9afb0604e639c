"""The accountant against frozen figures of Opacus, and against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from medfed.functional.privacy import ORDERS, epsilon, epsilon_of, noise_for, renyi

# Rate, noise, draws, delta and epsilon of opacus 1.6.0: opacus.accountants.analysis.rdp with
# RDPAccountant.DEFAULT_ALPHAS, which are fractional below 11.
OPACUS = [
    (0.01, 1.0, 1000, 1e-05, 2.101365),
    (0.01, 1.0, 100, 1e-05, 1.214145),
    (0.01, 4.0, 10000, 1e-05, 1.035490),
    (0.004, 1.1, 14000, 1e-05, 2.411231),
    (0.05, 1.0, 200, 0.001, 3.748464),
    (0.05, 2.0, 600, 0.001, 2.190186),
    (0.08, 1.0, 390, 1e-05, 12.222560),
    (0.08, 3.0, 600, 0.001, 2.235804),
    (0.1, 0.7, 50, 1e-05, 12.264058),
    (0.1, 1.0, 200, 1e-05, 11.015671),
    (0.1, 3.0, 200, 1e-05, 2.192891),
    (0.13, 3.0, 600, 0.001, 3.999776),
    (0.2, 1.5, 100, 0.0001, 7.278828),
    (0.35, 2.0, 300, 0.001, 15.781916),
    (0.53, 3.0, 600, 0.001, 24.528949),
    (0.53, 8.0, 600, 0.001, 6.483682),
    (1.0, 1.0, 1, 1e-05, 4.728507),
    (1.0, 5.0, 30, 1e-05, 5.252401),
    (1.0, 10.0, 100, 0.001, 3.536562),
    (0.001, 0.6, 5000, 1e-06, 3.627395),
]


def test_epsilon_is_at_most_slightly_above_that_of_opacus(subtests):
    """It bounds the same divergence at whole orders: never below, and close unless noise is low."""
    for rate, noise, draws, delta, theirs in OPACUS:
        with subtests.test(rate=rate, noise=noise, draws=draws):
            most = 1.024 if noise >= 1 else 1.12
            assert 1 - 1e-4 <= epsilon(rate, noise, draws, delta) / theirs <= most


def test_a_draw_of_everybody_is_the_plain_gaussian_mechanism():
    np.testing.assert_allclose(renyi(1.0, 3.0), ORDERS / 18)
    np.testing.assert_allclose(renyi(1 - 1e-12, 3.0), ORDERS / 18, rtol=1e-6)


def test_the_divergence_of_a_small_rate_equals_its_integral():
    """At order 2 the expectation of the squared likelihood ratio is known."""
    rate, noise = 0.2, 1.5
    ratio = 1 + rate**2 * math.expm1(1 / noise**2)
    assert renyi(rate, noise)[0] == pytest.approx(math.log(ratio), rel=1e-12)


def test_more_draws_less_noise_and_higher_rates_cost_more():
    base = epsilon(0.1, 2.0, 100, 1e-5)
    assert epsilon(0.1, 2.0, 101, 1e-5) > base > epsilon(0.1, 2.1, 100, 1e-5)
    assert epsilon(0.11, 2.0, 100, 1e-5) > base
    assert epsilon(0.1, 2.0, 0, 1e-5) == epsilon_of(np.zeros_like(ORDERS), 1e-5) == 0
    assert math.isinf(epsilon(0.1, 0.0, 1, 1e-5))


def test_noise_is_the_least_that_keeps_epsilon(subtests):
    for rate, draws, wanted in (
        (0.05, 600, 1.0),
        (1.0, 30, 8.0),
        (0.5, 2000, 0.1),
        (0.01, 1, 20.0),
    ):
        with subtests.test(rate=rate, draws=draws, wanted=wanted):
            noise = noise_for(rate, draws, wanted, 1e-4)
            assert epsilon(rate, noise, draws, 1e-4) <= wanted
            assert epsilon(rate, noise * 0.999, draws, 1e-4) > wanted
