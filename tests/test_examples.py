"""What the documents show as complete examples is complete: it trains, and is what trained."""

from __future__ import annotations

import csv
import json
import re
import sys

import pytest
import torch

import medfed
from medfed.datamodules.readers.base import Patient
from medfed.functional.statistics import difference
from medfed.standalone.errors import ConfigError, DataError
from tests.pages import DOCS, ROOT, write_clinics, write_files


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains two rounds with the files of a page as plugins."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def run(page, *overrides, folder="run", rounds=2):
        plugins = write_files(DOCS / page, tmp_path / "plugins")
        keys = [f"plugins={plugins}", "local.steps=2", "logger=none", "progress=false"]
        return medfed.train(*overrides, *keys, folder=tmp_path / folder, rounds=rounds)

    yield run
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_algorithm_at_strength_0_is_local_training(trained):
    page, base = "extending/algorithm.md", "experiment=clinical_pfednet"
    free = trained(page, base, "algorithm=kindred", "algorithm.strength=0", folder="free")
    tied = trained(page, base, "algorithm=kindred", folder="tied")
    local = trained(page, base, "algorithm=local", folder="local")
    assert free.config.algorithm["_target_"] == "kindred.Kindred"
    assert {e.part for e in free.ledger.entries if e.direction == "up"} == {"model"}
    for client in local.clients:
        alone, same, drawn = (
            torch.cat([p.flatten() for p in run.model(client).parameters()])
            for run in (local, free, tied)
        )
        assert torch.equal(alone, same)
        assert not torch.equal(alone, drawn)


def test_the_codec_sends_a_byte_per_element(trained):
    codecs = ["codec.up=int8", "codec.down=int8"]
    run = trained("extending/codec.md", "experiment=clinical_pfednet", *codecs)
    sent = [e for e in run.ledger.entries if e.part == "personal" and e.direction == "up"]
    assert len(sent) == 10
    # Header and scale, then a byte where fp32 has four behind its header.
    assert {e.bytes for e in sent} == {12 + 4 + (e.dense - 12) // 4 for e in sent}


def test_the_reader_makes_a_client_of_every_file(trained, tmp_path):
    data = write_clinics(tmp_path / "data")
    chosen = ["data=clinics", f"data.path={data}", "partition=centre"]
    run = trained("extending/reader.md", "experiment=clinical_pfednet", *chosen)
    assert run.clients == ("north", "south", "west")
    assert run.config.in_channels == 30
    read = sys.modules["clinics"].read_clinics
    assert read(data, "outcome", [1]).features.shape == (569, 30)
    with pytest.raises(DataError, match="holds no CSV file"):
        read(tmp_path, "outcome", [1])


def test_the_partition_finds_clients_in_ids(trained):
    chosen = ["partition=by_pattern", 'partition.pattern="(.)$"', "data=breast_cancer"]
    run = trained("extending/partition.md", "experiment=clinical_pfednet", *chosen)
    assert run.clients == tuple(f"site_{i}" for i in range(10))
    by_pattern = sys.modules["by_pattern"].ByPattern
    patients = [Patient(f"TCGA-{site}-{n}") for site in ("DU", "HT", "FG") for n in range(9)]
    found = by_pattern("^TCGA-(..)-", least=5).assign(patients[:20], seed=0)
    sizes = {name: len(ids) for name, ids in found.items()}
    assert sizes == {"site_DU": 9, "site_HT": 9, "others": 2}
    with pytest.raises(ConfigError, match="finds no group in the patient id TCGA-DU-0"):
        by_pattern("^x").assign(patients, seed=0)


def test_the_task_reports_its_metric_and_meets_its_quantile(trained):
    keys = ["experiment=diabetes_pfednet", "model=quantile", "optimizer.lr=20"]
    low, high = (
        trained("extending/task.md", *keys, f"model.quantile={q}", folder=f"q{q}", rounds=6)
        for q in (0.2, 0.8)
    )
    below, above = (run.summary["federation"]["coverage"]["mean"] for run in (low, high))
    assert below < 0.5 < above
    assert (low.summary["selection"]) == ["loss", "min"]


def test_the_network_keeps_its_head_at_the_client(trained):
    keys = ["experiment=digits_pfednet", "model=my_network", "partition.num_clients=4"]
    run = trained("networks.md", *keys, rounds=1)
    first, second = (run.model(client) for client in run.clients[:2])
    assert type(first).__name__ == "TwoConvolutions"
    assert torch.equal(first.body[0].weight, second.body[0].weight)
    assert not torch.equal(first.head.weight, second.head.weight)


NUMBER = re.compile(r"\d+\.\d{3}\b")


def printed(cell):
    """What a cell prints: the text around its scores, and the scores."""
    outputs = [o for o in cell.get("outputs", ()) if o.get("name") == "stdout"]
    text = "".join(output.text for output in outputs)
    return NUMBER.sub("#", text), [float(number) for number in NUMBER.findall(text)]


STORED = json.loads((DOCS / "numbers.json").read_text())


def test_the_first_example_s_numbers_are_those_of_its_runs():
    """After a change: ``python docs/scores.py outputs/first outputs/demo``."""

    def shown(page, start):
        line = next(line for line in page.read_text().splitlines() if line.startswith(start))
        return [float(n) for n in re.findall(r"-?\d\.\d{3}", line.replace("−", "-"))]

    runs = {m: [run["mean"] for run in kept] for m, kept in STORED["first"].items()}
    rows = {"pfednet": "| pFedNet |", "local": "| training alone", "fedavg": "| FedAvg:"}
    for method, start in rows.items():
        gains = [s - alone for s, alone in zip(runs[method], runs["local"], strict=True)]
        expected = [*difference(runs[method], 0.25)[:3], *difference(gains, 0.25)[:3]]
        numbers = shown(ROOT / "README.md", start)
        assert numbers == pytest.approx(expected[: len(numbers)], abs=0.001)


def test_the_demo_s_table_is_that_of_its_runs():
    """Three minutes of one core are too many for a test, so nothing is run here."""
    rows = [
        [float(cell.strip("* ").split()[0]) for cell in row.split("|")[2:-1]]
        for row in re.findall(
            r"^\| (?:pFedNet|FedAvg|alone) .*", (DOCS / "results" / "brats.md").read_text(), re.M
        )
    ]
    for row, (run,) in zip(rows, STORED["demo"].values(), strict=True):
        scores = [*run["hospitals"], run["mean"], min(run["hospitals"])]
        assert row == [round(score, 4) for score in scores] + [round(run["up"] / 1e6, 1)]


@pytest.mark.promise("the first example")
def test_a_fresh_run_of_the_first_example_scores_what_is_stored(tmp_path):
    run = medfed.train(
        "experiment=digits_conflict", "pictures.format=none", seed=0, folder=tmp_path / "run"
    )
    stored = STORED["first"]["pfednet"][0]["mean"]
    assert "may differ by 0.03" in (ROOT / "README.md").read_text()
    assert run.summary["federation"]["balanced_accuracy"]["mean"] == pytest.approx(stored, abs=0.03)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
def test_the_notebooks_print_what_they_store_and_leave_nothing_behind(tmp_path, monkeypatch):
    """One after the other in one kernel, which forgets all names in between."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    together = nbformat.v4.new_notebook()
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        assert path.stat().st_size < 200_000
        cells = nbformat.read(path, as_version=4).cells
        stated = [str(c.metadata.tolerance) for c in cells if "tolerance" in c.metadata]
        assert stated
        assert all(number in cells[0].source for number in stated)
        together.cells += [*cells, nbformat.v4.new_code_cell("%reset -f")]
    stored = [printed(cell) for cell in together.cells]
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work = tmp_path / "work"
    work.mkdir()
    place = {"metadata": {"path": str(work)}}
    nbclient.NotebookClient(together, timeout=240, kernel_name="python3", resources=place).execute()
    assert not list(work.iterdir())
    for cell, (text, scores) in zip(together.cells, stored, strict=True):
        fresh = printed(cell)
        assert fresh[0] == text
        assert fresh[1] == pytest.approx(scores, abs=cell.metadata.get("tolerance", 0)), text


def test_the_loss_and_the_metric_of_misses(trained):
    run = trained(
        "extending/training.md",
        "experiment=clinical_pfednet",
        "model.loss={_target_: costs.WeighedMisses, miss: 5}",
        "model.metrics={cost: {_target_: costs.cost, direction: min, worst: 5}}",
        "model.selection=[cost,min]",
    )
    assert run.summary["selection"] == ["cost", "min"]
    assert run.config.model["loss"]["_target_"] == "costs.WeighedMisses"
    with (run.folder / "cases.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["client"] == run.clients[0]]
    ill = [r["label"] == "1" for r in rows]
    alarm = [float(r["probability/1"]) > 1 / 6 for r in rows]
    costs = [5 * (y and not a) + (a and not y) for y, a in zip(ill, alarm, strict=True)]
    assert run.summary["clients"][run.clients[0]]["cost"] == pytest.approx(sum(costs) / len(costs))
