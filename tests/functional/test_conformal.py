"""Sets and intervals against loops over cases, and their coverage against its law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from medfed.config.compose import build, described
from medfed.functional.conformal import (
    ENOUGH,
    LEAST,
    SMALL,
    Covering,
    common,
    fewest,
    for_newcomer,
    quantile,
    range_of_coverage,
    volumes_within,
)
from medfed.functional.points import Chooser
from medfed.run.experiment import chooser_of
from medfed.standalone.errors import ConfigError

KINDS = ("classes", "outcome", "volumes")


def table(kind: str, patients: int, seed: int, most: int = 1, classes: int = 3) -> list[dict]:
    """Cases of patients, each with up to ``most``; of volumes two regions a patient."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for case in range(patients):
        for _ in range(rng.integers(1, most + 1)):
            if kind == "classes":
                chances = rng.dirichlet(np.ones(classes))
                label = int(rng.choice(classes, p=chances))
                odds = {f"probability/{k}": float(p) for k, p in enumerate(chances)}
                rows.append({"case": case, "label": label, **odds})
            elif kind == "outcome":
                at = float(rng.normal(50, 9))
                rows.append({"case": case, "label": at + rng.standard_t(3), "prediction": at})
            else:
                for region in ("whole", "core"):
                    of = int(rng.poisson(rng.choice([0, 40, 900])))
                    truth = int(rng.poisson(of * rng.lognormal(0, 0.4)))
                    row = {"case": case, "region": region, "predicted": of, "labelled": truth}
                    rows.append(row)
    return rows


def misfit(kind: str, row: dict) -> float:
    """The definition, in plain words of one case."""
    if kind == "classes":
        chances = [v for n, v in row.items() if n.startswith("probability/")]
        true = chances[row["label"]]
        return 0.0 if true == max(chances) else 1 - true
    if kind == "outcome":
        return abs(row["label"] - row["prediction"])
    low, high = sorted((row["labelled"] + SMALL, row["predicted"] + SMALL))
    return math.log(high / low)


def bound_of(kind: str, rows: list[dict], level: float) -> float:
    """The smallest misfit below which enough of all patients, and of one more, lie."""
    cases = sorted({row["case"] for row in rows})
    for bound in sorted(misfit(kind, row) for row in rows):
        inside = 0.0
        for case in cases:
            of = [row for row in rows if row["case"] == case]
            inside += sum(misfit(kind, row) <= bound for row in of) / len(of)
        if inside / (len(cases) + 1) >= level - 1e-12:
            return bound
    return math.inf


def covering(kind: str, level: float = 0.9, chooser: Chooser | None = None) -> Covering:
    parts = ("/whole", "/core") if kind == "volumes" else ("",)
    return Covering(level, kind, parts, chooser)


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("level", [0.8, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_sets_and_intervals_are_those_of_loops_over_cases(kind, level, most):
    rows = table(kind, ENOUGH, seed=1, most=1 if kind == "volumes" else most)
    tested = table(kind, 40, seed=2, most=1 if kind == "volumes" else most)
    chosen = covering(kind, level)
    point = chosen.choose(rows)
    metrics = chosen.apply(tested, point)
    for part in chosen.parts:
        of, test = ([r for r in t if r.get("region", "") == part[1:]] for t in (rows, tested))
        bound = point[f"quantile{part}"]
        expected = bound_of(kind, of, level)
        assert expected <= bound <= expected * 1.01  # rounded up, to three digits
        assert point[f"patients{part}"] == ENOUGH
        inside, sizes = [], []
        for row in test:
            if kind == "classes":
                chances = [v for n, v in row.items() if n.startswith("probability/")]
                held = [k for k, p in enumerate(chances) if p == max(chances) or 1 - p <= bound]
                inside.append(row["label"] in held)
                sizes.append(len(held))
            elif kind == "outcome":
                low, high = row["prediction"] - bound, row["prediction"] + bound
                inside.append(low <= row["label"] <= high)
                sizes.append(high - low)
            else:
                low, high = volumes_within(row["predicted"], bound)
                inside.append(low - 1e-9 <= row["labelled"] <= high + 1e-9)
                sizes.append(math.exp(bound))
        assert [row["covered"] for row in test] == inside
        name = {"classes": "set_size", "outcome": "width", "volumes": "factor"}[kind]
        assert [row[name] for row in test] == pytest.approx(sizes)
        cases = [row["case"] for row in test]
        weights = [1 / cases.count(case) / len({*cases}) for case in cases]
        coverage = sum(w * i for w, i in zip(weights, inside, strict=True))
        assert metrics[f"coverage{part}/point"] == pytest.approx(coverage)
        size = sum(w * s for w, s in zip(weights, sizes, strict=True))
        assert metrics[f"{name}{part}/point"] == pytest.approx(size)


@pytest.mark.parametrize(("patients", "level"), [(20, 0.9), (50, 0.9), (100, 0.95)])
def test_the_coverage_of_a_quantile_has_its_law(patients, level):
    """With misfits uniform in [0, 1] the bound is the coverage."""
    draws = np.random.default_rng(0).random((4000, patients))
    covers = [quantile(one, np.arange(patients), level) for one in draws]
    k = math.ceil((patients + 1) * level - 1e-9)
    assert stats.kstest(covers, stats.beta(k, patients + 1 - k).cdf).pvalue > 0.001
    low, high = range_of_coverage(patients, level)
    assert np.mean([low <= c <= high for c in covers]) == pytest.approx(0.9, abs=0.02)
    assert np.mean(covers) >= level - 0.005


def test_patients_with_several_cases_keep_the_level():
    """Cases of a patient are alike, and their numbers differ."""
    rng, covers = np.random.default_rng(1), []
    for _ in range(400):
        counts = rng.integers(1, 9, 61)
        of = np.repeat(np.arange(61), counts)
        misfits = rng.exponential(size=61)[of] * rng.uniform(0.8, 1.2, len(of))
        bound = quantile(misfits[of < 60], of[of < 60], 0.9)
        covers.append(np.mean(misfits[of == 60] <= bound))
    error = np.std(covers) / 20
    assert 0.9 - 3 * error < np.mean(covers) < 0.9 + 1 / 61 + 3 * error


def test_a_shared_quantile_is_the_mean_over_patients():
    chosen = covering("outcome")
    sizes = {"a": LEAST - 1, "b": LEAST, "c": 60, "d": ENOUGH}
    rows = {c: table("outcome", n, seed) for seed, (c, n) in enumerate(sizes.items())}
    alone = {c: chosen.choose(of) for c, of in rows.items()}
    assert "quantile" not in alone["a"]
    total, count = 0.0, 0
    for c in "bcd":
        misfits = sorted(abs(row["label"] - row["prediction"]) for row in rows[c])
        n = len(misfits)
        k = math.ceil((n + 1) * 0.9 - 1e-9) if n >= ENOUGH else (n + 1) * 0.9
        below = misfits[int(k) - 1]
        expected = below + (k - int(k)) * (misfits[min(int(k), n - 1)] - below)
        assert expected <= alone[c]["quantile"] <= expected * 1.01
        total, count = total + n * alone[c]["quantile"], count + n
    others = common(alone)
    assert total / count <= others["quantile"] <= total / count * 1.01
    final = {c: chosen.choose(of, others=others) for c, of in rows.items()}
    assert [final[c]["patients"] for c in "abcd"] == [0, 0, 0, ENOUGH]
    assert {final[c]["quantile"] for c in "abc"} == {others["quantile"]}
    assert final["d"] == alone["d"]
    assert for_newcomer(final) == others == for_newcomer({"a": final["a"]})
    assert for_newcomer({"d": final["d"]}) == {"quantile": final["d"]["quantile"]}


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_patients_and_failed_models(kind):
    chosen, tested = covering(kind), table(kind, 8, 3)
    assert chosen.choose([]) == chosen.choose(table(kind, LEAST - 1, 0)) == {"level": 0.9}
    assert all(math.isnan(v) for v in chosen.apply(tested, chosen.choose([])).values())
    assert all(math.isnan(v) for v in chosen.apply([], chosen.choose(table(kind, 30, 0))).values())
    assert {*tested[0]} > {"covered"}  # every row of a table has the same columns
    point = chosen.choose(table(kind, 30, 0))
    name = {"classes": "probability/0", "outcome": "prediction", "volumes": "predicted"}[kind]
    lost = [{**row, name: math.nan} for row in table(kind, 30, 4)]
    assert chosen.choose(lost) == {"level": 0.9}
    metrics = chosen.apply(lost, point)
    assert {v for n, v in metrics.items() if n.startswith("coverage")} == {0.0}


def test_a_finite_quantile_takes_more_patients_at_a_higher_level():
    for level in (0.5, 0.8, 0.9, 0.95, 0.99, 0.995):
        n = fewest(level, 1)
        assert math.ceil((n + 1) * level - 1e-9) <= n
        assert n == 1 or math.ceil(n * level - 1e-9) > n - 1


def test_sets_are_of_calibrated_probabilities():
    rows, tested = table("classes", 150, 5, classes=2), table("classes", 50, 6, classes=2)
    chosen = covering("classes", chooser=Chooser(2, "youden", "shift"))
    for row in [*rows, *tested]:  # far from the truth, as the model of another hospital
        odds = math.exp(1.5) * row["probability/1"] / row["probability/0"]
        row |= {"probability/1": odds / (1 + odds), "probability/0": 1 / (1 + odds)}
    kept = [dict(row) for row in rows]
    point = chosen.choose(rows)
    assert rows == kept
    assert {"threshold", "shift", "quantile"} <= {*point}
    metrics = chosen.apply(tested, point)
    for row in tested:
        chances = [row["calibrated/0"], row["calibrated/1"]]
        held = [
            k for k in (0, 1) if chances[k] == max(chances) or 1 - chances[k] <= point["quantile"]
        ]
        assert (row["covered"], row["set_size"]) == (row["label"] in held, len(held))
    assert {"sensitivity/point", "brier/calibrated", "coverage/point"} <= {*metrics}


TASKS = {
    "classes": (["experiment=clinical_pfednet"], "classes"),
    "outcome": (["experiment=diabetes_pfednet"], "outcome"),
    "volumes": (["experiment=brats_pfednet", "regions=[whole,core]"], "volumes"),
    "detection": (["experiment=luna16_detection"], None),
}


@pytest.mark.parametrize(("overrides", "kind"), TASKS.values(), ids=TASKS)
def test_which_tasks_have_sets_or_intervals(overrides, kind):
    facts = [
        "in_channels=2",
        f"out_channels={1 + (kind != 'outcome')}",
        "spatial_dims=2",
        "exclusive=false",
    ]
    config = described([*overrides, *facts, "evaluation.coverage=0.8"])
    task = build(config.model)
    if kind is None:
        with pytest.raises(ConfigError, match=r"evaluation.coverage=0.8 is for classification"):
            chooser_of(config, task)
        return
    chosen = chooser_of(config, task)
    assert (chosen.level, chosen.kind) == (0.8, kind)
    assert chooser_of(described([*overrides, *facts]), task) != chosen
