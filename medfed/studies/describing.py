"""Columns in groups (Table 1) and curves of survival, from counts and sums."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from medfed.common.floors import TIMES, divided
from medfed.functional import pooled
from medfed.standalone.errors import DataError, few
from medfed.studies import parts
from medfed.studies.parts import Floats, Groups, Line, State, Sums, Table, Whole, Word
from medfed.studies.rows import Rows

_QUARTERS = ("lower quartile", "median", "upper quartile")


def _with_all(by_group: Any, groups: Groups) -> Any:
    """Puts the sum over the groups, which are the last axis, before them."""
    whole = by_group.sum(axis=-1, keepdims=True)
    return np.concatenate([whole, by_group], axis=-1) if groups.names else by_group


class Column(msgspec.Struct, frozen=True):
    """A column in each group: shares of categories, or mean, deviation and quartiles of numbers."""

    name: str
    groups: Groups = Groups()
    names: tuple[str, ...] = ()  # its categories; none: it holds numbers
    ends: tuple[float, ...] = ()  # the ends of the bins of numbers

    @property
    def cells(self) -> int:
        """Categories or bins, then other categories or values beyond all bins, then gaps."""
        return len(self.names or self.ends) + 2

    def ask(self, rows: Rows, state: State) -> Sums:
        """See the protocol: counts (cells, G + 1); of numbers also two sums of each group."""
        if not self.names and self.name in rows.categories:
            raise DataError(
                f"The plan has bins for {self.name}, which holds categories; list their names, in "
                'quotation marks where they are numbers: ["1", "2"].'
            )
        of = rows.coded(self.name, self.names) if self.names else rows.column(self.name)
        gaps, group, clipped = np.isnan(of), self.groups.place(rows), 0
        place = np.where(of < 0, self.cells - 2, of)
        if not self.names:
            place = np.searchsorted(self.ends, of, "right")
        counts = np.zeros((self.cells, self.groups.count + 1), np.int64)
        np.add.at(counts, (np.where(gaps, self.cells - 1, place).astype(int), group), 1)
        whole = [counts.ravel()]
        if not self.names:
            z, (centre, half) = parts.scaled(of[~gaps], self.ends), parts.middle(self.ends)
            sums = np.zeros((self.groups.count + 1, 2))
            np.add.at(sums, group[~gaps], np.stack([z, z * z], axis=1))
            whole.append(parts.fixed(sums.T).ravel())
            clipped = int((np.abs(of[~gaps] - centre) > np.abs(z) * half * (1 + 1e-9)).sum())
        return Sums(np.concatenate(whole), len(np.unique(rows.patients[~gaps])), clipped)

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """See the protocol."""
        whole, wide = (yield ()), self.groups.count + 1
        counts = whole[: self.cells * wide].reshape(-1, wide)
        sums = whole[self.cells * wide :].reshape(-1, wide) / parts.UNIT
        if not counts[:, -1].any():  # everybody is in a group
            counts, sums = counts[:, :-1], sums[:, :-1]
        remarks = list[str]()
        absent = [name for name, of in zip(self.names, counts, strict=False) if not of.any()]
        if absent and (other := int(counts[-2].sum())):
            many = other if other >= TIMES else f"fewer than {TIMES}"
            what = f"{self.name}: no patient is {few(absent)}, and {many} are of other names"
            remarks.append(f"{what}; compare the plan's names with those of the data.")
        return [one._replace(remarks=remarks) for one in self.tables(counts, sums)]

    def tables(self, each: Whole, sums: Floats) -> list[Table]:
        """Returns the results of counts (cells, G) and sums (2, G); those in no group are last."""
        counts = _with_all(each, self.groups)
        known, everyone = counts[:-1].sum(axis=0), counts.sum(axis=0)
        rows = [*(counts[:-1] if self.names else [known]), counts[-1]]
        hidden = parts.withheld(np.array([*rows, everyone]))
        wholes = [known] * (len(rows) - 1) + [everyone]
        of_rows = zip(rows, wholes, hidden, strict=False)
        shares = [[*map(parts.share_of, *(each.tolist() for each in row))] for row in of_rows]
        of_all = zip(everyone.tolist(), hidden[-1].tolist(), strict=True)
        patients = [parts.share_of(n, n, True) if is_hidden else n for n, is_hidden in of_all]
        lines: list[Line] = [["patients", *patients], ["missing", *shares[-1]]]
        if self.names:
            named = zip((*self.names, "other"), shares, counts, strict=False)
            lines += [[name, *row] for name, row, n in named if name != "other" or n.any()]
            lines += self._of_categories(each[:-1, : self.groups.count], bool(hidden.any()))
        else:
            lines += self._of_numbers(known, counts[:-1], _with_all(sums, self.groups))
        others = ["in none"] * (each.shape[1] > self.groups.count)
        return [Table(self.name, ["column", "all", *self.groups.names, *others], lines)]

    def _of_categories(self, each: Whole, is_some_hidden: bool) -> Iterator[Line]:
        if self.groups.count > 1:
            yield ["p (χ²)", parts.p_value(pooled.chi_squared(each).p)]
        if self.groups.count == 2 and each.any(axis=0).all():
            shares = each / each.sum(axis=0)
            apart = pooled.standardised_difference(shares.T)  # in many digits it gives counts away
            yield ["standardised difference", float(f"{apart:.2g}") if is_some_hidden else apart]

    def _of_numbers(self, known: Any, counts: Whole, sums: Floats) -> Iterator[Line]:
        mean, sd = pooled.mean_and_sd(known, *sums)
        centre, half = parts.middle(self.ends)
        mean, sd = mean * half + centre, sd * half
        several = {str(n): count for n, count in enumerate(known[1:].tolist())}
        printable = [True, *(count is not None for count in divided(several, TIMES).values())]
        yield ["mean", *np.where(printable, mean, np.nan).tolist()]
        yield ["standard deviation", *np.where(printable, sd, np.nan).tolist()]
        ends = np.array(self.ends)
        shares = (0.25, 0.5, 0.75)
        quarters = [[pooled.quantile(c, ends, share) for c in counts.T] for share in shares]
        spreads = np.subtract(quarters[-1], quarters[0]).tolist()
        printed = np.where(printable, quarters, np.nan).tolist()
        for title, quarter in zip(_QUARTERS, printed, strict=True):
            yield [title, *map(self._or_bin, quarter, spreads)]
        groups = slice(1, 1 + self.groups.count)
        if self.groups.count > 1:
            yield ["p (Kruskal–Wallis)", parts.p_value(pooled.kruskal_wallis(counts[:, groups]).p)]
        if self.groups.count == 2 and all(printable) and (known[groups] > 1).all():
            test = pooled.welch(known[groups], mean[groups], sd[groups])
            yield ["p (Welch)", parts.p_value(test.p)]
            spread = math.sqrt((sd[groups] ** 2).mean())
            apart = abs(mean[1] - mean[2]) / spread if spread else math.nan
            yield ["standardised difference", apart]

    def _or_bin(self, quarter: float, spread: float) -> Word:
        """A quartile; its bin if that is wider than the quartiles are apart, or has one end."""
        first, last = self.ends[0], self.ends[-1]
        if quarter in (first, last):
            return f"below {first:g}" if quarter == first else f"from {last:g}"
        at = int(np.searchsorted(self.ends, quarter, "left"))
        low, high = self.ends[at - 1], self.ends[min(at, len(self.ends) - 1)]
        if high - low == 1 and all(end % 1 == 0.5 for end in self.ends):  # bins of whole numbers
            return high - 0.5
        return f"{low:g} to {high:g}" if high - low > spread else quarter


class Curves(msgspec.Struct, frozen=True):
    """Kaplan and Meier's curves of survival, and the log-rank test between groups."""

    ends: tuple[float, ...]  # the ends of B intervals of time
    groups: Groups = Groups()
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
        every = whole.reshape(2, len(self.ends) + 1, -1)
        counts, remarks = every[:, :, : self.groups.count].copy(), list[str]()
        # Who is in no group must not follow from the groups and from all patients.
        sizes = every.sum(axis=(0, 1))
        hidden = parts.withheld(np.array([[sizes.sum(), *sizes]]))[0, 1:]
        counts[1, -1] += counts[0, -1]  # what happens after the last end is not known
        counts[0, -1] = 0
        lines: list[Line] = []
        names = self.groups.names or ("all",)
        for name, group, is_hidden in zip(names, counts.T, hidden[:-1], strict=True):
            curve: Sequence[Floats] = pooled.survival_curve(*group.T)
            events, leavings = group.T
            lowest = np.cumprod(1 - events / np.maximum(curve[0] - leavings, 1))
            wide = list[str]()  # where the counts do not give the curve
            for end, n, share, e, low in zip(self.ends, *curve, lowest, strict=False):
                if n >= 2 * TIMES:
                    at_risk = parts.share_of(int(n), 0, True) if is_hidden else int(n)
                    lines.append([name, end, at_risk, float(share), float(e)])
                    if share - low > e:
                        what = f"Survival of {name} until {end:g} lies in {low:.3g} to {share:.3g}"
                        wide.append(f"{what}, by when patients leave; list more survival.ends.")
            remarks += wide[-1:]
        head = ["group", "until", "at risk", "survival", "standard error"]
        tables = [Table("Survival", head, lines, remarks=remarks)]
        if self.groups.count > 1:
            test = pooled.log_rank(*counts)
            line: Line = [test.statistic, self.groups.count, parts.p_value(test.p)]
            tables.append(Table("Log-rank test", ["χ²", "groups", "p"], [line]))
        return tables
