"""IFCA: its limit, what it recovers, what stays, what travels, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.ifca import IFCA
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.personalize.planted import federate, groups
from tests.sweeps import sweep
from tests.toys import ToyTask, canonical_toy, toy_data, toy_federation


def build(algorithm, count=3, mix="outputs", norm=False, **changes):
    data = changes.pop("data", None) or toy_data(4, dtype=torch.float64)
    task = canonical_toy(count, mix, norm=norm)
    return toy_federation(algorithm, task, data, **{"steps": 4, **changes})[1]


def run(algorithm, rounds=3, **changes):
    return run_reference(build(algorithm, **changes), rounds)


@sweep("mix", ["outputs", "parameters"])
@sweep("norm", [False, True])
def test_one_model_is_fedavg(mix, norm):
    """Bit for bit, minibatches and kept momentum included: there is nothing to choose."""
    changes = {"momentum": 0.9, "kept": True, "cohort": Cohort(fraction=0.5)}
    data = toy_data(4, dtype=torch.float64, batch=4)
    ifca = run(IFCA(), 4, count=1, mix=mix, norm=norm, data=data, **changes)
    task = ToyTask(norm=norm, dtype=torch.float64)
    _, fedavg, _ = toy_federation(FedAvg(), task, data, steps=4, **changes)
    run_reference(fedavg, 4)
    renamed = {
        n.removeprefix("common.").removeprefix("canonical.0."): t
        for n, t in ifca.server["shared"].items()
    }
    assert set(renamed) == set(fedavg.server["shared"])
    assert all(torch.equal(t, renamed[n]) for n, t in fedavg.server["shared"].items())


# In two of five starts two groups pick the same model at once, and a third model serves nobody.
RECOVERED = {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.5, 4: 1.0}


@sweep("seed", sorted(RECOVERED))
def test_planted_groups(seed):
    """Three groups that call the same classes by permuted names; PPFL recovers all five."""
    chosen = groups(federate(IFCA(), seed, rounds=6))
    found = adjusted_rand_score([i % 3 for i in range(9)], chosen)
    assert found == pytest.approx(RECOVERED[seed], abs=1e-3)
    assert len(set(chosen)) == (3 if RECOVERED[seed] == 1 else 2)


def test_an_instance_that_nobody_chose_stays_and_the_others_are_not_diluted():
    """Here c0 alone takes part: the common part and its instance move as if it trained alone."""
    federation = build(IFCA(), cohort=Cohort(clients=["c0"]))
    before = dict(federation.server["shared"])
    run_reference(federation, 1)
    after, row = federation.server["shared"], federation.server["membership"]["c0"]
    choice = int(row.argmax())
    assert sorted(row.tolist()) == [0.0, 0.0, 1.0]
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    own = {n for n in after if n.startswith(f"canonical.{choice}.")}
    assert moved == own | {n for n in after if n.startswith("common.")}
    start = {
        n.split(".", 2)[-1] if n in own else n.removeprefix("common."): before[n] for n in moved
    }
    task = ToyTask(norm=False, dtype=torch.float64)
    task.network.load_state_dict(start)
    alone = {"data": toy_data(4, dtype=torch.float64)[:1], "steps": 4}
    _, fedavg, _ = toy_federation(FedAvg(), task, **alone)
    run_reference(fedavg, 1)
    for name, tensor in fedavg.server["shared"].items():
        place = f"canonical.{choice}.{name}" if "head" in name else f"common.{name}"
        torch.testing.assert_close(after[place], tensor, rtol=0, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_weight_decay_leaves_other_instances_alone(decay):
    """They are not sent, whatever a client's optimizer does to them."""
    federation = build(IFCA(), cohort=Cohort(clients=["c0"]))
    trainer = federation.clients["c0"].trainer
    trainer._make_optimizer = lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=decay)
    before = dict(federation.server["shared"])
    run_reference(federation, 1)
    choice = int(federation.server["membership"]["c0"].argmax())
    for name, tensor in federation.server["shared"].items():
        if name.startswith("canonical.") and not name.startswith(f"canonical.{choice}."):
            assert torch.equal(tensor, before[name])


def test_absent_clients_keep_what_they_had():
    federation = run(IFCA(), cohort=Cohort(clients=["c0", "c3"]))
    rows = {c: federation.server["membership"][c] for c in federation.ids}
    for absent in ("c1", "c2"):
        assert torch.equal(rows[absent], torch.full((3,), 1 / 3, dtype=torch.float64))
    for client, row in rows.items():
        assert torch.equal(federation.personal_model(client)["membership"], row)


def test_of_equal_losses_the_first_is_chosen():
    federation = build(IFCA())
    shared = federation.server["shared"]
    for name in [n for n in shared if n.startswith("canonical.0.")]:
        for k in (1, 2):
            shared[name.replace("canonical.0.", f"canonical.{k}.")] = shared[name]
    run_reference(federation, 1)
    assert groups(federation) == [0, 0, 0, 0]


def test_the_choice_may_look_at_a_few_batches():
    """All instances are measured on the same ones; the steps are those of a full choice."""
    data = toy_data(4, dtype=torch.float64, batch=2)
    federation = build(IFCA(choice_batches=1), data=data)
    client, seen = federation.clients["c3"], []
    client.begin(0, "fit", 0)
    batches = data[3].train_batches
    data[3].train_batches = lambda seed: (seen.append(b["label"]) or b for b in batches(seed))
    federation.algorithm.choose(client, {**client.weights})
    assert len(seen) == 3
    assert all(torch.equal(labels, seen[0]) for labels in seen)


def test_what_travels():
    """Down go the body and 3 heads; up the body, one head, and the number of the head."""
    federation = run(IFCA(), rounds=1)
    sent = {(e.direction, e.part): e.bytes for e in federation.ledger.entries}
    body, head = 16, 5
    assert sent["down", "shared"] == 12 + 8 * (body + 3 * head)
    assert sent["up", "common"] == 12 + 8 * body
    assert sent["up", "canonical"] == 12 + 8 * head
    assert sent["up", "scalars"] == 8
    one = run(IFCA(), rounds=1, count=1)
    assert {e.part for e in one.ledger.entries} == {"shared", "common", "canonical"}


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
def test_statistics_that_stay_are_the_clients_own(mix):
    federation = run(IFCA(), norm=True, buffers="local", mix=mix)
    means = [federation.personal_model(c)["common.norm.running_mean"] for c in federation.ids]
    assert (means[0] - means[1]).abs().max() > 1e-3
    assert not any("running" in n for n in federation.server["shared"])
    assert all(float(federation.personal_model(c)["membership"].max()) == 1 for c in federation.ids)


def test_more_models_than_clients_are_allowed_and_warned_of(caplog):
    federation = run(IFCA(), count=5)
    assert "5 canonical models for 4 clients" in caplog.text
    assert all(torch.isfinite(t).all() for t in federation.server["shared"].values())


def test_losses_that_are_not_finite_name_the_place():
    data = toy_data(4, dtype=torch.float64)
    data[1].y[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"^Client c1, round 1, phase fit: .*every canonical"):
        run(IFCA(), data=data)


def test_an_instance_that_broke_is_not_chosen():
    federation = build(IFCA())
    broken = [n for n in federation.server["shared"] if n.startswith("canonical.0.")]
    at = dict(federation.clients["c0"].weights)
    at |= {n: torch.full_like(at[n], float("nan")) for n in broken}
    assert federation.algorithm.choose(federation.clients["c0"], at) in (1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IFCA(personal="task"), r"algorithm\.personal is membership in IFCA"),
        (lambda: IFCA(choice_batches=0), r"algorithm\.choice_batches must be 1 or more, or null"),
        (lambda: toy_federation(IFCA(), ToyTask()), r"algorithm=ifca needs a model with a canonic"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_history_has_a_row_per_round():
    history = run(IFCA(), rounds=2).server["history"]["membership"].numpy()
    assert history.shape == (3, 4, 3)
    assert np.array_equal(history[0], np.full((4, 3), 1 / 3))
    assert set(np.unique(history[1:])) == {0.0, 1.0}
