"""Clients kept out of training, and the few patients that they join with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.config.compose import build, load
from medfed.config.description import checked
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.plans import first_patients
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep


class Disk:
    """Rows that are no tensor."""

    def __init__(self, values):
        self.values = values
        self.shape = tuple(values.shape)

    def take(self, index):
        return self.values[index]

    def some(self, index):
        return Disk(self.values[index])


def client(labels, case, image=None):
    count = len(labels)
    image = torch.arange(count * 2.0).reshape(count, 2) if image is None else image
    block = {"image": image, "label": labels, "case": torch.tensor(case)}
    return ClientData(
        id="clinic",
        train=block,
        evaluation={"val": [], "test": [block]},
        channels=torch.ones(2, dtype=torch.bool),
        label_counts=torch.tensor([4.0, 5.0, 0.0]),
        patients={"train": ["p", "q", "r", "s"], "val": [], "test": ["t"]},
        batch_size=4,
    )


CASE = [0, 0, 2, 2, 2, 3, 3, 3, 0]  # patient q has no sample
LABELS = torch.tensor([0, 1, 0, 0, 1, 1, 1, 0, 1])


@sweep("seed", range(5))
def test_few_patients_are_among_more(seed):
    whole = client(LABELS, CASE)
    kept = [set(first_patients(whole, k, seed).patients["train"]) for k in (1, 2, 3, 9)]
    assert [len(k) for k in kept] == [1, 2, 3, 3]
    assert kept[0] < kept[1] < kept[2] == kept[3] == {"p", "r", "s"}


def test_another_seed_may_begin_with_another_patient():
    first = {first_patients(client(LABELS, CASE), 1, s).patients["train"][0] for s in range(9)}
    assert first == {"p", "r", "s"}


@sweep("on_disk", [False, True])
@sweep("count", [1, 2])
def test_the_samples_are_those_of_the_patients(on_disk, count):
    whole = client(LABELS, CASE)
    if on_disk:
        whole.train = {**whole.train, "image": Disk(whole.train["image"])}
    few = first_patients(whole, count, seed=3)
    names = few.patients["train"]
    rows = [i for i, c in enumerate(CASE) if whole.patients["train"][c] in names]
    assert few.num_samples == len(rows)
    assert torch.equal(few.samples(torch.arange(len(rows)))["image"][:, 0], torch.tensor(rows) * 2)
    assert isinstance(few.train["image"], Disk) == on_disk
    assert [names[c] for c in few.train["case"]] == [whole.patients["train"][CASE[i]] for i in rows]
    expected = np.bincount(LABELS[rows].numpy(), minlength=3)
    assert few.label_counts.tolist() == expected.tolist()
    assert few.evaluation is whole.evaluation
    assert whole.num_samples == 9
    assert whole.patients["train"] == ["p", "q", "r", "s"]


def test_voxels_of_regions_are_counted_anew():
    label = torch.zeros(9, 1, 2, 2)
    label[:5] = 1
    few = first_patients(client(label, CASE, torch.zeros(9, 2, 2, 2)), 1, seed=0)
    per_patient = {"p": [4.0, 8.0], "r": [0.0, 12.0], "s": [12.0, 0.0]}
    assert few.label_counts.tolist() == per_patient[few.patients["train"][0]]


def test_no_patient_is_refused():
    with pytest.raises(ConfigError, match="1 training patient or more, not 0"):
        first_patients(client(LABELS, CASE), 0, seed=0)


def table(*keep_out, **changes):
    config = load(["experiment=clinical_pfednet", *(f"data.{k}={v}" for k, v in changes.items())])
    data = build(config.data)
    data.keep_out = keep_out
    data.setup()
    return data


def test_onboarded_clients_keep_their_patients_and_are_no_clients():
    everyone, fewer = table(), table("hospital_3", "hospital_1")
    assert fewer.splits() == everyone.splits()
    assert list(fewer.clients) == ["hospital_0", "hospital_2", "hospital_4"]
    assert list(fewer.kept_out) == ["hospital_3", "hospital_1"]
    assert not everyone.kept_out
    same = everyone.clients["hospital_3"].train["image"]
    assert torch.equal(fewer.kept_out["hospital_3"].train["image"], same)


def test_features_are_scaled_without_the_onboarded_clients():
    keys = {"scaling": "pooled", "normalization": "standard"}
    everyone, fewer = table(**keys), table("hospital_0", **keys)
    rows = torch.cat([c.train["image"] for c in fewer.clients.values()])
    assert rows.mean(0).abs().max() < 1e-5
    again = [everyone.clients[c].train["image"] for c in fewer.clients]
    assert not torch.equal(rows, torch.cat(again))


@pytest.mark.parametrize(
    ("keep_out", "message"),
    [
        (("hospital_9",), r"'hospital_9', which is no client .*the clients are hospital_0, hosp"),
        (("hospital_1", "hospital_1"), "names a client twice"),
        (tuple(f"hospital_{i}" for i in range(5)), "all 5 clients, so no client is left to train"),
    ],
)
def test_mistakes_are_one_sentence(keep_out, message):
    with pytest.raises(ConfigError, match=message):
        table(*keep_out)


def test_keep_out_is_a_list():
    config = load(["experiment=clinical_pfednet", "keep_out=hospital_1"])
    config.folder, config.resume = "x", None
    with pytest.raises(ConfigError, match=r"write keep_out=\[hospital_1\]"):
        checked(config)
