"""Columns in groups (Table 1) and curves of survival, from counts and sums."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from medfed.common.errors import DataError
from medfed.common.floors import TIMES
from medfed.functional import pooled
from medfed.studies import parts
from medfed.studies.parts import Floats, Groups, State, Sums, Table, Whole, Word
from medfed.studies.rows import Rows

_QUARTERS = {"lower quartile": 0.25, "median": 0.5, "upper quartile": 0.75}


def _with_all(by_group: Floats | Whole, groups: Groups) -> Floats | Whole:
    """Puts the sum over the groups, which are the last axis, before them."""
    whole = by_group.sum(axis=-1, keepdims=True)
    return np.concatenate([whole, by_group], axis=-1) if groups.names else by_group


@dataclass(frozen=True)
class Categories:
    """A column of categories: how many patients of each group have each.

    Attributes:
        name: The column.
        names: Its K categories.
        groups: The groups.
    """

    name: str
    names: tuple[str, ...]
    groups: Groups = field(default_factory=Groups)

    def ask(self, rows: Rows, state: State) -> Sums:
        """See the protocol: counts (K + 2, G + 1); the last ones are of others and of gaps."""
        code, k = rows.coded(self.name, self.names), len(self.names)
        place = np.where(np.isnan(code), k + 1, np.where(code < 0, k, code)).astype(int)
        counts = np.zeros((k + 2, self.groups.count + 1), np.int64)
        np.add.at(counts, (place, self.groups.place(rows)), 1)
        return Sums(counts.ravel(), len(np.unique(rows.patients[place <= k])))

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """See the protocol."""
        whole = yield ()
        each = whole.reshape(len(self.names) + 2, -1)[:, : self.groups.count]
        counts = _with_all(each, self.groups)
        known = counts[:-1].sum(axis=0)
        lines: list[list[Word]] = _heading(counts[-1], counts.sum(axis=0))
        for name, row in zip((*self.names, "other"), counts[:-1], strict=True):
            if name != "other" or row.any():
                lines.append([name, *map(parts.share_of, row.tolist(), known.tolist())])
        if self.groups.count > 1:
            lines.append(["p (χ²)", parts.p_value(pooled.chi_squared(each[:-1]).p)])
        if self.groups.count == 2 and each[:-1].any(axis=0).all():
            shares = each[:-1] / each[:-1].sum(axis=0)
            lines.append(["standardised difference", pooled.standardised_difference(shares.T)])
        return [Table(self.name, ["column", "all", *self.groups.names], lines)]


def _heading(gaps: Whole, everyone: Whole) -> list[list[Word]]:
    missing = map(parts.share_of, gaps.tolist(), everyone.tolist())
    return [["patients", *map(int, everyone)], ["missing", *missing]]


@dataclass(frozen=True)
class Numbers:
    """A column of numbers: mean, deviation and quartiles in each group.

    Attributes:
        name: The column.
        ends: The ends of its B bins.
        groups: The groups.
    """

    name: str
    ends: tuple[float, ...]
    groups: Groups = field(default_factory=Groups)

    def ask(self, rows: Rows, state: State) -> Sums:
        """See the protocol: counts (B + 3, G + 1) by bin, of gaps at the end, and two sums."""
        if self.name in rows.categories:
            raise DataError(
                f"The plan has bins for {self.name}, which holds categories; list their names, in "
                'quotation marks where they are numbers: ["1", "2"].'
            )
        column, group = rows.column(self.name), self.groups.place(rows)
        gaps, last = np.isnan(column), len(self.ends) + 1
        counts = np.zeros((last + 1, self.groups.count + 1), np.int64)
        np.add.at(
            counts, (np.where(gaps, last, np.searchsorted(self.ends, column, "right")), group), 1
        )
        z = parts.scaled(column[~gaps], self.ends)
        sums = np.zeros((self.groups.count + 1, 2))
        np.add.at(sums, group[~gaps], np.stack([z, z * z], axis=1))
        centre, half = parts.middle(self.ends)
        clipped = int((np.abs(column[~gaps] - centre) > np.abs(z) * half * (1 + 1e-9)).sum())
        known = len(np.unique(rows.patients[~gaps]))
        return Sums(np.concatenate([counts.ravel(), parts.fixed(sums.T).ravel()]), known, clipped)

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """See the protocol."""
        whole, wide = (yield ()), self.groups.count + 1
        size = (len(self.ends) + 2) * wide
        each = whole[:size].reshape(-1, wide)[:, :-1]
        counts = _with_all(each, self.groups)
        sums = _with_all(whole[size:].reshape(2, wide)[:, :-1] / parts.UNIT, self.groups)
        known, (centre, half) = counts[:-1].sum(axis=0), parts.middle(self.ends)
        mean, sd = pooled.mean_and_sd(known, *sums)
        mean, sd = mean * half + centre, sd * half
        lines: list[list[Word]] = _heading(counts[-1], counts.sum(axis=0))
        lines += [["mean", *mean.tolist()], ["standard deviation", *sd.tolist()]]
        ends = np.array(self.ends)
        for title, share in _QUARTERS.items():
            lines.append([title, *(pooled.quantile(c, ends, share) for c in counts[:-1].T)])
        if self.groups.count > 1:
            lines.append(["p (Kruskal–Wallis)", parts.p_value(pooled.kruskal_wallis(each[:-1]).p)])
        if self.groups.count == 2 and (known[1:] > 1).all():
            lines.append(["p (Welch)", parts.p_value(pooled.welch(known[1:], mean[1:], sd[1:]).p)])
            spread = math.sqrt((sd[1:] ** 2).mean())
            apart = abs(mean[1] - mean[2])
            lines.append(["standardised difference", apart / spread if spread else math.nan])
        return [Table(self.name, ["column", "all", *self.groups.names], lines)]


@dataclass(frozen=True)
class Curves:
    """Kaplan and Meier's curves of survival, and the log-rank test between groups.

    Attributes:
        ends: The ends of B intervals of time.
        groups: The groups.
        name: See the protocol.
    """

    ends: tuple[float, ...]
    groups: Groups = field(default_factory=Groups)
    name: str = "survival"

    def ask(self, rows: Rows, state: State) -> Sums:
        """See the protocol: events and leavings (2, B + 1, G + 1); the last are of later times."""
        counts = np.zeros((2, len(self.ends) + 1, self.groups.count + 1), np.int64)
        time, event = rows.times()
        place = np.searchsorted(self.ends, time, "left")
        np.add.at(counts, (1 - event.astype(int), place, self.groups.place(rows)), 1)
        return Sums(counts.ravel(), len(np.unique(rows.patients)))

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """See the protocol; a curve ends where fewer than ten are at risk."""
        whole = yield ()
        counts = whole.reshape(2, len(self.ends) + 1, -1)[:, :, : self.groups.count].copy()
        counts[1, -1] += counts[0, -1]  # what happens after the last end is not known
        counts[0, -1] = 0
        lines: list[list[Word]] = []
        for name, group in zip(self.groups.names or ("all",), counts.T, strict=True):
            curve: Sequence[Floats] = pooled.survival_curve(*group.T)
            for end, n, share, e in zip(self.ends, *curve, strict=False):
                if n >= 2 * TIMES:
                    lines.append([name, end, int(n), float(share), float(e)])
        head = ["group", "until", "at risk", "survival", "standard error"]
        tables = [Table("Survival", head, lines)]
        if self.groups.count > 1:
            test = pooled.log_rank(*counts)
            line: list[Word] = [test.statistic, self.groups.count, parts.p_value(test.p)]
            tables.append(Table("Log-rank test", ["χ²", "groups", "p"], [line]))
        return tables
