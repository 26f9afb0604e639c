"""The plan of a study: what hospitals agree to count and to sum, before anything is counted.

The ends of bins and the names of categories stand in the plan, so that they say nothing about the
patients of any one hospital.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from medfed.common import schemas, untrusted
from medfed.common.floors import CATEGORY, LEAST, TIMES
from medfed.datamodules.splits import SPLITS, Split
from medfed.functional.pooled import Family
from medfed.records.bundles import manifest_hash, remembers_cases
from medfed.standalone.errors import ConfigError, did_you_mean
from medfed.studies.rows import OUTCOME, Floats, Rows

_log = logging.getLogger(__name__)
_CODES = 6  # values of a column that count as categories
_BESIDE = 5  # numbers of a column, beside its bins
_LEAST_NUMBERS = 8  # of a column in two bins, by group
_BINS, _FINE = 20, (1.0, 2.0, 2.5, 5.0, 10.0)
_OUTER = (0.1, 0.9)  # quantiles between which the bins of a suggestion are narrow


class Survival(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Curves of survival until the ends of intervals of time, by the categories of a column."""

    ends: Annotated[list[schemas.Number], msgspec.Meta(min_length=2, max_length=1000)]
    by: str | None = None


class Model(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A regression of the outcome, a column of 0 and 1 or of counts, on columns."""

    # the columns; a category stands against the first of its column
    of: Annotated[list[str], msgspec.Meta(min_length=1, max_length=30)]
    family: Family = "logistic"  # see :class:`medfed.functional.pooled.Regression`
    outcome: str = OUTCOME  # the column that is explained; ``hazard`` takes the times and events
    # ``hospital``: each has its own; ``common``: all have one
    intercept: Literal["hospital", "common"] = "hospital"
    # ``sums`` of all hospitals, or ``estimates``: each hospital fits the model by itself, and
    # a meta-analysis joins the coefficients
    join: Literal["sums", "estimates"] = "sums"

    @property
    def answer(self) -> str:
        """What is explained."""
        return "survival" if self.family == "hazard" else self.outcome


class Bundle(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A model that is evaluated."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,40}$")]
    # SHA-256 of the bundle's ``configs/manifest.json``, by which hospitals know it
    manifest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    path: str | None = None  # its folder, at the coordinator alone


_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Evaluation(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Scores that are compared with what happened."""

    # columns of predictions, such as probabilities of the outcome's second category, and
    # names of bundles; none: all bundles, and the reference
    scores: Annotated[list[str], msgspec.Meta(max_length=20)] = []
    # a column of two categories, or of 0 and 1; of numbers, what scores predict
    outcome: str = OUTCOME
    reference: str | None = None  # the score that is in use, against which the others are judged
    # by how much the Brier score, Dice, concordance or error (in the outcome's unit) may be
    # worse than that of the reference
    margin: Annotated[float, msgspec.Meta(gt=0)] = 0.02
    by: list[str] = []  # columns of categories whose groups are evaluated, too
    # of models of lesions, the scores from which their boxes count
    thresholds: Annotated[list[_Share], msgspec.Meta(max_length=30)] = []
    # of histograms under masks for pooled areas and calibration; ``None``: without
    cells: Annotated[int, msgspec.Meta(ge=10, le=100, multiple_of=10)] | None = None


class Plan(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A study of statistics."""

    # by name the ends of the bins of a column of numbers, or the names of categories
    columns: dict[str, list[schemas.Number | str]] = {}
    kind: Literal["statistics"] = "statistics"
    by: str | None = None  # a column of categories whose groups the tables compare
    survival: Survival | None = None
    models: list[Model] = []
    evaluate: Evaluation | None = None  # the scores that are evaluated, if any
    # the fewest patients of a hospital that takes part
    least: Annotated[int, msgspec.Meta(ge=LEAST)] = LEAST
    # models, whose predictions become scores
    bundles: Annotated[list[Bundle], msgspec.Meta(max_length=20)] = []
    # of whom all numbers are; ``None``: of those of the test if there are bundles, as one may
    # have been trained on the others, else of all
    patients: Literal["all", "test"] | None = None

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits whose patients count."""
        usual = "test" if self.bundles else "all"
        return ("test",) if (self.patients or usual) == "test" else SPLITS

    @property
    def agreed(self) -> Plan:
        """The plan as hospitals agree on it: without paths."""
        return replace(self, bundles=[replace(one, path=None) for one in self.bundles])

    def check(self, source: object) -> Plan:
        """Returns the plan if its parts fit each other."""
        for fault in self._faults():
            raise ConfigError(f"{source}{fault}")
        return self

    def _faults(self) -> Iterator[str]:
        lists = {f"columns.{n}": ends for n, ends in self.columns.items()}
        if self.survival is not None:
            lists["survival.ends"] = [*self.survival.ends]
        for key, ends in lists.items():
            if len(ends) < 2 or len({*map(str, ends)}) < len(ends):
                yield f", {key}: list two or more different values."
            numbers = [end for end in ends if not isinstance(end, str)]
            if numbers and (len(numbers) < len(ends) or any(a >= b for a, b in pairwise(numbers))):
                yield (
                    f", {key}: list the ends of bins in increasing order, or the names of "
                    'categories, in quotation marks where they are numbers: ["1", "2"].'
                )
        grouped = [self.by, self.survival.by if self.survival else None]
        if (evaluation := self.evaluate) is not None:
            grouped += evaluation.by
            if not evaluation.scores:
                yield ": evaluate has no scores; list columns or bundles."
            if len({*evaluation.thresholds}) < len(evaluation.thresholds):
                yield ": evaluate.thresholds has a value twice; leave one out."
            if evaluation.cells and len(self.groups(evaluation.outcome)) != 2:
                yield f": cells need the two names of {evaluation.outcome} in columns."
            if evaluation.reference not in (None, *evaluation.scores):
                yield f": the reference {evaluation.reference} is none of the scores."
        for name in grouped:
            if name is not None and not self.groups(name):
                yield (
                    ": groups are those of a column with categories; list the names of "
                    f"{name} under columns."
                )
        if len({bundle.name for bundle in self.bundles}) < len(self.bundles):
            yield ": two bundles have one name."
        for model in self.models:
            for name in [*model.of, *([] if model.family == "hazard" else [model.outcome])]:
                if name not in {*self.columns, OUTCOME}:  # whose categories the data know
                    yield f": a model names {name}; list it under columns."
            if model.family == "hazard" and self.survival is None:
                yield ": a model of hazards needs survival.ends."
            if model.outcome in model.of:
                yield f": a model explains {model.outcome} by itself."
        if not (self.columns or self.survival or self.models or self.evaluate):
            yield " asks for nothing; list columns, or what to evaluate."

    def completed(self) -> Plan:
        """Returns the plan with scores by name: bundles and the reference, unless it has some."""
        evaluation = self.evaluate or (Evaluation() if self.bundles else None)
        if evaluation is None or evaluation.scores:
            return self
        names = [*(bundle.name for bundle in self.bundles), *filter(None, [evaluation.reference])]
        return replace(self, evaluate=replace(evaluation, scores=[*dict.fromkeys(names)]))

    def groups(self, name: str | None) -> tuple[str, ...]:
        """The categories of a column; none for numbers and for no column."""
        return tuple(v for v in self.columns.get(name or "", ()) if isinstance(v, str))

    def ends(self, name: str) -> tuple[float, ...]:
        """The ends of a column's bins; none for categories."""
        return tuple(float(v) for v in self.columns[name] if not isinstance(v, str))


_KEYS = {n for of in (Plan, Survival, Model, Bundle, Evaluation) for n in of.__struct_fields__}
_CHOICES = {"family": get_args(Family), "join": ("sums", "estimates")}
_CHOICES |= {"intercept": ("hospital", "common"), "patients": ("all", "test")}
_CORRECT = "correct it by the example in docs/study.md; spaces indent lines, tabs do not"


def read_plan(path: Path) -> Plan:
    """Reads a plan."""
    if not path.is_file():
        raise ConfigError(f"The plan {path} is no file; medfed study without a plan writes one.")
    plan, bundles = plan_of(untrusted.read_yaml(path, what_to_do=_CORRECT), path), []
    for bundle in plan.bundles:
        if bundle.path is None:
            raise ConfigError(f"{path}: name the folder of the bundle {bundle.name} by path.")
        folder = (path.parent / Path(bundle.path).expanduser()).resolve()
        manifest = manifest_hash(folder)
        if bundle.manifest not in (None, manifest):
            raise ConfigError(
                f"{path}: the bundle {bundle.name} in {folder} has the manifest {manifest}, and "
                "the plan names another; correct manifest or path."
            )
        if "train" in plan.splits and remembers_cases(folder):
            _log.warning(
                "The model %s remembers cases of its training, so its numbers on them mean "
                "nothing; set patients: test in %s.",
                *(bundle.name, path),
            )
        bundles.append(replace(bundle, manifest=manifest, path=str(folder)))
    return replace(plan, bundles=bundles)


def plan_of(content: Mapping[str, Any], source: object) -> Plan:
    """Returns plain content as a plan."""
    try:
        plan = schemas.fit(content, Plan)
    except ValueError as error:
        why = _fault(content, str(error))
        raise ConfigError(f"{source} is no plan of a study: {why}.") from error
    return plan.completed().check(source)


def _fault(content: Mapping[str, Any], why: str) -> str:
    """Says more about what does not fit a plan."""
    for name, ends in content["columns"].items() if why.startswith("columns[...][") else ():
        try:
            schemas.fit(ends, list[schemas.Number | str])
        except ValueError as error:
            return (
                f"columns.{name}{error}; list finite ends of bins, or names, in quotation marks "
                'where YAML would read them otherwise: ["yes", "no"]'
            )
    (*_, key) = re.findall(r"\w+", why.removesuffix(" is unknown").partition(":")[0])
    if why.endswith(" is unknown"):
        return why + did_you_mean(key, _KEYS)
    return f"{why}; choose {' or '.join(_CHOICES[key])}" if key in _CHOICES else why


def suggested(hospitals: Mapping[str, Rows]) -> Plan:
    """Returns a plan of all columns for data that lie in one place: bins of about equal counts."""
    # Across hospitals the plan is written by hand, or taken from public data: its ends and
    # names would say what one hospital has.
    there = [of for of in hospitals.values() if len(np.unique(of.patients)) >= LEAST]
    there = there or [*hospitals.values()]
    first, everyone = there[0], sum(len(np.unique(rows.patients)) for rows in there)
    by = OUTCOME if OUTCOME in first.categories else None
    groups = 1 + len(first.categories.get(OUTCOME, "1"))
    if everyone < TIMES * groups * _LEAST_NUMBERS:  # too few to compare
        by, groups = None, 2
    columns: dict[str, list[float | str]] = {}
    for name in first.columns:
        known = [~np.isnan(rows.columns[name]) for rows in there]
        values = np.concatenate([of.columns[name][k] for of, k in zip(there, known, strict=True)])
        patients = sum(len(np.unique(of.patients[k])) for of, k in zip(there, known, strict=True))
        # As many numbers as hospitals answer: of patients in groups, and of those in none.
        most = patients // (TIMES * (2 if name == by else groups)) - _BESIDE
        if texts := first.categories.get(name):
            counts = np.bincount(values.astype(int), minlength=len(texts))
            often = sorted(np.argsort(-counts, kind="stable")[: max(2, most + _BESIDE - 2)])
            frequent = [texts[n] for n in often if counts[n] >= CATEGORY]
            if len(frequent) > 1:
                columns[name] = [*frequent]
        elif 1 < len(few := np.unique(values)) <= _CODES:
            columns[name] = [f"{value:.12g}" for value in few]
        elif len(few) > 1:
            columns[name] = _ends_of(values, max(2, min(_BINS, most)))
            if (few == np.rint(few)).all():  # a bin of one whole number has it in its middle
                columns[name] = sorted({float(np.ceil(end)) - 0.5 for end in columns[name]})
    survival, each = None, [rows.survival[:, 0] for rows in there if rows.survival is not None]
    if each and len(np.unique(times := np.concatenate(each))) > 1:
        # Events and leavings of each interval, of patients and of those in no group.
        ends = _ends_of(times, max(2, min(_BINS, everyone // (4 * TIMES) - 1)))[1:]
        survival = Survival(ends if len(ends) > 1 else [ends[0] / 2, *ends])
    return Plan(columns, by=by if by in columns else None, survival=survival)


def _ends_of(values: Floats, bins: int) -> list[Any]:
    """Round ends of bins that hold all values: near quantiles, so that outliers are in the last."""
    low, high = float(values.min()), float(values.max())
    inner = np.unique(np.quantile(values, np.linspace(*_OUTER, bins - 1) if bins > 2 else [0.5]))
    inner = inner[(inner > low) & (inner < high)]
    gaps = np.diff([low, *inner, high])
    first, last = _round_step(gaps[0]), _round_step(gaps[-1])
    start, end = _plain(np.floor(low / first), first), _plain(np.floor(high / last) + 1, last)
    steps = map(_round_step, np.minimum(gaps[:-1], gaps[1:]))
    rounded = {_plain(np.rint(q / step), step) for q, step in zip(inner, steps, strict=True)}
    return [start, *sorted(q for q in rounded if start < q < end), end]


def _round_step(gap: float) -> float:
    """The largest round number up to half of a gap."""
    unit = 10.0 ** np.floor(np.log10(gap / 2))
    return float(max(f for f in _FINE if f * unit <= gap / 2 * (1 + 1e-9)) * unit)


def _plain(count: float, step: float) -> float:
    """A multiple without the last digits of binary numbers."""
    return float(f"{count * step:.12g}")
