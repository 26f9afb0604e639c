"""Hospitals with a table each, for studies of statistics."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from medfed.config.compose import build, described
from medfed.delivery.main import open_bundle
from medfed.sites.calls import Caller
from medfed.sites.policy import NO_LIMITS, Counted, Policy
from medfed.sites.studying import Conductor, StudyPlace, StudySite
from medfed.studies.cohorts import Cohort, hospital_rows
from medfed.studies.plan import Evaluation, Model, Plan
from medfed.studies.simulation import simulated
from tests.sites.direct import Direct
from tests.sites.hospitals import QUICK
from tests.sites.toy_sites import opened

NAMES = ["alpha", "beta", "gamma", "delta"]
HEAD = ["id", "centre", "age", "sex", "score", "dead"]
PLAN = Plan(
    {"age": [*range(20, 121, 10)], "sex": ["f", "m"], "outcome": ["0", "1"]},
    by="outcome",
    models=[Model(["age", "sex"]), Model(["age"], join="estimates")],
    evaluate=Evaluation(["score"]),
).check("plan")
KEYS = ["data=csv", "data.label=dead", "data.patient=id", "data.centre=centre", "partition=centre"]


def rows(name: str, size: int = 150):
    rng = np.random.default_rng(len(name) + ord(name[0]))
    for n in range(size):
        age, sex = int(rng.normal(65, 12)), "fm"[rng.integers(2)]
        p = 1 / (1 + np.exp(-(age - 65) / 10))
        yield [f"{name}{n}", name, age, sex, round(float(p), 3), int(rng.random() < p)]


def write(path: Path, lines) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([HEAD, *lines])
    return path


def written(folder: Path) -> Path:
    """Writes the table of each hospital, and that of all."""
    for name in NAMES:
        write(folder / f"{name}.csv", rows(name))
    write(folder / "all.csv", [line for name in NAMES for line in rows(name)])
    return folder


def place(tables: Path, name: str, plan: Plan = PLAN, policy: Policy = NO_LIMITS) -> StudyPlace:
    config = described([*KEYS, f"data.path={tables / f'{name}.csv'}"])
    return StudyPlace(config, plan, name, NAMES, policy, open_bundle=open_bundle)


def sites(tables: Path, folder: Path, plan: Plan = PLAN, **policies: Policy) -> Direct:
    return Direct(
        {
            name: StudySite(
                place(tables, name, plan, policies.get(name, NO_LIMITS)),
                folder / name,
                counted=Counted(folder / name / "answered.json", "agreement"),
            )
            for name in NAMES
        }
    )


def conducted(transport, plan: Plan = PLAN, bundles: Mapping[str, bytes] | None = None):
    caller = opened(Caller(transport, NAMES, QUICK))
    conductor = Conductor(caller, plan, "job", bundles or {})
    return conductor.run(), conductor.remarks


def simulation(tables: Path, plan: Plan = PLAN, without: str = ""):
    data = build(described([*KEYS, f"data.path={tables / 'all.csv'}"]).data)
    data.plan()
    each = hospital_rows(data, plan)
    models = {one.name: open_bundle(Path(str(one.path))) for one in plan.bundles}
    there = [name for name in NAMES if name != without]
    rows = {c: Cohort(data, c, plan.splits).with_predictions(each[c], models) for c in there}
    return simulated(plan, rows)[0]


def plain(found):
    return [(t.title, [*t.head], [[*line] for line in t.lines]) for t in found]
