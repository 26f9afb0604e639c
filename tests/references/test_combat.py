"""ComBat by messages beside pooled ComBat, written from Johnson et al. (2007) with all rows.

A design matrix of hospitals and covariates, a regression of each column, then the iteration of the
conditional posterior means, one number at a time.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from medfed.datamodules.tables.agreement import AgreementSettings, TrainRows
from medfed.standalone.columns import from_facts
from tests.agreeing import agree

SITES, COLUMNS = ("a", "b", "c"), 6


def pooled_combat(rows, batch, covariates):
    """Returns adjusted rows (N, F), and the intercept and deviation of each column."""
    adjusted, z = rows.copy(), np.full(rows.shape, np.nan)
    shared = np.full(rows.shape, np.nan)
    alpha, sigma = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for f in range(rows.shape[1]):
        known = ~np.isnan(rows[:, f])
        hospitals = np.array([[float(b == i) for i in SITES] for b in batch[known]])
        design = np.hstack([hospitals, covariates[known]])
        b_hat = np.linalg.lstsq(design, rows[known, f], rcond=None)[0]
        alpha[f] = hospitals.mean(axis=0) @ b_hat[: len(SITES)]
        residuals = rows[known, f] - design @ b_hat
        sigma[f] = np.sqrt(np.mean(residuals**2))
        shared[known, f] = alpha[f] + covariates[known] @ b_hat[len(SITES) :]
        z[known, f] = (rows[known, f] - shared[known, f]) / sigma[f]
    for i in SITES:
        mine = z[batch == i]
        cells = [column[~np.isnan(column)] for column in mine.T]
        g_hat = np.array([c.mean() for c in cells])
        d_hat = np.array([c.var(ddof=1) for c in cells])
        g_bar, t2 = g_hat.mean(), g_hat.var(ddof=1)
        m, s2 = d_hat.mean(), d_hat.var(ddof=1)
        a, b = (2 * s2 + m**2) / s2, (m * s2 + m**3) / s2
        for f, c in enumerate(cells):
            g, d = g_hat[f], d_hat[f]
            for _ in range(2000):
                g_new = (t2 * len(c) * g_hat[f] + d * g_bar) / (t2 * len(c) + d)
                d = (0.5 * np.sum((c - g_new) ** 2) + b) / (len(c) / 2 + a - 1)
                g = g_new
            rows_of = np.flatnonzero(batch == i)
            better = (z[rows_of, f] - g) / np.sqrt(d)
            adjusted[rows_of, f] = better * sigma[f] + shared[rows_of, f]
    return adjusted, alpha, sigma


def made(seed, gaps):
    """Rows of three hospitals that shift and scale each column; the covariate differs, too."""
    random = np.random.default_rng(seed)
    batch = np.repeat(SITES, (40, 25, 60))
    age = random.normal(np.where(batch == "b", 70, 55), 6)
    rows = random.normal(100, 5, (len(batch), COLUMNS)) + np.outer(age, np.arange(COLUMNS))
    for n, i in enumerate(SITES):
        at = batch == i
        rows[at] = rows[at].mean(0) + (rows[at] - rows[at].mean(0)) * (0.6 + 0.4 * n)
        rows[at] += random.normal(0, 6, COLUMNS)
    rows[random.random(rows.shape) < gaps] = np.nan
    return rows, age, batch


@pytest.mark.parametrize("gaps", [0.0, 0.2])
@pytest.mark.parametrize("keeps_age", [False, True])
def test_messages_give_what_all_rows_together_give(keeps_age, gaps):
    rows, age, batch = made(3, gaps)
    stay = ("age",) if keeps_age else ()
    names = [*(f"f{n}" for n in range(COLUMNS)), "sex", *stay]
    columns = [rows, np.arange(len(rows))[:, None] % 2.0, age[:, None]]
    whole = np.hstack(columns)[:, : len(names)]
    settings = AgreementSettings(names, False, "standard", True, covariates=stay)
    agreement, _ = agree(settings, {i: TrainRows(whole[batch == i]) for i in SITES})
    # As everywhere, values far from all others count as the limit.
    whole = np.clip(whole, agreement.scaling.low, agreement.scaling.high)
    wanted, alpha, sigma = pooled_combat(whole[:, :COLUMNS], batch, whole[:, COLUMNS + 1 :])
    empty = np.full((1, len(names)), np.nan)
    shift = agreement.scaling.mean[:COLUMNS] - alpha  # alpha is that of a covariate of 0
    assert keeps_age or np.abs(shift).max() < 1e-9
    for i in SITES:
        mine, known = whole[batch == i], ~np.isnan(rows[batch == i])
        scaling = agreement.scaling_of(mine)
        # What a bundle holds reads a row in the same way.
        again = from_facts(json.loads(json.dumps(scaling.facts())))
        np.testing.assert_array_equal(again.scale(mine), scaling.scale(mine))
        adjusted = scaling.scale(mine)[:, :COLUMNS] * sigma + alpha + shift
        expected = wanted[batch == i]
        np.testing.assert_allclose(adjusted[known], expected[known], rtol=1e-8, atol=1e-8)
        # Two-valued columns and covariates are standardised by all rows, and gaps are alike.
        for at in range(COLUMNS, len(names)):
            z = (mine[:, at] - whole[:, at].mean()) / whole[:, at].std()
            np.testing.assert_allclose(scaling.scale(mine)[:, at], z, atol=1e-9)
        np.testing.assert_allclose(scaling.scale(empty), agreement.scaling.scale(empty), atol=1e-9)


def test_a_column_that_a_hospital_lacks_and_a_single_column_are_taken_as_they_are():
    rows, _, batch = made(5, 0.0)
    rows[batch == "b", 2] = np.nan
    for some in (rows, rows[:, :1]):
        names = [f"f{n}" for n in range(some.shape[1])]
        settings = AgreementSettings(names, False, "standard", True, covariates=())
        agreement, _ = agree(settings, {i: TrainRows(some[batch == i]) for i in SITES})
        for i in SITES:
            scaled = agreement.scaling_of(some[batch == i]).scale(some[batch == i])
            assert np.isfinite(scaled).all()
            if some.shape[1] == 1:  # no prior: its mean and deviation become those of all
                np.testing.assert_allclose(scaled.mean(), 0, atol=1e-9)
                np.testing.assert_allclose(scaled.std(ddof=1), 1, rtol=1e-9)
