"""PPFL: its limits, what it recovers, what travels, and what it refuses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from medfed.common.seeding import derive_seed
from medfed.common.tensors import digest
from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.personalize.canonical_base import MEMBERSHIP
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.ifca import IFCA
from medfed.personalize.ppfl import PPFL
from medfed.personalize.similarity import Affinity
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.contract import harness
from tests.personalize.planted import federate, groups, planted
from tests.toys import ToyTask, canonical_toy, toy_data, toy_federation

PAIRS = Affinity(kind="given", weights=[[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])


def run(algorithm, count=3, rounds=3, mix="outputs", norm=False, **changes):
    data = changes.pop("data", None) or toy_data(4, dtype=torch.float64)
    task = canonical_toy(count, mix, norm=norm)
    _, federation, _ = toy_federation(algorithm, task, data, **{"steps": 4, **changes})
    return run_reference(federation, rounds)


def memberships(federation) -> np.ndarray:
    return torch.stack([federation.server["membership"][c] for c in federation.ids]).numpy()


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
@pytest.mark.parametrize("norm", [False, True])
def test_one_canonical_model_is_fedavg(mix, norm):
    """Bit for bit, minibatches and kept momentum included: there is nothing to choose."""
    changes = {"momentum": 0.9, "kept": True, "cohort": Cohort(fraction=0.5)}
    data = toy_data(4, dtype=torch.float64, batch=4)
    ppfl = run(PPFL(), 1, 4, mix, norm, data=data, **changes)
    task = ToyTask(norm=norm, dtype=torch.float64)
    _, fedavg, _ = toy_federation(FedAvg(), task, data, steps=4, **changes)
    run_reference(fedavg, 4)
    renamed = {
        n.removeprefix("common.").removeprefix("canonical.0."): t
        for n, t in ppfl.server["shared"].items()
    }
    assert set(renamed) == set(fedavg.server["shared"])
    assert all(torch.equal(t, renamed[n]) for n, t in fedavg.server["shared"].items())


def test_more_coupling_draws_memberships_together_inside_components():
    """c0 is tied to c2 and c1 to c3, all strengths within the stable range."""
    within, across = [], []
    for strength in (0.0, 0.01, 0.03, 0.1, 0.3):
        algorithm = PPFL(strength=strength, membership_lr=0.3, affinity=PAIRS)
        rows = memberships(run(algorithm, rounds=12, steps=2))
        within.append(np.abs(rows[:2] - rows[2:]).sum(1))
        across.append(np.abs(rows[0] - rows[1]).sum())
    assert np.all(np.diff(within, axis=0) < 0)
    assert np.max(within[-1]) < 0.5 * np.min(within[0])
    assert min(across) > 0.5 * across[0]


@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_recovered(seed):
    """Three groups that call the same classes by permuted names."""
    federation = federate(PPFL(membership_lr=0.5), seed)
    truth = [i % 3 for i in range(9)]
    assert adjusted_rand_score(truth, groups(federation)) == 1.0
    assert memberships(federation).max(1).min() > 0.6  # no tie


def test_planted_groups_are_recovered_by_mixed_parameters():
    federation = federate(PPFL(membership_lr=0.5), 0, rounds=15, mix="parameters")
    assert adjusted_rand_score([i % 3 for i in range(9)], groups(federation)) == 1.0


def test_more_canonical_models_than_groups_do_no_harm():
    """Every client is served as well as with the true number; too few serve nobody."""

    def accuracy(count: int) -> float:
        federation = federate(PPFL(membership_lr=0.5), 0, count)
        hits = []
        for client, data in zip(federation.ids, planted(0), strict=True):
            local = federation.clients[client].trainer
            local.model.load(federation.personal_model(client))
            with torch.no_grad():
                hits.append((local.network(data.x).argmax(1) == data.y).double().mean().item())
        return float(np.mean(hits))

    few, true, many = (accuracy(count) for count in (1, 3, 5))
    assert few < 0.5
    assert true > 0.95
    assert many > true - 0.02


@pytest.mark.parametrize("blocks", ["both", "random"])
def test_memberships_rest_until_their_start(blocks):
    """Exactly 1/K so long; afterwards they move."""
    algorithm = PPFL(blocks=blocks, membership_start=3, strength=0.05, affinity=PAIRS, seed=2)
    history = run(algorithm, rounds=8).server["history"]["membership"]
    assert torch.equal(history[:4], torch.full_like(history[:4], 1 / 3))
    assert np.ptp(history[8].numpy(), axis=0).max() > 1e-3
    assert {algorithm.phases(t)[0] for t in range(3)} <= {"fit", "shared"}


def test_absent_clients_keep_their_memberships():
    federation = run(PPFL(), cohort=Cohort(clients=["c0", "c3"]))
    rows = memberships(federation)
    assert np.array_equal(rows[1], np.full(3, 1 / 3))
    assert np.array_equal(rows[2], np.full(3, 1 / 3))
    assert min(np.abs(rows[i] - 1 / 3).max() for i in (0, 3)) > 1e-3
    for client, row in zip(federation.ids, rows, strict=True):
        assert np.array_equal(federation.personal_model(client)["membership"].numpy(), row)


def test_weights_count_the_cohort_alone():
    """Of two equal clients each has the weight 1/2, whoever else there is."""
    pair, seen = Cohort(clients=["c0", "c1"]), []
    for clients in (2, 4):
        data = toy_data(clients, dtype=torch.float64)
        algorithm = PPFL(strength=0.0, membership_step="literal")
        seen.append(memberships(run(algorithm, data=data, cohort=pair))[:2])
    assert np.array_equal(*seen)


def test_statistics_that_stay_follow_the_steps_at_a_fixed_membership():
    """Local BatchNorm statistics are the client's own; only c's step moves c."""
    local = run(PPFL(strength=0.0), rounds=1, norm=True, buffers="local")
    averaged = run(PPFL(strength=0.0), rounds=1, norm=True)
    assert np.array_equal(memberships(local), memberships(averaged))
    means = [local.personal_model(c)["common.norm.running_mean"] for c in local.ids]
    assert all(m.abs().max() > 1e-3 for m in means)
    assert (means[0] - means[1]).abs().max() > 1e-3
    assert not any("norm.running_mean" in n for n in local.server["shared"])
    for name, tensor in local.server["shared"].items():
        torch.testing.assert_close(tensor, averaged.server["shared"][name], rtol=0, atol=1e-14)


def test_a_full_gradient_is_one_batch_of_everything():
    data = toy_data(4, dtype=torch.float64, batch=3)
    whole = toy_data(4, dtype=torch.float64)
    options = {"strength": 0.0, "membership_lr": 0.3}
    full = memberships(run(PPFL(membership_batches=None, **options), rounds=1, data=data))
    one = memberships(run(PPFL(**options), rounds=1, data=whole))
    part = memberships(run(PPFL(**options), rounds=1, data=data))
    assert np.abs(full - one).max() < 1e-14
    assert np.abs(part - one).max() > 1e-3


def bytes_of(federation) -> dict[tuple[int, str, str], set[int]]:
    found: dict[tuple[int, str, str], set[int]] = {}
    for e in federation.ledger.entries:
        found.setdefault((e.round, e.direction, e.part), set()).add(e.bytes)
    return found


def test_what_travels():
    """theta with its 3 heads once each way, 3 numbers of c, and 2 label shares in round 1."""
    theta, member = 12 + 8 * (16 + 3 * 5), 12 + 8 * 3
    sent = bytes_of(run(PPFL(strength=0.01), rounds=2))
    assert sent[0, "down", "shared"] == sent[0, "up", "shared"] == {theta}
    assert sent[0, "up", "membership"] == {member}
    assert sent[0, "up", "sketch"] == {12 + 8 * 2}
    assert sent[0, "down", "scalars"] == {16}
    assert sent[1, "down", "coupling"] == {member}
    assert (1, "up", "sketch") not in sent
    free = {part for _, _, part in bytes_of(run(PPFL(strength=0.0), rounds=2))}
    assert free == {"shared", "membership", "scalars"}
    assert {part for _, _, part in bytes_of(run(PPFL(), count=1))} == {"shared"}


@pytest.mark.parametrize("kind", ["label", "channel", "data"])
def test_affinities_from_what_clients_send(kind):
    federation = run(PPFL(strength=0.01, affinity=Affinity(kind=kind)), rounds=1)
    laplacian = federation.server["laplacian"]["L"]
    assert laplacian.sum(1).abs().max() < 1e-12
    off = laplacian - torch.diag(laplacian.diagonal())
    assert bool((off <= 0).all())
    assert float(off.min()) < -0.1


def test_a_coupling_too_strong_and_too_many_models_are_warned_of(caplog):
    algorithm = PPFL(strength=2.0, membership_lr=0.3, affinity=PAIRS)
    run(algorithm, count=5, rounds=2)
    stiff, many = sorted(r.getMessage() for r in caplog.records)
    assert "is 4.8, more than 1" in stiff  # 0.3 * 2 * |L| = 2 * 4 clients
    assert "5 canonical models for 4 clients" in many
    caplog.clear()
    run(PPFL(strength=0.1, membership_lr=0.3, affinity=PAIRS))
    assert not caplog.records


@pytest.mark.parametrize(("step", "clients"), [("scaled", 4), ("literal", 1)])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_the_warning_of_stiffness_begins_at_1(share, step, clients, caplog):
    """eta_2 lambda |L|, and the clients where their number scales the step; |L| is 2 here."""
    strength = share / (0.3 * 2 * clients)
    run(PPFL(strength=strength, membership_lr=0.3, membership_step=step, affinity=PAIRS), rounds=2)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == (share > 1)
    assert all(f"is {share}, more than 1" in t and ("clients" in t) == (clients > 1) for t in told)


def test_a_gradient_that_is_not_finite_names_the_place():
    data = toy_data(4, dtype=torch.float64)
    data[1].y[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"^Client c1, round 1, phase fit: .*optimizer\.lr"):
        run(PPFL(), data=data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personal": "task"}, r"algorithm\.personal is membership"),
        ({"strength": -1.0}, r"algorithm\.strength must not be negative"),
        ({"membership_lr": float("nan")}, r"algorithm\.membership_lr must not be negative"),
        ({"membership_batches": 0}, r"algorithm\.membership_batches must be 1 or more, or null"),
        ({"membership_start": -1}, r"algorithm\.membership_start must not be negative, not -1"),
        ({"membership_step": "scale"}, r"membership_step='scale' is unknown; choose scaled or"),
        ({"blocks": "all"}, r"algorithm\.blocks='all' is unknown; choose both or random"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PPFL(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "labels"}, r"affinity\.kind='labels' is unknown \(did you mean label\?\)"),
        ({"kind": "given"}, r"affinity\.weights goes with"),
        ({"weights": [[0.0]]}, r"affinity\.weights goes with"),
    ],
)
def test_bad_affinities_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Affinity(**options)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[0, 1], [2, 0]], r"entry \[0, 1\] is 1 and entry \[1, 0\] is 2"),
        ([[0, 1], [1, 0]], r"has 2 rows for 4 clients"),
        ([[0, 1], [1]], r"weights cannot be used"),
        ("nowhere.csv", r"weights cannot be used: nowhere\.csv"),
    ],
)
def test_given_weights_are_checked_before_the_run(weights, message):
    affinity = Affinity(kind="given", weights=weights)
    with pytest.raises(ConfigError, match=message):
        run(PPFL(strength=0.1, affinity=affinity))


def test_given_weights_from_a_file(tmp_path):
    file = tmp_path / "affinity.csv"
    file.write_text("0,0,1,0\n0,0,0,1\n1,0,0,0\n0,1,0,0\n")
    ends = [
        memberships(run(PPFL(strength=0.1, affinity=a)))
        for a in (PAIRS, Affinity(kind="given", weights=str(file)))
    ]
    assert np.array_equal(*ends)


@pytest.fixture
def random_blocks(monkeypatch):
    """The contract of Algorithm 1 with a coupling; both blocks occur in 3 rounds."""
    chosen = PPFL(blocks="random", strength=0.01, seed=1)
    assert {chosen.phases(t) for t in range(harness.ROUNDS)} == {("shared",), ("membership",)}
    monkeypatch.setattr(harness, "algorithm", lambda name: chosen)


@pytest.mark.usefixtures("random_blocks")
def test_random_blocks_keep_the_contract(tmp_path):
    """Under Lightning, serialised, and resumed, as in the plain loop."""
    _, fed, _ = harness.federation("ppfl", cohort=harness.half())
    expected = run_reference(fed, harness.ROUNDS).digests()
    straight, _ = harness.lightning("ppfl", tmp_path, cohort=harness.half())
    resumed, _ = harness.lightning(
        "ppfl", tmp_path, resume=tmp_path / "round_00001.ckpt", cohort=harness.half()
    )
    channel = harness.Serialising()
    _, serial, _ = harness.federation("ppfl", cohort=harness.half(), channel=channel)
    ends = [straight.federation, resumed.federation, run_reference(serial, harness.ROUNDS)]
    assert all(end.digests() == expected for end in ends)


def test_a_random_round_changes_its_block_alone():
    algorithm = PPFL(blocks="random", seed=2, strength=0.0)
    data = toy_data(4, dtype=torch.float64)
    _, federation, _ = toy_federation(algorithm, canonical_toy(), data, steps=2)
    for number in range(4):
        before = federation.server
        run_reference(federation, number + 1, start=number)
        for group in ("shared", "membership"):
            moved = digest(federation.server[group]) != digest(before[group])
            assert moved == (algorithm.phases(number) == (group,))


def test_the_max_rule_uses_the_model_of_the_largest_membership():
    soft, hard = run(PPFL()), run(PPFL(clusters="hard"))
    assert digest(soft.server["shared"]) == digest(hard.server["shared"])
    rows = memberships(soft)
    assert rows.max() < 0.999
    for client, row in zip(hard.ids, rows, strict=True):
        model = hard.personal_model(client)
        assert model[MEMBERSHIP].tolist() == (row == row.max()).astype(float).tolist()
        assert set(soft.personal_model(client)) == set(model)


def test_a_random_iterate_is_the_model_of_a_drawn_round():
    """Uniformly over rounds; until then, and only until then, the last round's is used."""
    drawn = []
    for seed in (0, 1):
        options = {"seed": seed, "strength": 0.0, "membership_lr": 3.0}
        method = PPFL(output="random", rounds=4, **options)
        found = run(method, rounds=4)
        ends = [run(PPFL(**options), rounds=n) for n in range(1, 5)]
        models = [digest(end.personal_model("c1")) for end in ends]
        drawn.append(models.index(digest(found.personal_model("c1"))))
        assert digest(found.server["shared"]) == digest(ends[-1].server["shared"])
        early = run(method, rounds=drawn[-1] + 1)
        assert digest(early.personal_model("c1")) == models[drawn[-1]]
    assert len(set(drawn)) > 1
    counts = np.bincount([derive_seed(s, "output") % 4 for s in range(400)], minlength=4)
    assert np.abs(counts - 100).max() < 4.4 * np.sqrt(400 * 3 / 16)


def test_blocks_are_drawn_evenly():
    draws = [PPFL(blocks="random", seed=s).phases(t)[0] for s in range(5) for t in range(200)]
    assert 430 < draws.count("shared") < 570  # 500 +- 4.4 standard deviations


def test_a_model_without_canonical_part_is_refused():
    with pytest.raises(ConfigError, match=r"choose canonical=outputs or canonical=parameters"):
        toy_federation(PPFL(), ToyTask())


@pytest.mark.parametrize("buffers", ["averaged", "local", "frozen"])
@pytest.mark.parametrize("method", [PPFL(), IFCA()], ids=["ppfl", "ifca"])
def test_the_memberships_gradient_is_not_clipped_with_the_others(method, buffers):
    """One step by hand: the norm is that of what is trained."""
    task = canonical_toy(norm=True)
    data, clip, lr = toy_data(1, dtype=torch.float64), 0.05, 0.1
    options = {"buffers": buffers, "clip": clip, "lr": lr, "steps": 1}
    _, federation, _ = toy_federation(method, task, data, **options)
    client = federation.clients["c0"]
    client.begin(0, "fit", 0)
    start = {**client.weights, MEMBERSHIP: torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)}
    end = federation.algorithm.shared_steps(client, start)

    network = copy.deepcopy(task.network)
    network.load_state_dict(start, strict=False)
    network.train(buffers != "frozen")
    shared = {n: p for n, p in network.named_parameters() if n != MEMBERSHIP}
    loss = (network(data[0].x).squeeze(-1) - data[0].y).square().mean() / 2
    gradients = torch.autograd.grad(loss, list(shared.values()))
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    assert norm > clip
    for (name, parameter), gradient in zip(shared.items(), gradients, strict=True):
        expected = parameter.detach() - lr * clip / norm * gradient
        torch.testing.assert_close(end[name], expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(end[MEMBERSHIP], start[MEMBERSHIP])
    moved = any(not torch.equal(end[n], start[n]) for n in end if "running_mean" in n)
    assert moved == (buffers != "frozen")
