"""Mask-aware aggregation against a NumPy loop over single weights, and where it is FedAvg."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.federation import Federation
from medfed.federation.lightning.callbacks import FederatedRounds
from medfed.federation.lightning.checkpoint import RoundCheckpoint
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense
from medfed.personalize.ditto import Ditto
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedper import FedPer
from medfed.personalize.local import Local
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.scaffold import Scaffold
from medfed.standalone.errors import ConfigError
from tests.contract.harness import Serialising, lossy
from tests.references.linear_net import HEAD, Problem, part
from tests.references.pairing import assert_same, to_numpy
from tests.toys import ToyTask, toy_data

# Four clients, three channels: nobody has the last one in some cohorts of two.
HAS = [[1, 1, 0], [1, 0, 1], [0, 1, 0], [1, 1, 0]]
ALL = [[1, 1, 1]] * 4
LR, STEPS, ROUNDS, DECAY = 0.05, 5, 4, 0.3


def federation(algorithm, has=HAS, decay=0.0, fraction=1.0, channel=None, dtype=torch.float64):
    data = toy_data(4, dtype=dtype)
    for client, row in zip(data, has, strict=True):
        client.channels = torch.tensor(row, dtype=torch.bool)
        client.x = client.x * client.channels
    task = ToyTask(norm=False, dtype=dtype)
    fed, local = assemble(
        algorithm,
        task.network,
        task.loss,
        data,
        personal=task.personal,
        optimizer=partial(torch.optim.SGD, lr=LR, weight_decay=decay),
        rounds=ROUNDS,
        budget=LocalBudget(steps=STEPS),
        channel=lambda _: channel or Channel(Dense("float64"), Dense("float64")),
        cohort=Cohort(fraction=fraction),
    )
    return task, fed, local, data


def masked_average(problem, has, cohort, before, ends):
    """The formula, weight by weight."""
    sizes = [len(problem.clients[k][1]) for k in cohort]
    after = problem.average(cohort, ends)
    for o, c in np.ndindex(after["body.weight"].shape):
        total = sum(s for s, k in zip(sizes, cohort, strict=True) if has[k][c])
        moved = sum(
            s * (end["body.weight"][o, c] - before["body.weight"][o, c])
            for s, k, end in zip(sizes, cohort, ends, strict=True)
            if has[k][c]
        )
        after["body.weight"][o, c] = before["body.weight"][o, c] + (moved / total if total else 0)
    return after


def by_hand(fed: Federation, local, data, fraction: float, personal=()):
    initial = to_numpy(local.model.initial())
    cohorts = [[fed.ids.index(c) for c in fed.members(t)] for t in range(ROUNDS)]
    problem = Problem([(d.x.numpy(), d.y.numpy()) for d in data], initial, cohorts, STEPS, LR)
    shared = [n for n in initial if n not in personal]
    w, own = part(initial, shared), [part(initial, personal) for _ in data]
    for cohort in cohorts:
        ends = [problem.descend(k, {**w, **own[k]}, STEPS) for k in cohort]
        for k, end in zip(cohort, ends, strict=True):
            own[k] = part(end, personal)
        w = masked_average(problem, HAS, cohort, w, [part(e, shared) for e in ends])
    return cohorts, [{**w, **o} for o in own]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("method", "personal"), [(FedAvg, ()), (FedPer, HEAD)])
def test_equals_the_formula(method, personal, fraction):
    _, fed, local, data = federation(method(mask_aware=True), fraction=fraction)
    cohorts, expected = by_hand(fed, local, data, fraction, personal)
    run_reference(fed, ROUNDS)
    for client, model in zip(fed.ids, expected, strict=True):
        assert_same(fed.personal_model(client), model, 1e-12)
    if fraction < 1:
        assert any(not any(HAS[k][2] for k in cohort) for cohort in cohorts)
    _, plain, *_ = federation(method(), fraction=fraction)
    run_reference(plain, ROUNDS)
    gap = plain.server["shared"]["body.weight"] - fed.server["shared"]["body.weight"]
    assert float(gap.abs().max()) > 1e-3


METHODS = [FedAvg, FedPer, Ditto, PFedNet]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("codec", [None, "stc"])
def test_where_all_have_all_not_a_bit_is_different(method, codec):
    ends = []
    for aware in (False, True):
        channel = lossy(codec) if codec else None
        _, fed, *_ = federation(method(mask_aware=aware), ALL, DECAY, channel=channel)
        run_reference(fed, ROUNDS)
        fed.server.pop("reads", None)
        ends.append((fed.digests(), fed.ledger.to_csv()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_channel_that_nobody_has_keeps_its_weights(method):
    """Though weight decay moves them at every client."""
    has = [[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]
    _, fed, *_ = federation(method(mask_aware=True), has, DECAY)
    start = fed.server["shared"]["body.weight"].clone()
    run_reference(fed, ROUNDS)
    end = fed.server["shared"]["body.weight"]
    assert torch.equal(end[:, 2], start[:, 2])
    assert float((end - start)[:, :2].abs().min()) > 0
    _, plain, *_ = federation(method(), has, DECAY)
    run_reference(plain, ROUNDS)
    assert not torch.equal(plain.server["shared"]["body.weight"][:, 2], start[:, 2])


@pytest.mark.parametrize("method", METHODS)
def test_what_travels_is_counted(method):
    """Eight bytes for each channel that a client lacks, with every reply."""
    sizes = []
    for aware in (False, True):
        _, fed, *_ = federation(method(mask_aware=aware))
        run_reference(fed, 1)
        sizes.append({c: fed.ledger.total(client=c, direction="up") for c in fed.ids})
    lacking = {c: 3 - sum(row) for c, row in zip(fed.ids, HAS, strict=True)}
    phases = len(fed.algorithm.phases(0))
    assert {c: sizes[1][c] - sizes[0][c] for c in fed.ids} == {
        c: 8 * phases * n for c, n in lacking.items()
    }


@pytest.mark.parametrize("setting", ["stc", "shifted"])
def test_every_runtime_and_a_resumed_run_agree(setting, tmp_path: Path):
    """Also behind lossy codecs, and when every message is serialised."""
    _, fed, *_ = federation(FedPer(mask_aware=True), channel=lossy(setting), dtype=torch.float32)
    expected = run_reference(fed, 2).digests()
    links = lossy(setting).links
    serial = Serialising(links["up"], links["down"])
    _, other, *_ = federation(FedPer(mask_aware=True), channel=serial, dtype=torch.float32)
    assert run_reference(other, 2).digests() == expected
    for rounds, resume in ((1, None), (2, tmp_path / "round_00000.ckpt")):
        task, lit, local, _ = federation(
            FedPer(mask_aware=True), channel=lossy(setting), dtype=torch.float32
        )
        module = FederatedModule(task, lit, local)
        pl.Trainer(
            accelerator="cpu",
            max_epochs=rounds,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[FederatedRounds(), RoundCheckpoint(tmp_path)],
        ).fit(module, ckpt_path=resume, weights_only=True)
    assert module.federation.digests() == expected


@pytest.mark.parametrize("method", [Local, Scaffold])
def test_methods_without_such_a_mean_refuse_it(method):
    with pytest.raises(ConfigError, match=r"algorithm\.mask_aware is"):
        method(mask_aware=True)
