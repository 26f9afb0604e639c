"""A run's record is a partition again."""

import json

import pytest
import torch

from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.partitions.by_group import ChannelMissing, SiteGroups
from medfed.datamodules.partitions.by_label import LabelImbalance
from medfed.datamodules.partitions.saved import Saved
from medfed.datamodules.readers.base import Patient
from medfed.standalone.errors import ConfigError, DataError

PATIENTS = [Patient(name) for name in ("p1", "p2", "p3", "p4")]


@pytest.fixture
def write(tmp_path):
    def write(content):
        file = tmp_path / "splits.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(file)

    return write


def test_an_earlier_run_comes_back_bit_by_bit(make_brats, write):
    partition = ChannelMissing(SiteGroups(2, scanners=[{}, {"gamma": 1.5, "noise": 0.1}]), "rotate")
    first = make_brats(partition=partition, val_fraction=0.3)
    first.setup()
    again = make_brats(partition=Saved(write(first.splits())), val_fraction=0.0)
    again.setup()
    for key in ("clients", "partition", "files"):
        assert again.splits()[key] == first.splits()[key]
    for name, client in first.clients.items():
        other = again.clients[name]
        index = torch.arange(client.num_samples)
        for key, values in client.samples(index).items():
            assert torch.equal(values, other.samples(index)[key])


def test_other_partitions_wrap_it(write):
    file = write({"clients": {"a": {"train": ["p1"], "test": ["p2"]}, "b": {"val": ["p3"]}}})
    partition = ChannelMissing(Saved(file), "lack_k", channel="T1", clients=["b"])
    assert partition.assign(PATIENTS, 0) == {"a": ["p1", "p2"], "b": ["p3"]}
    assert partition.splits(["a"]) == {"a": {"train": ["p1"], "val": [], "test": ["p2"]}}
    assert partition.availability(["a", "b"], ["T1", "T2"], 0)["b"].tolist() == [False, True]


def test_a_list_of_patients_is_split_by_the_seed(make_brats, write):
    plain = make_brats()
    ids = [p.id for p in plain.list_patients()]
    data = make_brats(partition=Saved(write({"clients": {"x": ids[3:], "y": ids[:3]}})))
    data.setup()
    parts = data.splits()["clients"]["x"]
    assert all(parts.values())
    assert sorted(i for part in parts.values() for i in part) == sorted(ids[3:])


def test_class_shares_come_back(write):
    partition = LabelImbalance(2, delta=3.0)
    shares = partition.class_shares(["a", "b"], 2, seed=0)
    record = {name: {"class_shares": list(share)} for name, share in shares.items()}
    saved = Saved(write({"clients": {"a": ["p1"], "b": ["p2"]}, "partition": record}))
    assert saved.class_shares(["a", "b"], 2, seed=9) == shares


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "does not list the patients of each client .* take a run's splits.json"),
        ([], "expected object, got array"),
        ({"clients": {}}, "clients: expected object of length >= 1"),
        ({"clients": {"a": "p1"}}, r"clients\[...\]: expected object \| array"),
        ({"clients": {"a": [1]}}, "expected str, got int"),
        ({"clients": {"a": {"dev": ["p1"]}}}, "invalid enum value 'dev'"),
        ({"clients": {"a": ["p1"]}, "partition": []}, "partition: expected object, got array"),
        ({"clients": {"a": ["p9", "p8"]}}, r"client a has patient p9, which is not among the 4"),
    ],
)
def test_bad_files(content, message, write):
    with pytest.raises(DataError, match=message):
        Saved(write(content)).assign(PATIENTS, 0)


def test_a_file_that_is_not_there():
    with pytest.raises(DataError, match=r"/no/such\.json cannot be read \(No such file.*set part"):
        Saved("/no/such.json").assign(PATIENTS, 0)


def test_a_record_that_does_not_fit_the_data(write):
    record = {"a": {"channels": ["T9"], "site": {"client": "a", "blur": 1}}}
    saved = Saved(write({"clients": {"a": ["p1"]}, "partition": record}))
    with pytest.raises(ConfigError, match="Unknown channel T9; known: T1"):
        saved.availability(["a"], ["T1"], 0)
    with pytest.raises(DataError, match=r"a scanner cannot be used: .*'blur'"):
        saved.scanners_of(["a"], 0)


def test_a_patient_twice_is_caught(make_brats, write):
    ids = [p.id for p in make_brats().list_patients()]
    data = make_brats(partition=Saved(write({"clients": {"x": ids, "y": ids[:1]}})))
    with pytest.raises(DataError, match=f"Patient {ids[0]} is in .* of x and again in"):
        data.setup()


def test_by_centre_is_what_it_falls_back_to(make_brats, write):
    """Without records, channels and images are as they are in the data."""
    plain = make_brats(partition=ByCentre())
    plain.setup()
    clients = {"clients": plain.splits()["clients"]}
    data = make_brats(partition=Saved(write(clients)))
    data.setup()
    assert data.splits()["partition"] == plain.splits()["partition"]
