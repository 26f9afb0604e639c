"""What every algorithm promises, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from medfed.common.scores import Record
from medfed.common.tensors import digest
from medfed.federation.algorithm import Algorithm, Cohort
from medfed.federation.lightning.callbacks import PersonalEvaluation
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import run_reference
from medfed.federation.wire.ledger import Ledger
from tests.contract.harness import (
    NAMES,
    POLICIES,
    ROUNDS,
    Serialising,
    algorithm,
    federation,
    half,
    lightning,
    recorded,
)
from tests.contract.shapes import KNOWN, STATES, marks

each_method = pytest.mark.parametrize("name", NAMES)
each_state = pytest.mark.parametrize("name", STATES)
Runs = Callable[[str], tuple[FederatedModule, PersonalEvaluation, Path]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A method's run with half cohorts, evaluations and checkpoints."""

    @cache
    def run(name: str):
        folder = tmp_path_factory.mktemp(name)
        return (*lightning(name, folder, cohort=half()), folder)

    return run


@each_method
def test_training_changes_what_is_evaluated(name):
    _, fed, _ = federation(name)
    before = {c: digest(fed.personal_model(c)) for c in fed.ids}
    run_reference(fed, 1)
    assert all(digest(fed.personal_model(c)) != before[c] for c in fed.ids)


@pytest.mark.parametrize("name", [*NAMES, "fedavg+averaged"])
def test_lightning_equals_reference(name, straight):
    lightning_equals_reference(name, half(), straight(name))


@each_state
def test_lightning_with_all_clients_equals_reference(name):
    lightning_equals_reference(name, None, lightning(name))


def lightning_equals_reference(name, cohort, run):
    _, fed, _ = federation(name, cohort=cohort)
    losses: list[Record] = []
    steps: dict[str, int] = {}

    def note(number):
        for name, client in fed.clients.items():
            if client.steps_done > steps.get(name, 0):
                losses.append(Record(number, name, {"loss": client.training_loss}))
            steps[name] = client.steps_done

    run_reference(fed, ROUNDS, note)
    module, record, *_ = run
    assert sorted(record.losses) == sorted(losses)
    assert module.federation.digests() == fed.digests()
    assert module.federation.ledger.to_csv() == fed.ledger.to_csv()
    passes = [c.passes for c in module.federation.clients.values()]
    assert passes == [c.passes for c in fed.clients.values()]


@pytest.mark.parametrize("name", [*NAMES, "fedavg+averaged"])
def test_resumed_equals_straight(name, straight, tmp_path: Path):
    whole, record, folder = straight(name)
    begun = folder / "round_00001.ckpt"
    parts, again = lightning(name, tmp_path, resume=begun, cohort=half())
    assert parts.federation.digests() == whole.federation.digests()
    assert parts.federation.ledger.to_csv() == whole.federation.ledger.to_csv()
    assert again.history == record.history
    assert again.losses == record.losses
    for what in ("steps_done", "passes"):
        assert [getattr(c, what) for c in parts.federation.clients.values()] == [
            getattr(c, what) for c in whole.federation.clients.values()
        ]


@each_state
def test_a_checkpoint_is_written_every_round(name, tmp_path: Path):
    lightning(name, tmp_path, rounds=2)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"round_00000.ckpt", "round_00001.ckpt", "best.ckpt"} <= names
    assert not [n for n in names if "partial" in n]


@each_method
def test_serialised_messages_change_nothing(name):
    _, serial, _ = federation(name, channel=Serialising())
    assert run_reference(serial, ROUNDS).digests() == recorded(name).federation.digests()
    assert serial.ledger.to_csv() == recorded(name).federation.ledger.to_csv()


@each_method
def test_evaluation_changes_nothing(name, straight):
    quiet, _ = lightning(name, evaluate=False, cohort=half())
    evaluated, record, _ = straight(name)
    assert len(record.history) == ROUNDS * 3
    assert evaluated.federation.digests() == quiet.federation.digests()
    state = torch.random.get_rng_state()
    before = evaluated.federation.digests()
    for client in evaluated.federation.ids:
        evaluated.evaluate_client(client, "val")
    assert evaluated.federation.digests() == before
    assert torch.equal(torch.random.get_rng_state(), state)


@each_method
def test_clients_outside_the_cohort_are_untouched(name):
    _, fed, _ = federation(name, cohort=Cohort(clients=["c0", "c2"]))
    before = fed.digests()["client/c1"]
    run_reference(fed, 2)
    assert fed.digests()["client/c1"] == before
    assert fed.clients["c1"].steps_done == 0
    assert fed.ledger.total(client="c1") == 0


@each_method
def test_only_declared_parts_leave_a_client(name):
    for policy in POLICIES:
        fed, local, messages = recorded(name, policy)
        split, sent = local.split, [m for direction, m in messages if direction == "up"]
        allowed = {"shared": set(split.shared), "personal": set(split.parameters("personal"))}
        for message in sent:
            assert set(message.parts) <= set(fed.algorithm.parts_sent)
            for part in {"shared", "personal"} & set(message.parts):
                assert set(message.parts[part]) == allowed[part], policy
        if split.policy != "averaged":
            names = {n for m in sent for part in m.parts.values() for n in part}
            assert not names & split.buffers, policy


@each_method
def test_frozen_buffers_never_change(name):
    fed, local, _ = recorded(name, "frozen")
    untouched = federation(name, buffers="frozen")[2].model.initial()
    start = {n: untouched[n] for n in local.split.buffers}
    for client in fed.ids:
        model = fed.personal_model(client)
        assert all(torch.equal(model[n], start[n]) for n in start)


@each_method
def test_yields_match_phases(name):
    fed = recorded(name).federation
    for number in range(2):
        current = [e.phase for e in fed.ledger.entries if e.round == number]
        assert list(dict.fromkeys(current)) == [
            p for p in dict.fromkeys(fed.algorithm.phases(number)) if p in current
        ]
        assert set(current) <= set(fed.algorithm.phases(number))


@each_method
def test_equal_budgets(name):
    """However a method divides it. One epoch is 6, 8 and 10 samples in batches of 4."""
    for steps, expected in ((6, [6, 6, 6]), (3, [3, 3, 3]), (None, [2, 2, 3])):
        _, fed, _ = federation(name, steps=steps)
        run_reference(fed, 2)
        if fed.algorithm.trains_centrally:  # one client takes the steps of all
            expected = [3 * expected[0], 0, 0]
        assert [fed.clients[c].steps_done for c in fed.ids] == [2 * n for n in expected], steps


QUANTISED = [n for n in NAMES if type(algorithm(n)).centers is not Algorithm.centers]


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_said_to_be_quantised_is(name):
    """Every such weight equals one of its centres, after every round."""
    _, fed, _ = federation(name)
    for number in range(ROUNDS + 1):
        run_reference(fed, number, start=max(0, number - 1))
        for client in fed.ids:
            model = fed.personal_model(client)
            for entry, centers in fed.centers(client).items():
                assert centers.dtype == model[entry].dtype
                assert bool((centers.diff() >= 0).all())
                assert bool(torch.isin(model[entry], centers).all())


@each_method
def test_who_mixes_and_nobody_else_has_memberships(name):
    _, fed, _ = federation(name)
    found = run_reference(fed, 2 if fed.algorithm.mixes else 0).memberships()
    assert (found is not None) == fed.algorithm.mixes
    if found is not None:  # in every round on the simplex
        assert found.shape == (3, 3, 3)  # rounds and the start, clients, instances
        assert float(found.min()) >= 0
        torch.testing.assert_close(found.sum(-1), torch.ones(3, 3))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_its_shape_is_the_one_in_the_file(name):
    assert marks(name) == KNOWN[name], "python -m tests.contract.shapes finds all shapes anew"


@each_state
def test_the_ledger_survives_its_state(name):
    fed, again = recorded(name).federation, Ledger()
    again.load_state_dict(fed.ledger.state_dict())
    assert again.to_csv() == fed.ledger.to_csv()


@each_method
def test_memory_grows_with_what_is_declared(name, tmp_path: Path):
    """Else with the personal part only."""
    whole = any(vector != "personal" for vector in algorithm(name).card.client)
    straight, _ = lightning(name, tmp_path, rounds=2)
    path = tmp_path / "round_00000.ckpt"
    for module in (straight, lightning(name, rounds=2, resume=path)[0]):
        split = module.local.split
        for entry in () if whole else split.shared:
            kept = {
                tensor.data_ptr()
                for client in module.federation.clients.values()
                for named in client.state.values()
                for n, tensor in named.items()
                if n == entry
            }
            assert len(kept) <= 1
    if not whole:
        saved = torch.load(path, weights_only=True)["federation"]["clients"]
        for entry in split.shared:
            held = [g[entry] for c in saved.values() for g in c["state"].values() if entry in g]
            assert len({t.untyped_storage().data_ptr() for t in held}) <= 1
