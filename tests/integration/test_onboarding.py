"""Hospitals that join finished runs of the shipped experiments, made small."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medfed.commands.evaluate import main as evaluate
from medfed.common import scores
from medfed.common.tensors import digest
from medfed.datamodules.readers.medmnist import read_medmnist
from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.splits import SPLITS
from medfed.run.finished import reopen_selected
from medfed.run.onboarding import find_clients, onboard, show_onboarding
from medfed.standalone.errors import CheckpointError, ConfigError, DataError, MedfedError
from tests.integration.runs import CLINICAL, ROOT, left_in, run

DIGITS = (
    "experiment=digits_ppfl",
    "rounds=2",
    "local.steps=2",
    "partition.num_clients=8",
    "canonical.count=2",
    "logger=none",
    "progress=false",
)
LATE = ("group_0_hospital_0", "group_3_hospital_1")


@pytest.fixture(scope="module")
def clinical(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("onboarding") / "clinical"
    run(folder, *CLINICAL, "keep_out=[hospital_0,hospital_4]")
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("onboarding") / "digits"
    run(folder, *DIGITS, f"keep_out=[{','.join(LATE)}]")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in left_in(folder)}


def test_onboarded_clients_take_no_part_in_training(clinical):
    summary = json.loads((clinical / "summary.json").read_text())
    assert list(summary["clients"]) == ["hospital_1", "hospital_2", "hospital_3"]
    splits = json.loads((clinical / "splits.json").read_text())["clients"]
    assert list(splits) == [f"hospital_{i}" for i in range(5)]
    assert "hospital_0" not in (clinical / "ledger.csv").read_text()


def test_pfednets_onboarded_clients_and_what_is_written(clinical):
    before = contents(clinical)
    found = onboard(clinical, "all", [1, 5, 999], steps=3)
    show_onboarding(found, clinical)
    after = contents(clinical)
    new = {"onboarding.csv", "onboarding.json", "pictures/onboarding.png"}
    assert {n: b for n, b in after.items() if n not in new} == before
    with (clinical / "onboarding.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 3
    assert [r["patients"] for r in rows[::3]] == ["1", "5", "58"] * 2
    record = json.loads((clinical / "onboarding.json").read_text())
    assert [float(r["auroc"]) for r in rows] == [r["metrics"]["auroc"] for r in record["rows"]]
    assert "hospital_4 has only 58 training patients; k=999 uses all of them." in found.notes
    # 30 weights and a bias down, a sketch of 8 rows of 30 up, with 12 bytes of header each
    assert {(r.up, r.down) for r in found.rows if r.rule != "local"} == {(972, 136)}
    assert {(r.up, r.down) for r in found.rows if r.rule == "local"} == {(0, 0)}


def test_the_models_are_those_of_the_selected_round(clinical):
    experiment = reopen_selected(clinical)
    federation = experiment.module.federation
    saved = torch.load(clinical / "checkpoints" / "best.ckpt", weights_only=True)["federation"]
    for part in ("personal", "sketches"):
        assert digest(federation.server[part]) == digest(saved["server"][part])


def test_ppfls_onboarded_clients_get_the_heads_and_send_nothing(digits):
    before = contents(digits)
    found = onboard(digits, "all", [1, 5], steps=3)
    assert contents(digits) == before
    assert {r.client for r in found.rows} == set(LATE)
    ledger = (digits / "ledger.csv").read_text().splitlines()
    delivery = next(int(line.split(",")[-2]) for line in ledger if ",deliver," in line)
    assert {(r.up, r.down) for r in found.rows if r.rule != "local"} == {(0, delivery)}
    again = onboard(digits, "group_0_hospital_0", [5], steps=3)
    same = [r for r in found.rows if (r.client, r.k) == ("group_0_hospital_0", 5)]
    assert [r.metrics for r in again.rows] == [r.metrics for r in same]


def test_scores_of_few_test_patients_are_said_to_vary_by_chance(digits, monkeypatch):
    late = reopen_selected(digits).data.kept_out[LATE[0]]
    labels = torch.cat([batch["label"] for batch in late.eval_batches("test")])
    rarer = len(labels) - int(labels.bincount().max())
    for least in (rarer, rarer + 1):
        monkeypatch.setattr(scores, "LEAST_CASES", least)
        said = [note for note in onboard(digits, LATE[0], [1], steps=1).notes if "chance" in note]
        what = f"{LATE[0]} ({rarer} test patients outside of its commonest class)"
        few = f"With so few patients, rules may differ by chance: {what}."
        assert said == [few] * (least > rarer)


def test_a_hospital_whose_patients_leave_the_metric_undefined_is_in_no_mean(tmp_path, capsys):
    """A ward kept out has patients of one class alone."""
    rng = np.random.default_rng(0)
    lines = ["ward,x,y"]
    for ward in ("a", "b", "c", "d"):
        for n in range(20):
            y = n % 2 * (ward != "d")
            lines.append(f"{ward},{rng.normal() + y:.3f},{y}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    table = (f"data.path={tmp_path}/table.csv", "data.label=y", "data.centre=ward")
    keys = ("data=csv", *table, "rounds=1", "local.steps=1", "keep_out=[c,d]")
    run(tmp_path / "run", "experiment=clinical_pfednet", "algorithm=fedavg", *keys)
    show_onboarding(onboard(tmp_path / "run", "all", [1], steps=1), tmp_path / "run")
    text = " ".join(capsys.readouterr().out.split())
    assert "d (0 test patients of a class)" in text
    assert "The test data of d leave balanced_accuracy, auroc" in text
    assert "their statistics omit d." in text


def test_the_table(digits, capsys):
    found = onboard(digits, LATE[0], [1], steps=1)
    show_onboarding(found, digits)
    text = capsys.readouterr().out
    assert "1 client onboarded, test" in text
    assert all(name in text for name in ("ppfl (own rule)", "fine-tuning", "local training"))


def test_another_number_of_steps_is_another_model(digits):
    few, many = (onboard(digits, LATE[0], [5], steps=n).rows for n in (1, 9))
    assert all(a.metrics != b.metrics for a, b in zip(few, many, strict=True))


@pytest.mark.parametrize(
    ("who", "key", "message"),
    [
        ("all", "k=[0]", "k[0] must be a whole number of at least 1, not 0."),
        ("all", "k=[]", "k must be a list with at least one entry, not []."),
        ("all", "k=[few]", "k[0] must be a whole number, not 'few'."),
        ("all", "onboard_steps=0", "onboard_steps must be a whole number of at least 1, not 0"),
        ("hospital_9", "k=[1]", "not kept out (did you mean hospital_"),
        ("hospital_2", "k=[1]", "took part in training; name one of hospital_0"),
        ("/nowhere", "k=[1]", "onboard=/nowhere does not exist; name a file or folder"),
    ],
)
def test_mistakes_are_one_sentence(clinical, who, key, message, capsys):
    with pytest.raises(SystemExit):
        evaluate([f"run={clinical}", f"onboard={who}", key])
    assert message in capsys.readouterr().err


def table(path: Path, rows: int, seed: int, columns: str = "a,b,c") -> Path:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)) * 9
    lines = [",".join(f"{v:.3f}" for v in row) + f",{int(row.sum() > 0)}" for row in x]
    path.write_text("\n".join([f"{columns},outcome", *lines, ""]))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """A run that kept nobody out, on a table whose features are scaled for all clients alike."""
    folder = tmp_path_factory.mktemp("onboarding") / "tables"
    folder.mkdir()
    data = (f"data.path={table(folder / 'old.csv', 60, 0)}", "data.label=outcome")
    more = ("data=csv", "partition=round_robin", "data.scaling=pooled", "data.positive=[1]")
    run(folder / "run", *CLINICAL, *more, *data, "rounds=1")
    return folder / "run"


def test_a_hospital_that_the_run_has_never_seen(tables, tmp_path):
    new = table(tmp_path / "new_hospital.csv", 20, 1)
    found = onboard(tables, str(new), [1, 5], steps=2)
    assert {r.client for r in found.rows} == {"new_hospital"}
    assert {r.patients for r in found.rows} == {1, 5}
    experiment = reopen_selected(tables)
    (client,) = find_clients(experiment, str(new))
    assert sum(map(len, client.patients.values())) == 20
    rows = np.loadtxt(new, delimiter=",", skiprows=1)[:, :3]
    chosen = [int(p.removeprefix("row_")) for p in client.patients["train"]]
    lines = (tables.parent / "old.csv").read_text().splitlines()[1:]
    old = np.array([[float(v) for v in line.split(",")[:3]] for line in lines])
    ids = [p for c in experiment.data.clients.values() for p in c.patients["train"]]
    seen = old[[int(p.removeprefix("row_")) for p in ids]]
    ends = experiment.data.agreed.scaling.low, experiment.data.agreed.scaling.high
    seen, found = np.clip(seen, *ends), np.clip(rows[chosen], *ends)
    expected = (found - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(client.train["image"].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "message"),
    [
        ("other.csv", 20, "a,b,d", r"other\.csv, data\.features: Unknown column c; known: a, b, d"),
        ("single.csv", 1, "a,b,c", "Hospital single has no test patient"),
        ("empty.csv", 0, "a,b,c", r"empty\.csv"),
    ],
)
def test_hospitals_that_cannot_join(name, rows, columns, message, tables, tmp_path):
    with pytest.raises(MedfedError, match=message):
        onboard(tables, str(table(tmp_path / name, rows, 4, columns)), [1])


@pytest.mark.parametrize("outcome", ["0", "1"])
def test_a_hospital_whose_rows_lack_a_class_joins(outcome, tables, tmp_path):
    """The classes are the federation's, not those of its rows."""
    new = table(tmp_path / "new.csv", 40, 5)
    head, *rows = new.read_text().splitlines()
    new.write_text("\n".join([head, *(row for row in rows if row.endswith(outcome))]))
    (client,) = find_clients(reopen_selected(tables), str(new))
    assert client.label_counts.tolist()[1 - int(outcome)] == 0
    assert client.label_counts.tolist()[int(outcome)] == client.num_samples > 0
    assert {r.client for r in onboard(tables, str(new), [3], steps=1).rows} == {"new"}


def class_folders(path: Path, counts: dict[str, int]) -> Path:
    for seed, (name, count) in enumerate(counts.items()):
        (path / name).mkdir(parents=True)
        for n in range(count):
            pixels = np.random.default_rng([seed, n, len(name)]).integers(0, 255, (8, 8))
            Image.fromarray(pixels.astype(np.uint8)).save(path / name / f"{n}.png")
    return path


def image_table(path: Path, counts: dict[str, int]) -> Path:
    class_folders(path, counts)
    rows = [f"{name}/{n}.png,{name}" for name, count in counts.items() for n in range(count)]
    (path / "images.csv").write_text("\n".join(["image,label", *rows, ""]))
    return path / "images.csv"


PICTURES = {"image_folder": class_folders, "image_table": image_table}
KINDS = ("adenoma", "benign", "cancer")


@pytest.fixture(scope="module", params=PICTURES)
def pictures(request, tmp_path_factory) -> tuple[str, Path]:
    """A run on pictures of three classes."""
    folder = tmp_path_factory.mktemp("onboarding") / request.param
    path = PICTURES[request.param](folder / "old", dict.fromkeys(KINDS, 8))
    size = ("data.reader.size=[8,8]", "model.network.channels=[4,4,4]", "rounds=1", "local.steps=1")
    options = ("partition=round_robin", "partition.num_clients=2", "logger=none", "progress=false")
    data = (f"data={request.param}", f"data.path={path}", "model=small_cnn", "algorithm=fedavg")
    run(folder / "run", *data, *options, *size)
    return request.param, folder / "run"


@pytest.mark.parametrize(
    "counts",
    [{"cancer": 6, "adenoma": 6}, {"benign": 6}, dict.fromkeys(reversed(KINDS), 4)],
    ids=["one lacks", "one alone", "all"],
)
def test_a_hospital_with_pictures_takes_the_federations_classes(counts, pictures, tmp_path):
    kind, folder = pictures
    new = PICTURES[kind](tmp_path / "new", counts)
    (client,) = find_clients(reopen_selected(folder), str(new))
    there = {name for name, count in zip(KINDS, client.label_counts, strict=True) if count}
    assert there == {*counts}
    assert onboard(folder, str(new), [2], steps=1).rows


def test_a_class_that_the_federation_lacks_is_named(pictures, tmp_path):
    kind, folder = pictures
    new = PICTURES[kind](tmp_path / "new", {"cancer": 4, "melanoma": 4})
    sentence = "has the class melanoma, which the federation does not have; its classes are adenoma"
    with pytest.raises(DataError, match=sentence):
        onboard(folder, str(new), [2], steps=1)


def test_a_label_that_the_federation_lacks_is_named(tmp_path):
    new = table(tmp_path / "new.csv", 40, 5)
    read = read_csv(new, "outcome", classes=("2", "1", "0"))  # in the federation's order
    outcomes = [line.rpartition(",")[2] for line in new.read_text().splitlines()[1:]]
    assert [read.classes[k] for k in read.labels] == outcomes
    new.write_text(new.read_text().replace(",1\n", ",grade 3\n", 1))
    with pytest.raises(DataError, match="grade 3"):
        read_csv(new, "outcome", classes=("0", "1"))


def medmnist(path: Path, labels: list[int]) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (len(labels), 8, 8), dtype=np.uint8)
    arrays = {f"{s}_images": pixels for s in SPLITS} | {f"{s}_labels": labels for s in SPLITS}
    np.savez(path, **{n: np.asarray(a) for n, a in arrays.items()})
    return path


def test_numbered_labels_take_the_federations_classes(tmp_path):
    read = read_medmnist(medmnist(tmp_path / "a.npz", [1, 1]), joined=KINDS)
    assert (read.classes, read.samples.num_classes) == (KINDS, 3)
    with pytest.raises(DataError, match=r"has labels up to 3, but .* names 3 classes"):
        read_medmnist(medmnist(tmp_path / "b.npz", [0, 3]), joined=KINDS)


def test_data_that_are_nowhere_else(digits, tmp_path):
    with pytest.raises(ConfigError, match="the digits come with scikit-learn"):
        onboard(digits, str(tmp_path), [1])


def test_a_run_without_onboarded_clients_says_how_to_get_some(tables):
    for who in ("all", "hospital_1"):
        with pytest.raises(ConfigError, match=r"keep_out=\[CLIENT\], or name a folder of data"):
            onboard(tables, who, [1])
    best = tables / "checkpoints" / "best.ckpt"
    best.write_bytes(best.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="missing or torn"):
        onboard(tables, "all", [1])


def test_the_command_line(clinical, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import evaluate  # the script

    logging.getLogger().handlers.clear()
    monkeypatch.setattr("sys.argv", ["evaluate.py"])
    evaluate.main([f"run={clinical}", "onboard=hospital_4", "k=1,2", "onboard_steps=1"])
    text = capsys.readouterr().out
    assert "1 client onboarded" in text
    rows = json.loads((clinical / "onboarding.json").read_text())["rows"]
    joined = [(r["client"], r["k"], r["steps"]) for r in rows[::3]]
    assert joined[-2:] == [("hospital_4", 1, 1), ("hospital_4", 2, 1)]
    assert {client for client, *_ in joined[:-2]} <= {"hospital_0"}  # another test's stay


def test_a_second_hospital_leaves_the_rows_of_the_first(digits):
    for who, k in ((LATE[0], 5), (LATE[1], 1), (LATE[0], 2)):
        show_onboarding(onboard(digits, who, [k], steps=1), digits)
    with (digits / "onboarding.csv").open() as file:
        rows = [(row["client"], row["k"], row["steps"]) for row in csv.DictReader(file)]
    assert rows[::3] == [(LATE[1], "1", "1"), (LATE[0], "2", "1")]
    record = digits / "onboarding.json"
    content = json.loads(record.read_text())
    del content["rows"][0]["rule"]
    record.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"onboarding\.json is not as a run writes it"):
        onboard(digits, LATE[0], [1], steps=1)  # before it trains
    record.unlink()
