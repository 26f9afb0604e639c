import numpy as np
import pytest
import torch

from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import SiteGroups
from medfed.datamodules.partitions.by_label import LabelImbalance
from medfed.datamodules.readers.table import read_csv
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.standalone.errors import ConfigError, DataError

CSV = """id,site,age,sugar,label
p1,Bern,50,1.0,0
p1,Bern,51,?,0
p2,Bern,60,3.0,1
p3,Bern,70,,1
p4,Basel,40,2.0,0
p5,Basel,45,NaN,1
p6,Basel,90,8.0,1
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(CSV)
    return path


def module(path, **settings):
    defaults = {"partition": ByCentre(), "label": "label", "centre": "site", "patient": "id"}
    data = TabularDataModule(path=str(path), **{**defaults, **settings})
    data.setup()
    return data


def test_breast_cancer_for_five_and_twenty_clients():
    for count in (5, 20):
        data = TabularDataModule(LabelImbalance(count, delta=4.0), normalization="exact_minmax")
        data.setup()
        assert (len(data.clients), data.in_channels, data.num_classes) == (count, 30, 2)
        for client in data.clients.values():
            assert client.train["image"].abs().max() <= 1
            assert client.label_counts.sum() == client.num_samples
            sizes = [len(client.patients[s]) for s in ("train", "val", "test")]
            assert min(sizes) >= 2
            for split in ("val", "test"):
                labels = torch.cat([b["label"] for b in client.eval_batches(split)])
                train = client.label_counts[1] / client.num_samples
                assert abs(float(labels.float().mean() - train)) < 0.16
    batch = next(data.clients["hospital_0"].train_batches(0))
    assert batch["label"].dtype == torch.int64
    assert batch["image"].dtype == torch.float32


def test_scaling_uses_training_rows_only(table):
    data = module(table, normalization="exact_minmax")
    raw = read_csv(table, "label", centre="site", patient="id")
    for client in data.clients.values():
        rows = np.isin(raw.patients, client.patients["train"])
        ages = raw.features[rows, raw.names.index("age")]
        if np.ptp(ages):
            scaled = client.train["image"][:, 0]
            assert (float(scaled.min()), float(scaled.max())) == (-1.0, 1.0)
        for split in ("val", "test"):
            assert torch.cat([b["image"] for b in client.eval_batches(split)]).abs().max() <= 1


def test_changing_test_rows_changes_no_training_tensor(table):
    before = module(table).clients["Bern"]
    held_out = before.patients["test"][0]
    lines = [
        line.replace(",50,", ",500,").replace(",60,", ",600,").replace(",70,", ",700,")
        if line.startswith(held_out)
        else line
        for line in CSV.splitlines()
    ]
    table.write_text("\n".join(lines))
    after = module(table).clients["Bern"]
    assert after.patients == before.patients
    assert torch.equal(after.train["image"], before.train["image"])


def test_missing_cells_become_zero_with_an_indicator(table):
    data = module(table, missing_indicator=True, normalization="exact_minmax")
    assert data.channel_names == ("age", "sugar", "age missing", "sugar missing")
    images = torch.cat(
        [
            b["image"]
            for c in data.clients.values()
            for s in ("train", "val", "test")
            for b in c.eval_batches(s)
        ]
    )
    missing = images[:, 3] == 1
    assert int(missing.sum()) == 3
    assert not images[missing, 1].any()


def test_pooled_scaling_is_the_same_everywhere():
    data = TabularDataModule(RoundRobin(3), scaling="pooled", normalization="exact_minmax")
    data.setup()
    rows = torch.cat([c.train["image"] for c in data.clients.values()])
    assert torch.allclose(rows.amin(0), -torch.ones(30))
    assert torch.allclose(rows.amax(0), torch.ones(30))
    assert any(
        c.train["image"].amax() < 1 or c.train["image"].amax(0).min() < 1
        for c in data.clients.values()
    )
    with pytest.raises(ConfigError, match=r"data\.scaling='test' is unknown"):
        TabularDataModule(RoundRobin(3), scaling="test")


def test_rows_of_a_patient_stay_together(table):
    data = module(table)
    parts = data.clients["Bern"].patients
    split = next(s for s, ids in parts.items() if "p1" in ids)
    rows = sum(len(b["image"]) for b in data.clients["Bern"].eval_batches(split))
    assert rows == 2


def test_splits_of_patients_with_several_rows_are_thinned_to_the_wanted_shares(tmp_path):
    """Every patient has two rows of class 0 and one of class 1; every split keeps 1:1."""
    lines = [f"p{n},{n},{int(row == 2)}" for n in range(20) for row in range(3)]
    path = tmp_path / "visits.csv"
    path.write_text("\n".join(["id,age,label", *lines]))
    partition = LabelImbalance(2, positive_fractions=[0.5, 0.5])
    data = module(path, partition=partition, centre=None)
    for client in data.clients.values():
        for split in ("train", "val", "test"):
            batches = list(client.eval_batches(split))
            labels = torch.cat([b["label"] for b in batches])
            patients = len(client.patients[split])
            assert torch.bincount(labels).tolist() == [patients, patients]
            assert int(torch.cat([b["case"] for b in batches]).max()) < patients


def test_tables_have_no_scanner():
    with pytest.raises(ConfigError, match=r"Client group_0_hospital_0 has a scanner, but tables"):
        TabularDataModule(SiteGroups(2, scanners=[{"gamma": 2}, {}])).setup()


def test_positive_values_header_and_features(tmp_path):
    path = tmp_path / "heart.data"
    path.write_text("63,1,0\n67,?,2.0\n41,0,1\n")
    table = read_csv(path, "num", positive=[1, 2, 3, 4], header=["age", "sex", "num"])
    assert table.labels.tolist() == [0, 1, 1]
    assert np.isnan(table.features[1, 1])
    some = read_csv(path, "num", features=["sex"], header=["age", "sex", "num"])
    assert some.features.shape == (3, 1)
    assert some.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("50,1.0", "old,1.0"), r"table\.csv, data row 1, column age: 'old' is not a number"),
        (("50,1.0", "inf,1.0"), r"data row 1, column age: 'inf'"),
        (("50,1.0,0", "50,1.0"), r"data row 1: 4 cells, but 5 columns"),
        (("50,1.0,0", "50,1.0,"), r"data row 1, column label: the cell is missing"),
        (("p2,Bern", ",Bern"), r"data row 3, column id: the cell is missing"),
        (("p2,Bern", "p2,?"), r"data row 3, column site: the cell is missing"),
        (("age,sugar", "age,Age"), r"table\.csv: column Age occurs twice"),
        ((CSV[CSV.index("p1") :], ""), r"has no data rows"),
    ],
)
def test_bad_cells_are_named(table, change, message):
    table.write_text(CSV.replace(*change))
    with pytest.raises(DataError, match=message):
        module(table)


def test_unknown_labels_are_named(table):
    table.write_text(CSV.replace("90,8.0,1", "90,8.0,2"))
    assert module(table, positive=[1, 2], negative=[0]).num_classes == 2
    assert module(table, positive=[1]).table.labels.tolist() == [0, 0, 1, 1, 0, 1, 0]
    with pytest.raises(DataError, match=r"data row 7: the label 2 is none of 0, 1; mend the row"):
        module(table, positive=[1], negative=[0])
    with pytest.raises(
        DataError, match=r"no row has a label of data\.positive \(ill\); .* 0, 1, 2"
    ):
        module(table, positive=["ill"])


def test_bad_columns_and_files(table, tmp_path):
    with pytest.raises(ConfigError, match=r"Unknown column lable; known: .*did you mean label"):
        module(table, label="lable")
    with pytest.raises(DataError, match="does not exist"):
        module(tmp_path / "none.csv")
    table.write_text(CSV.replace("p2,Bern", "p2,Basel").replace("p3,Bern", "p2,Bern"))
    with pytest.raises(
        ConfigError, match=r"Patient p2 has samples at several centres \(Basel, Bern\)"
    ):
        module(table)


def test_one_class_clients_are_allowed_and_warned_about(caplog):
    data = TabularDataModule(LabelImbalance(2, positive_fractions=[0.0, 0.5]))
    data.setup()
    assert data.clients["hospital_0"].label_counts[1] == 0
    assert "Client hospital_0 trains on a single class" in caplog.text
    assert "hospital_1" not in caplog.text


@pytest.mark.parametrize(
    "role", ["label", "centre", "patient", "split", "time", "drop", "features"]
)
def test_a_column_that_is_not_there_is_named_with_its_key(role, tmp_path):
    """As where an experiment names the columns of another table."""
    path = tmp_path / "t.csv"
    path.write_text("age,y\n1,0\n2,1\n")
    given = {"label": "y", role: ["of_others"] if role in ("drop", "features") else "of_others"}
    with pytest.raises(
        ConfigError, match=rf"t\.csv, data\.{role}: Unknown column of_others; known"
    ):
        read_csv(path, **given)
