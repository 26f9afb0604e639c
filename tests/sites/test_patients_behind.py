"""Patients behind a message: the least that the policy states, against the draws of real runs."""

import numpy as np
import pytest

from medfed.config.compose import described
from medfed.datamodules.client_data import ClientData
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.reference import run_reference
from medfed.run.assembly import read_data, task_for
from medfed.run.federating import federate
from medfed.sites.policy import patients_of_message
from tests.integration.runs import CLINICAL, imaging

ROUNDS = 4
BASE = (*CLINICAL, "model=mlp")
METHODS = {
    "fedavg": (),
    "ditto": (),
    "fedrep": ("algorithm.head_share=0.7",),
    "l2gd": ("algorithm.coins=random",),
    "pfednet": ("algorithm.local_steps=2",),
}


def visits(path):
    """A table of visits: the first patients of a hospital came far more often than the others."""
    rng = np.random.default_rng(0)
    lines = ["patient,age,crp,ill"]
    for patient in range(30):
        for _ in range(9 if patient < 4 else rng.integers(1, 3)):
            lines.append(f"P{patient},{rng.integers(30, 80)},{rng.random():.2f},{patient % 2}")
    path.write_text("\n".join(lines) + "\n")
    one = ("data.patient=patient", "data.label=ill", "partition=round_robin")
    return (*BASE, "data=csv", f"data.path={path}", *one, "partition.num_clients=2")


KINDS = {
    "one row each": ("data.batch_size=4", "local.steps=3"),
    "few left in an epoch": ("data.batch_size=28", "local.steps=4"),
    "a batch of one": ("data.batch_size=1", "local.steps=1"),
    "visits": ("data.batch_size=3", "local.steps=4", "local.accumulate=2"),
    "epochs of visits": ("data.batch_size=4", "local.steps=null", "local.epochs=1"),
    "patches": ("data.batch_size=4", "local.steps=3"),
    "fresh patches": ("data.batch_size=4", "local.steps=2", "data.patches=fresh"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_never_fewer_patients_than_the_policy_states(kind, tmp_path, monkeypatch, subtests):
    base = visits(tmp_path / "visits.csv") if "visits" in kind else BASE
    base = imaging(tmp_path) if "patches" in kind else base
    config = described([*base, *KINDS[kind], "algorithm=fedavg", f"rounds={ROUNDS}"])
    data, calls = read_data(config), [("before training", set())]
    run, train_batch = LocalTrainer.run, ClientData.train_batch

    def counted(trainer, client, *rest, **how):
        calls.append((client.id, set()))
        return run(trainer, client, *rest, **how)

    def seen(client, seed, number, index):
        calls[-1][1].update(client.units("patient")[index].tolist())
        return train_batch(client, seed, number, index)

    monkeypatch.setattr(LocalTrainer, "run", counted)
    monkeypatch.setattr(ClientData, "train_batch", seen)
    for method, more in METHODS.items():
        with subtests.test(method):
            method_keys = [f"algorithm={method}", *more, *base, *KINDS[kind], f"rounds={ROUNDS}"]
            config, task = task_for(described(method_keys), data)
            federation, _ = federate(config, data, task)
            del calls[1:]
            run_reference(federation, ROUNDS)
            for client in data.clients:
                fewest = min(len(patients) for who, patients in calls if who == client)
                stated = patients_of_message(config, data, client)
                assert 1 <= stated <= fewest
                if kind in ("one row each", "a batch of one") and method == "fedavg":
                    assert stated == fewest == config.local.steps * config.data.batch_size
