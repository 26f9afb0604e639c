"""ComBat of columns of numbers across hospitals, fitted by sums that hospitals send.

Johnson, Li and Rabinovic, "Adjusting batch effects in microarray expression data using empirical
Bayes methods", Biostatistics 2007; by messages: Chen et al., "Privacy-preserving harmonization via
distributed ComBat", NeuroImage 2022. Column f of row j at hospital i is

    y_ijf = alpha_f + x_ij beta_f + sigma_f (gamma_if + delta_if e_ijf).

============  ================  =================================================================
symbol        here              fitted by
============  ================  =================================================================
alpha, sigma  ``Combat.whole``  least squares with a constant per hospital, from the sums of all
beta          ``slopes``        hospitals (`pooled_fit`)
gamma, delta  `harmonised`      empirical Bayes over the columns of a hospital, which sends nothing
============  ================  =================================================================

The adjusted value is linear in the row, so that a bundle holds it as a scaling. Covariates x, and
columns that have at most two values everywhere, are not adjusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.tables.columns import Array, Standard

_ENOUGH = 3  # columns from which a prior can be fitted
_STEPS, _CLOSE = 10_000, 1e-13


def sums_with(covariates: Sequence[int], apart: Array) -> dict[str, list[float]]:
    """Sums over the known cells of each column, of covariates, their products, and with the cells.

    Args:
        covariates: (K,) their positions.
        apart: (N, P) cells, less the medians of all; NaN is missing.
    """
    cells, known = np.nan_to_num(apart), (~np.isnan(apart)).astype(float)
    x = cells[:, covariates]
    sums = known.T @ x, np.einsum("np,nk,nl->pkl", known, x, x), cells.T @ x
    return {n: values.ravel().tolist() for n, values in zip(("x", "xx", "xy"), sums, strict=True)}


def pooled_fit(
    sums: Sequence[Mapping[str, Sequence[float]]], median: Array, covariates: int
) -> tuple[Array, Array, Array]:
    """Least squares with a constant per hospital, from every hospital's sums.

    Args:
        sums: Per hospital ``count``, ``sum`` and ``squares`` of the cells less the median, and
            those of `sums_with`.
        median: (P,).
        covariates: K.

    Returns:
        (P,) mean, (P,) deviation within hospitals, 1 where it is 0, and (P, K) slopes.

    Example:
        >>> none = {"x": [], "xx": [], "xy": []}
        >>> one = {"count": [2], "sum": [4], "squares": [10]} | none  # of 1 and 3
        >>> two = {"count": [2], "sum": [12], "squares": [74]} | none  # of 5 and 7
        >>> [x.tolist() for x in pooled_fit([one, two], np.zeros(1), 0)]
        [[4.0], [1.0], [[]]]
    """
    shape, k = (len(sums), len(median)), covariates
    sizes = {"count": (), "sum": (), "squares": (), "x": (k,), "xx": (k, k), "xy": (k,)}
    n, y, yy, x, xx, xy = (
        np.array([one[name] for one in sums], dtype=float).reshape(*shape, *more)
        for name, more in sizes.items()
    )
    each, whole = np.maximum(n, 1), np.maximum(n.sum(axis=0), 1)
    inner = (xx - x[..., None] * x[..., None, :] / each[..., None, None]).sum(axis=0)
    outer = (xy - x * (y / each)[..., None]).sum(axis=0)
    slopes = np.einsum("pkl,pl->pk", np.linalg.pinv(inner), outer)
    mean = (y.sum(axis=0) - (slopes * x.sum(axis=0)).sum(axis=1)) / whole
    rest = (yy - y**2 / each).sum(axis=0) - (slopes * outer).sum(axis=1)
    sd = np.sqrt(np.maximum(rest, 0) / whole)
    constant = sd <= 1e-9 * np.maximum(np.abs(median + mean), np.abs(mean))
    return median + mean, np.where(constant, 1.0, sd), slopes


@dataclass(frozen=True)
class Combat:
    """The agreement of all hospitals.

    Attributes:
        whole: The limits and medians of all, and their mean and deviation within hospitals.
        slopes: (P, K).
        covariates: (K,) positions of the covariates.
        kept: (P,) the columns that are not adjusted.
    """

    whole: Standard
    slopes: Array
    covariates: Sequence[int]
    kept: NDArray[np.bool_]

    def harmonised(self, train: Array) -> Standard:
        """Returns the scaling of a hospital, from its (N, P) training cells; NaN is missing."""
        whole, at = self.whole, list(self.covariates)
        cells = np.clip(train, whole.low, whole.high)
        x = np.nan_to_num(cells[:, at] - whole.median[at])
        apart = (cells - whole.mean - x @ self.slopes.T) / whole.sd
        moved = ~self.kept & (np.isfinite(apart).sum(axis=0) > 1)
        shift, scale = np.zeros(len(moved)), np.ones(len(moved))
        if moved.any():
            shift[moved], scale[moved] = location_and_scale(apart[:, moved])
        mean, slopes = whole.mean + whole.sd * shift, (1 - 1 / scale) / whole.sd * self.slopes.T
        return replace(
            whole,
            median=mean + scale * (whole.median - whole.mean),  # so that gaps are alike everywhere
            mean=mean,
            sd=whole.sd * scale,
            slopes=dict(zip(at, slopes, strict=True)),
        )


def location_and_scale(apart: Array) -> tuple[Array, Array]:
    """Johnson's gamma and delta of one hospital, by empirical Bayes over its columns.

    With fewer than three columns, or columns that are all alike, they are its means and deviations.

    Args:
        apart: (N, P) standardised cells; NaN is missing.

    Example:
        >>> [x.round(2).tolist() for x in location_and_scale(np.array([[1.0], [3.0]]))]
        [[2.0], [1.41]]
    """
    count = (~np.isnan(apart)).sum(axis=0)
    means, variances = np.nanmean(apart, axis=0), np.nanvar(apart, axis=0, ddof=1)
    wide, uneven = (np.var(v, ddof=1) if len(v) >= _ENOUGH else 0.0 for v in (means, variances))
    if not (wide > 0 and uneven > 0):
        return means, np.sqrt(np.where(variances > 0, variances, 1.0))
    a = 2 + variances.mean() ** 2 / uneven
    b = variances.mean() * (a - 1)
    gamma, delta = means, variances
    for _ in range(_STEPS):
        last = gamma, delta
        gamma = (wide * count * means + delta * means.mean()) / (wide * count + delta)
        delta = (b + np.nansum((apart - gamma) ** 2, axis=0) / 2) / (a - 1 + count / 2)
        if max(np.abs(gamma - last[0]).max(), np.abs(delta - last[1]).max()) < _CLOSE:
            break
    return gamma, np.sqrt(delta)
