"""What travels in pFedNet, to whom, when, and at how many bytes (Algorithm 5 and its schedule)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from tests.sweeps import sweep
from tests.toys import ToyTask, toy_data, toy_federation

RING = SimilarityGraph(kind="ring")
X, Z = {"body.weight", "body.bias"}, {"head.weight", "head.bias"}
ROUNDS = 4


@pytest.fixture
def log(monkeypatch):
    """All (client, message, reply) triples of the client's half, in order."""
    seen = []
    fit = PFedNet.fit

    def logged(self, client, message):
        reply = fit(self, client, message)
        seen.append((client.id, message, reply))
        return reply

    monkeypatch.setattr(PFedNet, "fit", logged)
    return seen


def build(graph=RING, clients=3, norm=False, personal="task", **changes):
    options = {k: changes.pop(k) for k in ("shared_rounds", "personal_rounds") if k in changes}
    algorithm = PFedNet(strength=0.1, graph=graph, personal=personal, **options)
    task = ToyTask(norm=norm, dtype=torch.float64)
    data = toy_data(clients, dtype=torch.float64)
    return toy_federation(algorithm, task, data, **changes)[1]


def names(message):
    return {part: set(tensors) for part, tensors in message.parts.items()}


@pytest.mark.parametrize(("i", "j"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_phase_sends_its_own_part_and_receives_what_is_lacking(log, i, j):
    """Down goes x after each x phase, z after each Z step, and nothing else; nobody waits here."""
    federation = build(shared_rounds=i, personal_rounds=j)
    run_reference(federation, 2)
    order = ["shared"] * i + ["personal"] * j
    own = {"shared": X, "personal": Z}
    for client in federation.ids:
        mine = [(m, r) for c, m, r in log if c == client]
        assert [m.phase for m, _ in mine] == 2 * order
        assert names(mine[0][0]) == {}
        for (message, reply), (after, _) in pairwise(mine):
            assert names(reply) == {message.phase: own[message.phase]}
            assert reply.kinds == {message.phase: "update"}
            assert names(after) == names(reply)
        delivered = federation.delivered(client)
        assert names(delivered) == {"personal": Z}


def test_what_is_delivered_is_the_newest_value(log):
    """After the Z step z_{j+1} goes down (printed: z_j), and x is the mean of this phase."""
    federation = build()
    seen = []
    run_reference(federation, 3, after_round=lambda t: seen.append((len(log), federation.server)))
    for (end, server), number in zip(seen[:-1], range(2), strict=True):
        assert end == 6 * (number + 1)
        for k, (_, message, _) in enumerate(log[end : end + 3]):
            for name, tensor in message.parts["personal"].items():
                assert torch.equal(tensor, server["personal"][name][k])
    start = {n: t for n, t in federation.clients["c0"].weights.items() if n in X}
    for name in X:
        mean = sum(reply.parts["shared"][name] for _, _, reply in log[:3]) / 3
        for _, message, _ in log[3:6]:
            gap = message.parts["shared"][name] - (start[name] + mean)
            assert gap.abs().max() < 1e-14


def test_an_absent_client_receives_at_its_next_round(log):
    """Its z is drawn along by its neighbours on the server, and waits there with the new x."""
    federation = build(clients=4, cohort=Cohort(fraction=0.5))
    cohorts = [federation.members(t) for t in range(8)]
    history, waited = [federation.server], 0
    for number, cohort in enumerate(cohorts):
        before = federation.digests()
        log.clear()
        run_reference(federation, number + 1, start=number)
        history.append(federation.server)
        for client in set(federation.ids) - set(cohort):
            k = federation.ids.index(client)
            assert federation.digests()[f"client/{client}"] == before[f"client/{client}"]
            model = federation.personal_model(client)
            assert all(torch.equal(model[n], federation.server["shared"][n]) for n in X)
            assert all(torch.equal(model[n], federation.server["personal"][n][k]) for n in Z)
        for client in cohort:
            k = federation.ids.index(client)
            first = next(m for c, m, _ in log if c == client)
            last = max((t for t in range(number) if client in cohorts[t]), default=-1)
            missed = number > last + 1
            lacks = {"personal": Z} if number > 0 else {}
            assert names(first) == lacks | ({"shared": X} if missed else {})
            for part in first.parts:
                now = {n: history[number][part][n] for n in first.parts[part]}
                now = {n: t[k] for n, t in now.items()} if part == "personal" else now
                assert all(torch.equal(first.parts[part][n], now[n]) for n in now)
            if missed and last >= 0:
                then, now = (
                    h["personal"]["head.bias"][k] for h in (history[last + 1], history[number])
                )
                assert not torch.equal(then, now)
                waited += 1
    assert waited >= 2


@pytest.mark.parametrize("policy", ["averaged", "local"])
def test_buffers_of_the_personal_part_never_travel(log, policy):
    """The running statistics are updated at the client by its z phase, and stay there."""
    federation = build(norm=True, personal=("norm.*", "head.*"), buffers=policy)
    run_reference(federation, 2)
    parts = [n for _, m, r in log for s in (m, r) for part in s.parts.values() for n in part]
    assert "norm.weight" in parts
    assert not [n for n in parts if "running" in n]
    means = [federation.personal_model(c)["norm.running_mean"] for c in federation.ids]
    start = federation.clients["c0"].weights["norm.running_mean"]
    assert min((m - start).abs().max() for m in means) > 1e-3
    assert (means[0] - means[1]).abs().max() > 1e-3


def test_buffers_of_the_shared_part_are_averaged_in_x_phases_only(log):
    federation = build(norm=True, personal=("head.*",))
    run_reference(federation, 2)
    for _, message, reply in log:
        statistics = [n for part in reply.parts.values() for n in part if "running" in n]
        assert len(statistics) == (2 if message.phase == "shared" else 0)


@sweep(("dtype", "width"), [("float32", 4), ("float64", 8)])
@sweep("sketched", [False, True])
def test_bytes_equal_the_hand_count(dtype, width, sketched):
    """I = J = 1: x up, z up and the step size; x down, z down; 12 bytes before each of them.

    Linear 3 -> 4 has 16 numbers, the head 5; a data sketch is 8 x 3 numbers, once.
    """
    graph = SimilarityGraph(sketch="data", neighbours=2) if sketched else RING
    federation = build(graph, channel=Channel(Dense(dtype), Dense(dtype)))
    run_reference(federation, ROUNDS)
    federation.count_delivery(ROUNDS - 1)
    x, z, once = 12 + 16 * width, 12 + 5 * width, 12 + 24 * width if sketched else 0
    up = federation.ledger.totals("client", "direction", "part")
    for client in federation.ids:
        assert up[client, "up", "shared"] == up[client, "down", "shared"] == ROUNDS * x
        assert up[client, "up", "personal"] == up[client, "down", "personal"] == ROUNDS * z
        assert up[client, "up", "scalars"] == ROUNDS * 8
        assert up.get((client, "up", "sketch"), 0) == once
    assert federation.ledger.total() == 3 * (ROUNDS * (2 * x + 2 * z + 8) + once)


def test_every_client_sends_one_sketch_when_it_first_takes_part(log):
    federation = build(
        SimilarityGraph(sketch="label", neighbours=1), clients=4, cohort=Cohort(fraction=0.5)
    )
    met = set()
    for number in range(6):
        log.clear()
        cohort = federation.members(number)
        run_reference(federation, number + 1, start=number)
        assert {c for c, m, _ in log if m.phase == "sketch"} == set(cohort) - met
        met |= set(cohort)
        ends = {federation.ids[i] for i in federation.server["graph"]["edges"].flatten().tolist()}
        assert ends == met
    assert met == set(federation.ids)
