"""Which of the many non-nodules to keep: a seeded choice that hardly moves with the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.readers.points import Points
from medfed.datamodules.seeding import derive_seed

RULE = (
    "all nodules; of the other candidates those that rank first by a hash of seed, series and "
    "place among the rows of their series, negatives_per_positive for every nodule of the data set"
)


def subsample(
    points: Points, usable: NDArray[np.bool_], ratio: float | None, seed: int
) -> NDArray[np.bool_]:
    """Chooses candidates; see `readers.luna16.Luna16Reader`.

    Args:
        points: n candidates, whose value is 1 for nodules.
        usable: (n,) bool, whether a candidate's scan is there; nodules are counted among these.
        ratio: Other candidates per nodule; None keeps all.
        seed: Seed of the choice.

    Returns:
        (n,) bool.

    Example:
        >>> value = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
        >>> points = Points(("1.2",), np.zeros(5, int), np.zeros((5, 3)), value, np.arange(1, 6))
        >>> subsample(points, np.ones(5, bool), 2.0, seed=0).sum()
        np.int64(3)
    """
    positive = points.value == 1
    if ratio is None:
        return np.ones(len(positive), dtype=bool)
    negatives = np.flatnonzero(usable & ~positive)
    count = round(ratio * int((usable & positive).sum()))
    seeds = np.array([derive_seed(seed, "negatives", s) for s in points.series], dtype=np.uint64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(points.scan))[:-1]])
    place = np.empty(len(positive), dtype=np.int64)  # of a row among the rows of its series
    order = np.argsort(points.scan, kind="stable")
    place[order] = np.arange(len(order)) - starts[points.scan[order]]
    keys = mix((seeds[points.scan] << np.uint64(32)) | place.astype(np.uint64))
    kept = np.array(positive, dtype=bool)
    kept[negatives[np.argsort(keys[negatives], kind="stable")[:count]]] = True
    return kept


def mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scrambles 64-bit numbers one to one (SplitMix64's finalizer): neighbours end far apart.

    Source: G. L. Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        keys: (n,) uint64.

    Returns:
        (n,) uint64.

    Example:
        >>> [f"{key:x}" for key in mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64))]
        ['e220a8397b1dcdaf']
    """
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
