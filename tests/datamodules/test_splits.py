import itertools
import logging

import numpy as np
import pytest

from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.plans import by_id, plan_clients
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.splits import check_leakage, split_patients, warn_small
from medfed.standalone.errors import ConfigError, DataError
from tests.sweeps import sweep


@sweep(
    ("count", "sizes"),
    [(1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1]), (4, [2, 1, 1]), (10, [6, 2, 2])],
)
def test_sizes(count, sizes):
    ids = [f"p{i}" for i in range(count)]
    parts = split_patients(ids, 0.2, 0.2, seed=1)
    assert [len(parts[s]) for s in ("train", "val", "test")] == sizes
    assert sorted(i for part in parts.values() for i in part) == sorted(ids)


def test_order_does_not_matter_but_the_seed_does():
    ids = [f"p{i}" for i in range(30)]
    assert split_patients(ids, 0.2, 0.2, 1) == split_patients(ids[::-1], 0.2, 0.2, 1)
    assert split_patients(ids, 0.2, 0.2, 1) != split_patients(ids, 0.2, 0.2, 2)


def test_strata_keep_the_label_ratio():
    labels = {f"p{i}": int(i < 80) for i in range(100)}
    parts = split_patients(list(labels), 0.2, 0.3, 0, labels)
    for split, size in (("train", 50), ("val", 20), ("test", 30)):
        assert sum(labels[i] for i in parts[split]) == 0.8 * size


def test_without_strata_a_test_share_is_as_far_off_as_chance():
    """The variance of the sum of a simple random sample; with strata there is none."""
    tested = {True: [], False: []}
    for seed, stratify in itertools.product(range(300), (True, False)):
        patients = [Patient(f"p{i}", label=int(i < 16)) for i in range(40)]
        fractions = (0.2, 0.5)
        plans = plan_clients(
            *(RoundRobin(1), by_id(patients), (["x"], ["no", "yes"]), seed, fractions),
            stratify=stratify,
        )
        (plan,) = plans.values()
        tested[stratify].append(sum(int(i[1:]) < 16 for i in plan.patients["test"]))
    assert {*tested[True]} == {8}
    expected = 20 * 0.4 * 0.6 * 20 / 39
    assert np.mean(tested[False]) == pytest.approx(8, abs=0.4)
    assert np.var(tested[False]) == pytest.approx(expected, rel=0.35)


def test_no_test_split_where_none_is_wanted():
    assert split_patients(["a", "b", "c"], 0.3, 0.0, 0)["test"] == []
    with pytest.raises(ConfigError, match="leave a share for training"):
        split_patients(["a"], 0.5, 0.5, 0)


def test_folds_test_every_patient_once_and_keep_the_label_ratio():
    labels = {f"p{i}": int(i % 5 == 0) for i in range(53)}
    folds = [split_patients(list(labels), 0.25, 0.2, 3, labels, [k, 5]) for k in range(5)]
    tested = [i for parts in folds for i in parts["test"]]
    assert sorted(tested) == sorted(labels)
    assert {len(parts["test"]) for parts in folds} == {10, 11}
    for parts in folds:
        assert sorted(i for ids in parts.values() for i in ids) == sorted(labels)
        assert sum(labels[i] for i in parts["test"]) in (2, 3)
        assert len(parts["val"]) == pytest.approx(0.25 * (53 - len(parts["test"])), abs=1)
    other = split_patients(list(labels), 0.25, 0.2, 4, labels, [0, 5])
    assert other["test"] != folds[0]["test"]


def test_leakage_names_the_patient_and_both_places():
    good = {"a": {"train": ["p1"], "val": ["p2"]}, "b": {"train": ["p3"]}}
    check_leakage(good)
    with pytest.raises(DataError, match="Patient p2 is in val of a and again in test of b"):
        check_leakage({**good, "b": {"test": ["p2"]}})


def test_small_clients_are_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        tiny, small = {"train": ["p"], "val": [], "test": []}, {"train": ["p"], "val": ["q"]}
        some = {f"small_{n}": {**small, "test": ["r"]} for n in range(12)}
        warn_small({"tiny": tiny, **some})
    assert caplog.messages == [
        "Client tiny has no patient in: val, test.",
        "12 clients train on a single patient: small_0, small_1, small_2, small_3, small_4, "
        "small_5, small_6, small_7 and 4 more.",
    ]
