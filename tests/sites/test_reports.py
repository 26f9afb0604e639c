"""A coordinator's runs are compared and reported, though it knows no patient."""

from __future__ import annotations

from medfed.reports.report import report_runs
from tests.sites.hospitals import across, direct
from tests.sites.tables import EXPERIMENT, SITES, write_table


def test_a_coordinators_runs_are_compared_and_reported(tmp_path, capsys):
    """A site says whether its test patients are few, and not how many they are."""
    table, tiny = tmp_path / "ours.csv", SITES[2]
    write_table(table, SITES)
    head, *rows = table.read_text().splitlines()
    few = [row for row in rows if tiny in row][12:]
    table.write_text("\n".join([head, *(row for row in rows if row not in few)]) + "\n")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("local", 0), ("local", 1)):
        words = [*EXPERIMENT[:-2], f"algorithm={method}", "rounds=1", f"data.path={table}"]
        words += [f"seed={seed}", "local.steps=1", "data.test_fraction=0.4"]
        sites = direct(tmp_path / f"sites_{method}_{seed}", [*SITES], *words)
        across(tmp_path / "runs" / f"{method}_{seed}", sites, [*SITES], *words)
    capsys.readouterr()
    report = report_runs(str(tmp_path / "runs"))
    assert "Equal budgets" in (printed := capsys.readouterr().out)
    (page,) = (tmp_path / "runs").glob("**/report.html")
    text, said = page.read_text(), f"{tiny} (fewer than 10 test patients, or of a class, with an"
    assert said in text
    assert said in printed
    assert report.tasks[0][0].clients == SITES[:2]
    assert "2 splits, 2 hospitals, patients that only sites know tested, summed over splits" in text
