"""Wanted class proportions in whole numbers: of samples, of which some stay, and of patients.

Shares are rounded by the method of largest remainders (Hamilton): the counts sum to the wanted
size, and each is less than one away from its share. For two classes that is rounding half up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medfed.common.errors import ConfigError
from medfed.common.seeding import numpy_rng

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def apportion(size: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divides a whole number in given proportions.

    Args:
        size: What is divided, at least 0.
        shares: (K,) non-negative, of sum 1.

    Returns:
        K whole numbers of sum `size`; of equal remainders, the later class is rounded up.

    Raises:
        ConfigError: If `shares` are no proportions.

    Example:
        >>> apportion(5, (0.5, 0.5)), apportion(10, (0.26, 0.37, 0.37))
        ((2, 3), (2, 4, 4))
    """
    check_shares(shares)
    quotas = np.round(size * np.asarray(shares, dtype=np.float64), 9)  # 0.07 * 100 is above 7
    counts = np.floor(quotas).astype(np.int64)
    order = np.lexsort((np.arange(len(counts)), quotas - counts))  # ascending, ties by class
    counts[order[::-1][: size - int(counts.sum())]] += 1
    return tuple(int(count) for count in counts)


def largest_fit(available: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """Finds the most samples that can be had in given proportions.

    Args:
        available: (K,) samples per class.
        shares: (K,) non-negative, of sum 1.

    Returns:
        Samples per class, `apportion` of the largest size that every class suffices for; zeros
        where there is none.

    Raises:
        ConfigError: If `shares` are no proportions, or not one per class.

    Example:
        >>> largest_fit((100, 8), (0.8, 0.2)), largest_fit((100, 0), (0.5, 0.5))
        ((34, 8), (0, 0))
    """
    if len(available) != len(shares):
        raise ConfigError(f"{len(shares)} class shares do not fit {len(available)} classes.")
    check_shares(shares)
    bounds = [(n + 1) / s for n, s in zip(available, shares, strict=True) if s > 0]
    # No count is a whole one below its quota, so nothing beyond the bound fits. Fitting is not
    # monotone in the size (a larger sum can round one class down), hence the search from above.
    for size in range(min(sum(available), int(min(bounds) + 1e-6)), 0, -1):
        counts = apportion(size, shares)
        if all(c <= n for c, n in zip(counts, available, strict=True)):
            return counts
    return tuple(0 for _ in shares)


def thin(labels: ArrayLike, shares: Sequence[float], seed: int) -> Ints:
    """Keeps the largest subset of samples that has the given class proportions.

    Args:
        labels: (n,) class of every sample, 0 to K - 1.
        shares: (K,) wanted proportions, of sum 1.
        seed: Seed of which samples of a class that is too frequent are kept.

    Returns:
        (m,) int64 indices, ascending; empty where no sample may stay.

    Raises:
        ConfigError: If `shares` are no proportions, or a label has none.

    Example:
        >>> kept = thin(np.array([0, 0, 0, 0, 1]), (0.5, 0.5), seed=0)
        >>> kept.shape, 4 in kept
        ((2,), True)
    """
    values = np.asarray(labels)
    strange = (values < 0) | (values >= len(shares))
    if strange.any():
        raise ConfigError(
            f"Label {values[strange][0]} has no class share; {len(shares)} shares stand for the "
            f"classes 0 to {len(shares) - 1}."
        )
    members = [np.flatnonzero(values == k) for k in range(len(shares))]
    counts = largest_fit([len(m) for m in members], shares)
    kept = [
        numpy_rng(seed, "thin", k).permutation(member)[:count]
        for k, (member, count) in enumerate(zip(members, counts, strict=True))
    ]
    return np.sort(np.concatenate(kept)).astype(np.int64)


def deal_whole(counts: Ints, targets: Floats, seed: int, spare: bool = True) -> Ints:
    """Gives whole patients to clients so that their samples per class come near to targets.

    Greedy: each patient goes where it lessens the squared distance to the targets most, that is, to
    the client whose open need is most like it. A class counts as a share of all that is wanted of
    it, so that a rare one is not drowned. The most one-sided patients come first; the evenly mixed
    ones, which help any client, fill the gaps. (The tests hold the label imbalance that comes of
    it against the linear programme of divisible patients.)

    Args:
        counts: (P, K) samples per class and patient.
        targets: (N, K) wanted samples per class and client.
        seed: Seed of the order of equal patients.
        spare: Whether a patient that no client needs is dealt all the same.

    Returns:
        (P,) the client of every patient, -1 for one that stays unused.

    Example:
        >>> deal_whole(np.array([[0, 4], [4, 0], [2, 2]]), np.array([[4.0, 0.0], [2.0, 6.0]]), 0)
        array([1, 0, 1])
    """
    wanted = targets.sum(axis=0)
    weight = np.divide(1.0, wanted, out=np.zeros_like(wanted), where=wanted > 0)
    order = numpy_rng(seed, "deal").permutation(len(counts))
    size = counts * weight
    one_sided = np.linalg.norm(size - size.mean(axis=1, keepdims=True), axis=1)
    order = order[np.lexsort((-size.sum(axis=1)[order], -one_sided[order]))]
    open_need = targets.astype(np.float64)
    owner = np.full(len(counts), -1)
    for patient in order:
        score = (open_need * weight**2) @ counts[patient]
        if not spare:
            helps = ((open_need > 0) & (counts[patient] > 0)).any(axis=1)
            score = np.where(helps, score, -np.inf)
        best = int(score.argmax())
        if score[best] > -np.inf:
            owner[patient] = best
            open_need[best] -= counts[patient]
    return owner


def check_shares(shares: Sequence[float]) -> None:
    """Checks that numbers are proportions.

    Args:
        shares: (K,) numbers.

    Raises:
        ConfigError: If one is negative or not finite, or their sum is not 1.

    Example:
        >>> check_shares((0.8, 0.4))
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: Shares must be non-negative and sum to 1; got: 0.8, 0.4.
    """
    if not all(s >= 0 for s in shares) or not abs(sum(shares) - 1) < 1e-6:
        raise ConfigError(
            "Shares must be non-negative and sum to 1; got: "
            f"{', '.join(f'{s:g}' for s in shares) or 'none'}."
        )
