"""The parts of a plan: what a hospital sums, and what the sums say.

A hospital's half turns its rows into whole numbers: counts, and sums of columns in fixed point,
less an agreed centre and over an agreed width. Only their sum over hospitals is read, so that a
simulation and hospitals under masks get the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from medfed.common.floors import TIMES
from medfed.functional import pooled, statistics
from medfed.studies.rows import Rows

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Word = str | float
Line = list[Word]
Interval = tuple[str, float, float, float]
"""A name, an estimate, and the ends of its interval."""
State = Sequence[float]
"""What the hospitals are told before they answer: nothing, or the coefficients of a step."""
MEANS = ("mean", "lower 95 %", "upper 95 %", "I²", "another hospital", "hospitals")
COEFFICIENT = "coefficient"
NORMAL = float(stats.norm.ppf((1 + statistics.LEVEL) / 2))
"""Standard errors to either end of an interval."""
UNIT = 2.0**34
"""Steps of fixed point: the largest squares of 2^20 patients fit 63 bits."""
_FURTHEST = 16.0  # half-widths of a column's bins beyond which a value is clipped


Limits = tuple[float, float]
"""Between which a number lies."""
ANY, SHARE = (-math.inf, math.inf), (0.0, 1.0)


Estimates = dict[str, dict[str, tuple[float, float]] | str]
"""By what they are of: each number and its standard error by name, or why there are none."""


class Sums(NamedTuple):
    """What a hospital adds."""

    whole: Whole
    patients: int  # how many patients stand behind them
    clipped: int = 0  # how many values lie too far from the agreed bins, and count as the furthest


class Table(NamedTuple):
    """A result: the titles of columns, and lines of words and numbers."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[Word]]
    # names, values and ends of intervals, for a picture
    intervals: Sequence[Interval] = ()
    label: str = ""  # what these are
    remarks: Sequence[str] = ()  # what a reader must know of it


def interval(name: str, value: float, error: float, limits: Limits = ANY) -> Interval:
    """Returns a name, an estimate, and the ends of its 95 % interval, cut at its limits."""
    low, high = np.clip([value - NORMAL * error, value + NORMAL * error], *limits).tolist()
    return name, value, low, high


class Part(Protocol):
    """A part of a plan."""

    @property
    def name(self) -> str:
        """What the part is about."""

    def ask(self, rows: Rows, state: State) -> Sums:
        """A hospital's half: its sums."""

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """The other half: yields states, receives the hospitals' added sums, returns results."""


@runtime_checkable
class Separate(Protocol):
    """A part of which hospitals send estimates with their errors, and no sums."""

    @property
    def name(self) -> str:
        """What the part is about."""

    def estimate(self, rows: Rows) -> Estimates:
        """A hospital's half: its estimates in four digits, or why it has none."""

    def join(self, each: Mapping[str, Estimates]) -> list[Table]:
        """The other half: receives the hospitals' estimates, returns results."""


def numbers_in(estimates: Estimates) -> int:
    """Returns how many numbers estimates with their errors are."""
    return sum(2 * len(of) for of in estimates.values() if not isinstance(of, str))


class Groups(msgspec.Struct, frozen=True):
    """The groups that a part compares."""

    by: str | None = None  # the column of categories; ``None``: all patients are one group
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return max(len(self.names), 1)

    def place(self, rows: Rows) -> NDArray[np.int64]:
        """Returns the group (N,) of each row; of those in none it is `count`."""
        if self.by is None:
            return np.zeros(len(rows.patients), np.int64)
        code = rows.coded(self.by, self.names)
        return np.where(np.isnan(code) | (code < 0), self.count, code).astype(np.int64)


def fixed(sums: Floats) -> Whole:
    """Returns sums in fixed point."""
    return np.asarray(np.rint(sums * UNIT), np.int64)


def four(number: tuple[float, float]) -> tuple[float, float]:
    """Returns an estimate and its error in four digits, of which no patient can be told."""
    value, error = (float(f"{each:.4g}") for each in number)
    return value, error


def scaled(values: Floats, ends: Sequence[float]) -> Floats:
    """Returns values less the middle of their bins, over half of their width, clipped."""
    centre, half = middle(ends)
    return np.clip((values - centre) / half, -_FURTHEST, _FURTHEST)


def middle(ends: Sequence[float]) -> tuple[float, float]:
    """Returns the middle of bins, and half of their width."""
    return (ends[0] + ends[-1]) / 2, (ends[-1] - ends[0]) / 2


def mean_of_hospitals(pairs: Sequence[tuple[float, float]], limits: Limits = ANY) -> list[Word]:
    """Returns the cells of :data:`MEANS` for estimates with their errors, cut at their limits.

    Example:
        >>> mean_of_hospitals([(0.7, 0.02), (0.8, 0.02)])[3:]
        ['92 %', '–', 2]
    """
    m = pooled.meta_analysis(*np.transpose(pairs))
    low, high, next_low, next_high = np.clip([m.low, m.high, m.next_low, m.next_high], *limits)
    beyond = "–" if math.isnan(m.next_low) else f"{next_low:.4g} to {next_high:.4g}"
    share = "–" if math.isnan(m.i2) else f"{100 * m.i2:.0f} %"
    return [m.mean, float(low), float(high), share, beyond, len(pairs)]


def p_value(p: float) -> str:
    """Writes a p-value.

    Example:
        >>> p_value(0.0312), p_value(3e-9), p_value(math.nan)
        ('0.031', '< 0.0001', '–')
    """
    return "–" if math.isnan(p) else f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def withheld(counts: Whole) -> NDArray[np.bool_]:
    """Says which cells of a table of patients are not printed, so that none of 1 to 4 follows.

    Example:
        >>> withheld(np.array([[190, 92, 98], [10, 8, 2], [200, 100, 100]])).tolist()
        [[False, True, True], [False, True, True], [False, False, False]]
    """
    # Beside these cells the smallest ones are withheld that make two values of each possible.
    # The patients are so withheld among themselves alone, as all tables of a study have them.
    # counts: (R, C) whose last row is the sum of the others, as the first column is if C > 1.
    hidden = (counts > 0) & (counts < TIMES)
    if len(counts) > 1:
        hidden[-1:] = withheld(counts[-1:])
    free = np.ones(counts.shape, bool)
    free[-1] = len(counts) == 1
    while (known := _followed(counts, hidden)) is not None:
        alone = np.zeros(counts.shape, bool)  # beside the only withheld cell of a sum
        alone[hidden.sum(axis=1) == 1] = True
        alone[:, hidden.sum(axis=0) == 1] = True
        near, printed = np.zeros(counts.shape, bool), free & ~hidden
        near[known[0]], near[:, known[1]] = True, True
        choices = (alone & (counts > 0), near & (counts > 0), counts > 0, near, free)
        some = next((printed & of for of in choices if (printed & of).any()), None)
        if some is None:
            break
        hidden.flat[np.where(some, counts, counts.max() + 1).argmin()] = True
    return hidden


def _followed(counts: Whole, hidden: NDArray[np.bool_]) -> tuple[int, int] | None:
    """A withheld cell of 1 to 4 that the others leave one value."""
    places = np.arange(counts.size).reshape(counts.shape)
    lines = [np.roll(row, -1) for row in places] if counts.shape[1] > 1 else []  # the sum is last
    lines += [*places.T] if len(counts) > 1 else []
    sums = np.zeros((len(lines), counts.size))
    for of, line in zip(sums, lines, strict=True):
        of[line[:-1]], of[line[-1]] = 1, -1
    low = np.where(hidden, np.where(counts < TIMES, 0, TIMES), counts).ravel()
    most = int(counts.max()) + 2 * TIMES
    high = np.where(hidden, np.where(counts < TIMES, TIMES - 1, most), counts).ravel()

    def least(goal: Floats) -> float:
        bounds = optimize.Bounds(low, high)
        rules = optimize.LinearConstraint(sums, 0, 0)
        return float(optimize.milp(goal, integrality=1, bounds=bounds, constraints=rules).fun)

    small = hidden & (counts > 0) & (counts < TIMES)
    for row, column in np.argwhere(small).tolist() if lines else ():
        goal = np.eye(counts.size)[places[row, column]]
        if round(least(goal)) == round(-least(-goal)):
            return row, column
    return None


def share_of(count: int, of: int, is_withheld: bool = False) -> str:
    """Writes a count with its share, or only that it is less than five or not.

    Example:
        >>> share_of(30, 120), share_of(3, 120, True), share_of(118, 120, True), share_of(0, 0)
        ('30 (25 %)', '< 5', '≥ 5', '0')
    """
    if is_withheld:
        return f"< {TIMES}" if count < TIMES else f"≥ {TIMES}"
    return f"{count} ({100 * count / of:.0f} %)" if of else "0"
