"""Hospitals with a table each, for studies of statistics."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from medfed.config.compose import build, described, load
from medfed.config.description import checked
from medfed.delivery.main import export, open_bundle
from medfed.sites.calls import Caller
from medfed.sites.policy import NO_LIMITS, Counted, Policy
from medfed.sites.studying import Conductor, StudyPlace, StudySite
from medfed.studies.cohorts import hospital_rows
from medfed.studies.plan import Evaluation, Model, Plan
from medfed.studies.simulation import simulated
from tests.integration.runs import run
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
    rng = np.random.default_rng(len(name) + ord(name[0]) + sum(map(int, filter(str.isdigit, name))))
    for n in range(size):
        age, sex = int(rng.normal(65, 12)), "fm"[rng.integers(2)]
        p = 1 / (1 + np.exp(-(age - 65) / 10))
        yield [f"{name}{n}", name, age, sex, round(float(p), 3), int(rng.random() < p)]


def write(path: Path, lines) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([HEAD, *lines])
    return path


def written(folder: Path, names: Sequence[str] = NAMES) -> Path:
    """Writes the table of each hospital, and that of all."""
    for name in names:
        write(folder / f"{name}.csv", rows(name))
    write(folder / "all.csv", [line for name in names for line in rows(name)])
    return folder


def exported(tables: Path, folder: Path, client: str = "alpha") -> Path:
    """Returns the bundle of a model that was trained on the tables."""
    table = [*KEYS, f"data.path={tables / 'all.csv'}", "data.drop=[score]"]
    short = ["algorithm=fedavg", "rounds=2", "local.steps=5", "logger=none", "progress=false"]
    run(folder / "run", *table, *short, "model=logistic")
    keys = [f"run={folder / 'run'}", f"out={folder / 'bundles'}", f"client={client}"]
    return export(checked(load(keys, "export")))[0]


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


def simulation(tables: Path, plan: Plan = PLAN, without: str = "", names: Sequence[str] = NAMES):
    data = build(described([*KEYS, f"data.path={tables / 'all.csv'}"]).data)
    data.plan()
    models = {one.name: open_bundle(Path(str(one.path))) for one in plan.bundles}
    each = hospital_rows(data, plan, models)
    return simulated(plan, {name: each[name] for name in names if name != without})[0]


def plain(found):
    return [(t.title, [*t.head], [[*line] for line in t.lines]) for t in found]
