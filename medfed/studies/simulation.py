"""How a study is asked, and one of hospitals whose rows lie in one place: the same integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from medfed.common.floors import LEAST, TIMES
from medfed.datamodules.splits import SPLITS
from medfed.federation.wire.fixed_point import FEWEST
from medfed.functional.pooled import result_of
from medfed.standalone.errors import ConfigError, DataError, few
from medfed.studies.describing import Column, Curves
from medfed.studies.evaluating import Areas, Detections, Scores
from medfed.studies.parts import Estimates, Groups, Part, Separate, State, Table, Whole
from medfed.studies.plan import Plan
from medfed.studies.regressions import ByHospital, Coefficients
from medfed.studies.rows import Rows


def parts(plan: Plan) -> Iterator[Part | Separate]:
    """Yields the parts of a plan."""
    for name in plan.columns:
        by = plan.by if plan.by != name else None
        yield Column(name, Groups(by, plan.groups(by)), plan.groups(name), plan.ends(name))
    if plan.survival is not None:
        by = plan.survival.by
        yield Curves(tuple(plan.survival.ends), Groups(by, plan.groups(by)))
    for model in plan.models:
        yield (Coefficients if model.join == "sums" else ByHospital)(model, plan)
    if plan.evaluate is not None:
        yield Scores(plan.evaluate, plan)
        groups = Groups(plan.evaluate.outcome, plan.groups(plan.evaluate.outcome))
        if cells := plan.evaluate.cells:
            ends = tuple(np.linspace(0, 1, cells + 1).tolist())
            yield from (Areas(score, groups, ends=ends) for score in plan.evaluate.scores)
        if levels := tuple(plan.evaluate.thresholds):
            yield from (Detections(score, levels) for score in plan.evaluate.scores)


def answered(part: Part | Separate, ask: Callable[[Any, int, State], Any]) -> list[Table]:
    """Returns the results of a part; hospitals give their estimates, or the total of a step."""
    if isinstance(part, Separate):
        return part.join(ask(part, 0, ()))
    steps = count()
    tables: list[Table] = result_of(part.talk(), lambda state: ask(part, next(steps), state))
    return tables


def simulated(plan: Plan, hospitals: Mapping[str, Rows]) -> tuple[list[Table], list[str]]:
    """Answers a plan."""
    sizes = {name: len(np.unique(rows.patients)) for name, rows in hospitals.items()}
    small = [f"{name} ({size})" for name, size in sizes.items() if size < plan.least]
    hospitals = {name: rows for name, rows in hospitals.items() if sizes[name] >= plan.least}
    who = "patients" if plan.splits == SPLITS else "test patients"
    remarks = [f"Left out, with fewer than {plan.least} {who}: {few(small)}."] if small else []
    if not hospitals:
        more = "lower 'least' in the plan" if plan.least > LEAST else "join small hospitals"
        everyone = "set 'patients: all' in the plan, if no bundle has learned from these patients"
        raise ConfigError(
            f"No hospital has {plan.least} {who}; a study needs one, and three for sums: "
            f"{more if plan.splits == SPLITS else everyone}."
        )
    rows = sum(len(one.patients) for one in hospitals.values())
    patients = sum(sizes[name] for name in hospitals)
    if rows > patients:
        remarks.append(
            f"{rows} rows are of {patients} patients, and each counts as a patient: p-values are "
            "too small and intervals too narrow. Keep one row of each."
        )
    if len(hospitals) < FEWEST:
        remarks.append(
            "Across hospitals, sums need three of them: of two, each would know the other's. Ask "
            "for models with join: estimates."
        )
    remarks += whole_numbers(plan, [*hospitals.values()])
    tables: list[Table] = []
    for part in parts(plan):
        if isinstance(part, Coefficients):
            designs = [Coefficients.design(part, rows) for rows in hospitals.values()]
            lost = patients - sum(len(np.unique(one.patients)) for one in designs)
            of = f"{part.name} on {', '.join(part.model.of)}: {lost} of {patients} patients"
            remarks += [f"{of} have a missing or unlisted cell and are left out."] * bool(lost)
        tables += answered(part, partial(_answers, hospitals, remarks))
    return tables, list(dict.fromkeys(remarks))


def whole_numbers(plan: Plan, hospitals: Sequence[Rows]) -> Iterator[str]:
    """Names columns of whole numbers whose bins begin at them, which moves their quartiles."""
    for name in plan.columns:
        ends = np.array(plan.ends(name))
        if len(ends) > 2 and np.diff(ends).min() <= 1 and (ends == np.rint(ends)).all():
            of = np.concatenate([rows.column(name) for rows in hospitals])
            if (np.isnan(of) | (of == np.rint(of))).all():
                what = f"{name} holds whole numbers, and its bins begin at them, so its quartiles"
                mend = f"let bins begin a half lower ({ends[0] - 0.5:g}), or put codes in quotation"
                yield f"{what} are up to 1 too high: {mend} marks."


def _answers(
    hospitals: Mapping[str, Rows], remarks: list[str], part: Part | Separate, _: int, state: State
) -> Whole | dict[str, Estimates]:
    """Hospitals' estimates, or their total, with remarks on what they would refuse or clip."""
    if isinstance(part, Separate):
        return {name: part.estimate(rows) for name, rows in hospitals.items()}
    sums = []
    for name, rows in hospitals.items():
        try:
            sums.append(part.ask(rows, state))
        except DataError as error:
            raise DataError(f"{name} refuses. {error}") from error
    total: Whole = np.sum([one.whole for one in sums], axis=0)
    patients, clipped = (sum(each) for each in zip(*(one[1:] for one in sums), strict=True))
    refuses = f"Hospitals would refuse {part.name}: "
    is_said = any(remark.startswith(refuses) for remark in remarks)  # of an earlier step
    if patients < max(LEAST, TIMES * len(total)) and not is_said:
        remarks.append(
            f"{refuses}{len(total)} numbers of {patients} patients; {TIMES} patients must "
            "stand behind each. List fewer bins or categories, compare no groups by 'by', or "
            "name fewer columns in a model."
        )
    if clipped:
        remarks.append(
            f"{part.name}: {clipped} values lie far beyond the bins of the plan and count as "
            "the furthest; check their unit, or widen the bins."
        )
    return total
