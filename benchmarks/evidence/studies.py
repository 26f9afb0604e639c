"""How near the statistics of ``medfed study`` are to those of all rows, by statsmodels and SciPy.

python benchmarks/evidence/studies.py /path/to/ist.csv takes the International Stroke Trial's
hospitals of at least 200 patients and prints a table in Markdown: each statistic, what travels,
and the largest difference from the same statistic of the pooled rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import statsmodels.api as sm
from scipy import stats

from medfed.config.compose import build, described
from medfed.functional import pooled
from medfed.studies.cohorts import hospital_rows
from medfed.studies.plan import Model, Plan, Survival
from medfed.studies.rows import Rows
from medfed.studies.simulation import simulated

Row = tuple[str, str, str]
_ENDS = (19, 45)
_LAST = 180.0  # days


def main() -> None:
    """Reads the hospitals and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--least", type=int, default=200, help="patients of a hospital")
    given = parser.parse_args()
    whole = [
        *("experiment=stroke_survival", f"data.path={given.table}", "data.scaling=client"),
        *(f"partition.patients=[{given.least},1000000]", "data.features=[AGE,SEX,RSBP,RATRIAL]"),
    ]
    data = build(described(whole).data)
    data.plan()
    hospitals = hospital_rows(data)
    began = time.process_time()
    rows = list(compared(hospitals))
    patients = sum(len(r.patients) for r in hospitals.values())
    print(
        f"{len(hospitals)} hospitals, {patients} patients, {time.process_time() - began:.1f} CPU s"
    )
    print("| statistic | what travels | largest difference from all rows |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def compared(hospitals: dict[str, Rows]) -> Iterator[Row]:
    """Yields the rows of the table."""
    age, sex = (np.concatenate([r.columns[n] for r in hospitals.values()]) for n in ("AGE", "SEX"))
    times = np.concatenate([np.stack(r.times(), axis=1) for r in hospitals.values()])
    place = np.repeat(np.arange(len(hospitals)), [len(r.patients) for r in hospitals.values()])
    male = sex == hospitals[next(iter(hospitals))].categories["SEX"].index("M")
    groups = [age[~male & ~np.isnan(age)], age[male & ~np.isnan(age)]]
    for cells in _ENDS:
        ends = np.linspace(15, 105, cells + 1).tolist()
        plan = Plan({"AGE": ends, "SEX": ["F", "M"]}, by="SEX").check("plan")
        lines = {str(line[0]): line[1:] for line in simulated(plan, hospitals)[0][0].lines}
        if cells == _ENDS[0]:
            known = [np.concatenate(groups), *groups]
            gap = max(abs(float(m) - k.mean()) for m, k in zip(lines["mean"], known, strict=True))
            yield "mean", "a count and two sums", f"{gap:.1g}"
            pairs = zip(lines["standard deviation"], known, strict=True)
            gap = max(abs(float(s) - k.std(ddof=1)) for s, k in pairs)
            yield "standard deviation", "the same", f"{gap:.1g}"
        quartiles = {"lower quartile": 0.25, "median": 0.5, "upper quartile": 0.75}
        every = np.concatenate(groups)
        gap = max(abs(float(lines[n][0]) - np.quantile(every, q)) for n, q in quartiles.items())
        yield f"quartiles of age, {cells} bins", "counts by bin", f"{gap:.2g} years"
        counts = np.stack([np.histogram(g, [*ends[:-1], np.inf])[0] for g in groups], axis=1)
        ours, theirs = pooled.kruskal_wallis(counts).statistic, stats.kruskal(*groups).statistic
        yield f"Kruskal–Wallis, {cells} bins", "the same by group", f"{ours:.2f} for {theirs:.2f}"
    yield from _of_survival(hospitals, times, male)
    yield from _of_regressions(hospitals, age, male, place, times)


def _of_survival(hospitals: dict[str, Rows], times: np.ndarray, male: np.ndarray) -> Iterator[Row]:
    theirs = sm.SurvfuncRight(times[:, 0], times[:, 1])
    last = np.minimum(times[:, 0], _LAST)
    test, _ = sm.duration.survdiff(last, times[:, 1] * (times[:, 0] <= _LAST), male)
    for cells in (8, 18):
        ends = np.linspace(10, _LAST, cells).tolist()
        plan = Plan({"SEX": ["F", "M"]}, survival=Survival(ends)).check("plan")
        lines = next(t for t in simulated(plan, hospitals)[0] if t.title == "Survival").lines
        gaps = []
        for _, end, _, share, _ in lines:
            before = theirs.surv_times <= float(end)
            gaps.append(abs(float(share) - theirs.surv_prob[before][-1]))
        yield f"survival, {cells} intervals", "events and leavings", f"{max(gaps):.1g}"
        plan = Plan({"SEX": ["F", "M"]}, survival=Survival(ends, by="SEX")).check("plan")
        ours = next(t for t in simulated(plan, hospitals)[0] if t.title == "Log-rank test")
        found = float(ours.lines[0][0])
        yield f"log-rank, {cells} intervals", "the same by group", f"{found:.2f} for {test:.2f}"


def _of_regressions(
    hospitals: dict[str, Rows],
    age: np.ndarray,
    male: np.ndarray,
    place: np.ndarray,
    times: np.ndarray,
) -> Iterator[Row]:
    known = ~np.isnan(age)
    dummies = np.eye(len(hospitals))[place[known]]
    x = np.stack([age[known], male[known]], axis=1)
    for family, name in ((sm.families.Binomial(), "logistic"), (sm.families.Poisson(), "poisson")):
        y = times[known, 1]
        design = np.concatenate([x, dummies], axis=1)
        theirs = sm.GLM(y, design, family=family).fit(tol=1e-13, maxiter=100)
        with_event = {
            n: Rows({**r.columns, "event": r.times()[1]}, r.categories, r.survival, r.patients)
            for n, r in hospitals.items()
        }
        model = Model(["AGE", "SEX"], name, outcome="event")  # type: ignore[arg-type]
        columns = {"AGE": [15, 105], "SEX": ["F", "M"], "event": ["0", "1"]}
        if name == "poisson":
            columns["event"] = [0, 1, 2]
        plan = Plan(columns, models=[model]).check("plan")  # type: ignore[arg-type]
        (table,) = (t for t in simulated(plan, with_event)[0] if "regression" in t.title)
        ours = np.array([[float(v) for v in line[1:3]] for line in table.lines])
        gap = np.abs(ours / np.stack([theirs.params[:2], theirs.bse[:2]], axis=1) - 1).max()
        yield f"{name}, an intercept per hospital", "5 numbers a step", f"{gap:.0e}, relative"
    for cells in (8, 18):
        ends = np.linspace(10, _LAST, cells).tolist()
        plan = Plan(
            {"AGE": [15, 105], "SEX": ["F", "M"]},
            survival=Survival(ends),
            models=[Model(["AGE", "SEX"], "hazard")],
        ).check("plan")
        (table,) = (t for t in simulated(plan, hospitals)[0] if "regression" in t.title)
        last = np.minimum(times[known, 0], ends[-1])
        event = (times[known, 1] == 1) & (times[known, 0] <= ends[-1])
        beside = np.concatenate([x, dummies[:, 1:]], axis=1)
        cox = sm.PHReg(last, beside, event, ties="efron").fit()
        gap = max(
            abs(float(line[1]) - b) / e
            for line, b, e in zip(table.lines, cox.params, cox.bse, strict=False)
        )
        yield f"hazard, {cells} intervals", "as above, and intervals", f"{gap:.2f} errors of Cox'"


if __name__ == "__main__":
    main()
