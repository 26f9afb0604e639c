"""medfed report: the right numbers, refusals, and the path of the coupling strength."""

from __future__ import annotations

import csv
import json
import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from omegaconf import OmegaConf

from medfed.common.scores import worst_value
from medfed.common.untrusted import read_checkpoint
from medfed.federation.lightning.checkpoint import last_whole
from medfed.records.folder import Run
from medfed.reports.findings import report_on
from medfed.reports.report import report_runs
from medfed.reports.runs import differences, find_runs, metrics_of
from medfed.reports.sweeps import paths_of
from medfed.run.intervals import over_clients
from medfed.standalone.errors import CheckpointError, ConfigError
from tests.integration.runs import run

SMALL = ("rounds=1", "local.steps=2", "logger=none", "progress=false")
STRENGTHS = (0.0, 0.01, 10.0)


def train_in(folder: Path, *overrides: str) -> Path:
    run(folder, *SMALL[2:], *overrides)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("compare")
    for method in ("fedavg", "local"):
        for seed in (0, 1):
            overrides = ("experiment=clinical_pfednet", f"algorithm={method}", f"seed={seed}")
            train_in(root / f"{method}_{seed}", *SMALL[:2], *overrides)
    return root


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    for k, strength in enumerate(STRENGTHS):
        overrides = ("experiment=clinical_path", "rounds=2", f"algorithm.strength={strength}")
        small = ("partition.num_clients=4", "evaluation.every=1")
        train_in(root / f"{k}_run", *overrides, *small)
    return root


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def edit_splits(folder: Path, client: str) -> None:
    splits = json.loads((folder / "splits.json").read_text())
    splits["clients"][client]["test"].pop()
    (folder / "splits.json").write_text(json.dumps(splits))


def read_csv(path: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    with path.open() as file:
        return {(r["metric"], r["place"], r["method"]): r for r in csv.DictReader(file)}


def test_a_folders_name_brings_no_html_or_link_into_the_report(runs, tmp_path):
    for seed in (0, 1):
        shutil.copytree(
            runs / f"local_{seed}", tmp_path / "runs" / f"{seed}<img src=a>![x](http:y)"
        )
    report_runs(str(tmp_path / "runs"), tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1&lt;img src=a>![x]&#40;http:y)" in text
    assert "<img" not in text


def test_the_tables_have_the_numbers_of_the_summaries(runs, tmp_path):
    report_runs(str(runs), tmp_path)
    table = read_csv(tmp_path / "comparison.csv")
    for method in ("fedavg", "local"):
        summaries = [summary_of(runs / f"{method}_{seed}") for seed in (0, 1)]
        for client in summaries[0]["clients"]:
            values = [s["clients"][client]["auroc"] for s in summaries]
            row = table["auroc", client, method]
            assert float(row["value"]) == pytest.approx(statistics.fmean(values), abs=1e-12)
            assert float(row["sd_over_seeds"]) == pytest.approx(statistics.stdev(values))
        values = [min(m["auroc"] for m in s["clients"].values()) for s in summaries]
        worst = table["auroc", "worst", method]
        assert float(worst["value"]) == pytest.approx(statistics.fmean(values))
        sent = table["bytes up", "total", method]
        assert float(sent["value"]) == sum(s["bytes"]["up"] for s in summaries) / 2
    report = (tmp_path / "report.md").read_text()
    assert "Equal budgets: 2 gradient steps per client." in report
    for name in ("clients", "clinical-forest", "clinical-bytes", "clinical-gains"):
        for ending in ("png", "svg", "pdf"):
            assert (tmp_path / "figures" / f"{name}.{ending}").stat().st_size > 1000
    assert "(figures/clients.png)" in report


def test_intervals_of_one_seed_and_the_constant_stand_beside(runs, tmp_path, capsys):
    report_runs([str(runs / "fedavg_0"), str(runs / "local_0")], tmp_path, figures=False)
    assert not [*tmp_path.glob("**/*.png")]
    assert "![" not in (tmp_path / "report.md").read_text()
    table = read_csv(tmp_path / "comparison.csv")
    summary = summary_of(runs / "local_0")
    low, high = summary["intervals"]["mean"]["auroc"]
    row = table["auroc", "mean", "local"]
    assert (float(row["low"]), float(row["high"])) == (low, high)
    low_1, high_1 = summary["intervals"]["clients"]["hospital_1"]["brier"]
    row = table["brier", "hospital_1", "local"]
    assert (float(row["low"]), float(row["high"])) == (low_1, high_1)
    constant = summary["constant"]["constant"]
    for metric, places in (("accuracy", ("hospital_2", "mean", "worst")), ("auroc", ("mean",))):
        for place in places:
            over = constant["federation"][metric]
            expected = over[place] if place in over else constant["clients"][place][metric]
            assert float(table[metric, place, "constant"]["value"]) == expected
    told = capsys.readouterr().out
    assert f"[{low:.4f}, {high:.4f}]" in told
    for metric in ("sensitivity", "specificity", "f1", "brier", "balanced accuracy"):
        assert f" {metric} " in told
    report = (tmp_path / "report.md").read_text()
    head, *lines = means_in(report)
    names = ["fedavg", "fedavg, recalibrated", "fedavg, thresholds", "local"]
    assert head[:5] == ["metric", *names]
    rows = {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}
    federated = summary_of(runs / "fedavg_0")["federation"]
    expected = {("brier", "fedavg, recalibrated"): federated["brier/calibrated"]}
    expected["sensitivity", "fedavg, thresholds"] = federated["sensitivity/point"]
    for name in ("auroc", "accuracy", "brier"):
        for method, of in (("fedavg", federated), ("local", summary["federation"])):
            expected[name, method] = of[name]
        expected[name, "constant"] = constant["federation"][name]
    assert {at: rows[at[0]][at[1]] for at in expected} == {
        at: f"{of['mean']:.4f}" for at, of in expected.items()
    }
    assert rows["auroc"]["fedavg, recalibrated"] == "–"


def means_in(report):
    """The cells of the table of means."""
    lines = report.split("## Means of all metrics\n\n")[1].split("\n\n")[0].split("\n")
    rows = [line.strip("| ").split(" | ") for line in lines]
    return rows[:1] + rows[2:]


def test_no_method_is_called_best_without_a_shown_difference(runs, tmp_path, capsys):
    folders = [str(runs / "fedavg_0"), str(runs / "local_0")]
    reported = report_runs(folders, tmp_path, figures=False)
    printed = capsys.readouterr().out
    table = read_csv(tmp_path / "comparison.csv")
    ((_, verdicts),) = reported.tasks
    for method, verdict in verdicts.items():
        row = table["auroc", "mean", method]
        assert (verdict.mean.low, verdict.mean.high) == pytest.approx(
            (float(row["low"]), float(row["high"])), abs=1e-12
        )
    better = verdicts["fedavg"].against["local"].verdict == "better"
    assert ("FedAvg" in reported.answers["clinical"][0].split(" is better than ")[0]) == better
    assert ("No method is shown to be better than local training" in printed) != better
    assert "Best by" not in printed


def test_what_is_no_better_than_a_constant_is_told(runs, tmp_path, capsys):
    clients = summary_of(runs / "local_0")["clients"]
    for metrics in clients.values():
        metrics["auroc"] = 0.5
    changed(runs / "local_0", tmp_path / "local", clients=clients)
    report_runs([str(runs / "fedavg_0"), str(tmp_path / "local")], tmp_path / "out", figures=False)
    told = "no better than a constant prediction (0.5000) by mean auroc: local."
    assert told in capsys.readouterr().out
    assert told in (tmp_path / "out" / "report.md").read_text()


def test_runs_of_before_compare_without_them(runs, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(runs / "local_0", old)
    summary = summary_of(old)
    for key in ("intervals", "constant", "pooled", "absent", "remarks"):
        del summary[key]
    for values in (summary["federation"], *summary["clients"].values()):
        for metric in ("sensitivity", "specificity", "f1", "brier"):
            del values[metric]
    (old / "summary.json").write_text(json.dumps(summary))
    comparison = report_runs([str(runs / "fedavg_0"), str(old)], tmp_path / "out", figures=False)
    assert "brier" not in metrics_of(comparison.runs, "auroc")
    table = read_csv(tmp_path / "out" / "comparison.csv")
    assert {method for _, _, method in table} == {"fedavg", "local"}  # no constant
    assert table["auroc", "mean", "fedavg"]["low"]
    assert not table["auroc", "mean", "local"]["low"]


def test_the_default_place_is_the_folder_of_the_runs(runs, tmp_path):
    for name in ("fedavg_0", "local_0"):
        shutil.copytree(runs / name, tmp_path / name)
    report_runs([str(tmp_path / "fedavg_0"), str(tmp_path / "local_0")], figures=False)
    assert (tmp_path / "report" / "comparison.csv").is_file()


def test_a_users_file_is_not_overwritten(runs, tmp_path):
    for name in ("report.html", "report.md", "comparison.csv", "table.csv"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"{name} is there and no report has written it"):
            report_runs(str(runs), tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
    for _ in range(2):  # its own it replaces
        report_runs(str(runs), tmp_path)


def test_other_patients_are_refused(runs, tmp_path):
    shutil.copytree(runs / "local_0", tmp_path / "other")
    edit_splits(tmp_path / "other", "hospital_1")
    with pytest.raises(CheckpointError, match=r"hospital_1 in .*other are not those in .*fedavg_0"):
        report_on([runs / "fedavg_0", tmp_path / "other"])


def test_a_client_without_a_result_is_another_federation(runs, tmp_path):
    overrides = ("experiment=clinical_pfednet", "algorithm=local", "keep_out=[hospital_1]")
    less = train_in(tmp_path / "less", *SMALL[:2], *overrides)
    for pair in ([runs / "fedavg_0", less], [less, runs / "fedavg_0"]):
        with pytest.raises(CheckpointError, match=r"The clients of .* are not those of"):
            report_on(pair)


def test_methods_without_a_common_seed_are_refused(runs):
    with pytest.raises(CheckpointError, match="No seed was run with every method"):
        report_on([runs / "fedavg_0", runs / "local_1"])


def test_a_seed_that_a_method_lacks_is_left_out_and_told(runs):
    comparison = report_on([runs / "fedavg_0", runs / "fedavg_1", runs / "local_0"])
    assert [len(runs) for runs in comparison.runs.values()] == [1, 1]
    assert any("Seeds 1 of fedavg are left out" in note for note in comparison.notes)


def test_a_repeated_run_counts_once(runs, tmp_path):
    shutil.copytree(runs / "local_0", tmp_path / "again")
    comparison = report_on([runs / "fedavg_0", runs / "local_0", tmp_path / "again"])
    assert len(comparison.runs) == 2
    assert any(" repeats " in note for note in comparison.notes)


def test_differing_budgets_and_settings_are_told(runs, tmp_path):
    shutil.copytree(runs / "local_0", tmp_path / "longer")
    summary = summary_of(tmp_path / "longer")
    summary["steps"] = dict.fromkeys(summary["steps"], 7)
    (tmp_path / "longer" / "summary.json").write_text(json.dumps(summary))
    config = OmegaConf.load(tmp_path / "longer" / "config.yaml")
    config.local.steps = 7
    OmegaConf.save(config, tmp_path / "longer" / "config.yaml")
    comparison = report_on([runs / "fedavg_0", runs / "local_0", tmp_path / "longer"])
    assert [*comparison.runs] == ["fedavg", "local", "local steps=7"]
    assert (
        "local stands for local steps=2, the best of 2 settings on validation." in comparison.notes
    )
    notes = " ".join(comparison.notes)
    assert "Gradient steps per client differ: fedavg 2, local steps=2 2, local steps=7 7" in notes
    assert "Settings besides the algorithm differ between methods: local.steps" in notes


@pytest.mark.parametrize("typed", [False, True])
def test_a_key_that_one_version_lacks_is_no_setting_unless_somebody_typed_it(runs, tmp_path, typed):
    old = changed(runs / "fedavg_0", tmp_path / "old", algorithm="local")
    config = OmegaConf.load(runs / "local_0" / "config.yaml")
    del config.local["graphs"]
    del config.derived["out_channels"]
    config.data.older = 3
    OmegaConf.save(config, old / "config.yaml")
    versions = json.loads((old / "versions.json").read_text())
    (old / "versions.json").write_text(json.dumps(versions | {"commit": "a" * 40}))
    if typed:
        (old / "overrides.yaml").write_text("[+data.older=3]")
    names = [Run(runs / "local_0"), Run(old)]
    assert differences(*names) == differences(*names[::-1]) == ["data.older"] * typed
    methods = [runs / "fedavg_0", old] + [runs / "local_0"] * typed
    notes = " ".join(report_on(methods).notes)
    assert "The runs are of several versions of medfed (" in notes
    assert "aaaaaaaaaaaa" in notes
    config.local.steps = 7  # which both know
    OmegaConf.save(config, old / "config.yaml")
    assert "local.steps" in differences(names[0], Run(old))


def changed(run: Path, copy: Path, **changes) -> Path:
    shutil.copytree(run, copy)
    summary = summary_of(copy) | changes
    (copy / "summary.json").write_text(json.dumps(summary))
    return copy


def test_a_failed_client_is_in_the_means_and_named(runs, tmp_path):
    summary = summary_of(runs / "local_0")
    one = "hospital_1"
    lost = {name: worst_value(name) for name in summary["clients"][one]}
    clients = summary["clients"] | {one: lost}
    failed = changed(
        runs / "local_0", tmp_path / "local", clients=clients, federation=over_clients(clients)
    )
    comparison = report_runs(
        [str(runs / "fedavg_0"), str(failed)], tmp_path / "out", "loss", figures=False
    )
    table = read_csv(tmp_path / "out" / "comparison.csv")
    assert float(table["loss", "mean", "local"]["value"]) == math.inf
    report = (tmp_path / "out" / "report.md").read_text()
    assert comparison.answers["clinical"][0] in report
    assert any(
        f"Seed 0: local: The loss or the predictions of {one}" in n for n in comparison.notes
    )
    assert table["loss", "mean", "local"]["sd_over_seeds"] == ""


def test_equal_steps_with_other_passes_are_told(runs, tmp_path):
    clients = summary_of(runs / "local_0")["steps"]
    passes = {
        "gradient_passes": dict.fromkeys(clients, 5),
        "forward_passes": dict.fromkeys(clients, 3),
    }
    dear = changed(runs / "local_0", tmp_path / "local", **passes)
    comparison = report_runs([str(runs / "fedavg_0"), str(dear)], tmp_path / "out", figures=False)
    notes = " ".join(comparison.notes)
    assert "Equal budgets: 2 gradient steps per client." in notes
    assert (
        "Gradient passes per client, including those of the steps, differ: fedavg 2, local 5."
        in notes
    )
    assert "Forward-only passes per client differ: fedavg 0, local 3." in notes
    assert "local takes 2.50 times the gradient passes of fedavg, so a gain may be" in notes
    pooled = changed(dear, tmp_path / "pooled", algorithm="pooled")  # is no method to choose
    assert not [n for n in report_on([runs / "fedavg_0", pooled]).notes if " takes " in n]
    table = read_csv(tmp_path / "out" / "comparison.csv")
    assert table["forward passes", "hospital_1", "local"]["value"] == "3.0"
    plain = report_on([runs / "fedavg_0", runs / "local_0"])
    assert not [n for n in plain.notes if "passes" in n]


def test_unknown_metric_and_missing_runs(runs, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"has no metric=acuracy \(did you mean accuracy"):
        report_on([runs / "fedavg_0"], "acuracy")
    with pytest.raises(CheckpointError, match="holds no finished run"):
        find_runs(str(tmp_path))
    monkeypatch.setattr("medfed.reports.runs._FOLDERS", 3)
    for name in "abc":
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="holds more than 3 folders; name the folder that"):
        find_runs(str(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(CheckpointError, match="has not finished"):
        report_on(find_runs([str(tmp_path)]))


def test_personal_models_draw_together_as_the_coupling_grows(sweep, tmp_path):
    """The sum over the graph's edges of the distances of the exported models."""
    comparison = report_runs(str(sweep), tmp_path)
    assert [*comparison.runs] == [f"pfednet strength={s:g}" for s in STRENGTHS]
    with (tmp_path / "algorithm_strength.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["strength"]) for row in rows] == list(STRENGTHS)
    coupling = [float(row["coupling"]) for row in rows]
    assert coupling[0] > coupling[1] > coupling[2] >= 0
    assert coupling[2] <= 1e-3 * coupling[0]  # one model for all
    compared = 0
    for runs, found in zip(comparison.runs.values(), coupling, strict=True):
        one = runs[0]
        if one.summary["selected_round"] == 1:  # then the exported models are those of the end
            server = read_checkpoint(last_whole(one.checkpoints))["federation"]["server"]
            models = [
                safetensors.numpy.load_file(one.folder / "models" / f"{c}.safetensors")
                for c in one.clients
            ]
            names = server["personal"]
            flat = [np.concatenate([m[n].ravel() for n in names]) for m in models]
            apart = [
                np.linalg.norm(flat[i] - flat[j], ord=one.config.algorithm.p)
                for i, j in server["graph"]["edges"].tolist()
            ]
            assert found == pytest.approx(sum(apart), rel=1e-4, abs=1e-6)
            compared += 1
    assert compared
    assert (tmp_path / "figures" / "algorithm_strength.png").stat().st_size > 20000
    report = (tmp_path / "report.md").read_text()
    assert f"over the edges of the graph, last round {coupling[0]:.4g} (" in report


def test_without_a_sweep_there_is_no_path(runs):
    assert paths_of(report_on([runs / "fedavg_0", runs / "local_0"])) == {}
