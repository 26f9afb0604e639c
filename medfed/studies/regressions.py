"""Regressions of all patients from sums, or of each hospital by itself and a meta-analysis."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from medfed.common.floors import CATEGORY, LEAST
from medfed.functional import pooled
from medfed.standalone.errors import DataError, few
from medfed.studies import parts
from medfed.studies.parts import Estimates, Floats, State, Sums, Table, Whole, Word
from medfed.studies.plan import Model, Plan
from medfed.studies.rows import OUTCOME, Rows

_SHARE = 20  # no patient may be more than 1/20 of a step's information
_MOST = 2.0**28  # of a sum, which then fits 63 bits
_INSTANT = 1e-3  # least share of an interval at risk, of events at its very begin
FEW = f"fewer than {CATEGORY} of its patients are of a category"
ALONE = "its patients alone do not give the coefficients"
_FITTED = (parts.COEFFICIENT, "standard error")
_RATIOS = {"logistic": "odds ratio", "poisson": "rate ratio", "hazard": "hazard ratio"}


class Design(NamedTuple):
    """N complete rows."""

    x: Floats
    y: Floats
    patients: NDArray[np.int64]  # (N,) whose they are
    offset: Floats  # (N,) what is added to the linear predictor


class Coefficients(msgspec.Struct, frozen=True):
    """A regression of the patients of all hospitals."""

    model: Model
    plan: Plan  # the plan, for the bins and categories of the columns

    @property
    def name(self) -> str:
        """See the protocol."""
        return f"{self.model.family} regression of {self.model.answer}"

    @property
    def terms(self) -> dict[str, float]:
        """The unit of each coefficient that is printed, by its name."""
        terms: dict[str, float] = {}
        for name in self.model.of:
            if groups := self.plan.groups(name):
                terms |= {f"{name}: {group} against {groups[0]}": 1.0 for group in groups[1:]}
            else:
                terms[name] = parts.middle(self.plan.ends(name))[1]
        return terms

    @property
    def size(self) -> int:
        """P: also an intercept that all share, and the later intervals of time."""
        later = len(self.plan.survival.ends) - 1 if self.plan.survival is not None else 0
        hazard = self.model.family == "hazard"
        return len(self.terms) + (self.model.intercept == "common") + later * hazard

    @property
    def regression(self) -> pooled.Regression:
        """The method."""
        return pooled.Regression(self.model.family, self.model.intercept == "hospital")

    def design(self, rows: Rows) -> Design:
        """Returns the rows without a gap."""
        x = np.concatenate([self._inputs(rows, name) for name in self.model.of], axis=1)
        if self.model.family == "hazard" and self.plan.survival is not None:
            made = person_periods(x, *rows.times(), rows.patients, self.plan.survival.ends)
        else:
            y = self._outcome(rows)
            full = ~(np.isnan(x).any(axis=1) | np.isnan(y))
            made = Design(x[full], y[full], rows.patients[full], np.zeros(int(full.sum())))
        if self.model.intercept == "common":
            return made._replace(x=np.concatenate([made.x, np.ones((len(made.x), 1))], axis=1))
        return made

    def _inputs(self, rows: Rows, name: str) -> Floats:
        """(N, 1) a column of numbers, or (N, K - 1) a category against the first."""
        if not (groups := self.plan.groups(name)):
            return parts.scaled(rows.column(name), self.plan.ends(name))[:, None]
        code = rows.coded(name, groups)[:, None]
        return np.where(code >= 0, code == np.arange(1, len(groups)), np.nan)

    def _outcome(self, rows: Rows) -> Floats:
        if groups := self.plan.groups(self.model.outcome):
            y = rows.coded(self.model.outcome, groups)
            y[y < 0] = np.nan
        else:
            y = rows.column(self.model.outcome)
        most = 1 if self.model.family == "logistic" else np.inf
        if len(wrong := y[(y < 0) | (y != np.rint(y)) & ~np.isnan(y) | (y > most)]):
            name, needs = self.model.outcome, "two classes, or 0 and 1" if most == 1 else "counts"
            if not (texts := groups or rows.categories.get(name, ())):
                raise DataError(f"A {self.name} needs {needs}; {name} has {wrong[0]:g}.")
            one = f"data.positive=[{texts[-1]}] makes one class of a table 1 and all others 0"
            two = f"list two of them as columns.{name} in the plan"
            raise DataError(
                f"A {self.name} needs {needs}; {name} has {few([*texts])}: "
                f"{one if name == OUTCOME and not groups else two}."
            )
        return y

    def ask(self, rows: Rows, state: State) -> Sums:
        """See the protocol: how many patients, and their score and information at `state`."""
        x, y, patients, offset = self.design(rows)
        beta = np.array(state, float)
        if not len(y):
            return Sums(np.zeros(1 + self.size * (self.size + 3) // 2, np.int64), 0)
        _, place = np.unique(patients, return_inverse=True)
        weight = np.bincount(place, self.regression.weights(x, y, beta, offset))
        total = weight.sum()
        effective = total**2 / max(float(weight @ weight), 1e-300)
        if y.any() and (effective < LEAST or weight.max() * _SHARE > total):
            raise DataError(
                f"{self.name}: {effective:.0f} patients decide the sums at these coefficients; "
                f"at least {LEAST} must, and none more than 1/{_SHARE} of them. In the plan, a "
                "'least' above this hospital's patients leaves it out; or name fewer columns."
            )
        sums = np.clip(self.regression.sums(x, y, beta, offset), -_MOST, _MOST)
        return Sums(np.concatenate([[len(weight)], parts.fixed(sums)]), int(effective))

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """See the protocol."""
        fit = self.regression.fit(self.size, names=[*self.terms])
        beta = next(fit)
        try:
            while True:
                whole = yield beta.tolist()
                if not whole[0]:
                    raise DataError("no patient has a listed cell of each column; check its names")
                beta = fit.send(whole[1:] / parts.UNIT)
        except StopIteration as end:
            fitted: pooled.Fit = end.value
        except DataError as error:
            raise DataError(f"{self.name}: {error}.") from error
        lines: list[list[Word]] = []
        each = zip(self.terms.items(), fitted.coefficients, fitted.errors, strict=False)
        for (name, unit), scaled_b, scaled_e in each:
            b, e = float(scaled_b) / unit, float(scaled_e) / unit
            _, *ends = parts.interval(name, b, e)
            p = parts.p_value(float(2 * stats.norm.sf(abs(b / e))))
            lines.append([name, b, e, *map(math.exp, ends), p])
        ratio = _RATIOS[self.model.family]
        head = ["term", *_FITTED, ratio, "lower 95 %", "upper 95 %", "p"]
        common = ", a common intercept" * (self.model.intercept == "common")
        title = f"{self.name[0].upper()}{self.name[1:]}{common}, {int(whole[0])} patients"
        return [Table(title, head, lines)]


class ByHospital(Coefficients, frozen=True):
    """A regression that every hospital fits by itself; a meta-analysis joins the coefficients."""

    def design(self, rows: Rows) -> Design:
        """See the base class; intervals of time without an event say nothing and are left out."""
        made = super().design(rows)
        if self.model.family != "hazard":
            return made
        x, first, last = made.x, len(self.terms), self.size - (self.model.intercept == "common")
        of = np.where(x[:, first:last].any(axis=1), x[:, first:last].argmax(axis=1) + 1, 0)
        full = np.bincount(of, made.y, last - first + 1) > 0
        rest = [*range(first), *(first + np.flatnonzero(full[1:])), *range(last, x.shape[1])]
        if not full[0]:  # the first interval that is left becomes the one without a dummy
            del rest[first : first + 1]
        some = full[of]
        return Design(x[some][:, rest], made.y[some], made.patients[some], made.offset[some])

    def estimate(self, rows: Rows) -> Estimates:
        """Returns a hospital's coefficients, unless few of its patients are of a category."""
        for name in [*self.model.of, self.model.answer]:
            groups = self.plan.groups(name) or rows.categories.get(name, ())
            code = rows.coded(name, groups) if groups else np.zeros(0)
            counts = (len(np.unique(rows.patients[code == n])) for n in range(len(groups)))
            if any(0 < count < CATEGORY for count in counts):
                return {self.name: FEW}
        try:
            steps = self.regression.fit(self.design(rows).x.shape[1])
            fit = pooled.result_of(
                steps, lambda beta: self.ask(rows, beta.tolist()).whole[1:] / parts.UNIT
            )
            each = zip(self.terms.items(), fit.coefficients, fit.errors, strict=False)
            fitted = {term: parts.four((b / unit, e / unit)) for (term, unit), b, e in each}
            return {self.name: fitted}
        except DataError:
            return {self.name: ALONE}

    def join(self, each: Mapping[str, Estimates]) -> list[Table]:
        """Returns the mean of each coefficient, those of the hospitals, and who has none."""
        some = {name: of for name, one in each.items() if not isinstance(of := one[self.name], str)}
        title = f"Meta-analysis, {self.name}"
        means: list[list[Word]] = []
        tables: list[Table] = []
        for term in self.terms if some else ():
            pairs = {name: one[term] for name, one in some.items()}
            mean, low, high, *rest = parts.mean_of_hospitals([*pairs.values()])
            means.append([term, mean, low, high, *rest])
            intervals = [parts.interval(name, *pair) for name, pair in pairs.items()]
            intervals.append(("mean of hospitals", float(mean), float(low), float(high)))
            lines: list[list[Word]] = [[name, *pair] for name, pair in pairs.items()]
            head = ["hospital", *_FITTED]
            tables.append(Table(f"{title}, {term}", head, lines, intervals, parts.COEFFICIENT))
        first = Table(title, ["term", *parts.MEANS], means)
        missing = [[name, str(one[self.name])] for name, one in each.items() if name not in some]
        without = Table(f"{title}, without an estimate", ["hospital", "why"], missing)
        return [*([first, *tables] if some else []), *([without] if missing else [])]


def person_periods(
    x: Floats, time: Floats, event: Floats, patients: NDArray[np.int64], ends: Sequence[float]
) -> Design:
    """Returns a row for each interval of time that a patient entered, with the time at risk in it.

    Example:
        >>> x, time, event = np.array([[7.0], [8.0]]), np.array([1.0, 5.0]), np.array([1.0, 0.0])
        >>> made = person_periods(x, time, event, np.array([0, 1]), [2.0, 4.0])
        >>> made.x.tolist(), made.y.tolist(), made.patients.tolist()
        ([[7.0, 0.0], [8.0, 0.0], [8.0, 1.0]], [1.0, 0.0, 0.0], [0, 1, 1])
        >>> np.exp(made.offset).tolist()
        [0.5, 1.0, 1.0]
    """
    # x: (N, P); rows with a gap are left out. time: (N,). event: (N,). patients: (N,). ends:
    # Of B intervals; what happens after the last one does not count.
    # The inputs have dummies of the intervals but the first; the outcome is whether the event
    # happened in the interval.
    full = ~np.isnan(x).any(axis=1)
    x, time, event, patients = x[full], time[full], event[full], patients[full]
    place = np.searchsorted(ends, time, "left")
    times = np.minimum(place + 1, len(ends))
    row = np.repeat(np.arange(len(x)), times)
    interval = np.arange(len(row)) - np.repeat(times.cumsum() - times, times)
    happened = ((interval == place[row]) & (event[row] == 1)).astype(float)
    dummies = (interval[:, None] == np.arange(1, len(ends))).astype(float)
    begins = np.array([0.0, *ends])
    spent = np.minimum(time[row], begins[interval + 1]) - begins[interval]
    offset = np.log(np.maximum(spent / np.diff(begins)[interval], _INSTANT))
    return Design(np.concatenate([x[row], dummies], axis=1), happened, patients[row], offset)
