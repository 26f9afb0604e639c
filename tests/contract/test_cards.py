"""What every method says of itself: its traffic, its state and its gradient passes are measured."""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from medfed.commands.methods import comment_words
from medfed.federation.algorithm import Algorithm, Cohort
from medfed.federation.card import elements
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from medfed.models.networks.canonical import Canonical
from medfed.standalone.errors import ConfigError
from tests.contract.harness import NAMES, ROUNDS, algorithm, recorded, task, two_bodied
from tests.contract.names import algorithm_yamls
from tests.toys import ToyTask, canonical_toy, toy_data, toy_federation

GRADIENT = "one gradient a round: needs many rounds"
HEADER = 12  # bytes of a dense part
# A method from outside need not have a card of its own.
CARDS = [name for name in NAMES if "card" in vars(type(algorithm(name)))]
pytestmark = pytest.mark.parametrize("name", CARDS)


def wide(seed: int, outputs: int = 1) -> nn.Module:
    """Layers so long that the numbers which a method keeps beside vectors are few against them."""
    torch.manual_seed(seed)
    layers = {
        "body": nn.Linear(3, 128),
        "norm": nn.BatchNorm1d(128),
        "middle": nn.Linear(128, 128),
        "head": nn.Linear(128, outputs),
    }
    built = nn.Sequential()
    for name, layer in layers.items():
        built.add_module(name, layer)
    return built


# Steps, gradient and forward passes of the second round: the first and the last may be others.
SPENT: dict[tuple[str, str], tuple[int, ...]] = {}


@functools.cache
def finished(name: str) -> Federation:
    toy: ToyTask = task(name)
    toy.network = wide(0, 2 if algorithm(name).by_class else 1)
    if algorithm(name).sums:
        toy.personal = ToyTask.personal
        toy = two_bodied(toy, wide(1))
    if algorithm(name).mixes:
        toy.network = Canonical([wide(k) for k in range(3)], ["head.*"], activation="identity")
    _, federation, _ = toy_federation(algorithm(name), toy, rounds=ROUNDS, steps=4, lr=0.01)
    before = {}

    def remember(number: int) -> None:
        for client in federation.clients.values():
            then = before.get(client.id, (0, 0, 0))
            now = (client.steps_done, *client.passes)
            if number == 1:
                SPENT[name, client.id] = tuple(b - a for a, b in zip(then, now, strict=True))
            before[client.id] = now

    return run_reference(federation, ROUNDS, remember)


def vectors(federation: Federation) -> dict[str, int]:
    client = next(iter(federation.clients.values()))
    return federation.algorithm.vectors(client.split, client.weights)


def names(federation: Federation) -> dict[str, float]:
    """What a multiple may name: N, the edges of a graph with both ends, and hyper-parameters."""
    edges = federation.server.get("graph", {}).get("edges")
    return {"M": 0 if edges is None else len(edges)} | federation.algorithm.counts(
        len(federation.ids)
    )


def test_what_travels_is_what_the_card_says(name):
    """In every round after the first, unless nothing does; numbers that are told not counted."""
    federation = finished(name)
    for direction in ("down", "up"):
        sent: Counter[tuple[int, str]] = Counter()
        for e in federation.ledger.entries:
            if e.direction == direction and e.part not in ("scalars", "preprocessing"):
                sent[e.round, e.client] += (e.bytes - HEADER) // 4
        card = getattr(federation.algorithm.card, direction)
        said = elements(card, vectors(federation), names(federation))
        later = {count for (number, _), count in sent.items() if number and count}
        if federation.algorithm.card.at_most:
            assert max(later) == said, direction
        else:
            assert later == ({said} if said else set()), direction


def floats(state) -> dict[int, int]:
    """Elements by place, of what is a number."""
    return {
        t.data_ptr(): t.numel()
        for named in state.values()
        for t in named.values()
        if isinstance(t, Tensor) and t.is_floating_point()
    }


def test_what_is_kept_is_what_the_card_says(name):
    """Up to a few numbers for each client and each pair of them."""
    federation = finished(name)
    card, count = federation.algorithm.card, len(federation.ids)
    small = 32 + 8 * count + count**2 * (ROUNDS + 1)
    lengths, known = vectors(federation), names(federation)
    assert small < min(n for v, n in lengths.items() if n > count and v != "personal")
    server = sum(floats(federation.server).values())
    assert server == pytest.approx(elements(card.server, lengths, known), abs=small)
    own = [floats(c.state) for c in federation.clients.values()]
    common = set.intersection(*map(set, own))
    for kept in own:
        measured = sum(n for place, n in kept.items() if place not in common)
        said = elements(card.client, lengths, known)
        assert measured == pytest.approx(said, abs=small)


def test_gradient_passes_are_those_of_the_card(name):
    card = finished(name).algorithm.card
    for steps, gradient, forward in (v for (who, _), v in SPENT.items() if who == name):
        assert (gradient + forward > card.passes * steps) if card.extra_passes else forward == 0
        assert (
            gradient >= card.passes * steps
            if card.extra_passes
            else gradient == card.passes * steps
        )


def test_noise_can_cover_what_declares_gradients(name):
    """It takes no more gradients than its noise is chosen for, and no losses."""
    method = algorithm(name)
    if method.card.privacy_exposure != "gradients":
        # A user's method may declare nothing: privacy.example then refuses it by name.
        assert method.card.privacy_exposure or not type(method).__module__.startswith("medfed.")
        return
    toy = canonical_toy(dtype=torch.float32) if method.mixes else ToyTask(norm=name == "fedbn")
    toy = task(name) if method.sums else toy
    data, rounds = toy_data(batch=2), 2 * ROUNDS
    _, federation, _ = toy_federation(method, toy, data, rounds=rounds, steps=4, lr=0.01)
    run_reference(federation, rounds)
    for client in federation.clients.values():
        draws = federation.algorithm.max_batches_drawn(4, math.ceil(client.num_samples / 2))
        assert client.passes.forward == 0
        assert client.passes.gradient <= rounds * draws * federation.algorithm.gradients_per_batch


def test_who_needs_everybody_refuses_less(name):
    method: Algorithm = algorithm(name)
    part = Cohort(fraction=0.5)
    if method.card.full_cohort:
        with pytest.raises(ConfigError, match=r"choose cohort\.fraction=1"):
            method.check_cohort(part)
    else:
        method.check_cohort(part)
    method.check_cohort(Cohort())


def test_methods_without_local_steps_say_so(name):
    card = algorithm(name).card
    assert (card.passes == 0 and bool(card.up)) == (card.note == GRADIENT)


def test_no_message_follows_from_fewer_steps_than_the_method_declares(name, monkeypatch):
    """What a hospital counts the patients behind a message by."""
    method, calls, run = algorithm(name), [], LocalTrainer.run

    def counted(trainer, data, start, key, rate, steps, memory, **how):
        calls.append(steps)
        return run(trainer, data, start, key, rate, steps, memory, **how)

    monkeypatch.setattr(LocalTrainer, "run", counted)
    _, federation, _ = toy_federation(method, task(name), rounds=ROUNDS, steps=12, lr=0.01)
    run_reference(federation, ROUNDS)
    assert 1 <= method.least_steps(12) <= min(calls, default=12)


def test_a_method_is_for_what_it_says(name):
    """Measured on what travels, and on the widths that it takes."""
    method = algorithm(name)
    suits = comment_words(algorithm_yamls()[name], "for")
    fed, local, messages = recorded(name)
    sent = {n for _, m in messages for part in m.parts.values() for n in part}
    if "no_shared_weights" in suits:
        assert not sent.intersection(local.split.parameters("all"))
    if "few_bytes" in suits:
        assert fed.ledger.total() < recorded("fedavg").federation.ledger.total()
    if "unequal_networks" in suits:
        assert hasattr(method, "widths")
    assert {*suits} <= {"few_bytes", "few_patients", "no_shared_weights", "unequal_networks"}
