"""Sets and intervals of whole runs: in their records, tables, reports, bundles and predictions."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.functional.conformal import volumes_within
from medfed.reports.coverage import coverage_table
from medfed.reports.report import report_runs
from medfed.run.results import print_summary
from tests.integration.runs import CLINICAL, imaging

SETS = (
    *CLINICAL,
    "algorithm=fedavg",
    "evaluation.coverage=0.8",
    "rounds=1",
    "partition.num_clients=3",
)


def cases_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "cases.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def test_a_run_says_how_often_its_sets_hold_the_class(finished_run, capsys):
    folder = finished_run(*SETS)
    summary = json.loads((folder / "summary.json").read_text())
    rows = cases_of(folder)
    for client, metrics in summary["clients"].items():
        point, of = summary["points"][client], [row for row in rows if row["client"] == client]
        inside, sizes = [], []
        for row in of:
            chances = [float(row[f"calibrated/{k}"]) for k in (0, 1)]
            held = {k for k in (0, 1) if 1 - chances[k] <= point["quantile"]}
            held.add(int(np.argmax(chances)))
            inside.append(int(row["label"]) in held)
            sizes.append(len(held))
        assert [float(row["covered"]) for row in of] == inside
        assert metrics["coverage/point"] == pytest.approx(np.mean(inside))
        assert metrics["set_size/point"] == pytest.approx(np.mean(sizes))
    print_summary(summary, folder)
    printed = " ".join(capsys.readouterr().out.split())
    assert "hospital quantile of coverage range classes in a set" in printed
    assert "guarantee" not in printed
    mean = np.mean([metrics["coverage/point"] for metrics in summary["clients"].values()])
    assert f"mean {mean:.4f}" in printed
    report_runs([str(folder)], folder / "report", figures=False)
    assert "Sets and intervals" in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        text = (folder / "report" / name).read_text()
        assert f"{mean:.4f}" in text
        assert "promises nothing to a single hospital" in text


def test_a_bundle_has_the_quantile_of_its_run(finished_run, tmp_path):
    folder = finished_run(*SETS)
    summary = json.loads((folder / "summary.json").read_text())
    export_run(checked(load([f'run="{folder}"', f'out="{tmp_path}"'], "export")))
    for client, point in summary["points"].items():
        facts = json.loads((tmp_path / client / "configs" / "metadata.json").read_text())
        bounds = {"level": 0.8, "quantiles": {"": point["quantile"]}, "patients": {"": 0}}
        assert facts["medfed"]["coverage"] == bounds
        card = (tmp_path / client / "docs" / "model_card.md").read_text()
        assert "hold the truth at a rate of 0.8; their bounds are quantiles of all" in card
    few = ["bits=[2]", "finetune_steps=0"]
    made = export_run(checked(load([f'run="{folder}"', f'out="{tmp_path}/few"', *few], "export")))
    facts = json.loads((made[0] / "configs" / "metadata.json").read_text())["medfed"]
    assert (facts["coverage"] is None) == bool(facts["bits"])  # validation has seen other weights


def test_volumes_of_a_run_have_intervals(finished_run, tmp_path):
    overrides = (*imaging(tmp_path / "cohort"), "data.reader.regions=[whole,core]", "rounds=1")
    many = ("data.generated.patients=24", "data.val_fraction=0.84", "data.test_fraction=0.08")
    folder = finished_run(*overrides, *many, "evaluation.coverage=0.5", "algorithm=fedavg")
    summary = json.loads((folder / "summary.json").read_text())
    client, point = next(iter(summary["points"].items()))
    assert point["quantile/whole"] > 0
    rows = [row for row in cases_of(folder) if row["client"] == client]
    for part in ("whole", "core"):
        inside = []
        for row in (row for row in rows if row["region"] == part):
            low, high = volumes_within(
                float(row.get("predicted/point") or row["predicted"]), point[f"quantile/{part}"]
            )
            inside.append(low - 1e-6 <= float(row["labelled"]) <= high + 1e-6)
        found = summary["clients"][client][f"coverage/{part}/point"]
        assert found == pytest.approx(np.mean(inside))
    table = coverage_table({"fedavg": [summary]})
    assert table is not None
    assert [row[1].text for row in table.rows][-1] == "mean, core"
    export_run(checked(load([f'run="{folder}"', f'out="{tmp_path}/bundles"'], "export")))
    bundle = tmp_path / "bundles" / client
    scan = next((tmp_path / "cohort").rglob("*_t1.nii.gz"), None) or next(
        path.parent for path in sorted((tmp_path / "cohort").rglob("*.nii.gz"))
    )
    keys = [f'bundle="{bundle}"', f'input="{scan.parent if scan.is_file() else scan}"']
    for name, more in (("out", []), ("other", ["threshold=0.4"])):
        predict(checked(load([*keys, f'output="{tmp_path / name}"', *more], "predict")))
    with (tmp_path / "out" / "summary.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    mask = nib.load(tmp_path / "out" / row["output"])
    ml = abs(np.linalg.det(mask.affine[:3, :3])) / 1000
    low, high = volumes_within(float(row["whole_ml"]) / ml, point["quantile/whole"])
    ends = [float(row["whole_ml_low_50"]), float(row["whole_ml_high_50"])]
    assert ends == pytest.approx([low * ml, high * ml], rel=1e-4)
    assert "_low_50" not in (tmp_path / "other" / "summary.csv").read_text()


def test_a_mean_over_hospitals_of_too_few_patients_has_no_range():
    unknown = {"coverage/point": np.nan, "set_size/point": np.nan}
    summary = {"clients": {"a": unknown, "b": unknown}, "points": {"a": {}, "b": {}}}
    table = coverage_table({"fedavg": [summary]})
    assert table is not None
    assert [cell.text for cell in table.rows[-1]] == ["fedavg", "mean", "", "–", "–", "–"]
