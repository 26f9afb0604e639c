"""How much better than alone a pilot has found methods, and what would be needed to tell.

An interval is the wider one, at either end, of two: over repetitions, whose training sets overlap
(Nadeau and Bengio, see :mod:`medfed.functional.paired`), and over patients drawn anew. It counts
how many such intervals are looked at (Bonferroni), so that all of them hold at once: whoever picks
the best of several methods, or the worst of many hospitals, may rely on its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from medfed.functional.bootstrap import percentiles
from medfed.functional.paired import Difference, Floats, difference, noncentrality

Says = Literal["better", "worse", "cannot tell"]
LEVEL, POWER = 0.95, 0.8
FEW = 10
"""Patients below which nothing is said of a hospital."""
LEAST = 3
"""Repetitions below which an interval would mean nothing."""
MOST = 100
"""Times as many patients, or repetitions, beyond which nobody would ask for them."""


@dataclass(frozen=True)
class Gain:
    """How much better one side is than the other, larger is better whatever the metric.

    Attributes:
        mean: Over repetitions.
        low: The lower end of its interval.
        high: The upper end.
        visible: The smallest true difference that would be found in 8 of 10 such pilots.
        says: ``better`` or ``worse`` only if the interval is on one side of 0.
        why: Why nothing can be told, and what would be needed; empty where it can.
        repetitions: That define the metric.
        patients: Who were tested.
        times: How many times as many patients would show a difference as large as the measured one;
            NaN where that is unknown, or more than anybody has.
        repeats: How many repetitions would show it with the present patients; 0: none.
    """

    mean: float
    low: float
    high: float
    visible: float
    says: Says
    why: str
    repetitions: int
    patients: int
    times: float = math.nan
    repeats: int = 0


def gain_of(
    values: Sequence[float],
    drawn: Floats,
    patients: int,
    *,
    overlap: float,
    again: float = 1.0,
    looks: int = 1,
) -> Gain:
    """Says what repetitions of a pilot show.

    Args:
        values: (S,) a difference per repetition; NaN where the patients leave it undefined.
        drawn: (W,) their mean, of patients drawn anew; empty where that is unknown.
        patients: Who were tested, once or several times.
        overlap: Test patients per training patient.
        again: How often each patient was tested. Draws of the same patients are no new ones, so
            that their interval is widened by its root.
        looks: How many such differences are looked at.

    Example:
        >>> found = gain_of([0.1, 0.12, 0.11, 0.1], np.array([]), 40, overlap=0.3)
        >>> found.says, round(found.mean, 4)
        ('better', 0.1075)
        >>> gain_of([0.1, 0.12, 0.11, 0.1], np.array([]), 5, overlap=0.3).says
        'cannot tell'
    """
    level = 1 - (1 - LEVEL) / looks
    found = difference(values, overlap, level, POWER)
    count = sum(not math.isnan(v) for v in values)
    low, high = wider(found, drawn, again, level)
    known = (found.mean, low, high, found.visible)
    if not count:
        return Gain(*known, "cannot tell", "its patients leave the metric undefined", 0, patients)
    if patients < FEW:
        why = f"{patients} patients are too few to say anything; {FEW} are the least"
        return Gain(*known, "cannot tell", why, count, patients)
    if count < LEAST:
        why = f"only {count} repetitions define the metric; {LEAST} are the least"
        return Gain(*known, "cannot tell", why, count, patients)
    if not math.isfinite(found.error):
        why = "a model has failed, so that there is no mean"
        return Gain(*known, "cannot tell", why, count, patients)
    if found.error == 0:
        same = "there is no difference" if found.mean == 0 else "all repetitions give the same"
        return Gain(*known, "cannot tell", same, count, patients)
    if low > 0 or high < 0:
        return Gain(*known, "better" if low > 0 else "worse", "", count, patients)
    times, repeats = needed(found, count, overlap, level)
    why = _words(found, patients, times, repeats, count)
    return Gain(*known, "cannot tell", why, count, patients, times, repeats)


def wider(found: Difference, drawn: Floats, again: float, level: float) -> tuple[float, float]:
    """Returns the wider of two intervals, at either end.

    Args:
        found: Over repetitions.
        drawn: See `gain_of`.
        again: See `gain_of`.
        level: Of the interval.

    Example:
        >>> wider(Difference(0.0, -1.0, 1.0, 1.0, 0.1, 0.1), np.array([-2.0, 0.0, 0.5]), 1.0, 1.0)
        (-2.0, 1.0)
    """
    ends = percentiles(np.asarray(drawn, dtype=float), level)
    low, high = (found.mean + math.sqrt(again) * (end - found.mean) for end in ends)
    if math.isnan(low) or math.isnan(found.low):
        return found.low, found.high
    return min(found.low, low), max(found.high, high)


def needed(found: Difference, count: int, overlap: float, level: float) -> tuple[float, int]:
    """Returns how much larger a pilot would have to be, if the truth is what was measured.

    More repetitions deal the same patients anew, and leave the share of the variance that comes of
    their being the same. Beyond it, only more patients help; the variance falls with their number.

    Args:
        found: The measured difference.
        count: Repetitions.
        overlap: See `gain_of`.
        level: Of the interval.

    Returns:
        Times as many patients, NaN if more than `MOST`; and repetitions of the present ones, 0 if
        more than `MOST`.

    Example:
        >>> times, repeats = needed(difference([0.1, -0.1, 0.2, 0.1]), 4, 0.0, 0.95)
        >>> round(times, 1), repeats
        (12.7, 25)
    """
    alpha = 1 - level
    spread = found.error / math.sqrt(1 / count + overlap)
    times = math.nan
    if found.mean != 0 and (found.visible / found.mean) ** 2 <= MOST:
        times = max(1.0, (found.visible / found.mean) ** 2)
    for repeats in range(count + 1, MOST + 1):
        error = spread * math.sqrt(1 / repeats + overlap)
        if error * 2 > abs(found.mean):  # no test needs fewer standard errors
            continue
        if error * noncentrality(repeats - 1, alpha, POWER) <= abs(found.mean):
            return times, repeats
    return times, 0


def _words(found: Difference, patients: int, times: float, repeats: int, count: int) -> str:
    seen = f"a difference below {found.visible:.2g} could not be seen"
    if math.isnan(times):
        return f"{seen}; if it is as small as measured, no pilot of a sensible size would show it"
    how = f"about {_round(times * patients):,} patients rather than {patients:,}"
    if repeats:
        how += f", or {repeats} repetitions rather than {count},"
    return f"{seen}; if it is as large as measured, {how} would show it"


def _round(value: float) -> int:
    """Two digits, as no more are known."""
    digits = 10.0 ** max(0, len(str(int(value))) - 2)
    return int(math.ceil(value / digits) * digits)
