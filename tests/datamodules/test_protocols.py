"""What it takes to repeat what others did: their split, their values, their settings per method."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from medfed.config.compose import described
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.splits import split_patients
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.standalone.errors import ConfigError, DataError


def table(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows(count=24):
    return [
        {
            "hospital": "ab"[n % 2],
            "age": 40 + n,
            "dead": n // 2 % 2,
            "part": "test" if n % 6 < 2 else "train",
        }
        for n in range(count)
    ]


def module(path, **keys):
    given = {"label": "dead", "centre": "hospital", "val_fraction": 0.0, **keys}
    data = TabularDataModule(ByCentre(), path=path, **given)
    data.setup()
    return data


def test_a_column_names_the_split_and_values_stay_as_they_are(tmp_path):
    path = table(tmp_path / "table.csv", rows())
    data = module(path, split="part", normalization="none")
    assert data.channel_names == ("age",)
    for name, client in data.clients.items():
        plan, number = data.plans[name].patients, "ab".index(name)
        assert plan["test"] == sorted(f"row_{n}" for n in range(number, 24, 6))
        assert not plan["val"]
        assert len(plan["train"]) == 8
        ages = sorted(client.train["image"].numpy().ravel().tolist())
        assert ages == [40.0 + n for n in range(number, 24, 2) if n % 6 > 1]
    with_validation = module(path, split="part", val_fraction=0.25)
    assert {len(p.patients["val"]) for p in with_validation.plans.values()} == {2}
    wrong = [{**row, "part": "second"} for row in rows()]
    with pytest.raises(DataError, match="'second' is none of train, val and test"):
        module(table(tmp_path / "wrong.csv", wrong), split="part")
    with pytest.raises(ConfigError, match=r"scaling=pooled needs data.normalization=standard"):
        module(path, normalization="none", scaling="pooled")


def test_labels_in_neither_list_are_left_out_and_counted(tmp_path, caplog):
    given = [{**row, "dead": 9 if n in (3, 4) else row["dead"]} for n, row in enumerate(rows())]
    path = table(tmp_path / "table.csv", given)
    keys = {"positive": [1], "negative": [0], "drop": ["part"]}
    with pytest.raises(DataError, match="the label 9 is none of 0, 1"):
        module(path, **keys)
    data = module(path, unlabelled="drop", **keys)
    assert len(data.table.labels) == 22
    assert "2 of 24 rows have no dead and are left out: data rows 4, 5" in caplog.text


def test_few_patients_are_among_those_of_more_and_the_test_patients_stay():
    ids = [f"p{n:03}" for n in range(100)]
    strata = {i: int(n % 4 == 0) for n, i in enumerate(ids)}
    found = {
        most: split_patients(ids, 0.2, 0.2, 3, strata, [1, 5], most) for most in (None, 40, 20, 7)
    }
    tests = {tuple(parts["test"]) for parts in found.values()}
    assert len(tests) == 1
    for most, parts in found.items():
        used = {*parts["train"], *parts["val"]}
        assert len(used) == (80 if most is None else most)
        share = sum(strata[i] for i in used) / len(used)
        assert share == pytest.approx(0.25, abs=1 / len(used))
        if most == 40:
            assert len(parts["val"]) == 8
            assert used > {*found[20]["train"], *found[20]["val"]}
    assert split_patients(ids, 0.2, 0.2, 3, strata, [1, 5], 500) == found[None]


def test_hospitals_are_kept_by_their_size():
    patients = [
        Patient(f"{c}{n}", centre=c) for c, k in {"x": 2, "y": 5, "z": 9}.items() for n in range(k)
    ]
    kept = ByCentre(patients=[3, 8])
    assert {name: len(ids) for name, ids in kept.assign(patients, 0).items()} == {"y": 5}
    assert kept.remark(patients).startswith("1 of 3 hospitals, with 5 of 16 patients, take part")
    assert not kept.traits.keeps_all
    with pytest.raises(ConfigError, match="no hospital has so many patients; they have 2 to 9"):
        ByCentre(patients=[20, 30]).assign(patients, 0)
    with pytest.raises(ConfigError, match="must be \\[LEAST, MOST\\]"):
        ByCentre(patients=[9, 3])


@pytest.mark.parametrize("experiment", ["tcga_brca_flamby", "heart_flamby"])
def test_an_experiment_has_settings_of_single_methods(experiment, tmp_path):
    def composed(*words):
        place = f"data.path={tmp_path}"
        return described([f"experiment={experiment}", place, "folder=nowhere", *words])

    average, alone = composed("algorithm=fedavg"), composed("algorithm=local")
    adaptive = composed("algorithm=fedadam")
    assert average.optimizer.momentum == 0.0
    assert str(average.optimizer.get("_target_")).endswith("SGD")
    assert str(alone.optimizer.get("_target_")).endswith("Adam")
    assert (alone.local.steps, alone.rounds) == (None, 1)
    assert "momentum" not in alone.optimizer.plain()
    assert (adaptive.optimizer.lr, adaptive.algorithm.beta2) == (0.01, 0.999)
    assert composed("algorithm=fedadam", "optimizer.lr=0.5").optimizer.lr == 0.5
    other = composed("algorithm=local", "optimizer=sgd")  # the command line wins
    assert str(other.optimizer.get("_target_")).endswith("SGD")
    assert np.isclose(average.optimizer.lr, {"t": 0.1, "h": 0.001}[experiment[0]])
