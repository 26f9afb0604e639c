"""What a user's readers and partitions return: taken in any usual type, or refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from medfed.datamodules.client_data import gather
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.partitions.base import Dealt, Partition, RoundRobin
from medfed.datamodules.partitions.by_centre import Auto
from medfed.datamodules.partitions.by_group import ChannelMissing
from medfed.datamodules.readers.samples import ImageSet, Samples
from medfed.datamodules.readers.table import Table
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.standalone.errors import MedfedError

COUNT = 24
LABELS = np.arange(COUNT) % 2
IDS = [str(n) for n in range(100, 100 + COUNT)]
CENTRES = [("7", "8", "9")[n % 3] for n in range(COUNT)]
ROWS = {"labels": LABELS, "patients": IDS, "centres": CENTRES}
FEATURES = np.random.default_rng(0).normal(size=(COUNT, 2))
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 1, 8, 8), dtype=np.uint8)


def table(**other):
    keys = {**ROWS, "names": ("x", "y"), "features": FEATURES, "classes": ("no", "yes"), **other}
    return Table(**keys)


def images(pixels=PIXELS, classes=("no", "yes"), channels=("grey",), **other):
    return ImageSet(
        pixels, channels, classes, Samples(**{**ROWS, "num_classes": len(classes), **other}), ""
    )


def data_of(reader, partition=None, kind=None, rows=None):
    kind = kind or (ImageDataModule if reader is images else TabularDataModule)
    partition = Auto() if partition is None else partition
    return kind(partition=partition, path=Path("rows"), reader=lambda path: reader(**(rows or {})))


def seen_of(made):
    made.setup()
    clients = {name: client.patients for name, client in made.clients.items()}
    trained = {
        name: gather(client.train["image"], torch.arange(3)).sum().item()
        for name, client in made.clients.items()
    }
    return clients, trained, {n: c.label_counts.tolist() for n, c in made.clients.items()}


FORMS = {
    "numbers": {"patients": [*map(int, IDS)], "centres": [*map(int, CENTRES)]},
    "arrays": {"patients": np.array(IDS), "centres": np.array([*map(int, CENTRES)])},
    "columns": {"patients": pd.Series(IDS).astype(float), "centres": pd.Series(CENTRES)},
    "views": {"patients": dict.fromkeys(IDS), "centres": dict(enumerate(CENTRES)).values()},
    "labels: list": {"labels": LABELS.tolist()},
    "labels: tensor": {"labels": torch.as_tensor(LABELS)},
    "labels: truth": {"labels": LABELS == 1},
    "labels: bytes": {"labels": LABELS.astype(np.uint8)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [table, images])
def test_rows_in_any_usual_type(kind, form):
    assert seen_of(data_of(kind, rows=FORMS[form])) == seen_of(data_of(kind))


MISTAKES = {
    "patients: fewer": ({"patients": IDS[:20]}, "has 20 patients and 24 labels; give one for"),
    "patients: none": ({"patients": ()}, "has 0 patients and 24 labels"),
    "centres: fewer": ({"centres": CENTRES[:20]}, "has 20 centres and 24 labels"),
    "files: more": ({"files": ["a"] * 25}, "has 25 files and 24 labels"),
    "splits: unknown": ({"splits": ["dev"] * 24}, "has the split dev; write train, val or test"),
    "labels: fewer": ({"labels": LABELS[:20]}, "has 24 patients and 20 labels"),
    "labels: from 1": (
        {"labels": LABELS + 1},
        "has the label 2; write numbers, classes from 0 to 1",
    ),
    "labels: negative": ({"labels": 2 * LABELS - 1}, "has the label -1; write"),
    "labels: texts": ({"labels": ["no", "yes"] * 12}, "has the label no; write numbers"),
    "labels: NaN": ({"labels": np.where(LABELS, np.nan, 0)}, "has the label nan; write numbers"),
}


@pytest.mark.parametrize(("other", "says"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("kind", [table, images])
def test_rows_that_do_not_fit(kind, other, says):
    with pytest.raises(MedfedError, match=f"The reader.* {says}"):
        kind(**other)


WHOLE = {
    "0 to 1": ({"pixels": PIXELS / 255}, "images of type float64 .*; give uint8 from 0 to"),
    "16 bits": ({"pixels": PIXELS.astype(np.uint16)}, "images of type uint16 .*; give uint8"),
    "channels last": (
        {"pixels": PIXELS.transpose(0, 2, 3, 1)},
        r"\(24, 8, 8, 1\); .* \(24, 1, height",
    ),
    "no channel": ({"pixels": PIXELS[:, 0]}, r"shape \(24, 8, 8\); give"),
    "fewer": ({"pixels": PIXELS[:20]}, r"shape \(20, 1, 8, 8\); .* \(24, 1"),
    "colours": ({"channels": ("red", "green")}, r"shape \(24, 1, 8, 8\); .* \(24, 2, height"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_pixels_that_do_not_fit(case):
    other, says = WHOLE[case]
    with pytest.raises(MedfedError, match=says):
        images(**other)


@pytest.mark.parametrize("returned", [None, {}, (PIXELS, LABELS), pd.DataFrame()], ids=type)
@pytest.mark.parametrize(("kind", "name"), [(table, "Table"), (images, "ImageSet")])
def test_a_reader_returns_the_shape_of_its_data_module(kind, name, returned):
    made = data_of(lambda: returned, kind=type(data_of(kind)))
    with pytest.raises(
        MedfedError, match=f"returns {type(returned).__name__}; .* {name} of medfed"
    ):
        made.setup()


@dataclass(frozen=True)
class Own(Partition):
    """A partition that returns what a test gives."""

    make: object

    def assign(self, patients, seed):
        return self.make([p.id for p in patients])


def plans_of(make):
    made = data_of(table, Own(make))
    made.setup()
    return {name: client.patients for name, client in made.clients.items()}


ASSIGNED = {
    "arrays": lambda ids: {"a": np.array(ids)[:9], "b": np.array(ids)[9:]},
    "columns": lambda ids: {"a": pd.Series(ids)[:9], "b": pd.Series(ids)[9:]},
    "generators": lambda ids: {"a": (i for i in ids[:9]), "b": (i for i in ids[9:])},
    "tuples": lambda ids: {"a": (*ids[:9],), "b": (*ids[9:],)},
}


@pytest.mark.parametrize("make", ASSIGNED.values(), ids=ASSIGNED)
def test_patients_of_a_client_in_any_usual_type(make):
    assert plans_of(make) == plans_of(lambda ids: {"a": ids[:9], "b": ids[9:]})


@pytest.mark.parametrize("kind", [table, images])
def test_classes_of_a_reader_that_look_like_a_measurement_are_said(kind):
    for classes, said in (
        ((*map(str, range(40, 64)),), True),
        ((*"abcdefghijklmnopqrstuvwx",), False),
    ):
        made = data_of(kind, rows={"labels": np.arange(COUNT), "classes": classes})
        made.plan()
        assert ("The labels are 24 different numbers" in " ".join(made.remarks)) == said


NOT_ASSIGNED = {
    "nothing": (lambda ids: None, "Own.assign returns None; it must return {client"),
    "no client": (lambda ids: {}, "Own.assign returns {}"),
    "lists": (lambda ids: [ids[:9], ids[9:]], "Own.assign returns .*; it must return {client"),
    "one id": (lambda ids: {"a": ids[0], "b": ids[1:]}, "gives a '1', which is no patient's id"),
    "a number": (lambda ids: {"a": 9}, "gives a 9, which is no patient's id"),
    "positions": (lambda ids: {"a": range(9)}, "gives a 0, which is no patient's id"),
    "a stranger": (lambda ids: {"a": [*ids, "1000"]}, "gives a '1000', which .* mean 100"),
    "an empty client": (lambda ids: {"a": ids, "b": []}, "Client b has no patients"),
    "a patient twice": (
        lambda ids: {"a": ids, "b": ids[:1]},
        "Patient 100 is in .* of a and again",
    ),
}


@pytest.mark.parametrize(("make", "says"), NOT_ASSIGNED.values(), ids=NOT_ASSIGNED)
def test_an_assignment_that_cannot_be_used(make, says):
    with pytest.raises(MedfedError, match=says):
        plans_of(make)


SHUFFLES = {
    "Python": random.shuffle,
    "NumPy": np.random.shuffle,
    "PyTorch": lambda ids: ids.sort(
        key=dict(zip(ids, torch.rand(COUNT).tolist(), strict=True)).get
    ),
}


@pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES)
def test_whatever_a_partition_draws_follows_the_seed(shuffle):
    def halves(ids):
        shuffle(ids)
        return {"a": ids[:12], "b": ids[12:]}

    first, second, other = (
        replace_seed(data_of(table, Own(halves)), seed).plans["a"].every for seed in (0, 0, 1)
    )
    assert first == second
    assert sorted(first) != sorted(other)


def replace_seed(made, seed):
    random.random(), np.random.rand(), torch.rand(1)
    made.seed = seed
    made.plan()
    return made


def answering(name, value):
    """Three clients, for which one method of a partition returns `value` of them."""

    def method(self, clients, *facts):
        return value(clients) if callable(value) else value

    kind = type("Answers", (Dealt,), {"deal": lambda self, of, seed: np.arange(len(of)) % 3})
    setattr(kind, name, method)
    return dataclass(frozen=True)(kind)(3)


def each(value):
    return lambda clients: dict.fromkeys(clients, value)


TRUTH, FIGURES = (
    "not True or False for each of 2 channels, at least one",
    "not 2 shares that sum to 1",
)
NUMBERS, LISTS = "not the 2 numbers of the classes from 0", "not lists of patient ids by train, val"
NO_ANSWERS = {
    "availability: names": ("availability", each(["x", "y"]), TRUTH),
    "availability: positions": ("availability", each([0, 1]), TRUTH),
    "availability: fewer": ("availability", each([True]), TRUTH),
    "availability: no channel": ("availability", each([False, False]), TRUTH),
    "availability: one client": (
        "availability",
        {"hospital_0": [True, True]},
        "leaves out hospital_1, hospital_2; it must give every client True or False",
    ),
    "class_shares: percent": ("class_shares", each([40, 60]), FIGURES),
    "class_shares: fewer": ("class_shares", each([1.0]), FIGURES),
    "class_shares: negative": ("class_shares", each([-0.5, 1.5]), FIGURES),
    "class_shares: NaN": ("class_shares", each([float("nan"), 1.0]), FIGURES),
    "class_shares: a number": ("class_shares", each(0.5), FIGURES),
    "label_orders: from 1": ("label_orders", each([1, 2]), NUMBERS),
    "label_orders: twice": ("label_orders", each([0, 0]), NUMBERS),
    "label_orders: halves": ("label_orders", each([0.5, 1]), NUMBERS),
    "label_orders: names": ("label_orders", each(["no", "yes"]), NUMBERS),
    "scanners_of: settings": ("scanners_of", each({"gamma": 2.0}), "not a Scanner"),
    "splits: lists": ("splits", each(["100"]), LISTS),
    "splits: dev": ("splits", each({"dev": IDS}), LISTS),
    "splits: one id": ("splits", each({"train": "100"}), LISTS),
    "splits: others": (
        "splits",
        each({"train": IDS}),
        "must divide the patients of hospital_0, all 8",
    ),
    "splits: fewer": ("splits", each({"train": IDS[:1]}), "must divide the patients of hospital_0"),
}
OPTIONAL = ("availability", "class_shares", "label_orders", "scanners_of", "splits")
for method in OPTIONAL:
    stranger = {"hospital_0": None, "hospitl_1": None}
    NO_ANSWERS[f"{method}: nothing"] = (method, None, f"{method} returns None; it must return")
    NO_ANSWERS[f"{method}: a list"] = (method, [1, 2, 3], f"{method} returns .*; it must return")
    NO_ANSWERS[f"{method}: a stranger"] = (
        method,
        stranger,
        f"{method} names 'hospitl_1', which is no client .did you mean hospital_1",
    )


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
@pytest.mark.parametrize(("name", "value", "says"), NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_an_optional_answer_that_cannot_be_used(name, value, says, wrapped):
    partition = answering(name, value)
    if wrapped:
        partition = ChannelMissing(partition, "lack_k", channel="x", clients=["hospital_1"])
    with pytest.raises(MedfedError, match=f"(Answers|The partition's splits).*{says}"):
        data_of(table, partition).plan()


USABLE = {
    "availability: array": ("availability", each(np.array([True, False])), "channels", [1, 0]),
    "availability: tensor": ("availability", each(torch.tensor([True, False])), "channels", [1, 0]),
    "availability: list": ("availability", each([True, False]), "channels", [1, 0]),
    "class_shares: array": ("class_shares", each(np.array([0.25, 0.75])), "shares", [0.25, 0.75]),
    "class_shares: some": ("class_shares", {"hospital_0": (1, 0)}, "shares", [1.0, 0.0]),
    "label_orders: array": ("label_orders", each(np.array([1, 0])), "label_order", [1, 0]),
    "label_orders: tensor": ("label_orders", each(torch.tensor([1, 0])), "label_order", [1, 0]),
}


@pytest.mark.parametrize(("name", "value", "part", "wanted"), USABLE.values(), ids=USABLE)
def test_an_optional_answer_in_any_usual_type(name, value, part, wanted):
    made = data_of(table, answering(name, value))
    made.plan()
    assert [*map(float, getattr(made.plans["hospital_0"], part))] == wanted


def test_an_optional_answer_that_is_drawn_follows_the_seed():
    def drawn(clients):
        return {client: [True, random.random() < 0.5] for client in clients}

    made = data_of(table, answering("availability", drawn))
    seen = [
        [plan.channels.tolist() for plan in replace_seed(made, seed).plans.values()]
        for seed in (*range(6), *range(6))
    ]
    assert seen[:6] == seen[6:]
    assert seen[0] != seen[1] or seen[1] != seen[2]


@dataclass(frozen=True)
class Given(Dealt):
    """A deal of numbers that a test gives."""

    make: object = None

    def deal(self, patients, seed):
        return self.make(len(patients))


DEALS = {
    "too high": lambda count: np.arange(count) % 4,
    "from 1": lambda count: 1 + np.arange(count) % 3,
    "below -1": lambda count: np.arange(count) % 3 - 2,
    "too few": lambda count: np.arange(9) % 3,
    "halves": lambda count: np.arange(count) % 3 / 2,
    "nothing": lambda count: None,
    "names": lambda count: np.array(CENTRES),
}


@pytest.mark.parametrize("make", DEALS.values(), ids=DEALS)
def test_a_deal_that_cannot_be_used(make):
    with pytest.raises(
        MedfedError, match="for each of the 24 patients: -1 for none, or a client fr"
    ):
        data_of(table, Given(3, make)).plan()


def test_a_deal_may_be_a_list():
    made = data_of(table, Given(3, lambda count: [n % 3 for n in range(count)]))
    made.plan()
    turns = RoundRobin(3, shuffle=False).assign([*made.patients.values()], 0)
    assert {name: sorted(plan.every) for name, plan in made.plans.items()} == turns
