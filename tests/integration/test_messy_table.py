"""A hospital's table as it comes, from the first look to a prediction; beside scikit-learn."""

from __future__ import annotations

import csv
import json
import logging

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from medfed.config.compose import load
from medfed.config.description import checked
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.delivery.export.export import export_run
from medfed.delivery.predict.prediction import predict
from medfed.functional.graph import edge_similarity
from medfed.functional.points import calibrated
from medfed.functional.sketches import data_sketch, sketch_vector
from medfed.standalone.errors import DataError
from tests.datamodules.test_heart import REAL
from tests.delivery.hospitals import run_by_monai
from tests.integration.runs import CLINICAL, run

HEADER = "\ufeffNr;Klinik;Alter;Geschlecht;Stadium;Cholesterin;Bemerkung;Tod;;"


def messy(outlier="231,5"):
    """Semicolons, decimal commas, a mark, Windows' line ends, empty lines and columns, gaps."""
    rng = np.random.default_rng(5)
    lines, shares = [HEADER], [0.2, 0.3, 0.5]
    rare = dict.fromkeys((5, 8, 11), "IV")  # three patients of Aachen
    for n in range(1, 151):
        age, chol, ill = rng.normal(62, 11), rng.normal(230, 40), int(rng.random() < 0.4)
        cells = [
            *(str(n), ("Köln", "Bonn", "Aachen")[n % 3]),
            "" if n % 13 == 0 else f"{age + 8 * ill:.0f}",
            '"weiblich"' if rng.random() < 0.5 else "männlich",
            rare.get(n, rng.choice(["I", "II", "III"], p=shares[::-1] if ill else shares)),
            outlier if n == 12 else f"{chol + 15 * ill:.1f}".replace(".", ","),
            f"Text {n}",
            "ja" if ill else "nein",
        ]
        lines.append(";".join(cells) + ";;")
    return "\r\n".join([*lines, "", ";;;;;;;;;"]) + "\r\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy")
    (folder / "t.csv").write_text(messy(), encoding="utf-8")
    keys = ["data=csv", f"data.path={folder / 't.csv'}", "data.label=Tod", "data.centre=Klinik"]
    keys += ["data.positive=[ja]", "partition=centre", "rounds=4", "local.steps=10"]
    summary, experiment = run(folder / "run", *CLINICAL, *keys, "pictures.format=png")
    (bundle,) = export_run(
        checked(
            load([f"run={folder / 'run'}", "client=Köln", f"out={folder / 'bundle'}"], "export")
        )
    )
    return folder, summary, experiment, bundle


def test_a_messy_table_trains_and_what_was_sent_for_it_is_counted(trained):
    folder, summary, experiment, _ = trained
    names = experiment.data.channel_names
    assert names == (
        *("Alter", "Geschlecht=weiblich", "Stadium=I", "Stadium=II", "Stadium=III", "Cholesterin"),
        "Alter missing",
    )
    assert summary["federation"]["auroc"]["mean"] > 0.6
    with (folder / "run" / "ledger.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "preprocessing"]
    assert [(r["client"], r["direction"], int(r["bytes"])) for r in rows] == [
        *experiment.data.exchanged
    ]
    assert {r["round"] for r in rows} == {"0"}
    assert summary["bytes"]["up"] > sum(int(r["bytes"]) for r in rows if r["direction"] == "up")


@pytest.mark.filterwarnings("ignore")  # of MONAI's own making
def test_the_bundle_predicts_as_training_did_and_names_what_it_never_saw(
    trained, tmp_path, caplog, monkeypatch
):
    folder, _, experiment, bundle = trained
    client, data = "Köln", experiment.data
    ids = data.plans[client].patients["test"]
    lines = (folder / "t.csv").read_text(encoding="utf-8-sig").splitlines()
    header, wanted = lines[0], [lines[1 + int(i.removeprefix("row_"))] for i in ids]
    odd = "900;Köln;1300;divers;II;;;;;"
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("\n".join([header, *wanted, odd]), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        predict(
            checked(load([f'bundle="{bundle}"', f"input={source}", f"output={output}"], "predict"))
        )
    with output.open() as file:
        found = list(csv.DictReader(file))
    last = found.pop()["warning"]
    assert last.startswith("Alter is 1300, outside of ")
    assert "Geschlecht is 'divers', unknown in training" in last
    assert "Cholesterin is missing, which it never was in training" in last
    assert f"data row {len(wanted) + 1}: Alter is 1300" in caplog.text
    low, high = (data.preprocessing(client)["input"][end][0] for end in ("lowest", "highest"))
    rows = data.train[client].rows[:, 0]
    assert low < np.nanmin(rows) <= np.nanmax(rows) < high
    experiment.module.local.model.load(experiment.module.federation.personal_model(client))
    batches = data.clients[client].eval_batches("test")
    own = torch.cat([experiment.task.predict(batch) for batch in batches]).double().numpy()
    own = torch.from_numpy(calibrated(own, experiment.evaluation.points[client]))[:, -1].float()
    chances = torch.tensor([float(row["probability_positive"]) for row in found])
    torch.testing.assert_close(chances, own, atol=1e-5, rtol=0)
    # What MONAI runs without medfed writes the same file.
    run_by_monai(bundle, source, tmp_path / "eval", monkeypatch)
    assert (tmp_path / "eval" / "predictions.csv").read_bytes() == output.read_bytes()


def test_a_bundle_holds_no_patients_cell_and_no_name_of_the_table(trained):
    """Not the oldest patient's age, not what three patients of another hospital have."""
    folder, _, experiment, bundle = trained
    facts = json.loads((bundle / "configs" / "metadata.json").read_text())["medfed"]
    assert sorted(facts["input"]) == [
        *("categories", "features", "highest", "indicators", "kind", "lowest"),
    ]
    assert facts["input"]["features"] == ["Alter", "Geschlecht", "Stadium", "Cholesterin"]
    assert facts["input"]["categories"]["Stadium"] == ["I", "II", "III"]
    numbers = experiment.data.train["Köln"].rows[:, [0, 3]]
    extremes = {*np.nanmin(numbers, axis=0), *np.nanmax(numbers, axis=0)}
    assert not extremes.intersection(facts["input"]["lowest"] + facts["input"]["highest"])
    pages = [p for p in bundle.rglob("*") if p.suffix in (".json", ".md", ".csv", ".yaml", ".txt")]
    assert len(pages) > 4
    for name in ("Klinik", '"IV"', " IV ", str(folder)):
        assert not [p for p in pages if name in p.read_text()]


def test_a_bundle_says_which_column_is_missing(trained, tmp_path):
    (tmp_path / "in.csv").write_text("Alter,Stadium\n50,I\n")
    keys = [f'bundle="{trained[3]}"', f"input={tmp_path / 'in.csv'}"]
    with pytest.raises(DataError, match="lacks the columns Geschlecht, Cholesterin; it needs"):
        predict(checked(load([*keys, f"output={tmp_path / 'out.csv'}"], "predict")))


def test_preprocessing_is_plain_json(trained):
    text = (trained[0] / "run" / "preprocessing.json").read_text()
    facts = json.loads(text)["Köln"]
    assert facts["input"]["categories"]["Geschlecht"] == ["männlich", "weiblich"]
    assert facts["normalization"]["name"] == "standard"


def graph_of(data):
    rows = [sketch_vector(data_sketch(c.train_inputs(256))) for c in data.clients.values()]
    pairs = [(0, 1), (0, 2), (1, 2)]
    return edge_similarity(torch.stack([(rows[i] - rows[j]).norm() for i, j in pairs]))


def test_one_outlier_hardly_moves_the_similarity_graph_and_the_ranking(tmp_path):
    weights, scores = [], []
    for outlier in ("231,5", "1000000,5"):
        (tmp_path / "t.csv").write_text(messy(outlier), encoding="utf-8")
        places = {"path": tmp_path / "t.csv", "label": "Tod", "centre": "Klinik"}
        data = TabularDataModule(ByCentre(), **places, positive=["ja"])
        data.setup()
        assert "row_11" in data.clients["Köln"].patients["train"]  # who has it
        weights.append(graph_of(data))
        x, y = (
            torch.cat([c.train[key] for c in data.clients.values()]) for key in ("image", "label")
        )
        model = LogisticRegression().fit(x, y)
        test = [b for c in data.clients.values() for b in c.eval_batches("test")]
        rows, labels = (torch.cat([b[key] for b in test]) for key in ("image", "label"))
        scores.append(roc_auc_score(labels, model.predict_proba(rows)[:, 1]))
    torch.testing.assert_close(weights[1], weights[0], atol=0.1, rtol=0)
    assert scores[1] == pytest.approx(scores[0], abs=0.02)  # two of 112 pairs of test rows


@pytest.mark.parametrize("data", ["breast_cancer", "heart"])
def test_logistic_regression_is_that_of_scikit_learn(data, tmp_path):
    """On the same pooled rows with the same penalty, by AUROC; and one outlier moves it little."""
    if data == "heart" and not REAL.is_dir():
        pytest.skip(f"{REAL} is absent (the four UCI files)")
    more = [f"data.path={REAL}"] if data == "heart" else ["data.normalization=standard"]
    keys = ["partition=round_robin", "partition.num_clients=1", "algorithm=local", "model.l2=0.01"]
    keys += ["rounds=2", "local.steps=300", "data.batch_size=1024", "optimizer.lr=0.3"]
    name = "heart_pfednet" if data == "heart" else "clinical_pfednet"
    quiet = ["logger=none", "progress=false", f"experiment={name}"]
    summary, experiment = run(tmp_path / "run", *quiet, *more, *keys)
    (client,) = experiment.data.clients.values()
    x, y = client.train["image"].numpy(), client.train["label"].numpy()
    theirs = LogisticRegression(C=1 / (0.01 * len(y)), max_iter=5000).fit(x, y)
    test = list(client.eval_batches("test"))
    rows, labels = (torch.cat([b[key] for b in test]).numpy() for key in ("image", "label"))
    wanted = roc_auc_score(labels, theirs.predict_proba(rows)[:, 1])
    assert summary["federation"]["auroc"]["mean"] == pytest.approx(wanted, abs=0.01)
    assert wanted > 0.8


def test_a_bundle_reads_words_and_limits_as_training_did(tmp_path):
    """Missing cells are a word, and some values are below what can be measured."""
    head, *rows = messy().split("\r\n")
    for n, cell in ((12, "k.A."), (13, "<200,0")):
        cells = rows[n].split(";")
        rows[n] = ";".join([*cells[:5], cell, *cells[6:]])
    path = tmp_path / "t.csv"
    path.write_text("\n".join([head, *rows]), "utf-8")
    keys = ["data=csv", f"data.path={path}", "data.label=Tod", "data.positive=[ja]"]
    keys += ["data.missing=[k.A.]", "data.limits=half", "partition.num_clients=2", "rounds=1"]
    run(tmp_path / "run", *CLINICAL, *keys)
    line = [f"run={tmp_path / 'run'}", "client=hospital_0", f"out={tmp_path / 'bundle'}"]
    (bundle,) = export_run(checked(load(line, "export")))
    facts = json.loads((bundle / "configs" / "metadata.json").read_text())["medfed"]["input"]
    assert (facts["missing"], facts["limits"]) == (["k.A."], "half")
    asked = [f"60;Köln;weiblich;II;{cell}" for cell in ("k.A.", "", "<200,0", "100,0", "200,0")]
    names = "Alter;Klinik;Geschlecht;Stadium;Cholesterin"
    (tmp_path / "in.csv").write_text("\n".join([names, *asked]), "utf-8")
    line = [f'bundle="{bundle}"', f"input={tmp_path / 'in.csv'}", f"output={tmp_path / 'out.csv'}"]
    predict(checked(load(line, "predict")))
    with (tmp_path / "out.csv").open() as file:
        word, empty, limit, half, whole = (r["probability_positive"] for r in csv.DictReader(file))
    assert (word, limit) == (empty, half)
    assert half != whole
