"""Advice from small pilots: whom it looks at, what it says, and when it cannot tell."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from sklearn.datasets import load_breast_cancer

from medfed.benchmark import advice as choice
from medfed.benchmark import advice as written
from medfed.benchmark import runner
from medfed.benchmark.advice import (
    advise,
    gain_of,
    markdown,
    pilot_data,
    pilots,
    sentences,
)
from medfed.benchmark.runner import Progress
from medfed.benchmark.suite import Method
from medfed.commands import advise as door
from medfed.common.scores import LEAST_CASES
from medfed.functional.statistics import difference
from medfed.reports.sentences import takes_to_show
from medfed.reports.tasks import Scores, Task
from medfed.standalone.errors import DataError
from tests.pages import ROOT
from tests.sites.test_reading import words_of

HOSPITALS = {"north": 90, "south": 90, "odd": 90, "tiny": 8}
SHORT = (
    "model=logistic",
    "optimizer.lr=0.5",
    "rounds=2",
    "local.steps=8",
    "model.selection=[auroc,max]",
)
METHODS = ["fedavg"]


def split_of(name: str, size: int) -> dict[str, list[str]]:
    ids = [f"{name}_{n}" for n in range(size)]
    cuts = size // 5, 2 * size // 5
    return {"test": ids[: cuts[0]], "val": ids[cuts[0] : cuts[1]], "train": ids[cuts[1] :]}


SPLITS = {name: split_of(name, size) for name, size in HOSPITALS.items()}


def write(path, *, spoilt=()):
    """Patients of four hospitals; the odd one calls the classes the other way round."""
    table = load_breast_cancer()
    names = [f"{name}_{n}" for name, size in HOSPITALS.items() for n in range(size)]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["patient", "centre", "label", *(f"f{n}" for n in range(4))])
        for n, name in enumerate(names):
            centre = name.partition("_")[0]
            label, values = int(table.target[n]), table.data[n, :4].tolist()
            if centre == "odd":
                label = 1 - label
            if name in spoilt:
                label, values = 1 - label, [1e3 * v for v in reversed(values)]
            rows.writerow([name, centre, label, *values])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    (folder / "splits.json").write_text(json.dumps({"clients": SPLITS}))
    return folder


def asks(folder, name="table.csv", *more):
    return (
        *("experiment=clinical_pfednet", "data=csv", f"data.path={folder / name}"),
        *("data.patient=patient", "data.centre=centre", "data.label=label"),
        *("partition=saved", f"partition.file={folder / 'splits.json'}", *SHORT, *more),
    )


def ask(folder, name="table.csv", out="out", **own):
    given = {"folds": 3, "repeats": 1, "workers": 0, **own}
    return advise(asks(folder, name), METHODS, out=folder / out, **given)


@pytest.fixture(scope="module")
def done(folder):
    write(folder / "table.csv")
    return ask(folder)


def without_time(path):
    content = json.loads((path / "advice.json").read_text())
    for method in content["methods"].values():
        assert method["cost"].pop("cpu_hours") > 0
    content["pilot"].pop("overrides")  # where the table lies
    return content


def test_test_patients_are_never_looked_at(done, folder):
    """Whatever they hold, the advice is the same to the bit; a training patient's is not."""
    _, where = done
    spoilt = {i for parts in SPLITS.values() for i in parts["test"]}
    write(folder / "spoilt.csv", spoilt=spoilt)
    assert (folder / "spoilt.csv").read_text() != (folder / "table.csv").read_text()
    _, other = ask(folder, "spoilt.csv", "spoilt")
    assert without_time(other) == without_time(where)
    write(folder / "train.csv", spoilt={SPLITS["north"]["train"][0]})
    _, third = ask(folder, "train.csv", "third")
    assert without_time(third) != without_time(where)


def test_every_other_patient_is_tested_once_per_repetition(done, folder):
    asked = pilot_data(asks(folder), folds=3, repeats=2)
    used = {c: sorted([*p["train"], *p["val"]]) for c, p in SPLITS.items()}
    assert asked.patients == used
    assert asked.kept_out == sum(len(p["test"]) for p in SPLITS.values())
    for repeat in (0, 1):
        dealt = [d.content["clients"] for d in asked.divisions[3 * repeat : 3 * repeat + 3]]
        for client, ids in used.items():
            assert sorted(i for one in dealt for i in one[client]["test"]) == ids
            for one in dealt:
                assert sorted(i for part in one[client].values() for i in part) == ids
    firsts = [d.content["clients"]["north"]["test"] for d in asked.divisions]
    assert firsts[0] != firsts[3]
    files = {p.name: json.loads(p.read_text()) for p in (folder / "out/divisions").iterdir()}
    assert files == {d.name: d.content for d in asked.divisions[:3]}


def test_the_hospital_that_disagrees_stays_alone_and_a_tiny_one_is_left_open(done):
    found, where = done
    fedavg = found.methods["fedavg"]
    assert fedavg.hospitals["odd"].says == "worse"
    assert fedavg.hospitals["tiny"].says == "cannot tell"
    assert f"a verdict takes {LEAST_CASES} or more" in fedavg.hospitals["tiny"].why
    page = (where / "advice.md").read_text()
    (command,) = [line.strip() for line in page.splitlines() if "medfed train experiment=" in line]
    command = command[command.index("medfed train") :].strip("`. ")
    assert "experiment=clinical_pfednet" in command
    assert page == markdown(found, command)
    decide = [ids for client, ids in found.pilot_data.patients.items() if client != "tiny"]
    assert fedavg.gain.patients == sum(map(len, decide))  # those behind the number beside it
    known = found.methods["fedavg"].hospitals["odd"]
    assert f"| {known.text} | {known.p:.3f} | stays alone |" in page
    for client, gain in fedavg.hospitals.items():
        assert page.count(f"| {client} |") == 2
        mean = "–" if math.isnan(gain.mean) else f"{gain.mean:+.4f}"
        assert gain.text.startswith(mean)
        assert f"| {client} | {gain.text} |" in page
    assert "tiny" in found.hospitals("cannot tell")


def test_what_is_said_is_what_the_cells_hold(done, folder):
    found, where = done
    files = sorted((folder / "out/cells/pilot/clinical").rglob("final*.json"))
    results: dict[str, list] = {}
    for path in files:
        result = json.loads(path.read_text())["result"]
        assert sum(c["test"] for c in result["patients"].values()) < 100
        results.setdefault(path.parent.name, []).append(result)
    north = [[r["clients"]["north"]["auroc"] for r in results[m]] for m in ("fedavg", "local")]
    gain = found.methods["fedavg"].hospitals["north"]
    assert gain.mean == pytest.approx(np.mean(np.subtract(*north)))
    sent = np.mean([sum(r["bytes"].values()) for r in results["fedavg"]])
    content = json.loads((where / "advice.json").read_text())
    cost = content["methods"]["fedavg"]["cost"]
    assert cost["bytes_up"] + cost["bytes_down"] == pytest.approx(sent, abs=1)
    assert content["pilot"]["test_patients_left_out"] == found.pilot_data.kept_out


def test_nothing_is_run_twice_and_nothing_is_overwritten(done, folder, monkeypatch):
    _, where = done
    before = {p.name: p.read_bytes() for p in where.iterdir()}
    count = []
    run_cell = runner.run_cell

    def counted(*given):
        count.append(given)
        return run_cell(*given)

    monkeypatch.setattr(runner, "run_cell", counted)
    assert ask(folder)[1] == where
    assert not count
    assert {p.name: p.read_bytes() for p in where.iterdir()} == before
    # Fewer rounds are another pilot, whose bytes are multiplied.
    short, other = ask(folder, rounds=1)
    assert len(count) == 6
    assert other != where
    assert {p.name: p.read_bytes() for p in where.iterdir()} == before
    measured = short.task.scores["fedavg"].sent[0]
    assert short.methods["fedavg"].cost.bytes_up == pytest.approx(2 * measured, abs=1)
    assert "had 1 rounds instead of 2" in (other / "advice.md").read_text()


def test_afterwards_it_is_compared_with_the_test_patients(done, folder, monkeypatch, capsys):
    found, _ = done
    given = (*asks(folder), "--methods", *METHODS, "--folds", "3", "--repeats", "1", "--seeds", "0")
    monkeypatch.setattr("sys.argv", ["advice.py", *given, "--out", str(folder / "out")])
    runpy.run_path(str(ROOT / "benchmarks/evidence/advice.py"), run_name="__main__")
    text = capsys.readouterr().out
    measured = {}
    for name in ("fedavg", "local"):
        (path,) = (folder / "out/cells/test/clinical" / name).iterdir()
        result = json.loads(path.read_text())["result"]
        assert {c: n["test"] for c, n in result["patients"].items()} == {
            c: len(parts["test"]) for c, parts in SPLITS.items()
        }
        measured[name] = result["clients"]["odd"]["auroc"]
    gain = found.methods["fedavg"].hospitals["odd"]
    pilot = f"{gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"
    test = f"{measured['fedavg'] - measured['local']:+.4f}"
    assert f"| 0 |  | odd | {pilot} | worse | {test} [" in text
    assert "a hospital: worse, 1 times; held: yes" in text


@pytest.mark.parametrize(
    ("shifts", "use", "shown", "rivals"),
    [
        ({"fedavg": 0.1, "ditto": 0.2, "apfl": 0.198}, "ditto", "ditto", ["apfl"]),
        ({"fedavg": -0.1, "ditto": -0.2, "apfl": -0.3}, "local", "fedavg", []),
        ({"fedavg": 0.0, "ditto": 0.002, "apfl": -0.3}, "", "ditto", ["fedavg"]),
    ],
)
def test_planted_gains_are_found(shifts, use, shown, rivals, done, folder, monkeypatch):
    """Scores of four hospitals in ten repetitions, shifted by what a method is to gain."""
    found, _ = done
    rng = np.random.default_rng(0)
    alone = rng.normal(0.7, 0.05, (10, 4))
    names = ("local", *shifts)
    values = {n: alone + rng.normal(shifts.get(n, 0.0), 0.01, (10, 4)) for n in names}
    none = np.full((10, 0, 4), math.nan)
    planted = {n: Scores(n, v, none, (1.0, 1.0), 1.0, 0, {}) for n, v in values.items()}
    planted_task = {"scores": planted, "clients": tuple("abcd"), "small": {}, "fewest": {}}
    task = replace(found.task, **planted_task, overlap=0.25)
    monkeypatch.setattr(choice, "task_of", lambda *_: task)
    group = pilots(found.pilot_data, ["local"], folder / "planted", None)[0]
    (cell, *_) = group.final(0)
    results = {cell.place: {"cpu_seconds": 7.2}}
    of_names = (replace(group, method=Method.of(name)) for name in names)
    progress = [Progress(one, results, 0, [cell]) for one in of_names]
    asked = replace(found.pilot_data, patients={c: ["x"] * 50 for c in "abcd"})
    told = choice.choose(asked, progress)
    assert (told.use, told.leader, told.rivals) == (use, shown, rivals)
    assert told.methods["local"].cost.cpu_hours == pytest.approx(0.002)
    for name, shift in shifts.items():
        gain = told.methods[name].gain
        assert gain.low <= shift <= gain.high
    text = " ".join(sentences(told))
    begins = {
        "ditto": "Use ditto: ",
        "local": "Train alone: ",
        "": "The pilot cannot tell whether any",
    }
    assert text.startswith(begins[use])


def test_a_pilot_of_small_hospitals_names_no_number_of_patients():
    found, task = difference([0.1, 0.12, 0.11, 0.1], overlap=0.3), Task("pilot", "")
    task.fewest = {"a": (3, "test patients"), "b": (30, "test patients")}
    gain = choice.gain_of(task, found, "undecided", 4, 40, 0.01)
    assert gain.says == "cannot tell"
    assert gain.why.startswith("fewer than two hospitals have 10 test patients")


def test_no_difference_is_detected_that_the_metric_cannot_have():
    found = difference([0.5, -0.4, 0.3])
    assert found.detectable > 1
    metrics = ("auroc", "rmse")
    whys = [
        gain_of(replace(pilot(3), metric=m), found, "undecided", 3, 40, 0.5).why for m in metrics
    ]
    assert whys[0].startswith("the pilot would miss even the largest difference that the metric")
    assert whys[1].startswith("the pilot detects differences of 1.5 or more")


def test_a_hospital_alone_has_nobody_to_learn_with(folder, done):
    (folder / "one.json").write_text(json.dumps({"clients": {"north": SPLITS["north"]}}))
    with pytest.raises(DataError, match=r"only one hospital \(north\), and a federation takes two"):
        pilot_data([*asks(folder), f"partition.file={folder / 'one.json'}"], 3, 1)


@pytest.mark.parametrize("width", [60, 80])
def test_every_word_of_advice_is_there_at_any_width(done, width, monkeypatch, capsys):
    """In a pipe, too, which has the width of no terminal."""
    found, _ = done
    written.print_advice(found, "medfed train")
    piped = capsys.readouterr().out.split()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    written.print_advice(found, "medfed train")
    assert words_of(" ".join(piped)) == words_of(capsys.readouterr().out)


def test_the_command_hands_over_what_train_would_get(folder, done, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr(
        written, "advise", lambda *a, **k: given.update(k, overrides=a[0], methods=a[1])
    )
    door.main([*asks(folder), "methods=ditto,fedrep", "folds=4", f"out={folder / 'x'}"])
    assert capsys.readouterr().err == ""
    assert given["methods"] == ["ditto", "fedrep"]
    assert given["folds"] == 4
    assert not any(o.startswith(("methods=", "folds=", "out=")) for o in given["overrides"])
    assert pilot_data(given["overrides"], 3, 1).patients.keys() == HOSPITALS.keys()
    assert not (folder / "x").exists()


def pilot(splits, overlap=0.0):
    one = Scores("fedavg", np.zeros((splits, 1)), None, (0, 0), 1)
    return Task("pilot", "", overlap=overlap, scores={"fedavg": one})


def test_as_many_repetitions_as_are_said_to_be_needed_find_the_difference():
    """By brute force: tests of as many draws find it in 8 of 10."""
    values = [0.3, -0.2, 0.1, 0.25, -0.1]
    found = difference(values)
    why = gain_of(pilot(5), found, "undecided", 5, 50, found.p).why
    repeats = int(re.search(r"takes about (\d+) splits instead of 5", why)[1])
    rng = np.random.default_rng(0)
    spread = np.std(values, ddof=1)
    draws = rng.normal(found.mean, spread, (20_000, repeats))
    assert (ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)
    fewer = draws[:, :-1]
    assert (ttest_1samp(fewer, 0, axis=1).pvalue < 0.05).mean() < 0.8
    # With so many times as many patients each repetition varies less.
    takes = takes_to_show(pilot(1), found, found.mean, 1)
    times = int(re.search(r"about (\d+) times as many patients", takes)[1])
    draws = rng.normal(found.mean, spread / math.sqrt(times), (20_000, 5))
    assert (ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("values", "patients", "why"),
    [
        ([math.nan] * 4, 50, "the metric is undefined"),
        ([0.5, 0.5, math.nan, math.nan], 50, "only 2 repetitions define the metric"),
        ([0.5, 0.4, 0.5], 9, "9 patients are too few"),
        ([0.5, 0.5, 0.5], 50, "all repetitions give the same"),
        ([0.0, 0.0, 0.0], 50, "there is no difference"),
        ([0.5, 0.5, -math.inf], 50, "a model has failed"),
        ([0.01, -0.3, 0.3], 50, "takes more than 100 times as many patients"),
    ],
)
def test_what_cannot_be_told_says_why(values, patients, why):
    measured, task = difference(values, overlap=0.25), pilot(len(values), 0.25)
    found = gain_of(task, measured, "undecided", int(np.sum(~np.isnan(values))), patients, 0.5)
    assert found.says == "cannot tell"
    assert why in found.why
