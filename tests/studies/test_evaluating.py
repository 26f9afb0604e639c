"""Scores that others made, evaluated at each hospital without training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from medfed.functional import discrimination
from medfed.functional.detection import lesion_curve
from medfed.functional.scores import class_scores
from medfed.functional.survival import survival_scores
from medfed.standalone.errors import ConfigError, DataError
from medfed.studies.page import pictures, write_study
from medfed.studies.plan import Evaluation, Model, Plan
from medfed.studies.rows import Rows
from medfed.studies.simulation import simulated


def hospital(seed, size=400, harm=0.0):
    """A good score, and one that is spoilt by `harm` of noise."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=size)
    label = (rng.random(size) < 1 / (1 + np.exp(-truth))).astype(float)
    good = 1 / (1 + np.exp(-truth))
    bad = 1 / (1 + np.exp(-(truth + harm * 4 * rng.normal(size=size))))
    columns = {"good": good, "new": bad, "outcome": label, "sex": rng.integers(0, 2, size) * 1.0}
    return Rows(columns, {"outcome": ("no", "yes"), "sex": ("f", "m")}, None, np.arange(size))


PLAN = Plan(
    {"outcome": ["no", "yes"], "sex": ["f", "m"]},
    evaluate=Evaluation(["good", "new"], reference="good", margin=0.03, by=["sex"]),
).check("plan")
EACH = {"a": hospital(0), "b": hospital(1), "c": hospital(2, harm=1.0), "d": hospital(3, 60, 0.1)}


def tables(each=EACH, plan=PLAN):
    return {table.title: table for table in simulated(plan, each)[0]}


def test_every_hospital_has_scikit_learns_numbers():
    lines = {(line[0], line[1]): line for line in tables()["Every hospital"].lines}
    for name, rows in EACH.items():
        for score in ("good", "new"):
            p, y = rows.columns[score], rows.columns["outcome"]
            _, _, patients, auroc, brier, *_ = lines[score, name]
            assert patients == len(y)
            assert float(auroc.split()[0]) == pytest.approx(roc_auc_score(y, p), abs=6e-4)
            assert float(brier.split()[0]) == pytest.approx(brier_score_loss(y, p), abs=6e-4)
    assert ("new, sex: f", "a") in lines


def test_the_mean_of_hospitals_lies_between_them():
    means = {(line[0], line[1]): line for line in tables()["Means of hospitals"].lines}
    each = [roc_auc_score(r.columns["outcome"], r.columns["new"]) for r in EACH.values()]
    _, _, mean, low, high, _, _, count = means["new", "AUROC"]
    assert min(each) < mean < max(each)
    assert low < mean < high
    assert count == 4
    assert means["new", "− Brier score"][2] > 0


def test_the_harmed_hospital_is_named_and_no_other():
    verdicts = {
        line[1]: line[-1] for line in tables()["Who would be harmed"].lines if line[0] == "new"
    }
    assert verdicts["c"] == "worse"
    assert verdicts["a"] == verdicts["b"] == "not worse by more than 0.03"
    assert "worse" not in verdicts["d"] or verdicts["d"].startswith("not worse")


def test_few_patients_cannot_tell_and_the_line_says_how_many_would():
    each = {name: hospital(seed, 60, 0.3) for seed, name in enumerate("abc", start=20)}
    plan = Plan(PLAN.columns, evaluate=Evaluation(["good", "new"], reference="good", margin=0.005))
    lines = tables(each, plan)["Who would be harmed"].lines
    assert any(str(line[-1]).startswith("cannot tell; about") for line in lines)


def test_hospitals_of_few_cases_send_nothing_and_are_named():
    few = hospital(5, 40)
    few.columns["outcome"][:] = 0.0
    few.columns["outcome"][:3] = 1.0
    found = tables({**EACH, "few": few})
    assert ["good", "few", "fewer than 20 patients, or than 5 of a class"] in [
        [*line] for line in found["Too few to evaluate"].lines
    ]
    assert "few" not in {line[1] for line in found["Every hospital"].lines}


def test_wrong_scores_are_named():
    odd = hospital(6)
    odd.columns["new"][4] = 12.0
    with pytest.raises(DataError, match="The score new holds 12; a score is a probability"):
        tables({"odd": odd})
    with pytest.raises(ConfigError, match="the reference old is none of the scores"):
        Plan(PLAN.columns, evaluate=Evaluation(["new"], reference="old")).check("plan")
    with pytest.raises(DataError, match="name a column of each category as SCORE: CATEGORY"):
        tables(EACH, Plan({"outcome": ["a", "b", "c"]}, evaluate=Evaluation(["good"])))


CELLS = changed(PLAN, evaluate=Evaluation(["good", "new"], cells=50))


def test_pooled_areas_are_those_of_all_patients():
    """From 50 cells under masks, second after the mean of hospitals; also DeLong's error."""
    found, remarks = simulated(CELLS, EACH)
    titles = [table.title for table in found]
    assert titles.index("Means of hospitals") < titles.index("Pooled AUROC of good")
    assert not remarks
    for score in ("good", "new"):
        p, y = (
            np.concatenate([rows.columns[name] for rows in EACH.values()])
            for name in (score, "outcome")
        )
        ((_, value, low, high, patients),) = tables(plan=CELLS)[f"Pooled AUROC of {score}"].lines
        exact = discrimination.areas(p[:, None], None, y[:, None])[0]
        assert value == pytest.approx(roc_auc_score(y, p), abs=1e-3)
        assert (high - low) / 3.92 == pytest.approx(exact.error, rel=0.01)
        assert patients == len(y)


def test_cells_of_single_scores_give_the_exact_area():
    rng = np.random.default_rng(5)
    p, y = rng.integers(0, 9, 300), rng.integers(0, 2, 300)
    counts = [np.bincount(p[y == label], minlength=9) for label in (1, 0)]
    exact = discrimination.areas(p[:, None] * 1.0, None, y[:, None] * 1.0)[0]
    np.testing.assert_allclose(discrimination.area_of_counts(*counts), exact, rtol=1e-12)


def test_calibration_is_what_happened_in_each_tenth():
    """Of at least 20 patients, and five with the event and five without it."""
    p, y = (np.concatenate([r.columns[n] for r in EACH.values()]) for n in ("new", "outcome"))
    lines = tables(plan=CELLS)["Calibration of new"].lines
    printed = {}
    for _, predicted, observed, low, high, patients in lines:
        inside = (p >= (tenth := int(10 * predicted) / 10)) & (p < tenth + 0.1)
        inside |= (tenth == 0.9) & (p == 1)
        assert patients == inside.sum() >= 20
        assert observed == pytest.approx(y[inside].mean())
        assert predicted == pytest.approx(p[inside].mean(), abs=0.01)
        assert low < observed < high
        printed[tenth] = patients
    assert len(printed) == len(lines) > 5
    rare = {name: replace(rows, columns={**rows.columns}) for name, rows in EACH.items()}
    for rows in rare.values():  # nobody of a tenth had the event
        rows.columns["outcome"] = np.where(rows.columns["new"] < 0.1, 0.0, rows.columns["outcome"])
    fewer = tables(rare, CELLS)["Calibration of new"].lines
    assert min(line[1] for line in fewer) > 0.1


def test_cells_need_the_two_names_of_the_outcome():
    with pytest.raises(ConfigError, match="cells need the two names of outcome in columns"):
        Plan({"sex": ["f", "m"]}, evaluate=Evaluation(["new"], cells=50)).check("plan")


def test_predictions_of_a_number_are_judged_by_their_errors():
    each = {}
    for seed, name in enumerate("abc"):
        rng = np.random.default_rng(seed)
        y = rng.normal(50, 10, 200)
        near, far = y + rng.normal(0, 1, 200), y + rng.normal(3, 4, 200)
        each[name] = Rows({"near": near, "far": far, "outcome": y}, patients=np.arange(200))
    asked = Evaluation(["near", "far"], reference="near", margin=1.0)
    found = tables(each, Plan(evaluate=asked))
    lines = {(line[0], line[1]): line[3:] for line in found["Every hospital"].lines}
    head = found["Every hospital"].head[3:]
    for name, rows in each.items():
        apart = rows.columns["far"] - rows.columns["outcome"]
        values = dict(zip(head, lines["far", name], strict=True))
        expected = {"absolute error": np.abs(apart).mean()}
        expected["root mean squared error"] = np.sqrt((apart**2).mean())
        for what, value in expected.items():
            assert float(values[what].split()[0]) == pytest.approx(value, rel=1e-3)
    verdicts = {line[-1] for line in found["Who would be harmed"].lines}
    assert verdicts == {"worse"}


KINDS = ("a", "b", "c")


def of_classes(seed, size=300, spoilt=0.0):
    """Probabilities of three classes, or of three findings of which some cells are missing."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(size, 3))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    label = np.array([rng.choice(3, p=row) for row in p])
    noisy = np.exp(logits + spoilt * rng.normal(size=(size, 3)))
    noisy /= noisy.sum(1, keepdims=True)
    columns = {f"good: {k}": p[:, n] for n, k in enumerate(KINDS)}
    columns |= {f"new: {k}": noisy[:, n] for n, k in enumerate(KINDS)}
    return p, noisy, label, columns


def shown(found, score):
    """The numbers of every hospital, by name."""
    table = found["Every hospital"]
    return {
        line[1]: dict(zip(table.head[3:], (str(w).split()[0] for w in line[3:]), strict=True))
        for line in table.lines
        if line[0] == score
    }


def test_several_classes_have_scikit_learns_numbers():
    each, known = {}, {}
    for seed, name in enumerate(("x", "y", "z")):
        p, noisy, label, columns = of_classes(seed, spoilt=1.0)
        each[name] = Rows(
            columns | {"outcome": label * 1.0}, {"outcome": KINDS}, patients=np.arange(len(p))
        )
        known[name] = noisy, label
    plan = Plan(evaluate=Evaluation(["good", "new"], reference="good")).check("plan")
    found = tables(each, plan)
    for name, numbers in shown(found, "new").items():
        p, label = known[name]
        expected = {
            f"AUROC of {k}": roc_auc_score(label == n, p[:, n]) for n, k in enumerate(KINDS)
        }
        expected |= {
            "AUROC": roc_auc_score(label, p, multi_class="ovr"),
            "accuracy": (p.argmax(1) == label).mean(),
            "log loss": log_loss(label, p),
            "Brier score": class_scores(p, label, np.ones((1, len(p))))["brier"][0],
        }
        for what, value in expected.items():
            assert float(numbers[what]) == pytest.approx(value, abs=6e-4), what
    assert {line[-1] for line in found["Who would be harmed"].lines} == {"worse"}
    first = found["Every hospital"].intervals[0]
    assert first[1] == pytest.approx(float(shown(found, "good")["x"]["AUROC"]), abs=6e-4)


@pytest.mark.parametrize("harm", [0.0, 1.0])
def test_no_interval_leaves_the_limits_of_its_score(harm):
    """Of two small hospitals that differ, where intervals of the normal distribution are wide."""
    each = {}
    for seed in range(2):
        _, _, label, columns = of_classes(seed, 40, spoilt=harm * (1 + 3 * seed))
        each[f"{seed}"] = Rows(
            columns | {"outcome": label * 1.0}, {"outcome": KINDS}, patients=np.arange(40)
        )
    plan = Plan(evaluate=Evaluation(["good", "new"], reference="good")).check("plan")
    found = tables(each, plan)
    intervals = []
    for _, what, _, low, high, _, beyond, _ in found["Means of hospitals"].lines:
        ends = [] if beyond == "–" else [float(end) for end in beyond.split(" to ")]
        intervals += [(what, end) for end in (low, high, *ends)]
    every = found["Every hospital"]
    for line in every.lines:
        written = [w.split(" ", 1)[1][1:-1].split(", ") for w in line[3:] if w != "–"]
        names = [n for n, w in zip(every.head[3:], line[3:], strict=True) if w != "–"]
        intervals += [(n, float(e)) for n, ends in zip(names, written, strict=True) for e in ends]
    intervals += [("AUROC", end) for one in every.intervals for end in one[2:]]
    harms = found["Who would be harmed"]
    intervals += [("− Brier score", end) for line in harms.lines for end in line[4:6]]
    assert len(intervals) > 50
    for what, end in intervals:
        if not what.startswith("− log loss"):
            low, high = (-1, 1) if what[0] == "−" else (0, np.inf if what == "log loss" else 1)
            assert low <= end <= high, what
    shares = [end for what, end in intervals if what == "AUROC"]
    assert 1.0 in shares  # where the normal distribution would go on


def test_a_class_that_a_hospital_hardly_has_is_left_out_there():
    p, _, label, columns = of_classes(9)
    label[label == 2] = np.where(np.arange((label == 2).sum()) < 4, 2, 0)
    rows = Rows(columns | {"outcome": label * 1.0}, {"outcome": KINDS}, patients=np.arange(300))
    numbers = shown(tables({"x": rows}, Plan(evaluate=Evaluation(["good"]))), "good")["x"]
    assert "AUROC of c" not in numbers
    assert "AUROC" not in numbers
    assert float(numbers["AUROC of a"]) == pytest.approx(
        roc_auc_score(label == 0, p[:, 0]), abs=6e-4
    )


def test_findings_are_judged_where_they_are_known():
    rng = np.random.default_rng(4)
    p, _, _, columns = of_classes(4)
    y = (rng.random(p.shape) < p).astype(float)
    y[rng.random(p.shape) < 0.2] = np.nan
    rows = Rows(columns | {k: y[:, n] for n, k in enumerate(KINDS)}, patients=np.arange(len(p)))
    numbers = shown(tables({"x": rows}, Plan(evaluate=Evaluation(["good"]))), "good")["x"]
    areas = []
    for n, kind in enumerate(KINDS):
        some = ~np.isnan(y[:, n])
        areas.append(roc_auc_score(y[some, n], p[some, n]))
        assert float(numbers[f"AUROC of {kind}"]) == pytest.approx(areas[-1], abs=6e-4)
    assert float(numbers["AUROC"]) == pytest.approx(np.mean(areas), abs=6e-4)
    some = ~np.isnan(y).all(axis=1)
    brier = np.nanmean((p[some] - y[some]) ** 2, axis=1).mean()
    assert float(numbers["Brier score"]) == pytest.approx(brier, abs=6e-4)
    assert "accuracy" not in numbers


def test_the_error_of_a_mean_area_is_that_of_new_samples():
    values = []
    for seed in range(200):
        p, _, label, _ = of_classes(seed + 50, 150)
        values.append(discrimination.areas(p, None, np.eye(3)[label])[-1])
    spread = np.std([one.value for one in values], ddof=1)
    assert np.mean([one.error for one in values]) == pytest.approx(spread, rel=0.15)


def with_lesions(seed, scans=40):
    """Boxes of scans, and what they come to for two thresholds."""
    rng = np.random.default_rng(seed)
    lesions = rng.integers(0, 4, scans)
    hits = [rng.random(n) for n in lesions]  # the score of the box on each lesion
    alarms = [rng.random(rng.integers(0, 6)) for _ in range(scans)]
    columns = {"lesions": lesions * 1.0}
    for level in (0.3, 0.7):
        found = [(h >= level).mean() if len(h) else np.nan for h in hits]
        columns[f"new: lesions found from {level:g}"] = np.array(found)
        wrong = [(a >= level).sum() for a in alarms]
        columns[f"new: false alarms from {level:g}"] = np.array(wrong, dtype=float)
    return Rows(columns, patients=np.arange(scans)), hits, alarms


def test_a_froc_counts_the_boxes_of_all_scans():
    made = {name: with_lesions(seed) for seed, name in enumerate("abc")}
    hits, alarms = (
        np.concatenate([box for _, *of in made.values() for box in of[n]]) for n in (0, 1)
    )
    scores = np.concatenate([hits, alarms])
    scans = 3 * 40
    plan = Plan(evaluate=Evaluation(["new"], thresholds=[0.3, 0.7])).check("plan")
    found = tables({name: rows for name, (rows, *_) in made.items()}, plan)
    lines = found["FROC of new"].lines
    assert [line[1] for line in lines] == [0.3, 0.7]
    for _, level, sensitivity, per_scan, lesions, counted in lines:
        assert (lesions, counted) == (len(hits), scans)
        assert sensitivity == pytest.approx((hits >= level).mean())
        # The FROC of boxes at as many false alarms, where the next box would be one more.
        cases = {
            "found": np.array([-2] * scans + [1] * len(hits) + [0] * len(alarms)),
            "lesions": np.array([len(hits), *[0] * (scans - 1 + len(scores))]),
            "score": np.concatenate([np.zeros(scans), np.where(scores >= level, scores, 0)]),
        }
        kept = np.ones((1, scans + len(scores)))
        kept[0, scans:] = scores >= level
        curve = lesion_curve(cases, kept, (per_scan,))
        assert curve[0, 0] * kept[0, :1] == pytest.approx(sensitivity)
    first = found["Every hospital"].head[3]
    assert first == "lesions found from 0.3"


def followed(seed, size=150, noise=1.0):
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=size)
    time = np.ceil(10 * rng.exponential(np.exp(-risk)))
    times = np.stack([time, (rng.random(size) < 0.7) * 1.0], axis=1)
    columns = {"right": risk, "rough": risk + noise * rng.normal(size=size)}
    return Rows(columns, survival=times, patients=np.arange(size))


def test_risks_are_judged_by_harrells_concordance():
    each = {name: followed(seed) for seed, name in enumerate("abc")}
    found = tables(each, Plan(evaluate=Evaluation(["right", "rough"], reference="right")))
    for score, hospital, _, value, *rest in found["Every hospital"].lines:
        rows = each[hospital]
        time, event = rows.survival.T
        cases = {"time": time, "event": event, "risk": rows.columns[score]}
        exact = survival_scores(cases, np.ones((1, len(time))), [time.max()])["cindex"][0]
        assert float(value.split()[0]) == pytest.approx(exact, abs=6e-4)
        assert rest == (["–"] if score == "right" else rest)
    assert {line[-1] for line in found["Who would be harmed"].lines} == {"worse"}


def test_the_error_of_a_concordance_is_that_of_new_samples():
    values = [
        discrimination.concordance(rows.columns["rough"], *rows.survival.T)
        for rows in (followed(seed) for seed in range(300))
    ]
    spread = np.std([one.value for one in values], ddof=1)
    assert np.mean([one.error for one in values]) == pytest.approx(spread, rel=0.12)


def test_a_hospital_with_few_of_a_category_sends_no_estimate():
    rare = hospital(7)
    rare.columns["sex"][:] = 0.0
    rare.columns["sex"][:3] = 1.0
    plan = Plan(PLAN.columns, models=[Model(["sex"], join="estimates")]).check("plan")
    found = tables({**EACH, "rare": rare}, plan)
    ((name, why),) = found[
        "Meta-analysis, logistic regression of outcome, without an estimate"
    ].lines
    assert (name, why) == ("rare", "fewer than 5 of its patients are of a category")


def test_a_page_draws_intervals_of_hospitals_and_calibration(tmp_path):
    plan = changed(PLAN, evaluate=changed(PLAN.evaluate, cells=20))
    found, remarks = simulated(plan, EACH)
    drawn = pictures(found)
    assert {*drawn} == {
        *("Every hospital", "Who would be harmed"),
        *("Calibration of good", "Calibration of new"),
    }
    write_study(plan, found, remarks, tmp_path / "out")
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert (tmp_path / "out" / "plan.yaml").is_file()
