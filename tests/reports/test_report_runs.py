"""``medfed report``: the page of a user's own runs, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from html import escape

import numpy as np
import pytest
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score

from medfed.api import train
from medfed.commands.main import main
from medfed.common.untrusted import read_rows
from medfed.config.allowed import CONFIG_DIR
from medfed.functional.statistics import patients_anew
from medfed.records.folder import Run
from medfed.reports.report import report_runs
from medfed.reports.tasks import resampled_of
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.integration.runs import CLINICAL, run

SMALL = (*CLINICAL[:1], "rounds=2", *CLINICAL[2:], "partition.num_clients=2")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two methods on two splits, and on one of them with other initial weights."""
    folder = tmp_path_factory.mktemp("sweep")
    for method in ("local", "fedavg"):
        for seed, split in ((0, 0), (1, 1), (1, 0)):
            keys = (f"algorithm={method}", f"seed={seed}", f"data.seed={split}")
            run(folder / f"split_{split}" / f"{method}_{seed}", *SMALL, *keys)
    return folder


def report(runs, out, **own):
    given = {"metric": "auroc", "figures": False, **own}
    return report_runs(str(runs), out, **given)


def values(folder, method, seed, split):
    clients = Run(folder / f"split_{split}" / f"{method}_{seed}").summary["clients"]
    return [metrics["auroc"] for metrics in clients.values()]


@pytest.mark.promise("a report")
def test_splits_are_paired_and_their_overlap_is_allowed_for(sweep, tmp_path):
    both = tmp_path / "both"
    for split, seed in ((0, 0), (1, 1)):
        for method in ("local", "fedavg"):
            shutil.copytree(
                sweep / f"split_{split}" / f"{method}_{seed}", both / f"{method}_{split}"
            )
    told = report(both, tmp_path / "out", figures=True)
    ((task, verdicts),) = told.tasks
    assert set(verdicts) == {"local", "fedavg"}
    assert task.splits == 2
    assert "2 splits of the patients. Patients appear in several splits" in told.remark
    gains = [
        np.mean(values(sweep, "fedavg", n, n)) - np.mean(values(sweep, "local", n, n))
        for n in (0, 1)
    ]
    found = verdicts["fedavg"].against["local"].difference
    assert found.mean == pytest.approx(np.mean(gains))
    # Nadeau and Bengio's variance, from what the run folders say.
    parts = Run(both / "local_0").patients.values()
    tested = sum(len(p["test"]) for p in parts)
    trained = sum(len(p["train"]) + len(p["val"]) for p in parts)
    assert task.overlap == pytest.approx(tested / trained, abs=0.01)
    error = np.std(gains, ddof=1) * math.sqrt(1 / 2 + task.overlap)
    assert found.p == pytest.approx(2 * student.sf(abs(np.mean(gains)) / error, 1))
    text = (tmp_path / "out" / "report.html").read_text()
    for sentence in (told.remark, *told.notes, *told.answers[task.name]):
        assert escape(sentence) in text
    pictures = {p.name for p in (tmp_path / "out" / "figures").iterdir()}
    assert {f"{task.name}-forest.svg", f"{task.name}-forest.pdf"} <= pictures


@pytest.mark.parametrize("way", ["typed", "experiment", "python"])
def test_a_plugins_method_has_the_name_of_its_yaml(way, tmp_path, monkeypatch):
    """However the run was asked for, and whatever the class and its other yamls are called."""
    code = (
        "from medfed.personalize.fedavg import FedAvg\n\n\nclass MovingAverage(FedAvg):\n    pass\n"
    )
    yamls = tmp_path / "plug" / "configs"
    (yamls / "algorithm").mkdir(parents=True)
    (yamls / "experiment").mkdir()
    (tmp_path / "plug" / f"moving_of_{way}.py").write_text(code)
    keys = (CONFIG_DIR / "algorithm" / "fedavg.yaml").read_text()
    keys = re.sub("_target_: .*", f"_target_: moving_of_{way}.MovingAverage", keys)
    (yamls / "algorithm" / "mine.yaml").write_text(keys)
    other = keys.replace("weighting: samples", "weighting: uniform")
    (yamls / "algorithm" / "mine_uniform.yaml").write_text(other)
    by_name = (
        "# @package _global_\ndefaults:\n  - clinical_pfednet\n  - override /algorithm: mine\n"
    )
    (yamls / "experiment" / "by_name.yaml").write_text(by_name)
    words = [*SMALL[1:], "rounds=1", f"plugins={tmp_path / 'plug'}", "pictures.format=none"]
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mine_uniform"):
        asked = [SMALL[0], f"algorithm={name}"]
        if way == "python":
            assert train(*asked, *words).folder.parent.name == name
        elif way == "experiment" and name == "mine":
            main(["train", "experiment=by_name", *words])
        else:
            main(["train", *asked, *words])
    ((_, verdicts),) = report(tmp_path / "outputs", tmp_path / "out").tasks
    assert set(verdicts) == {"mine", "mine_uniform"}


def test_seeds_on_one_split_say_nothing_about_other_patients(sweep, tmp_path):
    told = report(sweep / "split_0", tmp_path / "out")
    ((task, verdicts),) = told.tasks
    assert task.single
    assert "All 2 seeds are on one split" in told.remark
    assert "seeds on one split say nothing about other patients" in told.remark
    both = [values(sweep, "fedavg", seed, 0) for seed in (0, 1)]
    assert verdicts["fedavg"].scores.values.tolist() == [pytest.approx(np.mean(both, axis=0))]
    a = verdicts["fedavg"].against["local"]
    assert (a.difference.low, a.difference.high) == a.patients  # of nothing else is anything known


def test_patients_are_drawn_anew_alike_for_all_methods(sweep):
    """Against scikit-learn, on cases that are repeated as often as they were drawn."""
    for method in ("local", "fedavg"):
        own = Run(sweep / "split_0" / f"{method}_0")
        found = resampled_of(own, "auroc", own.clients, 0)
        for i, client in enumerate(own.clients):
            rows = [r for r in read_rows(own.folder / "cases.csv", ()) if r["client"] == client]
            patients = own.patients[client]["test"]
            counts = patients_anew(len(patients), 0, client)[7]
            again = [r for r in rows for _ in range(counts[patients.index(r["patient"])])]
            label = [int(float(r["label"])) for r in again]
            score = [float(r["probability/1"]) for r in again]
            assert found[7, i] == pytest.approx(roc_auc_score(label, score))


def test_seeds_on_one_split_do_not_narrow_the_interval_over_its_patients(sweep, tmp_path):
    """Their mean is that of models on the same draws of patients, as wide as that of one seed."""
    ((_, verdicts),) = report(sweep / "split_0", tmp_path / "out").tasks
    for method in ("local", "fedavg"):
        runs = [Run(sweep / "split_0" / f"{method}_{seed}") for seed in (0, 1)]
        drawn = [resampled_of(one, "auroc", one.clients, 0) for one in runs]
        found = verdicts[method].scores.resampled[0]
        np.testing.assert_allclose(found, np.mean(drawn, axis=0), rtol=1e-12)
        one, mean = drawn[0].mean(axis=1).std(), found.mean(axis=1).std()
        assert mean > 0.8 * one  # draws of their own would give 0.7


def test_reading_numbers_needs_no_pytorch(sweep, tmp_path):
    """Whoever reports or compares tables of finished runs does not wait for it."""
    script = (
        "import sys; from medfed.reports.report import report_runs; "
        "report_runs(sys.argv[1]); "
        "assert not {'torch', 'monai', 'pytorch_lightning'} & {*sys.modules}"
    )
    shutil.copytree(sweep / "split_0", tmp_path / "runs")
    command = [sys.executable, "-c", script, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_said(sweep, tmp_path):
    lost = tmp_path / "runs" / "lost"
    shutil.copytree(sweep / "split_0" / "fedavg_0", tmp_path / "runs" / "fedavg")
    shutil.copytree(sweep / "split_0" / "fedavg_1", lost)
    (lost / "summary.json").unlink()
    told = report(tmp_path / "runs", tmp_path / "out")
    text = " ".join(told.notes)
    assert "There is no run of local training" in text
    assert f"The report leaves out unfinished runs: {lost}" in text


def test_what_was_typed_is_told(sweep, tmp_path):
    copied = tmp_path / "runs"
    shutil.copytree(sweep, copied)
    runs = sorted(path.parent for path in copied.rglob("config.yaml"))
    for folder in runs:  # as the command writes it
        (folder / "overrides.yaml").write_text("- algorithm=ditto\n- data.path=/a b\n")
    report(copied, tmp_path / "out")
    assert (
        "medfed train algorithm=ditto 'data.path=/a b'"
        in json.loads((tmp_path / "out" / "findings.json").read_text())["commands"]
    )
    (runs[0] / "overrides.yaml").write_text("algorithm: ditto\n")
    with pytest.raises(CheckpointError, match=r"overrides\.yaml.*no list of overrides"):
        report(copied, tmp_path / "again")


def changed(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


REFUSED = {
    "data": (
        "splits.json",
        lambda c: c["files"].update({"heart.csv": "0"}),
        "heart.csv in the data",
    ),
    "clients": ("splits.json", lambda c: c["clients"].update({"other": {}}), "The clients of"),
    "patients": (
        "splits.json",
        lambda c: c["clients"]["hospital_0"]["test"].pop(),
        "patients of hospital_0",
    ),
    "metric": ("summary.json", lambda c: c.update(selection=["loss", "min"]), "selects its round"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_runs_that_do_not_belong_together_are_refused_by_name(what, sweep, tmp_path):
    name, change, told = REFUSED[what]
    for method in ("local", "fedavg"):
        shutil.copytree(sweep / "split_0" / f"{method}_0", tmp_path / "runs" / method)
    changed(tmp_path / "runs" / "local", name, change)
    with pytest.raises(CheckpointError, match=told) as error:
        report(tmp_path / "runs", tmp_path / "out")
    assert str(tmp_path / "runs") in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_metric_that_runs_lack_and_a_page_of_another_are_refused(sweep, tmp_path):
    with pytest.raises(ConfigError, match=r"has no metric=aurok .did you mean auroc"):
        report(sweep / "split_0", tmp_path / "out", metric="aurok")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.html").write_text("mine")
    with pytest.raises(ConfigError, match=r"report\.html is there and no report has written it"):
        report(sweep / "split_0", tmp_path / "out")
