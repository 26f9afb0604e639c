"""Studies of made hospitals: the sums say what all rows say, and show no patient."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import optimize, stats

from medfed.commands.study import main
from medfed.standalone.errors import ConfigError, DataError, MedfedError
from medfed.studies import regressions
from medfed.studies.page import write_study
from medfed.studies.parts import UNIT, Groups, scaled
from medfed.studies.plan import Model, Plan, Survival, read_plan, suggested
from medfed.studies.rows import Rows
from medfed.studies.simulation import parts, simulated

RNG = np.random.default_rng(11)
N = 800
AGE = np.round(RNG.normal(68, 12, N))
AGE[RNG.random(N) < 0.05] = np.nan
SEX = RNG.integers(0, 2, N).astype(float)
OLD = np.nan_to_num(AGE, nan=68.0)
DEAD = (RNG.random(N) < 1 / (1 + np.exp(-(OLD - 70) / 10))).astype(float)
TIMES = np.stack([np.ceil(RNG.exponential(60 / (1 + DEAD), N)), RNG.integers(0, 2, N)], 1)
ALL = Rows(
    {"age": AGE, "sex": SEX, "outcome": DEAD},
    {"sex": ("f", "m"), "outcome": ("no", "yes")},
    TIMES,
    np.arange(N),
)
ENDS = [*range(20, 121, 5)]
PLAN = Plan(
    {"age": ENDS, "sex": ["f", "m"], "outcome": ["no", "yes"]},
    by="outcome",
    survival=Survival([10, 20, 40, 80, 160, 320], by="sex"),
    models=[Model(["age", "sex"]), Model(["age", "sex"], intercept="common")],
).check("plan.yaml")


def dealt(whole, places):
    """Deals rows to hospitals."""
    return {
        f"h{at}": Rows(
            {name: column[places == at] for name, column in whole.columns.items()},
            whole.categories,
            None if whole.survival is None else whole.survival[places == at],
            whole.patients[places == at],
        )
        for at in np.unique(places)
    }


def table(tables, title):
    return {str(line[0]): line[1:] for t in tables if t.title.startswith(title) for line in t.lines}


@pytest.mark.parametrize("seed", range(3))
def test_any_deal_of_the_rows_has_the_same_sums(seed):
    """Only regressions with an intercept per hospital ask which rows lie together."""
    places = np.random.default_rng(seed).integers(0, 3 + seed, N)
    common = replace_models(PLAN, [PLAN.models[1]])
    several, _ = simulated(common, dealt(ALL, places))
    single, _ = simulated(common, {"all": ALL})
    for one, other in zip(several, single, strict=True):
        assert [*one.head] == [*other.head]
        for line, same in zip(one.lines, other.lines, strict=True):
            assert [w for w in line if isinstance(w, str)] == [
                w for w in same if isinstance(w, str)
            ]
            numbers = [[w for w in each if not isinstance(w, str)] for each in (line, same)]
            np.testing.assert_allclose(*numbers, rtol=1e-8, atol=1e-9, equal_nan=True)


def replace_models(plan, models):
    return Plan(plan.columns, by=plan.by, survival=plan.survival, models=models)


def test_columns_are_numpys_and_scipys():
    found, (remark,) = simulated(PLAN, dealt(ALL, np.arange(N) % 4))
    assert remark.endswith("have a missing or unlisted cell and are left out.")
    groups = [AGE[(g == DEAD) & ~np.isnan(AGE)] for g in (0, 1)]
    age = table(found, "age")
    every = np.concatenate(groups)
    np.testing.assert_allclose(age["mean"], [every.mean(), *(g.mean() for g in groups)], rtol=1e-9)
    sd = [v.std(ddof=1) for v in (every, *groups)]
    np.testing.assert_allclose(age["standard deviation"], sd, rtol=1e-8)
    quartiles = [[np.quantile(v, q) for v in (every, *groups)] for q in (0.25, 0.5, 0.75)]
    ours = [age["lower quartile"], age["median"], age["upper quartile"]]
    np.testing.assert_allclose(ours, quartiles, atol=1.5)
    p = stats.ttest_ind(*groups, equal_var=False).pvalue
    assert age["p (Welch)"][0] == (f"{p:.2g}" if p >= 1e-4 else "< 0.0001")
    assert age["missing"][0] == f"{np.isnan(AGE).sum()} ({100 * np.isnan(AGE).mean():.0f} %)"
    p = stats.chi2_contingency(np.histogram2d(SEX, DEAD, 2)[0], correction=False).pvalue
    assert table(found, "sex")["p (χ²)"] == [f"{p:.2g}"]


def test_regressions_are_statsmodels_with_a_dummy_per_hospital():
    places = np.arange(N) % 4
    found, _ = simulated(PLAN, dealt(ALL, places))
    lines = table(found, "Logistic regression of outcome")
    known = ~np.isnan(AGE)
    x = np.stack([AGE, SEX], 1)[known]
    both = []
    for dummies in (np.eye(4)[places[known]], np.ones((known.sum(), 1))):
        whole = sm.GLM(DEAD[known], np.concatenate([x, dummies], 1), family=sm.families.Binomial())
        both.append(whole.fit(tol=1e-13))
    fits = [t for t in found if t.title.startswith("Logistic")]
    assert len(fits) == 2
    for one, theirs in zip(fits, both, strict=True):
        ours = [line[1:3] for line in one.lines]
        expected = np.stack([theirs.params[:2], theirs.bse[:2]], 1)
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert [*lines] == ["age", "sex: m against f"]


def test_an_outcome_needs_no_names_and_who_is_left_out_is_printed(tmp_path, capsys):
    """The names of the outcome's categories are those of the data; a page is not the only place."""
    hospitals = dealt(ALL, np.arange(N) % 4)
    apart = hospitals["h3"].columns  # the old die, and nobody else
    apart["outcome"][:] = np.where(np.isnan(apart["age"]), 0, apart["age"] > 68)
    of, columns = ["age", "sex"], {"age": ENDS, "sex": ["f", "m"]}
    models = [Model(of), Model(of, join="estimates")]
    unnamed = Plan(columns, models=models).check("plan.yaml")
    named = Plan({**columns, "outcome": ["no", "yes"]}, models=models).check("plan.yaml")
    tables, remarks = simulated(unnamed, hospitals)
    of_models = [t for t in simulated(named, hospitals)[0] if t.title not in named.columns]
    assert [t for t in tables if t.title not in columns] == of_models
    gaps = int(np.isnan(AGE).sum())
    assert (
        f"logistic regression of outcome on age, sex: {gaps} of {N} patients have a" in remarks[0]
    )
    write_study(unnamed, tables, remarks, tmp_path / "study")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{gaps} of {N} patients have a missing or unlisted cell and are left out." in printed
    assert "h3 its patients alone do not give the coefficients" in printed
    few = Plan(columns, models=models[1:]).check("plan.yaml")
    rare = {**hospitals["h0"].columns, "outcome": np.arange(N // 4) < 3}
    (without,) = simulated(few, {"h0": replace(hospitals["h0"], columns=rare)})[0][-1:]
    assert without.lines == [["h0", regressions.FEW]]


def test_hazards_are_a_poisson_regression_and_near_cox():
    """Exactly that of events on time at risk; with ten intervals a tenth of an error from Cox."""
    time, event = TIMES.T
    ends = sorted({*np.quantile(time[event == 1], np.linspace(0.1, 1, 10)).tolist()})
    models = [Model(["sex"], "hazard"), Model(["sex"], "hazard", join="estimates")]
    plan = Plan({"sex": ["f", "m"]}, survival=Survival(ends), models=models).check("plan")
    places = np.arange(N) % 3
    found, _ = simulated(plan, dealt(ALL, places))
    ((ours, error, *_),) = table(found, "Hazard regression").values()
    beside = np.eye(3)[places]
    x, y, at_risk = [], [], []
    for at, (begin, end) in enumerate(zip([0.0, *ends], ends, strict=False)):
        there = time > begin
        interval = np.tile(np.eye(len(ends))[at, 1:], (there.sum(), 1))
        x.append(np.concatenate([SEX[there, None], beside[there], interval], 1))
        y.append((time[there] <= end) & (event[there] == 1))
        at_risk.append(np.minimum(time[there], end) - begin)
    x, y, at_risk = (np.concatenate(each).astype(float) for each in (x, y, at_risk))
    whole = sm.GLM(y, x, family=sm.families.Poisson(), offset=np.log(at_risk)).fit(tol=1e-13)
    np.testing.assert_allclose([ours, error], [whole.params[0], whole.bse[0]], rtol=1e-6)
    cox = sm.PHReg(time, np.concatenate([SEX[:, None], beside[:, 1:]], 1), event, ties="efron")
    theirs = cox.fit()
    assert abs(ours - theirs.params[0]) < 0.1 * theirs.bse[0]
    joined = next(t for t in found if t.title == "Meta-analysis, hazard regression of survival")
    assert abs(joined.lines[0][1] - theirs.params[0]) < theirs.bse[0]


def test_curves_end_where_the_plan_ends():
    """Later events count for nobody; those who are there until the end were at risk."""
    last = 40.0
    ends = [*range(1, int(last) + 1)]
    plan = Plan({"sex": ["f", "m"]}, survival=Survival(ends, by="sex")).check("plan")
    found, _ = simulated(plan, dealt(ALL, np.arange(N) % 3))
    time = np.minimum(TIMES[:, 0], last)
    event = TIMES[:, 1] * (TIMES[:, 0] <= last)
    statistic, _ = sm.duration.survdiff(time, event, SEX)
    ours = next(t for t in found if t.title == "Log-rank test").lines[0][0]
    assert ours == pytest.approx(statistic, rel=1e-9)
    curve = sm.SurvfuncRight(TIMES[SEX == 1, 0], TIMES[SEX == 1, 1])
    lines = next(t for t in found if t.title == "Survival").lines
    for group, end, _, share, _ in lines:
        if group == "m":
            expected = curve.surv_prob[curve.surv_times <= end]
            assert share == pytest.approx(expected[-1] if len(expected) else 1.0, rel=1e-12)


def test_one_step_at_chosen_coefficients_shows_nobody():
    """The weights p(1 - p) select patients of one age; such a step is refused."""
    part = regressions.Coefficients(Model(["age"], intercept="common"), PLAN)
    honest = part.ask(ALL, [0.0, 0.0])
    assert honest.patients > 700
    spot = scaled(np.array([93.0]), PLAN.ends("age"))[0]
    steep = 4000.0
    with pytest.raises(DataError, match="patients decide the sums"):
        part.ask(ALL, [steep, -steep * spot])


def of_grades(size=200):
    """Hospitals of an outcome of three classes."""
    rng = np.random.default_rng(3)
    columns = {"crp": rng.exponential(5, size), "outcome": rng.integers(0, 3, size) * 1.0}
    texts = {"outcome": ("mild", "none", "severe")}
    return dealt(Rows(columns, texts, patients=np.arange(size)), np.arange(size) % 4)


CRP = {"crp": [0, 2, 5, 10, 100]}
REMEDIES = {
    "three classes": (
        Plan(CRP, models=[Model(["crp"])]),
        "outcome has mild, none, severe: data.positive=[severe] makes one class",
    ),
    "three names": (
        Plan({**CRP, "outcome": ["none", "mild", "severe"]}, models=[Model(["crp"])]),
        "list two of them as columns.outcome in the plan.",
    ),
    "a number": (
        Plan(CRP, models=[Model(["crp"], outcome="crp")]),
        "needs two classes, or 0 and 1; crp has ",
    ),
    "test patients": (
        Plan(CRP, patients="test", least=60),
        "No hospital has 60 test patients; a study needs one, and three for sums: set 'patients: "
        "all' in the plan",
    ),
    "small hospitals": (Plan(CRP, least=60), "lower 'least' in the plan."),
    "few decide": (
        Plan({"gaps": [0, 5, 50]}, models=[Model(["gaps"], outcome="dead")]),
        "In the plan, a 'least' above this hospital's patients leaves it out",
    ),
}


@pytest.mark.parametrize(("plan", "words"), REMEDIES.values(), ids=[*REMEDIES])
def test_a_refusal_says_what_mends_it(plan, words):
    hospitals = of_grades()
    for rows in hospitals.values():
        some = np.arange(50)
        rows.columns["gaps"] = np.where(some < 18, rows.columns["crp"], np.nan)
        rows.columns["dead"] = some % 2.0
    with pytest.raises(MedfedError) as error:
        simulated(plan, hospitals)
    assert words in str(error.value)


def test_too_many_numbers_of_too_few_patients_have_a_remedy():
    _, (remark,) = simulated(Plan({"crp": [*range(50)]}), of_grades())
    assert "List fewer bins or categories, compare no groups by 'by'" in remark


def test_few_patients_are_not_printed():
    """Neither a count of 1 to 4, nor one from which it follows."""
    rare = np.where(np.arange(N) < 3, 2.0, SEX)
    rows = replace(ALL, columns={"sex": rare}, categories={"sex": ("f", "m", "other one")})
    found, _ = simulated(Plan({"sex": ["f", "m", "other one"]}), dealt(rows, np.arange(N) % 3))
    assert table(found, "sex")["other one"] == ["< 5"]


def possible(counts, words, sums, cell):
    """The least and the greatest count of a cell that the printed words and sums allow."""
    exact = [word.split()[0] for word in words.ravel()]
    low = [0 if w == "<" else 5 if w == "≥" else int(w) for w in exact]
    high = [4 if w == "<" else counts.sum() if w == "≥" else int(w) for w in exact]
    rows = np.zeros((len(sums), counts.size))
    for row, (whole, some) in zip(rows, sums, strict=True):
        row[some], row[whole] = 1, -1
    limits = [*zip(low, high, strict=True)]
    goal = np.eye(counts.size)[cell]
    ends = [milp(s * goal, rows, limits) for s in (1, -1)]
    return ends[0], -ends[1]


def milp(goal, rows, limits):
    low, high = np.transpose(limits)
    found = optimize.milp(
        goal,
        constraints=optimize.LinearConstraint(rows, 0, 0),
        bounds=optimize.Bounds(low, high),
        integrality=np.ones(len(goal)),
    )
    assert found.success
    return round(found.fun)


@pytest.mark.parametrize("groups", ["all groups", "some in none"])
@pytest.mark.parametrize("kind", ["categories", "numbers"])
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 19, 38, 53])
def test_no_count_of_one_to_four_follows_from_the_others(kind, seed, groups):
    """Of all words of a table together, every withheld small count has two possible values."""
    rng = np.random.default_rng(seed)
    n = 120
    crp = rng.choice([0.0, 1.0, 2.0, np.nan], n, p=[0.6, 0.3, 0.03, 0.07])
    group = rng.choice([0.0, 1.0, 2.0], n, p=[0.7, 0.2, 0.1] if seed else [0.7, 0.28, 0.02])
    names = ("a", "b", "c") if kind == "categories" else ()
    rows = Rows(
        {"crp": crp, "by": group},
        {"by": ("f", "m", "d")} | ({"crp": names} if names else {}),
        patients=np.arange(n),
    )
    by = ["f", "m", "d"] if groups == "all groups" else ["f", "m"]
    plan = Plan({"crp": [*names] or [0, 1, 2, 3], "by": by}, by="by").check("plan")
    words = table(simulated(plan, {"all": rows})[0], "crp")
    every = np.concatenate([np.ones((1, n)), group == np.arange(3)[:, None]]).astype(int)
    lines = {name: every @ (crp == at) for at, name in enumerate(names)}
    lines |= {"missing": every @ np.isnan(crp), "patients": every.sum(1)}
    counts = np.array([*lines.values()])
    printed = np.array([[str(word) for word in words[name]] for name in lines])
    at = np.arange(counts.size).reshape(counts.shape)
    sums = [(row[0], row[1:]) for row in at]
    sums += [(column[-1], column[:-1]) for column in at.T] if names else []
    for cell, count in enumerate(counts.ravel()):
        shown = printed.ravel()[cell]
        assert shown.startswith(("< 5", "≥ 5") if 0 < count < 5 or shown[0] in "<≥" else str(count))
        if 0 < count < 5:
            least, most = possible(counts, printed, sums, cell)
            assert least < most


def test_all_are_all_patients_also_those_in_no_group():
    """Of the 3 in none, neither table says how many they are, nor the curves' patients at risk."""
    code = np.select([np.arange(N) < 3, SEX == 1], [2.0, 1.0], 0.0)
    rows = replace(ALL, columns={"age": AGE, "sex": code}, categories={"sex": ("f", "m", "d")})
    lists = {"age": ENDS, "sex": ["f", "m"]}
    found, _ = simulated(Plan(lists, by="sex", survival=Survival([10, 20], by="sex")), {"a": rows})
    age = next(t for t in found if t.title == "age")
    assert [*age.head] == ["column", "all", "f", "m", "in none"]
    fewer, more = sorted(["f", "m"], key=lambda name: (code == "fm".index(name)).sum())
    printed = dict(zip(age.head[1:], table(found, "age")["patients"], strict=True))
    count = int((code == "fm".index(more)).sum())
    assert printed == {"all": N, fewer: "≥ 5", more: count, "in none": "< 5"}
    assert table(found, "age")["mean"][0] == pytest.approx(np.nanmean(AGE), rel=1e-9)
    sexes = table(found, "sex")
    assert [sexes[n][0].split()[0] for n in (fewer, more, "other")] == ["≥", str(count), "<"]
    lines = next(t for t in found if t.title == "Survival").lines
    assert {n for name, _, n, *_ in lines if name == fewer} == {"≥ 5"}
    assert next(n for name, _, n, *_ in lines if name == more) == count


def test_names_that_no_patient_has_are_said():
    plan = Plan({"sex": ["female", "m"]}, models=[Model(["sex"], outcome="outcome")])
    with pytest.raises(
        DataError, match="sex: m against female say the same, or the same of all patients of each"
    ):
        simulated(plan, {"all": ALL})
    (sex,), _ = simulated(replace_models(plan, []), {"all": ALL})
    wanted = f"sex: no patient is female, and {(SEX == 0).sum()} are of other names"
    assert [line.startswith(wanted) for line in sex.remarks] == [True]
    with pytest.raises(DataError, match="no patient has a listed cell of each column"):
        simulated(Plan({"sex": ["F", "M"]}, models=plan.models), {"all": ALL})


def test_columns_that_say_the_same_are_named():
    twice = replace(ALL, columns={**ALL.columns, "months": AGE * 12, "crp": OLD * (1 + SEX)})
    plan = Plan({"crp": [0, 100], "months": [240, 1440], "age": ENDS, "sex": ["f", "m"]})
    plan = replace_models(plan, [Model(["crp", "months", "sex", "age"], outcome="outcome")])
    with pytest.raises(DataError, match="of outcome: months, age say the same, or"):
        simulated(plan, dealt(twice, np.arange(N) % 3))


def test_a_mean_of_few_patients_is_not_printed():
    """Neither that of the group from which it follows."""
    group = np.where(np.arange(N) < 3, 1.0, 0.0)
    rows = replace(ALL, columns={"age": OLD, "sex": group})
    plan = Plan({"age": ENDS, "sex": ["f", "m"]}, by="sex").check("plan")
    age = table(simulated(plan, {"all": rows})[0], "age")
    for name in ("mean", "standard deviation", "median"):
        assert np.isfinite(age[name][0])
        assert np.isnan(age[name][1:]).all()
    assert age["patients"] == [N, "≥ 5", "< 5"]


def test_several_rows_of_a_patient_are_said_to_make_p_values_too_small():
    three = replace(
        ALL,
        columns={name: np.repeat(column, 3) for name, column in ALL.columns.items()},
        survival=None,
        patients=np.repeat(ALL.patients, 3),
    )
    plan = Plan({"age": ENDS, "sex": ["f", "m"]}, by="sex").check("plan")
    (once, none), (thrice, said) = simulated(plan, {"all": ALL}), simulated(plan, {"all": three})
    p_of = [table(tables, "age")["p (Welch)"][0] for tables in (once, thrice)]
    assert p_of[1] < p_of[0]
    wanted = f"{3 * N} rows are of {N} patients, and each counts as a patient: p-values are too"
    assert [remark.startswith(wanted) for remark in said].count(True) == 1
    assert not any("p-values" in remark for remark in none)


def test_sums_are_whole_numbers_of_counts_and_fixed_point():
    part = next(p for p in parts(PLAN) if p.name == "age")
    whole = part.ask(ALL, ()).whole
    assert whole.dtype == np.int64
    cells = (len(ENDS) + 2) * 3
    assert whole[:cells].sum() == N
    z = (AGE[~np.isnan(AGE)] - 70) / 50
    np.testing.assert_allclose(whole[cells:].reshape(2, 3).sum(1) / UNIT, [z.sum(), (z**2).sum()])


def test_small_hospitals_are_left_out_by_name():
    places = np.where(np.arange(N) < 9, 3, np.arange(N) % 3)
    found, remarks = simulated(PLAN, dealt(ALL, places))
    assert remarks[0] == "Left out, with fewer than 20 patients: h3 (9)."
    assert table(found, "age")["patients"][0] == N - 9


def test_values_far_beyond_the_bins_are_said():
    plan = Plan({"age": [20, 21, 22]})
    _, remarks = simulated(plan, dealt(ALL, np.arange(N) % 3))
    assert any("far beyond the bins" in line for line in remarks)


WRONG = {
    "columns: {age: [50, 40]}": "list the ends of bins in increasing order",
    "columns: {age: [50, 50]}": "list two or more different values",
    "columns: {age: [40, 50], sex: [f, 1]}": "in quotation marks where they are numbers",
    "columns: {age: [40, 50]}\nby: age": "groups are those of a column with categories",
    "columns: {age: [40, 50]}\nmodels: [{of: [sex]}]": "a model names sex; list it under columns",
    "columns: {age: [40, 50]}\nleast: 3": "least",
    "columns: {age: [40, 50]}\nwhatever: 3": "whatever is unknown",
    "colums: {age: [40, 50]}": "colums is unknown (did you mean columns",
    "columns: {smoker: [no, yes]}": "columns.smoker[0]: expected float | str, got bool; list",
    "columns: {age: [40, .inf]}": "columns.age[1]: expected float <= 1.797",
    "columns: {age: [40, 50]}\nmodels: [{of: [age], family: cox}]": "logistic or poisson or hazard",
    "columns:\n\tage: [40, 50]": "line 2: found character",
    "": "it has no lines of a key, a colon, a space and a value",
    "columns: {age: [40, 50]}\nmodels: [{of: [age], family: hazard}]": "needs survival.ends",
    "[1, 2]": "plan.yaml",
}


@pytest.mark.parametrize(("text", "words"), WRONG.items(), ids=[*WRONG])
def test_a_wrong_plan_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MedfedError) as error:
        read_plan(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_that_are_not_there_are_named():
    with pytest.raises(ConfigError, match="did you mean age"):
        simulated(Plan({"agee": [1, 2]}), {"all": ALL})


def test_a_table_becomes_a_page_and_a_plan_from_which_to_go_on(tmp_path):
    """The suggested plan, read again, gives the same numbers."""
    lines = [
        [
            f"p{i}",
            "abc"[i % 3],
            "" if np.isnan(AGE[i]) else int(AGE[i]),
            "fm"[int(SEX[i])],
            "ny"[int(DEAD[i])],
        ]
        for i in range(240)
    ]
    with (tmp_path / "t.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "hospital", "age", "sex", "died"], *lines])
    words = [
        "data=csv",
        f"data.path={tmp_path / 't.csv'}",
        "data.label=died",
        "data.patient=id",
        "data.centre=hospital",
        "partition=centre",
    ]
    main([*words, f"folder={tmp_path / 'first'}"])
    plan = tmp_path / "first" / "plan.yaml"
    main([*words, f"plan={plan}", f"folder={tmp_path / 'second'}"])
    first, second = (
        json.loads((tmp_path / name / "study.json").read_text(encoding="utf-8"))
        for name in ("first", "second")
    )
    assert first == second
    titles = {t["title"]: t for t in first["tables"]}
    assert {*titles} == {"age", "sex", "outcome"}
    ages = np.array([float(line[2]) for line in lines if line[2] != ""])
    rows = {line[0]: line[1:] for line in titles["age"]["lines"]}
    assert rows["mean"][0] == pytest.approx(ages.mean(), rel=1e-9)
    page = (tmp_path / "first" / "study.html").read_text(encoding="utf-8")
    assert "Table 1" in page
    assert (tmp_path / "first" / "tables" / "Table 1.csv").is_file()


@pytest.mark.parametrize("left", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("size", [60, 300, 900])
def test_suggested_curves_are_those_of_rows_or_it_is_said_where_they_are_not(size, left):
    """The curve of counts is at most the exact one's upper end; a line names both ends."""
    rng = np.random.default_rng(size)
    time, event = rng.exponential(300, size), (rng.random(size) > left).astype(float)
    rows = Rows({}, {}, np.stack([time, event], axis=1), np.arange(size))
    plan = suggested({"all": rows})
    (curve, *_), _ = simulated(plan.check("plan"), {"all": rows})
    exact = sm.SurvfuncRight(time, event)
    said = {line.split(" until ")[1].split()[0]: line for line in curve.remarks}
    for _, end, _, share, error in curve.lines:
        at = np.searchsorted(exact.surv_times, end, "right")
        true = exact.surv_prob[at - 1] if at else 1.0
        assert true <= share + 1e-9
        if share - true > error:
            assert said
        if (line := said.get(f"{end:g}")) is not None:
            low, high = (float(w.rstrip(",")) for w in line.split(" in ")[1].split()[:3:2])
            assert low - 1e-3 <= true <= high + 1e-3
    assert len(said) <= 1
    bulk = [share for _, end, n, share, _ in curve.lines if n > size / 2]
    assert len(bulk) >= min(3, size // 60)


def test_curves_of_one_time_are_left_out():
    rows = Rows({"age": AGE}, {}, np.stack([np.full(N, 5.0), SEX], axis=1), np.arange(N))
    assert suggested({"all": rows}).survival is None


def test_quartiles_of_whole_numbers_are_those_of_the_numbers():
    rng = np.random.default_rng(2)
    counts = {"nodes": rng.poisson(3, 500), "stay": rng.geometric(0.3, 500)}
    counts |= {"codes": rng.choice([1234567, 1234568], 500)}
    rows = Rows({n: c.astype(float) for n, c in counts.items()}, patients=np.arange(500))
    plan = suggested({"all": rows})
    found, _ = simulated(plan.check("plan"), {"all": rows})
    for name in ("nodes", "stay"):
        words = table(found, name)
        for title, share in (("lower quartile", 0.25), ("median", 0.5), ("upper quartile", 0.75)):
            true = np.quantile(counts[name], share, method="inverted_cdf")
            assert words[title][0] == true
    assert plan.groups("codes") == ("1234567", "1234568")
    _, (said,) = simulated(Plan({"nodes": [0, 1, 2, 3, 9]}), {"a": rows, "b": rows, "c": rows})
    assert said.startswith("nodes holds whole numbers, and its bins begin at them")
    halves = Plan({"nodes": [-0.5, 0.5, 1.5, 2.5, 9.5]})
    assert simulated(halves, {"a": rows, "b": rows, "c": rows})[1] == []


def test_suggested_bins_hold_all_values():
    plan = suggested({"all": ALL})
    assert plan.ends("age")[0] <= np.nanmin(AGE)
    assert plan.ends("age")[-1] > np.nanmax(AGE)
    assert plan.groups("sex") == ("f", "m")


SKEWED = {
    "lognormal": lambda rng, n: np.round(np.exp(rng.normal(1.5, 0.8, n)), 2),
    "very skewed": lambda rng, n: np.exp(rng.normal(0, 2, n)),
    "to the left": lambda rng, n: -rng.exponential(3, n),
    "normal": lambda rng, n: rng.normal(60, 10, n),
}


@pytest.mark.parametrize("size", [200, 800])
@pytest.mark.parametrize("draw", SKEWED.values(), ids=[*SKEWED])
def test_an_outlier_moves_no_quartile_by_more_than_a_bin_of_the_bulk(draw, size):
    """Suggested bins follow the bulk, so that quartiles and Kruskal's test are those of rows."""
    rng = np.random.default_rng(size)
    values, groups = draw(rng, size), np.arange(size) % 3
    values[groups == 2] += values.std()
    quartiles = {}
    for outlier in (values[0], 1000 * np.abs(values).max()):
        values[0] = outlier
        rows = Rows(
            {"crp": values, "outcome": groups.astype(float)},
            {"outcome": ("none", "mild", "severe")},
            patients=np.arange(size),
        )
        plan = suggested({"all": rows})
        crp = table(simulated(plan.check("plan"), {"all": rows})[0], "crp")
        ends = np.array(plan.ends("crp"))
        found = [crp[n][0] for n in ("lower quartile", "median", "upper quartile")]
        exact = np.quantile(values, [0.25, 0.5, 0.75])
        for one, true in zip(found, exact, strict=True):
            at = np.searchsorted(ends, true)
            assert abs(one - true) <= ends[at] - ends[at - 1] < 1.5 * (exact[2] - exact[0])
        quartiles[outlier] = np.array(found)
        assert crp["p (Kruskal–Wallis)"] == ["< 0.0001"]
        assert crp["mean"][0] == pytest.approx(values.mean(), rel=1e-8, abs=1e-8)
    apart = np.abs(np.subtract(*quartiles.values()))
    assert apart.max() < np.diff(ends[1:-1]).max()


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([0, 50, 100], ["0 to 50"] * 3),
        ([5, 6, 7], ["below 5", None, "from 7"]),
        ([-5, 0, 4, 5, 6, 8, 100], [None] * 3),
    ],
    ids=["wide", "beyond", "narrow"],
)
def test_a_quartile_in_a_wide_bin_is_the_bin(ends, words):
    """A number that the bins do not give is not printed as one."""
    values = np.random.default_rng(1).normal(5.5, 3, 400)
    rows = Rows({"crp": values}, patients=np.arange(400))
    crp = table(simulated(Plan({"crp": ends}), {"all": rows})[0], "crp")
    found = [crp[n][0] for n in ("lower quartile", "median", "upper quartile")]
    for one, word, share in zip(found, words, (0.25, 0.5, 0.75), strict=True):
        assert one == (word or pytest.approx(np.quantile(values, share), abs=2))


@pytest.mark.parametrize(("size", "bins"), [(90, 3), (130, 2), (240, 5), (800, 12)])
def test_hospitals_answer_a_suggested_plan(size, bins):
    """Few patients have few bins and categories; a column that nearly nobody has is named."""
    some = np.arange(size)
    rare = np.where(some % 2, AGE[:size], np.nan)
    town = (some % 40).astype(float)
    columns = {name: column[:size] for name, column in ALL.columns.items()}
    rows = Rows(
        columns | {"rare": rare, "town": town},
        {**ALL.categories, "town": tuple(f"town {n}" for n in range(40))},
        TIMES[:size],
        some,
    )
    hospitals = dealt(rows, some % 3)
    plan = suggested(hospitals)
    _, remarks = simulated(plan.check("plan"), hospitals)
    refused = [line.split()[3] for line in remarks if "would refuse" in line]
    assert refused == ["rare:"] * (size < 200)  # known of half of the patients
    assert len(plan.ends("age")) - 1 >= bins
    assert plan.by == (None if size < 120 else "outcome")
    plain = Rows({"age": rows.columns["age"]}, patients=some)
    alone = suggested(
        {"few": replace(plain, patients=some[:15], columns={"age": AGE[:15]}), "all": plain}
    )
    assert alone.ends("age") == suggested({"all": plain}).ends("age")


def test_groups_hold_every_row_once():
    rows = replace(ALL, columns={**ALL.columns, "sex": np.where(np.arange(N) < 5, np.nan, SEX)})
    place = Groups("sex", ("f",)).place(rows)
    assert place.shape == (N,)
    assert set(place) == {0, 1}


def test_two_models_of_one_outcome_have_tables_of_their_own(tmp_path):
    """With other intercepts they share a title, and neither may take the other's file."""
    write_study(PLAN, *simulated(PLAN, dealt(ALL, np.arange(N) % 4)), tmp_path / "study")
    whole = json.loads((tmp_path / "study" / "study.json").read_text(encoding="utf-8"))
    lines = [t["lines"] for t in whole["tables"] if t["title"].startswith("Logistic regression")]
    files = (tmp_path / "study" / "tables").glob("Logistic regression*.csv")
    files = sorted(files, key=lambda file: len(file.name))  # the second has a number
    assert len(files) == len(lines) == 2
    tables = (csv.reader(file.read_text(encoding="utf-8").splitlines()) for file in files)
    written = [[float(row[1]) for row in [*table][1:]] for table in tables]
    assert written == pytest.approx(np.array([[line[1] for line in model] for model in lines]))
