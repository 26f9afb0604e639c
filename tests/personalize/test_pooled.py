"""Pooled training: a plain loop over everybody's samples, each once an epoch, in mixed batches."""

from __future__ import annotations

import copy
from itertools import chain, islice

import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.inputs import Pool
from medfed.federation.reference import run_reference
from medfed.personalize.pooled import Pooled
from medfed.standalone.errors import ConfigError
from tests.toys import ToyTask, toy_data, toy_federation


def pools(batch=4, clients=3):
    data = toy_data(clients, batch=batch)
    return data, [Pool(own, data) for own in data]


def test_an_epoch_has_every_sample_of_every_client_once_and_batches_mix_them():
    data, (first, *_) = pools()
    everything = torch.cat([d.x for d in data])
    batches = list(first.train_batches(seed=1))
    found = torch.cat([b["image"] for b in batches])
    assert torch.equal(found.sort(0).values, everything.sort(0).values)
    assert max(len(b["image"]) for b in batches) == 4
    owner = {tuple(row.tolist()): d.id for d in data for row in d.x}
    assert any(len({owner[tuple(r.tolist())] for r in b["image"]}) > 1 for b in batches)
    again = torch.cat([b["image"] for b in first.train_batches(seed=1)])
    other = torch.cat([b["image"] for b in first.train_batches(seed=2)])
    assert torch.equal(found, again)
    assert not torch.equal(found, other)


def test_all_else_is_the_clients_own():
    data, (_, second, _) = pools()
    assert second.id == "c1"
    assert second.num_samples == 8  # of 6, 8 and 10
    assert torch.equal(next(second.eval_batches("test"))["image"], data[1].x)


def test_it_is_a_plain_loop_over_the_pool():
    """Stochastic gradient descent by hand, on the batches that the client was given."""
    task = ToyTask(norm=False)
    network = copy.deepcopy(task.network)
    seen = []

    class Listening(Pool):
        def train_batches(self, seed):
            for batch in super().train_batches(seed):
                seen.append(batch)
                yield batch

    data = toy_data(batch=4)
    wrapped = [Listening(own, data) for own in data]
    federation = run_reference(toy_federation(Pooled(), task, wrapped, steps=3)[1], 2)
    taken = [c.steps_done for c in federation.clients.values()]
    assert taken == [18, 0, 0]  # three clients, three steps, two rounds
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for batch in islice(chain(seen), 18):
        optimizer.zero_grad()
        (network(batch["image"]).squeeze(-1) - batch["label"]).square().mean().div(2).backward()
        optimizer.step()
    for client in federation.ids:
        for name, value in federation.personal_model(client).items():
            torch.testing.assert_close(value, dict(network.named_parameters())[name].detach())


def test_the_steps_are_those_of_the_cohort():
    federation = toy_federation(Pooled(), cohort=Cohort(clients=["c1", "c2"]), steps=5)[1]
    run_reference(federation, 1)
    assert [c.steps_done for c in federation.clients.values()] == [0, 10, 0]


def test_nothing_is_personal():
    with pytest.raises(ConfigError, match=r"pooled trains one model; leave algorithm\.personal"):
        Pooled(personal="all")
