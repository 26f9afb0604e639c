"""A coordinator's runs are compared and reported, though it knows no patient."""

from __future__ import annotations

from medfed.reports.comparison import compare_runs
from medfed.reports.report import report_runs
from tests.sites.hospitals import across, direct
from tests.sites.tables import EXPERIMENT, write_table


def test_a_coordinators_runs_are_compared_and_reported(tmp_path, capsys):
    names = ("Basel", "Bern")
    table = tmp_path / "ours.csv"
    write_table(table, names)
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("local", 0), ("local", 1)):
        words = [*EXPERIMENT[:-2], f"algorithm={method}", "rounds=1", f"data.path={table}"]
        words += [f"seed={seed}", "local.steps=1"]
        sites = direct(tmp_path / f"sites_{method}_{seed}", [*names], *words)
        across(tmp_path / "runs" / f"{method}_{seed}", sites, [*names], *words)
    capsys.readouterr()
    compare_runs(str(tmp_path / "runs"))
    assert "Equal budgets" in capsys.readouterr().out
    report_runs(str(tmp_path / "runs"), quiet=True)
    (page,) = (tmp_path / "runs").glob("**/report.html")
    text = page.read_text()
    assert "The runs do not say how many patients a hospital has tested" in text
    assert "2 splits, 2 hospitals, patients that only sites know tested over all splits" in text
