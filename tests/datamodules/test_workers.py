"""Batches made by worker processes are those made here."""

import os
import pickle
import signal
from functools import partial
from itertools import chain

import pytest
import torch

from medfed.datamodules.augmentation import Augmentation
from medfed.standalone.errors import ConfigError, DataError

LIGHT = Augmentation(flip_chance=0.5, affine_chance=0.3, rotation=15, noise_chance=0.5, noise=0.1)


@pytest.fixture
def make(make_brats):
    return partial(make_brats, augment=LIGHT, flips=(0,))


def epochs(data, seeds=(1, 2)):
    return [
        {key: value.clone() for key, value in batch.items()}
        for client in data.clients.values()
        for seed in seeds
        for batch in client.train_batches(seed)
    ]


def same(one, other):
    assert len(one) == len(other)
    return all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


def prepared(data):
    data.setup()
    return data


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_processes_gives_the_same_bits(workers, make):
    expected = epochs(prepared(make()))
    data = prepared(make(workers=workers))
    assert same(expected, epochs(data))
    source = next(iter(data.clients.values())).source
    assert len(source.pool._processes) == workers  # all clients share them
    # Two epochs in turns, one of them left early.
    client = data.clients["hospital_0"]
    one, two = client.train_batches(1), client.train_batches(2)
    turns = [next(one), next(two), next(one)]
    one.close()
    assert same(turns[:1] + turns[2:], expected[:2])
    assert same([turns[1], *two], list(prepared(make()).clients["hospital_0"].train_batches(2)))


def test_a_started_process_is_not_needed_to_pickle_a_client(make):
    data = prepared(make(workers=1))
    client = data.clients["hospital_1"]
    expected = list(client.train_batches(4))
    spawned = pickle.loads(pickle.dumps(client.source)).clients["hospital_1"]
    assert same(expected, list(spawned.train_batches(4)))


def test_a_killed_process_is_one_sentence(make):
    client = prepared(make(workers=1)).clients["hospital_0"]
    batches = client.train_batches(0)
    next(batches)
    for process in client.source.pool._processes:  # at work on what comes next, or sending it
        os.kill(process, signal.SIGKILL)
    with pytest.raises(DataError, match=r"One of data\.workers=1 processes was killed"):
        list(chain(batches, client.train_batches(1)))


def test_a_workers_error_is_the_one_it_raised(make):
    def broken(sample):
        raise DataError("the transform's own sentence")

    client = prepared(make(augment=broken, workers=1)).clients["hospital_0"]
    with pytest.raises(DataError, match="the transform's own sentence"):
        next(client.train_batches(0))


def test_an_absurd_number_is_refused(make):
    with pytest.raises(ConfigError, match=r"data\.workers must be in \[0, 64\], not -1"):
        make(workers=-1)
