"""Clients' states on another device: moved for a turn, or resident, with the bits of main memory.

The device is that of `tests/elsewhere.py`, on which whole federations train without a GPU.
"""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medfed.common import tensors
from medfed.common.tensors import distinct, states_on
from medfed.federation.algorithm import ClientInfo
from medfed.federation.budget import LocalBudget
from medfed.federation.engine import batches
from medfed.federation.engine.batches import Residents
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.onboarding import rules_of
from medfed.federation.reference import (
    onboarded_client,
    question,
    run_onboarding,
    run_reference,
)
from medfed.federation.wire.ledger import Ledger
from medfed.federation.wire.packet import Packet
from medfed.sites.site import newcomer_of
from tests.contract import harness
from tests.elsewhere import ELSEWHERE, elsewhere

CPU = torch.device("cpu")


@pytest.fixture
def moves(monkeypatch):
    """Where tensors went, one for each time, on a device that may keep what clients have."""
    monkeypatch.setattr(batches, "DEVICES", {ELSEWHERE.type})
    went, move = [], tensors._moved

    def noted(given, device):
        went.extend([device.type] * bool(given))
        return move(given, device)

    monkeypatch.setattr(tensors, "_moved", noted)
    with elsewhere():
        yield went


def federation(name="ditto", device=ELSEWHERE, lossy=False, cohort=None, **budget):
    channel = harness.lossy("stc") if lossy else None
    task, made, local = harness.federation(name, channel=channel, cohort=cohort)
    local.budget = replace(local.budget, **budget)
    task.network.to(device)
    made.to(device)
    return made, local


def everything(done):
    """All hashes, of models and optimizers, too."""
    hashes = done.digests()
    for name, client in done.clients.items():
        hashes[f"model/{name}"] = tensors.digest(done.personal_model(name))
        optimizers = client.state_dict()["optimizers"]
        hashes[f"optimizer/{name}"] = tensors.digest(
            {f"{slot}/{n}": t for slot, named in optimizers.items() for n, t in named.items()}
        )
    return hashes


def devices(client):
    return {t.device for t in distinct(client._states.values()).values()} - {CPU}


def saved(done):
    """The states of all clients as a checkpoint has them."""
    file = io.BytesIO()
    torch.save({name: client.state_dict() for name, client in done.clients.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The moves of three clients in two rounds: first states of methods begin in main memory.
METHODS = {
    "fedavg": ([3, 9], [0, 0]),
    "ditto": ([6, 12], [3, 3]),
    "scaffold": ([6, 12], [3, 3]),
    "fedavg+averaged": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("name", METHODS)
def test_states_that_stay_on_the_device_are_not_moved_and_change_no_bit(name, moves):
    lossy = name == "ditto"  # which keeps memory, too
    plain = everything(run_reference(federation(name, CPU, lossy)[0], 2))
    for stay, expected in zip((False, True), METHODS[name], strict=True):
        done, local = federation(name, lossy=lossy, resident_states=stay)
        moves.clear()
        counts = []
        run_reference(done, 2, lambda _, counts=counts: counts.append(len(moves)))
        assert counts == expected
        assert everything(done) == plain
        assert not local.residents.states
        assert not any(map(devices, done.clients.values()))


@pytest.mark.parametrize("name", harness.NAMES)
def test_each_method_has_its_bits_on_a_device(name, moves):
    def outcome(device):
        done, _ = federation(name, device, resident_states=device == ELSEWHERE)
        run_reference(done, 2)
        client = onboarded_client(done, done.clients["c1"].data)
        message, _ = run_onboarding(done, client)
        joined = rules_of(done.algorithm).onboard(client, message)
        return everything(done) | {"joined": tensors.digest(done.as_evaluated(client, joined))}

    assert outcome(ELSEWHERE) == outcome(CPU)


def test_a_turn_has_its_state_on_the_device_and_main_memory_has_it_afterwards(moves):
    done, local = federation()
    seen = []
    begin = local.run
    local.run = lambda *at, **how: seen.append(devices(done.clients[at[0].id])) or begin(*at, **how)
    run_reference(done, 1)
    assert seen
    assert all(where == {ELSEWHERE} for where in seen)
    assert not any(map(devices, done.clients.values()))


def test_a_checkpoint_copies_what_has_changed_and_a_resumed_run_has_the_bits(moves):
    straight = everything(run_reference(federation("scaffold", resident_states=True)[0], 2))
    first, local = federation("scaffold", resident_states=True)
    checkpoints = []

    def save(number):
        moves.clear()
        checkpoints.append(saved(first))
        assert moves == ["cpu"] * len(first.clients)
        saved(first)  # again: nothing has changed
        assert len(moves) == len(first.clients)
        assert len(local.residents.states) == len(first.clients)

    run_reference(first, 1, save)
    second, _ = federation("scaffold", resident_states=True)
    second.server, second.memory = first.server, first.memory
    for name, client in second.clients.items():
        client.load_state_dict(checkpoints[-1][name])
    assert everything(run_reference(second, 2, start=1)) == straight


def test_an_evaluation_moves_a_state_at_most_once_and_leaves_it_where_it_was(moves, tmp_path):
    for stay in (False, True):
        done, local = federation(resident_states=stay)
        run_reference(done, 1)
        done.clients["c1"].offload(tmp_path)
        before = {n: distinct(c._states.values()) for n, c in done.clients.items()}
        moves.clear()
        for name in done.clients:
            done.personal_model(name)
        assert moves == [ELSEWHERE.type] * len(done.clients)
        assert not local.residents.states
        for name, client in done.clients.items():  # the same tensors, those on disk, too
            assert distinct(client._states.values()).keys() == before[name].keys()
        assert not [*Path(tmp_path).iterdir()]


class Holder:
    """A client whose state has some bytes."""

    def __init__(self, residents: Residents) -> None:
        self.residents = residents

    def offload(self) -> None:
        self.residents.states.pop(self)


def test_the_state_used_the_longest_ago_makes_room_for_one_that_is_used_more_often():
    residents = Residents(2.5)
    clients = {name: Holder(residents) for name in "abc"}

    def after(order: str) -> str:
        for name in order:
            residents.states.pop(clients[name], None)
            residents.states[clients[name]] = 0  # so that it can leave
            residents.keep(clients[name], 1)
        return "".join(n for n, c in clients.items() if c in residents.states)

    assert after("abc") == "ab"  # taking turns: nobody is pushed out
    assert after("abcabc") == "ab"
    assert after("acac") == "ac"
    residents.limit = 0
    assert after("b") == "ac"
    residents.release()
    assert not residents.states


def test_a_budget_that_is_too_small_keeps_none(moves):
    plain = everything(run_reference(federation(device=CPU)[0], 2))
    done, local = federation(resident_states=True)
    local.residents.limit = 10.0
    sizes = []
    assert everything(run_reference(done, 2, lambda _: sizes.append(len(local.residents.states))))
    assert sizes == [0, 0]
    assert everything(done) == plain


class Full:
    """A loss that finds the memory full at a call."""

    def __init__(self, loss, at: int) -> None:
        self.loss, self.left = loss, at

    def __call__(self, batch):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("out of memory")
        return self.loss(batch)


# In the second round: a step of a client, and a batch of its gradient.
@pytest.mark.parametrize(("name", "at"), [("fedper", 14), ("fedsgd", 21)])
def test_full_memory_gives_states_back_and_the_turn_goes_on(name, at, moves, caplog):
    plain, _ = federation(name, CPU)
    full, local = federation(name, resident_states=True)
    local.gradients.loss = Full(local.gradients.loss, at)
    with caplog.at_level(logging.WARNING):
        run_reference(full, 2)
    assert everything(full) == everything(run_reference(plain, 2))
    assert caplog.text.count("local.resident_gib=0") == 1
    assert local.residents.limit == local.residents.size == len(local.residents.states) == 0
    assert {n: c.passes for n, c in full.clients.items()} == {
        n: c.passes for n, c in plain.clients.items()
    }


def test_states_on_disk_do_not_stay(moves, tmp_path):
    plain = everything(run_reference(federation(device=CPU)[0], 2))
    done, local = federation(resident_states=True)
    done.absent_folder = tmp_path
    assert everything(run_reference(done, 2, lambda _: local.residents.states and 1 / 0)) == plain


@pytest.mark.parametrize("name", ["binaryrelax", "fedfomo"])
def test_a_newcomer_at_a_site_has_its_state_on_the_device(name, moves):
    run_reference(server := federation(name, CPU)[0], 1)
    models = []
    for device in (CPU, ELSEWHERE):
        task, there, local = harness.federation(name)
        task.network.to(device)
        there.to(device)
        newcomer = newcomer_of(FederatedModule(task, there, local), "c1", 4)

        def send(packet, newcomer=newcomer):
            return newcomer.answer(Packet.from_bytes(packet.to_bytes()))

        last = question(server, ClientInfo("c1", newcomer.client.num_samples), send, Ledger())
        message = newcomer.begin(Packet.from_bytes(last.to_bytes()))
        rules = rules_of(newcomer.federation.algorithm)
        models.append(rules.onboard(newcomer.client, message))
    assert tensors.digest(models[0]) == tensors.digest(models[1])


def test_one_copy_moves_small_tensors_of_a_type_in_their_layouts(moves):
    wide = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    state = {
        "a": {"last": wide.to(memory_format=torch.channels_last), "number": torch.tensor(7)},
        "b": {
            "view": wide[0, :, 1],
            "none": torch.zeros(0, 3),
            "bits": torch.tensor([True, False]),
        },
        "c": {"large": torch.randn(600, 600), "half": torch.randn(3).half()},
    }
    state["c"]["same"] = state["a"]["number"]
    there = states_on({0: state}, ELSEWHERE)[0]
    assert there["c"]["same"] is there["a"]["number"]
    back = states_on({0: there}, CPU)[0]
    for group, named in state.items():
        for name, tensor in named.items():
            assert there[group][name].device == ELSEWHERE
            assert back[group][name].dtype == tensor.dtype
            assert torch.equal(back[group][name], tensor)
            assert back[group][name].stride() == torch.empty_like(tensor).stride()
            whole = back[group][name].untyped_storage().nbytes()
            assert whole == tensor.nbytes  # no view of more
    assert moves == [ELSEWHERE.type, "cpu"]


def test_a_cpu_says_once_that_states_are_there_anyway(caplog):
    assert LocalBudget().resident_states is False
    done, _ = federation(device=CPU, resident_states=True)
    with caplog.at_level(logging.WARNING):
        run_reference(done, 2)
    sentence = "local.resident_states=true has no effect on some steps: the network is on no GPU."
    assert caplog.messages == [sentence]
