"""How good predicted probabilities are at each hospital, and whom they harm; nothing is trained.

A hospital sends estimates with their standard errors, of at least 20 patients and five of each
class, in four digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from medfed.common.floors import CATEGORY, LEAST, TIMES
from medfed.functional import discrimination
from medfed.functional.discrimination import Estimate
from medfed.functional.statistics import LEVEL, POWER, holm
from medfed.standalone.errors import DataError, few
from medfed.studies import describing, parts
from medfed.studies.parts import Estimates, Floats, State, Sums, Table, Whole, Word
from medfed.studies.plan import Evaluation, Plan
from medfed.studies.rows import ALARMS, DETECTED, LESIONS, OF, Rows

_ERROR = "absolute error"
_HARMS = {"Brier score": 1, "Dice": -1, "concordance": -1, _ERROR: 1, DETECTED: -1}
"""By what a hospital is worse off: the number that grows, or that falls."""
_SHARES = ("AUROC", "accuracy", "Brier score", "Dice", "concordance", DETECTED)
_POSITIVE = ("log loss", _ERROR, "root mean squared error", "HD95", ALARMS)
Measured = Mapping[str, tuple[float, float]]
"""By the name of a number; of a difference from the reference it begins with ``−``."""
FEW = f"fewer than {LEAST} patients, or than {CATEGORY} of a class"


class Scores(msgspec.Struct, frozen=True):
    """Predictions against the outcome."""

    settings: Evaluation
    plan: Plan  # the plan, for the categories of columns

    @property
    def name(self) -> str:
        """See the protocol."""
        return f"evaluation of {', '.join(self.settings.scores)}"

    def estimate(self, rows: Rows) -> Estimates:
        """Returns a hospital's numbers by score and group, or why it has none."""
        each = {name: self._predictions(rows, name) for name in self.settings.scores}
        of_all, groups = Estimates(), {"": np.ones(len(rows.patients), bool)}
        for by in self.settings.by:
            names = self.plan.groups(by)
            code = rows.coded(by, names)
            groups |= {f", {by}: {group}": code == n for n, group in enumerate(names)}
        for group, there in groups.items():
            for name, of in each.items():
                known = there & of.known
                patients = len(np.unique(rows.patients[known]))
                if patients < max(LEAST, self.plan.least) or of.are_few(known):
                    of_all[name + group] = FEW
                    continue
                numbers, reference = of.numbers(known), each[self.settings.reference or name]
                if of.p.shape != reference.p.shape:
                    raise DataError(
                        f"{name} and its reference {self.settings.reference} predict other things; "
                        "compare scores of one kind."
                    )
                both = known & reference.known
                if reference is not of and both.sum() >= LEAST and not of.are_few(both):
                    numbers |= of.numbers(both, reference.p)
                numbers["patients"] = Estimate(patients, 0.0)
                of_all[name + group] = {n: parts.four(e) for n, e in numbers.items()}
        return of_all

    def _predictions(self, rows: Rows, name: str) -> Predictions:
        """What a score says, and how it is judged."""
        scores = {n.partition(OF)[2]: c for n, c in rows.columns.items() if n.startswith(name + OF)}
        names, outcome = [*scores], self.settings.outcome
        p = np.stack([*scores.values()], axis=1) if names else rows.column(name)[:, None]
        classes = self.plan.groups(outcome) or rows.categories.get(outcome, ())
        if names and classes and {*classes} <= {*names}:
            code = rows.coded(outcome, tuple(names))[:, None]
            y = np.where(code >= 0, code == np.arange(len(names)), np.nan)
            return Predictions(p, y, y, partial(_of_labels, names, True))
        if names and {*names} <= rows.columns.keys():
            y = np.stack([rows.columns[finding] for finding in names], axis=1)
            return Predictions(p, y, y, partial(_of_labels, names, False))
        if names:
            return Predictions(p, np.zeros((len(p), 1)), None, partial(_of_scores, names))
        if rows.survival is not None:
            return Predictions(p, rows.survival, rows.survival[:, 1:], _of_risks)
        y = rows.column(outcome)
        named = self.plan.groups(outcome) or outcome in rows.categories
        if not named and (~np.isnan(y) & (y != 0) & (y != 1)).any():
            return Predictions(p, y[:, None], None, _of_numbers)
        y = self._outcome(rows)[:, None]
        if name in rows.categories or (beyond := p[(p < 0) | (p > 1)]).size:
            what = "holds categories" if name in rows.categories else f"holds {beyond[0]:g}"
            raise DataError(f"The score {name} {what}; a score is a probability from 0 to 1.")
        return Predictions(p, y, y, _of_probabilities)

    def _outcome(self, rows: Rows) -> Floats:
        name, groups = self.settings.outcome, self.plan.groups(self.settings.outcome)
        y = rows.coded(name, groups) if groups else rows.column(name)
        if len(groups) > 2 or (~np.isnan(y) & (y != 0) & (y != 1)).any():
            known = rows.categories.get(name, groups)
            has = f"; the data have {few([*known])}" if known else ""
            raise DataError(
                f"One column of scores judges an outcome of two categories, the second of which it "
                f"predicts{has}: name a column of each category as SCORE{OF}CATEGORY."
            )
        return y

    def join(self, each: Mapping[str, Estimates]) -> list[Table]:
        """Returns the mean of hospitals, every hospital, the harm list, and who is missing."""
        measured: dict[str, dict[str, Measured]] = {}
        missing: list[list[Word]] = []
        for hospital, scores in each.items():
            for score, numbers in scores.items():
                if isinstance(numbers, str):
                    missing.append([score, hospital, numbers])
                else:
                    measured.setdefault(score, {})[hospital] = numbers
        every = [of for each in measured.values() for of in each.values()]
        names = [n for n in dict.fromkeys(n for of in every for n in of) if n != "patients"]
        names.sort(key=lambda name: name.startswith("−"))
        first, bars = next(iter(names), ""), []
        means: list[list[Word]] = []
        single: list[list[Word]] = []
        for score, hospitals in measured.items():
            for what in names:
                pairs = [numbers[what] for numbers in hospitals.values() if what in numbers]
                if pairs:
                    means.append([score, what, *parts.mean_of_hospitals(pairs, _limits(what))])
            for hospital, of in hospitals.items():
                written = (_written(what, of.get(what)) for what in names)
                single.append([score, hospital, int(of["patients"][0]), *written])
                if first in of:
                    bars.append(parts.interval(f"{hospital}, {score}", *of[first], _limits(first)))
        tables = [
            Table("Means of hospitals", ["score", "number", *parts.MEANS], means),
            Table("Every hospital", ["score", "hospital", "patients", *names], single, bars, first),
        ]
        if self.settings.reference is not None:
            tables.append(self._harm(measured))
        if missing:
            tables.append(Table("Too few to evaluate", ["score", "hospital", "why"], missing))
        return tables

    def _harm(self, measured: Mapping[str, Mapping[str, Measured]]) -> Table:
        """Who is worse off than with the reference, of all rows by Holm."""
        every = [(s, h, of) for s, hospitals in measured.items() for h, of in hospitals.items()]
        names = dict.fromkeys(n.removeprefix("− ") for *_, of in every for n in of if n[0] == "−")
        what = next((n for w in _HARMS for n in names if n.startswith(w)), "Brier score")
        worse = next(sign for w, sign in _HARMS.items() if what.startswith(w))
        margin = self.settings.margin
        rows = [
            (score, hospital, int(of["patients"][0]), of[f"− {what}"])
            for score, hospital, of in every
            if f"− {what}" in of
        ]
        z = [value / error if error else 0.0 for *_, (value, error) in rows]
        adjusted = holm([float(2 * stats.norm.sf(abs(one))) for one in z])
        lines, bars = list[list[Word]](), []
        for (score, hospital, patients, (value, error)), p in zip(rows, adjusted, strict=True):
            bars.append(parts.interval(f"{hospital}, {score}", value, error, _limits(f"− {what}")))
            if worse * value > 0 and p < 1 - LEVEL:
                verdict = "worse"
            elif worse * value + parts.NORMAL * error < margin:
                verdict = f"not worse by more than {margin:g}"
            else:
                times = ((parts.NORMAL + float(stats.norm.ppf(POWER))) * error / margin) ** 2
                needed = f"; about {math.ceil(patients * times)} patients would"
                verdict = f"cannot tell{needed if times > 1 else ': it is near the margin'}"
            lines.append([score, hospital, patients, *bars[-1][1:], parts.p_value(p), verdict])
        label = f"{what} − that of {self.settings.reference}"
        head = ["score", "hospital", "patients", label]
        head += ["lower 95 %", "upper 95 %", "p (Holm)", "verdict"]
        return Table("Who would be harmed", head, lines, bars, label)


class Areas(describing.Column, frozen=True):
    """The area under the curve of all patients together, and calibration, from a histogram."""

    def tables(self, each: Whole, sums: Floats) -> list[Table]:
        """See the base class; a group of few patients, or of few of a class, is not printed."""
        no, yes = each[:-1, :2].T
        title, few_cells = f"Calibration of {self.name}", (len(self.ends) - 1) // 10
        if min(no.sum(), yes.sum()) < TIMES:
            return []
        estimate = discrimination.area_of_counts(yes, no)
        known = int((no + yes).sum())
        area: list[Word] = [*parts.interval(self.name, *estimate, parts.SHARE), known]
        middles = np.array([0.0, *(np.add(self.ends[1:], self.ends[:-1]) / 2), 1.0])
        lines: list[list[Word]] = []
        for cells in np.split(np.arange(len(no)), range(1 + few_cells, len(no) - 2, few_cells)):
            n, events = int((no + yes)[cells].sum()), int(yes[cells].sum())
            if n >= LEAST and min(events, n - events) >= TIMES:
                mean = float((no + yes)[cells] @ middles[cells]) / n
                error = math.sqrt(events * (n - events) / n**3)
                _, *share = parts.interval("", events / n, error, parts.SHARE)
                lines.append([self.name, mean, *share, n])
        ends = ("lower 95 %", "upper 95 %", "patients")
        head = ["score", "predicted", "observed", *ends]
        whole = Table(f"Pooled AUROC of {self.name}", ["score", "AUROC", *ends], [area])
        return [whole, Table(title, head, lines)]


class Detections(msgspec.Struct, frozen=True):
    """Lesions found and false alarms of all scans together, at agreed thresholds: the FROC."""

    score: str
    thresholds: tuple[float, ...]  # scores from which its boxes count

    @property
    def name(self) -> str:
        """See the protocol."""
        return f"detections of {self.score}"

    def ask(self, rows: Rows, state: State) -> Sums:
        """See the protocol: scans, lesions, and lesions found and false alarms by threshold."""
        lesions = rows.column(LESIONS)
        each = [
            [rows.column(f"{self.score}{OF}{what}{level:g}") for level in self.thresholds]
            for what in (DETECTED, ALARMS)
        ]
        hits, alarms = (np.nan_to_num(np.array(of)).T for of in each)
        counts = np.column_stack([np.ones(len(lesions)), lesions, hits * lesions[:, None], alarms])
        return Sums(np.asarray(np.rint(counts.sum(axis=0)), np.int64), len(lesions))

    def talk(self) -> Generator[State, Whole, list[Table]]:
        """See the protocol; a threshold by which one to four lesions are found has no line."""
        scans, lesions, *rest = (yield ()).tolist()
        right, alarms = np.split(np.array(rest), 2)
        lines: list[list[Word]] = [
            [self.score, level, int(hits) / lesions, int(wrong) / scans, int(lesions), int(scans)]
            for level, hits, wrong in zip(self.thresholds, right, alarms, strict=True)
            if lesions >= LEAST and not 0 < hits < TIMES
        ]
        head = ["score", "threshold", "sensitivity", "false alarms per scan", "lesions", "scans"]
        return [Table(f"FROC of {self.score}", head, lines)] if lines else []


class Predictions(msgspec.Struct, frozen=True):
    """What a score says of N patients, beside what happened."""

    p: Floats  # (N, M) predictions, or scores of each patient such as a Dice
    y: Floats  # (N, L) outcomes
    classes: Floats | None  # (N, K) 1, 0 or NaN, if there must be enough patients of each class
    # returns how good (N, M) are for (N, L), or how much better than a third
    judge: Callable[[Floats, Floats, Floats | None], Mapping[str, Estimate]]

    @property
    def known(self) -> NDArray[np.bool_]:
        """(N,) whether both are known."""
        return np.asarray(~(np.isnan(self.p).all(axis=1) | np.isnan(self.y).all(axis=1)))

    def are_few(self, some: NDArray[np.bool_]) -> bool:
        """Whether too few of some patients are of every class."""
        return self.classes is not None and not _frequent(self.classes[some])

    def numbers(self, some: NDArray[np.bool_], other: Floats | None = None) -> dict[str, Estimate]:
        """Returns how good they are of some patients, less how good another's (N, M) are."""
        q = None if other is None else other[some]
        scores = self.judge(self.p[some], self.y[some], q)
        return {n if q is None else f"− {n}": estimate for n, estimate in scores.items()}


def _frequent(y: Floats) -> list[int]:
    """The columns of (N, K) labels that have enough patients with and without."""
    fewest = np.minimum((y == 1).sum(axis=0), (y == 0).sum(axis=0))
    return np.flatnonzero(fewest >= CATEGORY).tolist()


def _of_labels(
    names: Sequence[str], exclusive: bool, p: Floats, y: Floats, q: Floats | None
) -> dict[str, Estimate]:
    """Areas of each class against the others and their mean, and losses of all classes."""
    some, numbers = _frequent(y), dict[str, Estimate]()
    each = discrimination.areas(p[:, some], None if q is None else q[:, some], y[:, some])
    if len(some) == y.shape[1]:
        numbers["AUROC"] = each[-1]
    if names:
        pairs = zip(some, each, strict=False)
        numbers |= {f"AUROC of {names[k]}": estimate for k, estimate in pairs}
    losses, others = (None if of is None else _losses(of, y, exclusive) for of in (p, q))
    assert losses is not None
    for name, values in losses.items():
        numbers[name] = discrimination.mean_of(values - (0 if others is None else others[name]))
    return numbers


def _losses(p: Floats, y: Floats, exclusive: bool) -> dict[str, Floats]:
    """(N,) losses by name: of findings the mean of those known; of classes as for training."""
    each = {"Brier score": (p - y) ** 2, "log loss": discrimination.log_losses(p, y)}
    if not exclusive:
        return {name: np.nanmean(of, axis=1) for name, of in each.items()}
    right = np.take_along_axis(p, y.argmax(axis=1)[:, None], axis=1)
    return {
        "accuracy": (p.argmax(axis=1) == y.argmax(axis=1)).astype(float),
        "Brier score": each["Brier score"].sum(axis=1) / 2,
        "log loss": discrimination.log_losses(right, np.ones_like(right))[:, 0],
    }


def _of_probabilities(p: Floats, y: Floats, q: Floats | None) -> dict[str, Estimate]:
    numbers = _of_labels((), False, p, y, q)
    if q is None:
        with suppress(DataError):  # a score that tells all patients apart has no slope
            numbers |= discrimination.calibration(p[:, 0], y[:, 0])
    return numbers


def _of_numbers(p: Floats, y: Floats, q: Floats | None) -> dict[str, Estimate]:
    apart = (p - y)[:, 0]
    if q is not None:
        return {_ERROR: discrimination.mean_of(np.abs(apart) - np.abs(q - y)[:, 0])}
    squares = discrimination.mean_of(apart**2)
    root = math.sqrt(squares.value)
    rmse = Estimate(root, squares.error / (2 * root) if root else 0.0)
    return {_ERROR: discrimination.mean_of(np.abs(apart)), "root mean squared error": rmse}


def _of_risks(p: Floats, y: Floats, q: Floats | None) -> dict[str, Estimate]:
    other = None if q is None else q[:, 0]
    return {"concordance": discrimination.concordance(p[:, 0], y[:, 0], y[:, 1], other)}


def _of_scores(names: Sequence[str], p: Floats, y: Floats, q: Floats | None) -> dict[str, Estimate]:
    apart = (p if q is None else p - q).T
    each = {n: of[~np.isnan(of)] for n, of in zip(names, apart, strict=True)}
    return {n: discrimination.mean_of(of) for n, of in each.items() if len(of) >= LEAST}


def _limits(what: str) -> parts.Limits:
    """Between which a number of this name lies, or a difference of two such numbers.

    Example:
        >>> _limits("AUROC of mild"), _limits("− AUROC"), _limits("log loss"), _limits("slope")
        ((0.0, 1.0), (-1.0, 1.0), (0.0, inf), (-inf, inf))
    """
    name = what.removeprefix("− ")
    if name.startswith(_SHARES):
        return parts.SHARE if name == what else (-1.0, 1.0)
    return (0.0, math.inf) if what.startswith(_POSITIVE) else parts.ANY


def _written(what: str, number: tuple[float, float] | None) -> str:
    """Writes a number with its interval."""
    if number is None:
        return "–"
    _, value, low, high = parts.interval(what, *number, _limits(what))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
