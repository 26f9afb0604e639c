"""What the test cases say, recomputed from cases.csv by scikit-learn, SciPy and by hand."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk
from sklearn.dummy import DummyClassifier, DummyRegressor

from medfed.common.seeding import derive_seed
from medfed.run.evaluation import evaluate_run
from medfed.run.results import metric_table, print_summary
from medfed.standalone.errors import NonFiniteError
from tests.integration.runs import CLINICAL, imaging, run

SHORT = ("algorithm=local", "rounds=1")


def rows_of(folder) -> dict[str, list[dict[str, str]]]:
    found = defaultdict(list)
    with (folder / "cases.csv").open() as file:
        for row in csv.DictReader(file):
            found[row["client"]].append(row)
    return found


@pytest.fixture(scope="module")
def cohort_root(tmp_path_factory):
    """Where the small cohort is generated, once."""
    return tmp_path_factory.mktemp("cohorts")


@pytest.fixture(scope="module")
def risk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intervals") / "run"
    summary, experiment = run(folder, *CLINICAL, *SHORT)
    holds_its_values(summary)
    return folder, summary, experiment


def holds_its_values(summary) -> None:
    """Each interval of a run, of whatever metric, holds the number beside which it is printed."""
    ends = summary["intervals"]
    means = {n: of["mean"] for n, of in summary["federation"].items()}
    pairs = [(ends["mean"], means), (ends["pooled"], summary["pooled"])]
    pairs += [(ends["clients"][c], summary["clients"][c]) for c in ends["clients"]]
    known = [(of[n], *e) for each, of in pairs for n, e in each.items() if not math.isnan(e[0])]
    assert known
    for value, low, high in known:
        assert low - 1e-9 <= value <= high + 1e-9


def labels_and_risks(rows) -> tuple[np.ndarray, np.ndarray]:
    label = np.array([int(r["label"]) for r in rows])
    return label, np.array([float(r["probability/1"]) for r in rows])


def test_the_table_of_cases_gives_the_metrics(risk):
    folder, summary, _ = risk
    rows = rows_of(folder)
    parts = {**rows, "pooled": [r for own in rows.values() for r in own]}
    for place, own in parts.items():
        label, risks = labels_and_risks(own)
        measured = summary["clients"].get(place, summary["pooled"])
        expected = {
            "accuracy": sk.accuracy_score(label, risks > 0.5),
            "balanced_accuracy": sk.balanced_accuracy_score(label, risks > 0.5),
            "auroc": sk.roc_auc_score(label, risks),
            "f1": sk.f1_score(label, risks > 0.5),
            "brier": sk.brier_score_loss(label, risks),
        }
        assert {n: measured[n] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_intervals_of_a_client_are_those_of_scipy(risk):
    folder, summary, experiment = risk
    for client, rows in rows_of(folder).items():
        label, risks = labels_and_risks(rows)
        patients = experiment.data.plans[client].patients["test"]
        assert [r["patient"] for r in rows] == patients  # one row each, in this order
        theirs = stats.bootstrap(
            ((label == (risks > 0.5)).astype(float),),
            np.mean,
            n_resamples=1000,
            method="percentile",
            rng=np.random.default_rng(derive_seed(0, "bootstrap", client)),
        )
        low, high = summary["intervals"]["clients"][client]["accuracy"]
        assert (low, high) == pytest.approx(tuple(theirs.confidence_interval))
        assert low <= summary["clients"][client]["accuracy"] <= high


def test_the_constant_is_scikit_learns_dummy(risk):
    folder, summary, experiment = risk
    for client, rows in rows_of(folder).items():
        label, _ = labels_and_risks(rows)
        train = experiment.data.clients[client].train["label"].numpy()
        dummy = DummyClassifier(strategy="prior").fit(np.zeros((len(train), 1)), train)
        risks = dummy.predict_proba(np.zeros((len(label), 1)))[:, 1]
        predicted = dummy.predict(np.zeros((len(label), 1)))
        expected = {
            "accuracy": sk.accuracy_score(label, predicted),
            "balanced_accuracy": 0.5,
            "auroc": 0.5,
            "brier": sk.brier_score_loss(label, risks),
            "log_loss": sk.log_loss(label, risks),
        }
        found = summary["constant"]["constant"]["clients"][client]
        assert {n: found[n] for n in expected} == pytest.approx(expected)
    over = summary["constant"]["constant"]["federation"]["auroc"]
    assert over["mean"] == 0.5


def test_an_evaluation_repeats_them(risk, capsys):
    folder, summary, _ = risk
    kept = json.loads((folder / "summary.json").read_text())
    again = evaluate_run(folder)
    for key in ("pooled", "intervals", "constant"):
        assert again[key] == summary[key] == kept[key]
    capsys.readouterr()
    print_summary(again, folder)
    told = capsys.readouterr().out
    assert all(len(line) <= 100 for line in told.split("[low, high]")[0].splitlines())
    low, high = kept["intervals"]["clients"]["hospital_3"]["auroc"]
    assert f"[{low:.3f}, {high:.3f}]" in told
    for word in ("mean", "pooled", "constant", "balanced", "spec.", "brier"):
        assert word in told


def test_no_two_columns_of_a_run_are_the_same(risk):
    """The loss of a classification is its log loss, which has a column already."""
    _, summary, _ = risk
    columns = metric_table(summary).columns
    cells = [tuple(column.cells)[: len(summary["clients"])] for column in columns]
    assert len({*cells}) == len(cells) > 8


def test_outcomes_have_them_too(tmp_path):
    linear = ("experiment=diabetes_pfednet", *CLINICAL[1:], *SHORT)
    summary, experiment = run(tmp_path / "run", *linear)
    holds_its_values(summary)
    for client, rows in rows_of(tmp_path / "run").items():
        true, found = (np.array([float(r[n]) for r in rows]) for n in ("label", "prediction"))
        error = sk.root_mean_squared_error(true, found)
        assert summary["clients"][client]["rmse"] == pytest.approx(error, rel=1e-6)
        train = experiment.data.clients[client].train["label"].numpy()
        dummy = DummyRegressor().fit(np.zeros((len(train), 1)), train)
        error = sk.root_mean_squared_error(true, dummy.predict(np.zeros((len(true), 1))))
        constant = summary["constant"]["constant"]["clients"][client]
        assert constant["rmse"] == pytest.approx(error, rel=1e-6)


def test_segmentations_are_measured_against_empty_and_full_masks(tmp_path, cohort_root):
    options = (*SHORT, "data.test_fraction=0.5")
    summary, experiment = run(tmp_path / "run", *imaging(cohort_root), *options)
    holds_its_values(summary)
    intervals = summary["intervals"]
    for name, client in experiment.data.clients.items():
        label = [b["label"] for b in client.eval_batches("test")]
        case = np.concatenate([b["case"] for b in client.eval_batches("test")])
        masks = np.concatenate([y.numpy().reshape(len(y), -1) for y in label]) > 0.5
        volumes = [masks[case == c] for c in np.unique(case)]
        full = [2 * m.sum() / (m.sum() + m.size) for m in volumes]
        found = {n: c["clients"][name] for n, c in summary["constant"].items()}
        assert found["all foreground"]["dice_case"] == pytest.approx(np.mean(full))
        assert found["empty mask"]["dice_case"] == np.mean([not m.any() for m in volumes])
        low, high = intervals["clients"][name]["dice_case"]
        dice = [float(r["dice"]) for r in rows_of(tmp_path / "run")[name]]
        assert len(dice) == 2
        assert (low, high) == pytest.approx((min(dice), max(dice)))  # 1 of 4 draws is one twice
        for metric in ("iou", "dice", "dice_case", "hd95", "nsd"):
            plain = experiment.evaluation.test[name][metric]
            low, high = intervals["clients"][name][metric]
            assert low <= plain <= high


def test_a_single_patient_has_no_interval(tmp_path, cohort_root, capsys):
    summary, _ = run(tmp_path / "run", *imaging(cohort_root), *SHORT)
    ends = [*summary["intervals"]["clients"].values(), summary["intervals"]["mean"]]
    assert all(math.isnan(v) for values in ends for v in values["iou"])
    assert "There is no interval for hospital_0" in capsys.readouterr().out


def test_models_that_all_failed_have_no_interval(tmp_path):
    """Their predictions are none that other patients could have had."""
    with pytest.raises(NonFiniteError, match="no round can be selected"):
        run(tmp_path / "run", *CLINICAL, *SHORT, "local.steps=1", "optimizer.lr=1e29")
    assert "summary.json" not in {p.name for p in (tmp_path / "run").iterdir()}


def test_candidates_have_a_froc_per_client_and_together(tmp_path, capsys):
    small = (f"data.root={tmp_path / 'data'}", "data.generated.hospitals=2", "rounds=1")
    cohort = (
        "data.generated.patients=5",
        "partition.num_clients=2",
        "data.generated.shape=[64,64,24]",
        "data.test_fraction=0.5",
    )
    more = ("data.generated.lookalikes=8", "evaluation.every=1", "model.network.block_config=[1]")
    luna = ("experiment=luna16_pfednet", "algorithm=local", "local.steps=2", *CLINICAL[-2:])
    summary, experiment = run(
        tmp_path / "run", *luna, *small, *cohort, *more, "pictures.format=png"
    )
    rows = rows_of(tmp_path / "run")
    scans = {c: len(experiment.data.plans[c].patients["test"]) for c in summary["clients"]}
    rows["pooled"] = [r for own in rows.values() for r in own]
    scans["pooled"] = sum(scans.values())
    for place, own in rows.items():
        label, scores = labels_and_risks(own)
        fpr, tpr, _ = sk.roc_curve(label, scores, drop_intermediate=False)
        alarms = fpr * (label == 0).sum() / scans[place]
        # As LUNA16's evaluation does it.
        found = np.interp([0.125, 0.25, 0.5, 1, 2, 4, 8], alarms, tpr)
        measured = summary["clients"].get(place, summary["pooled"])
        assert measured["cpm"] == pytest.approx(found.mean())
        assert measured["cpm/2"] == pytest.approx(found[4])
    low, high = summary["intervals"]["pooled"]["cpm"]
    assert 0 <= low < high <= 1
    assert "cpm counts only the kept candidates (" in capsys.readouterr().out
    assert (tmp_path / "run" / "pictures" / "froc.png").stat().st_size > 5000
