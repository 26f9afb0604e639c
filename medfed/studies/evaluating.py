"""How good predicted probabilities are at each hospital, and whom they harm; nothing is trained.

A hospital sends estimates with their standard errors, of at least 20 patients and five of each
class, in four digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from scipy import stats

from medfed.common.errors import DataError, few
from medfed.common.floors import CATEGORY, LEAST
from medfed.functional import discrimination, pooled
from medfed.functional.discrimination import Estimate
from medfed.functional.statistics import LEVEL, POWER, holm
from medfed.studies.parts import Estimates, Floats, Table, Word, four, p_value
from medfed.studies.plan import Evaluation, Plan
from medfed.studies.rows import Rows

_Z = float(stats.norm.ppf((1 + LEVEL) / 2))
_LOSSES = {
    "Brier score": discrimination.squared_errors,
    "log loss": discrimination.log_losses,
}
_MEASURES: dict[str, Callable[[Floats, Floats], Estimate]] = {
    "AUROC": discrimination.area,
    "Brier score": lambda p, y: discrimination.mean_of(discrimination.squared_errors(p, y)),
    "log loss": lambda p, y: discrimination.mean_of(discrimination.log_losses(p, y)),
}
_OF_CALIBRATION = ("calibration in the large", "calibration slope")
Measured = Mapping[str, tuple[float, float]]
"""By the name of a number; of a difference from the reference it begins with ``−``."""
FEW = f"fewer than {LEAST} patients, or than {CATEGORY} of a class"


@dataclass(frozen=True)
class Scores:
    """Columns of probabilities against the outcome.

    Attributes:
        asked: What is evaluated.
        plan: The plan, for the categories of columns.
    """

    asked: Evaluation
    plan: Plan

    @property
    def name(self) -> str:
        """See the protocol."""
        return f"evaluation of {', '.join(self.asked.scores)}"

    def estimate(self, rows: Rows) -> Estimates:
        """Returns a hospital's numbers by score and group, or why it has none."""
        y, found = self._outcome(rows), Estimates()
        columns = {name: self._column(rows, name) for name in self.asked.scores}
        groups = {"": ~np.isnan(y)}
        for by in self.asked.by:
            code = rows.coded(by, self.plan.groups(by))
            parts = enumerate(self.plan.groups(by))
            groups |= {f", {by}: {group}": ~np.isnan(y) & (code == n) for n, group in parts}
        for group, there in groups.items():
            for name, p in columns.items():
                known = there & ~np.isnan(p)
                patients, rare = len(np.unique(rows.patients[known])), _fewer(y[known])
                if patients < max(LEAST, self.plan.least) or rare < CATEGORY:
                    found[name + group] = FEW
                    continue
                reference = columns[self.asked.reference or name]
                numbers = _numbers(p[known], y[known])
                both = known & ~np.isnan(reference)
                if reference is not p and _fewer(y[both]) >= CATEGORY:
                    numbers |= _differences(p[both], reference[both], y[both])
                numbers["patients"] = Estimate(patients, 0.0)
                found[name + group] = {n: four(e) for n, e in numbers.items()}
        return found

    def _outcome(self, rows: Rows) -> Floats:
        groups = self.plan.groups(self.asked.outcome)
        y = rows.coded(self.asked.outcome, groups) if groups else rows.column(self.asked.outcome)
        if len(groups) > 2 or (~np.isnan(y) & (y != 0) & (y != 1)).any():
            known = rows.categories.get(self.asked.outcome, ())
            has = f"; the data have {few([*known])}" if known else ""
            raise DataError(
                f"The outcome {self.asked.outcome} of an evaluation needs two categories, the "
                f"second of which is what the scores predict{has}."
            )
        return y

    def _column(self, rows: Rows, name: str) -> Floats:
        p = rows.column(name)
        if name in rows.categories or (beyond := p[(p < 0) | (p > 1)]).size:
            what = "holds categories" if name in rows.categories else f"holds {beyond[0]:g}"
            raise DataError(f"The score {name} {what}; a score is a probability from 0 to 1.")
        return p

    def join(self, each: Mapping[str, Estimates]) -> list[Table]:
        """Returns the mean of hospitals, every hospital, the harm list, and who is missing."""
        measured: dict[str, dict[str, Measured]] = {}
        missing: list[list[Word]] = []
        for hospital, found in each.items():
            for score, numbers in found.items():
                if isinstance(numbers, str):
                    missing.append([score, hospital, numbers])
                else:
                    measured.setdefault(score, {})[hospital] = numbers
        names = [*_MEASURES, *_OF_CALIBRATION]
        names += [f"− {name}" for name in _MEASURES] if self.asked.reference else []
        means: list[list[Word]] = []
        single: list[list[Word]] = []
        for score, hospitals in measured.items():
            for what in names:
                pairs = [numbers[what] for numbers in hospitals.values() if what in numbers]
                if pairs:
                    m = pooled.meta_analysis(*np.transpose(pairs))
                    ends = (m.next_low, m.next_high)
                    beyond = "–" if math.isnan(ends[0]) else "{:.3f} to {:.3f}".format(*ends)
                    means.append([score, what, m.mean, m.low, m.high, beyond, len(pairs)])
            for hospital, measured_there in hospitals.items():
                written = (_written(measured_there.get(what)) for what in names)
                single.append([score, hospital, int(measured_there["patients"][0]), *written])
        head = ["score", "number", "mean", "lower 95 %", "upper 95 %", "another hospital"]
        tables = [
            Table("Means of hospitals", [*head, "hospitals"], means),
            Table("Every hospital", ["score", "hospital", "patients", *names], single),
        ]
        if self.asked.reference is not None:
            tables.append(self._harm(measured))
        if missing:
            tables.append(Table("Too few to evaluate", ["score", "hospital", "why"], missing))
        return tables

    def _harm(self, measured: Mapping[str, Mapping[str, Measured]]) -> Table:
        """Who is worse off than with the reference, by the Brier score, of all rows by Holm."""
        rows = [
            (score, hospital, int(numbers["patients"][0]), numbers["− Brier score"])
            for score, hospitals in measured.items()
            for hospital, numbers in hospitals.items()
            if "− Brier score" in numbers
        ]
        z = [value / error if error else 0.0 for *_, (value, error) in rows]
        adjusted = holm([float(2 * stats.norm.sf(abs(one))) for one in z])
        lines: list[list[Word]] = []
        for (score, hospital, patients, (value, error)), p in zip(rows, adjusted, strict=True):
            low, high, margin = value - _Z * error, value + _Z * error, self.asked.margin
            if value > 0 and p < 1 - LEVEL:
                verdict = "worse"
            elif high < margin:
                verdict = f"not worse by more than {margin:g}"
            else:
                times = ((_Z + float(stats.norm.ppf(POWER))) * error / margin) ** 2
                verdict = f"cannot tell; about {math.ceil(patients * times)} patients would"
            lines.append([score, hospital, patients, value, low, high, p_value(p), verdict])
        head = ["score", "hospital", "patients", f"Brier score − that of {self.asked.reference}"]
        head += ["lower 95 %", "upper 95 %", "p (Holm)", "verdict"]
        return Table("Who would be harmed", head, lines)


def _fewer(label: Floats) -> int:
    """How many cases are of the rarer class."""
    return int(min((label == 1).sum(), (label == 0).sum()))


def _numbers(p: Floats, label: Floats) -> dict[str, Estimate]:
    numbers = {name: of(p, label) for name, of in _MEASURES.items()}
    with suppress(DataError):  # a score that tells all patients apart has no slope
        numbers |= discrimination.calibration(p, label)
    return numbers


def _differences(p: Floats, reference: Floats, label: Floats) -> dict[str, Estimate]:
    numbers = {"− AUROC": discrimination.area_difference(p, reference, label)}
    for name, of in _LOSSES.items():
        numbers[f"− {name}"] = discrimination.mean_of(of(p, label) - of(reference, label))
    return numbers


def _written(number: tuple[float, float] | None) -> str:
    return "–" if number is None else f"{number[0]:.3f} ± {_Z * number[1]:.3f}"
