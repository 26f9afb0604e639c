"""An ordinary table over several seeds is reported, and a tiny clinic decides nothing."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from medfed.commands.main import main
from medfed.common.scores import LEAST_CASES, fewest
from medfed.common.untrusted import read_rows
from medfed.records.folder import Run
from medfed.reports.findings import report_on
from medfed.reports.report import report_runs
from medfed.reports.runs import differences
from medfed.reports.sentences import answer
from medfed.reports.tables import hospitals_table, methods_table
from medfed.reports.tasks import Scores, Task
from medfed.reports.verdicts import harm_of, judge
from medfed.run.results import print_summary
from medfed.standalone.errors import CheckpointError
from tests.integration.runs import run

CLINICS = {"Basel": 220, "Bern": 180, "Chur": 110, "Zug": 9, "Uri": 81}
SEEDS = (0, 1, 2)
FOUR = ("patient", "label", "probability/1", "probability/2")
SETTING = (
    *("experiment=clinical_pfednet", "data=csv", "data.label=ill", "data.patient=nr"),
    *("data.centre=clinic", "rounds=2", "local.steps=2", "logger=none", "progress=false"),
)


def write_table(path, leak=False, clinics=CLINICS):
    """Five clinics, one of nine patients and one without a healthy one; a rare category; gaps."""
    rng = np.random.default_rng(3)
    rows = ["nr,age,kind,ill,clinic" + ",code" * leak]
    for clinic, count in clinics.items():
        for n in range(count):
            age = rng.normal(60, 10)
            kind = "rare" if clinic == "Basel" and n < 7 else "ab"[rng.integers(2)]
            ill = 1 if clinic == "Uri" else int(rng.random() < 1 / (1 + math.exp((60 - age) / 8)))
            shown = "" if rng.random() < 0.05 else f"{age:.1f}"
            rows.append(f"{len(rows)},{shown},{kind},{ill},{clinic}" + f",c{ill}" * leak)
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clinics")
    write_table(folder / "table.csv")
    for seed in SEEDS:
        for method in ("local", "fedavg"):
            own = (f"data.path={folder / 'table.csv'}", f"algorithm={method}", f"seed={seed}")
            run(folder / "runs" / f"{method}_{seed}", *SETTING, *own)
    return folder / "runs"


@pytest.mark.long
def test_from_a_table_to_a_report_over_ten_seeds(tmp_path, monkeypatch, capsys):
    """As a stranger: init, a sweep of two methods, report, compare."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "table.csv", leak=True)
    main(["init", "table.csv", "data.label=ill", "yes=true"])
    written = (tmp_path / "medfed_experiments/configs/experiment/table.yaml").read_text()
    assert "  drop:\n  - code\n" in written  # it alone predicts the label
    capsys.readouterr()
    short = ("rounds=2", "local.steps=4", "pictures.format=none", "progress=false", "logger=none")
    chosen = ("plugins=medfed_experiments", "experiment=table", "algorithm=local,fedavg")
    sweep = ("seed=range(10)", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    main(["train", "-m", *chosen, *sweep, *short])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-1]
        == f"20 of 20 runs are finished; compare them: medfed report runs={tmp_path}/sweep"
    )
    for once in ("Before training", "all 600 rows are taken"):
        assert sum(once in line for line in lines) == 1
    gaps = [line for line in lines if "Missing training cells become" in line]
    assert len(gaps) == 1  # the shares of another split say nothing new
    main(["report", f"runs={tmp_path}/sweep", "figures=false"])
    said = capsys.readouterr().out
    for words in (
        "10 splits of the patients.",
        "Too small to decide or to have a verdict: ",
        "train patients",
        "p (Holm)",
    ):
        assert words in said
    assert re.search(r"[ ,]Uri\b[^;()]* \(0 test patients of a class", said)
    harmed = said.partition(" hospitals that decide have a lower auroc than alone")
    assert harmed[1], "the small ones are not among those of whom it is a share"
    assert "Zug" not in harmed[2].split(".")[0]
    assert "local, without small" in said


def test_values_that_follow_from_a_split_are_no_settings(runs):
    ones = [Run(runs / f"fedavg_{seed}") for seed in SEEDS]
    assert len({one.config.in_channels for one in ones}) > 1  # the rare category has few patients
    assert all(differences(ones[0], other) == [] for other in ones[1:])
    assert dict(ones[0].config.derived)["in_channels"] is None


def test_a_chosen_value_that_equals_a_derived_one_elsewhere_is_a_difference(runs, tmp_path):
    one, other = Run(runs / "fedavg_0"), Run(runs / "fedavg_1")
    assert not differences(one, other)
    set_by_hand = dict(other.config.plain())
    set_by_hand["derived"].pop("in_channels")
    object.__setattr__(other, "config", type(other.config)(set_by_hand))
    assert differences(one, other) == ["in_channels"]


def test_a_sweep_over_seeds_is_reported_and_small_clinics_decide_nothing(runs, tmp_path):
    report = report_runs(str(runs), tmp_path / "report")
    ((task, verdicts),) = report.tasks
    assert task.clients == ("Basel", "Bern", "Chur")
    assert set(task.small) == {"Zug", "Uri"}
    assert task.small["Uri"] == "0 test patients of a class"
    (answer,) = report.answers.values()
    assert any("Too small to decide or to have a verdict: " in sentence for sentence in answer)
    assert set(verdicts["fedavg"].harm.gains) == {"Basel", "Bern", "Chur"}
    # Independently: the mean of means over the three clinics, from the tables of the runs.
    means = []
    for seed in SEEDS:
        rows = read_rows(runs / f"fedavg_{seed}" / "metrics.csv", ("client",))
        tested = {r["client"]: float(r["auroc"]) for r in rows if r["split"] == "test"}
        means.append(np.mean([tested[c] for c in task.clients]))
    assert verdicts["fedavg"].mean.mean == pytest.approx(np.mean(means), abs=1e-12)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<th>mean without small" in page.replace(' scope="col"', "")
    assert "test patients" in page


@pytest.mark.parametrize("alone", [True, False], ids=["with local", "without"])
def test_the_table_of_hospitals_counts_patients_per_split(alone, runs):
    methods = ("local", "fedavg") if alone else ("fedavg",)
    folders = [runs / f"{method}_{seed}" for method in methods for seed in SEEDS]
    ((task, verdicts),) = report_on(folders).tasks
    table = hospitals_table(task, verdicts)
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    if table.head[0] == "hospital":  # the longer side runs downwards
        columns = zip(*rows.values(), strict=True)
        cells = dict(zip(table.head[1:], map(list, columns), strict=True))
        hospitals = list(rows)
    else:
        cells, hospitals = rows, list(table.head[1:])
    assert hospitals[:3] == ["Basel", "Bern", "Chur"]
    assert {*hospitals[3:]} == {"Zug", "Uri"}
    ones = [Run(runs / f"fedavg_{seed}") for seed in SEEDS]
    for part in ("train", "val", "test"):
        counts = [np.mean([len(one.patients[c][part]) for one in ones]) for c in hospitals]
        assert cells[f"{part} patients"] == [f"{count:.0f}" for count in counts]
    assert cells["least tested, all splits"][hospitals.index("Uri")] == "0 of a class"
    assert cells["fedavg"][-2:] == ["too small"] * 2
    for hospital, cell in zip(hospitals[:3], cells["fedavg"], strict=False):
        expected = np.mean([one.summary["clients"][hospital]["auroc"] for one in ones])
        if alone:
            base = (Run(runs / f"local_{seed}").summary["clients"][hospital] for seed in SEEDS)
            expected -= np.mean([metrics["auroc"] for metrics in base])
        assert float(cell) == pytest.approx(expected, abs=6e-4)


def test_both_means_stand_beside_each_other(runs, tmp_path, capsys):
    report_runs(str(runs), tmp_path, figures=False)
    rows = read_rows(tmp_path / "comparison.csv", ("metric", "place"))
    brier = {
        r["place"]: float(r["value"])
        for r in rows
        if r["metric"] == "brier"
        if r["method"] == "local"
    }
    assert brier["mean without small"] == pytest.approx(
        np.mean([brier[c] for c in ("Basel", "Bern", "Chur")])
    )
    assert brier["mean"] == pytest.approx(np.mean([brier[c] for c in CLINICS]))
    printed = capsys.readouterr().out
    assert "local, without small" in printed
    for name, place in (("local", "mean"), ("local, without small", "mean without small")):
        lines = [line for line in printed.splitlines() if line.startswith(f"  {name}   ")]
        assert any(f"{brier[place]:.4f}" in line for line in lines)


def test_a_run_says_what_its_own_split_cannot_tell(runs):
    summary = Run(runs / "local_0").summary
    assert set(summary["small"]) >= {"Zug", "Uri"}
    assert summary["intervals"]["patients"]["Zug"] < LEAST_CASES
    console = Console(file=io.StringIO(), width=140)
    print_summary(summary, runs / "local_0", console)
    rows = (line.split() for line in console.file.getvalue().splitlines())
    (without,) = (row[3:] for row in rows if row[:3] == ["mean", "without", "small"])
    known = [m["auroc"] for c, m in summary["clients"].items() if c not in summary["small"]]
    assert without[0] == f"{np.mean(known):.4f}"
    assert "alone too small for a verdict, and left out of the mean without small: " in " ".join(
        console.file.getvalue().split()
    )
    console = Console(file=io.StringIO(), width=140)
    many = {f"clinic {n}": "3 test patients" for n in range(25)}
    print_summary(summary | {"small": many}, runs / "local_0", console)
    said = " ".join(console.file.getvalue().split())
    assert "clinic 19 and 5 more (3 test patients each). A report counts" in said


def auroc_anew(rows, rng):
    """AUROC of 2000 draws of a clinic's patients, by pairs; draws without both classes repeat."""
    ill = np.array([int(row["label"]) for row in rows], dtype=bool)
    risk = np.array([float(row["probability/1"]) for row in rows])
    over = np.sign(risk[ill][:, None] - risk[~ill]) / 2 + 0.5
    drawn = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), 8000)
    sick, well = drawn[:, ill], drawn[:, ~ill]
    whole = np.flatnonzero(sick.any(1) & well.any(1))[:2000]
    sick, well = sick[whole], well[whole]
    return np.einsum("wi,ij,wj->w", sick, over, well) / (sick.sum(1) * well.sum(1))


@pytest.mark.parametrize("tiny", [15, 5], ids=["three patients", "one patient"])
def test_the_interval_of_a_mean_is_of_the_clinics_of_that_mean(tiny, tmp_path):
    """Also where a clinic is so small that many resamples leave its metric undefined, or all do."""
    clinics = {"Basel": 220, "Bern": 180, "Zug": tiny}
    write_table(tmp_path / "table.csv", clinics=clinics)
    summary, _ = run(tmp_path / "run", *SETTING, f"data.path={tmp_path / 'table.csv'}")
    cases, rng = Run(tmp_path / "run").cases(), np.random.default_rng(7)
    known = [c for c in clinics if not math.isnan(summary["clients"][c]["auroc"])]
    assert ("Zug" in known) == (tiny > 5)
    anew = {c: auroc_anew([r for r in cases if r["client"] == c], rng) for c in known}
    of = {"mean": known, "mean without small": [c for c in known if c not in summary["small"]]}
    for name, members in of.items():
        expected = np.quantile(np.mean([anew[c] for c in members], axis=0), (0.025, 0.975))
        assert summary["intervals"][name]["auroc"] == pytest.approx(expected, abs=0.03)


def test_runs_that_differ_by_choice_are_refused_by_their_names(runs, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"No seed was run with every method .*fedavg: 0; local: 1"
    ):
        report_runs([str(runs / "fedavg_0"), str(runs / "local_1")], tmp_path / "out")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"patient": n, "event": n < 3} for n in range(20)], (3, "test patients with an event")),
        ([{"patient": n // 2, "dice": 0.5} for n in range(20)], (10, "test patients")),
        (
            [
                {"patient": n // 2, "found": -2 + n % 2, "lesions": n % 4 // 2 * (1 - n % 2)}
                for n in range(24)
            ],
            (6, "test patients with a lesion"),
        ),
        ([], (0, "test patients")),
        (
            [
                {"patient": n, "label": n % 4, "probability/1": 0, "probability/2": 0}
                for n in range(16)
            ],
            (12, "test patients outside of its commonest class"),
        ),
    ],
    ids=["events", "slices of a patient", "lesions", "nobody", "four classes"],
)
def test_what_scores_rest_on(rows, expected):
    assert fewest(rows) == expected


def test_where_all_are_small_all_decide():
    values, none = np.full((2, 3), 0.5), np.zeros((2, 0, 3))
    task = Task("x", "", "auroc", clients=("a", "b", "c"))
    task.scores = {"local": Scores("local", values, none, (0.0, 0.0), 1.0, 0, {})}
    task.leave_out_small({c: (9 if c != "a" else 12, "test patients") for c in "abc"})
    assert task.clients == ("a", "b", "c")
    assert not task.small
    told = answer(task, judge(task))[1]
    assert told.startswith("Fewer than two hospitals have 10 test patients over all splits")


def test_where_all_are_small_no_hospital_has_a_verdict():
    """All decide the mean, as there are no others; of none by itself is anything said."""
    task = Task("toy", "")
    task.clients, gap = ("a", "b", "c"), np.array([-0.2, 0.1, 0.0])
    rng = np.random.default_rng(0)
    for name, values in (("local", np.full((5, 3), 0.5)), ("fedavg", np.full((5, 3), 0.5) + gap)):
        values = values + rng.normal(0, 1e-3, values.shape)
        resampled = values[:, None] + rng.normal(0, 1e-3, (5, 50, 3))
        task.scores[name] = Scores(name, values, resampled, (0.0, 0.0), 1.0)
    alone = harm_of(task.scores["fedavg"], task.scores["local"], task)
    assert alone.gains["a"].verdict == "worse"
    task.leave_out_small(dict.fromkeys(task.clients, (3, "test patients")))
    assert task.small == {}
    small = harm_of(task.scores["fedavg"], task.scores["local"], task)
    assert {gain.verdict for gain in small.gains.values()} == {"undecided"}
    assert small.gains["a"].difference == alone.gains["a"].difference


def test_a_gain_of_level_is_told_from_a_gain_of_personalisation(runs, tmp_path, capsys):
    """The report of a probability's score has each method recalibrated, without small hospitals."""
    report = report_runs(str(runs), tmp_path, metric="brier", figures=False)
    ((task, verdicts),) = report.tasks
    expected = {}
    for name in verdicts:
        each = [Run(runs / f"{name}_{seed}").summary["clients"] for seed in SEEDS]
        values = [[of[c]["brier/calibrated"] for c in task.clients] for of in each]
        expected[name] = f"{np.mean(values):.4f}"
    table = methods_table(task, verdicts)
    at = table.head.index("recalibrated")
    assert {row[0].text: row[at].text for row in table.rows} == expected
    (said,) = [line for line in report.answers[task.name] if line.startswith("Recalibrated on")]
    assert said.count(expected["fedavg"]) == 1
    page, printed = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    for text in (said, "fedavg, recalibrated"):
        assert text in page
        assert text in " ".join(printed.split())


def test_a_name_of_two_lines_stays_in_its_sentence():
    """A hospital may be called anything; each sentence is a line of the report and its file."""
    task = Task("toy", "", clients=("a\nb", "c", "d"))
    for name, score in (("local", 0.5), ("fedavg", 0.4)):
        task.scores[name] = Scores(name, np.full((5, 3), score), np.zeros((5, 0, 3)), (0.0, 0.0), 1)
    task.leave_out_small({"a\nb": (3, "test patients")} | dict.fromkeys("cd", (30, "patients")))
    told = answer(task, judge(task))
    assert r"Too small to decide or to have a verdict: a\nb (3 test patients);" in told[1]
    assert not any("\n" in sentence or sentence.startswith("b") for sentence in told)
