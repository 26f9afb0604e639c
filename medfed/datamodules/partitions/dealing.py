"""Dealing whole patients to clients, where the samples of each class are what counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.readers.base import Patient
from medfed.datamodules.seeding import numpy_rng

Counts = NDArray[np.int64]


def count_classes(patients: Sequence[Patient]) -> Counts:
    """Collects the samples per class of every patient.

    Args:
        patients: P patients, each with one label or with counts.

    Returns:
        (P, K), with K the number of classes up to the largest that occurs.

    Raises:
        ConfigError: If a patient has neither.

    Example:
        >>> count_classes([Patient("a", label=2), Patient("b", counts=(5, 1))]).tolist()
        [[0, 0, 1], [5, 1, 0]]
    """
    classes = max((max((p.label or 0) + 1, len(p.counts or ())) for p in patients), default=0)
    rows = [p.class_counts(classes) for p in patients]
    return np.array(rows, dtype=np.int64).reshape(len(rows), classes)


def deal_whole(
    counts: Counts, targets: NDArray[np.float64], seed: int, spare: bool = True
) -> NDArray[np.int64]:
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


def by_client(
    ids: Sequence[str], owner: NDArray[np.int64], names: Sequence[str]
) -> dict[str, list[str]]:
    """Turns the owners of patients into the patients of owners.

    Args:
        ids: (P) patient ids.
        owner: (P,) index of the client of every patient, -1 for none.
        names: Client ids.

    Returns:
        Sorted patient ids per client.

    Example:
        >>> by_client(["b", "a", "c"], np.array([0, 0, -1]), ["x", "y"])
        {'x': ['a', 'b'], 'y': []}
    """
    return {
        name: sorted(ids[i] for i in np.flatnonzero(owner == n).tolist())
        for n, name in enumerate(names)
    }
