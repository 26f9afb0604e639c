"""Studies judge a bundle as the training side judges its model, for each kind of data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_fields
from sklearn.metrics import roc_auc_score

from medfed.delivery.main import open_bundle
from medfed.functional.detection import ALARM, HIT, SCAN
from medfed.standalone.errors import ConfigError, DataError
from medfed.studies.cohorts import Cohort, hospital_rows
from medfed.studies.plan import Bundle, Plan, read_plan
from medfed.studies.rows import OF, OUTCOME
from medfed.studies.simulation import simulated

ALL = Plan(bundles=[Bundle("new")]).completed()


def judged(made, plan=ALL, models=None):
    """The rows of the bundle's hospital, with what its model says."""
    rows = hospital_rows(made.data, plan)[made.client]
    models = models or {"new": open_bundle(made.bundle)}
    return Cohort(made.data, made.client, plan).with_predictions(rows, models)


def expected(made):
    """Probabilities and labels of the test patients, by the task."""
    batches = [*made.data.clients[made.client].eval_batches("test")]
    answers = torch.cat([made.task.predict(batch) for batch in batches]).double().numpy()
    return answers, torch.cat([batch["label"] for batch in batches]).numpy()


def test_of_two_classes_it_is_the_probability_of_the_second(hospital):
    made = hospital("table")
    rows, (answers, label) = judged(made), expected(made)
    np.testing.assert_allclose(rows.columns["new"], answers[:, 1], atol=1e-6)
    assert rows.columns[OUTCOME].tolist() == label.tolist()


def test_of_an_outcome_it_is_the_prediction(hospital):
    made = hospital("outcome")
    rows, (answers, label) = judged(made), expected(made)
    np.testing.assert_allclose(rows.columns["new"], answers[:, 0], rtol=1e-5)
    np.testing.assert_allclose(rows.columns[OUTCOME], label, rtol=1e-6)


def test_of_survival_it_is_a_risk(hospital):
    made = hospital("survival")
    rows, (answers, _) = judged(made), expected(made)
    np.testing.assert_allclose(rows.columns["new"], 1 - answers.mean(1), atol=1e-6)


@pytest.mark.parametrize("kind", ["slices", "windows", "classes", "pictures"])
def test_of_masks_it_is_their_overlap_with_each_scan(hospital, kind):
    made = hospital(kind)
    rows, regions = judged(made), made.data.class_names
    batches = made.data.clients[made.client].eval_batches("test")
    cases = made.task.measured(batches, test=True).cases()
    for region in regions:
        of_region = [case for case in cases if case["region"] == region]
        name = f"new{OF}Dice of {region}" if len(regions) > 1 else f"new{OF}Dice"
        theirs = [case["dice"] for case in of_region]
        if kind != "slices":  # of nested regions a prediction makes the outer hold the inner ones
            np.testing.assert_allclose(rows.columns[name], theirs, atol=2e-3)
        distances = f"new{OF}HD95 of {region} in mm"
        assert (distances in rows.columns) == made.data.millimetres
        if made.data.spatial_dims == 3:
            hd95 = [case["hd95"] for case in of_region]
            np.testing.assert_allclose(rows.columns[distances], hd95, atol=0.5)
    each = [rows.columns[n] for n in rows.columns if "Dice of" in n] or [
        rows.columns[f"new{OF}Dice"]
    ]
    np.testing.assert_allclose(rows.columns[f"new{OF}Dice"], np.mean(each, axis=0))


@pytest.mark.parametrize("kind", ["digits", "findings"])
def test_of_several_classes_or_findings_it_is_a_probability_of_each(hospital, kind):
    made = hospital(kind)
    rows, (answers, label) = judged(made), expected(made)
    names = made.data.class_names
    each = [rows.columns[f"new{OF}{name}"] for name in names]
    np.testing.assert_allclose(np.stack(each, axis=1), answers, atol=1e-6)
    if kind == "digits":
        assert rows.columns[OUTCOME].tolist() == label.tolist()
    else:
        np.testing.assert_array_equal(np.stack([rows.columns[n] for n in names], axis=1), label)


def test_of_lesions_it_is_what_is_found_from_each_threshold(hospital):
    """The same boxes and hits as those of the test after training."""
    made, levels = hospital("lesions"), [0.02, 0.1, 0.12]
    plan = replace_fields(ALL, evaluate=replace_fields(ALL.evaluate, thresholds=levels))
    rows = judged(made, plan)
    batches = made.data.clients[made.client].eval_batches("test")
    cases = made.task.measured(batches, test=True).cases()
    for at in range(len(rows.patients)):
        boxes = [case for case in cases if case["case"] == at]
        (scan,) = (case for case in boxes if case["found"] == SCAN)
        assert rows.columns["lesions"][at] == scan["lesions"]
        for level in levels:
            kinds = [case["found"] for case in boxes if case["score"] >= level]
            share = kinds.count(HIT) / scan["lesions"] if scan["lesions"] else np.nan
            found = rows.columns[f"new{OF}lesions found from {level:g}"][at]
            np.testing.assert_allclose(found, share)
            alarms = rows.columns[f"new{OF}false alarms from {level:g}"][at]
            assert alarms == kinds.count(ALARM)
    with pytest.raises(ConfigError, match="The model new finds lesions; list the scores from"):
        judged(made)


def test_a_model_of_other_data_is_refused_in_a_sentence(hospital):
    table, digits = hospital("table"), hospital("digits")
    with pytest.raises(DataError, match="The model new takes images; the data"):
        judged(table, models={"new": open_bundle(digits.bundle)})
    model = open_bundle(table.bundle)
    facts = {**model.facts, "labels": ["a", "b"]}
    with pytest.raises(DataError, match="The model new tells a, b apart, and the data have"):
        judged(table, models={"new": replace(model, facts=facts)})
    source = {**model.facts["input"], "features": ["bones", *model.facts["input"]["features"][1:]]}
    with pytest.raises(ConfigError, match="The study needs the column 'bones', which the data do"):
        judged(table, models={"new": replace(model, facts={**model.facts, "input": source})})


def test_scans_unlike_those_of_the_training_are_said_before_they_are_evaluated(hospital, caplog):
    made = hospital("windows")
    model = open_bundle(made.bundle)
    judged(made, models={"new": model})
    assert "unlike those of the training" not in caplog.text
    coarse = {**model.facts, "spacing_range": [[4.0, 4.0, 4.0], [5.0, 5.0, 5.0]]}
    rows = judged(made, models={"new": replace(model, facts=coarse)})
    count = len(rows.patients)
    assert (
        f"{made.client}: {count} of {count} scans are unlike those of the training" in caplog.text
    )
    assert "4 × 4 × 4 to 5 × 5 × 5 mm" in caplog.text


def test_a_plan_of_bundles_alone_is_complete(hospital, tmp_path):
    """The hash of the manifest comes from the folder, and the test patients count."""
    made = hospital("table")
    path = tmp_path / "plan.yaml"
    path.write_text(f"bundles: [{{name: new, path: {made.bundle}}}]\n", encoding="utf-8")
    plan = read_plan(path)
    assert plan.evaluate is not None
    assert plan.evaluate.scores == ["new"]
    assert plan.splits == ("test",)
    assert plan.agreed.bundles == [Bundle("new", plan.bundles[0].manifest)]
    everyone = replace_fields(plan, patients="all")
    rows = judged(made, everyone)
    found = {t.title: t for t in simulated(everyone, {"a": rows})[0]}
    ((_, _, patients, auroc, *_),) = found["Every hospital"].lines
    label, p = rows.columns[OUTCOME], rows.columns["new"]
    assert patients == len(label)
    assert float(auroc.split()[0]) == pytest.approx(roc_auc_score(label, p), abs=6e-4)
    path.write_text(f"bundles: [{{name: new, manifest: {'a' * 64}, path: {made.bundle}}}]\n")
    with pytest.raises(ConfigError, match="has the manifest"):
        read_plan(path)
    path.write_text("bundles: [{name: new, path: nowhere}]\n")
    with pytest.raises(ConfigError, match=r"is no bundle \(it has no configs/manifest\.json"):
        read_plan(path)
