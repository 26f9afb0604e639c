"""Runs whose patients noise protects: what is refused and why, and what is recorded and printed."""

from __future__ import annotations

import json
import re

import pytest

from medfed.commands.methods import main
from medfed.config.compose import described
from medfed.delivery.main import keep_bundle
from medfed.federation.round import Round
from medfed.functional.privacy import epsilon
from medfed.personalize.fedavg import FedAvg
from medfed.run.assembly import read_data, task_for
from medfed.run.federating import federate
from medfed.run.privacy import protections
from medfed.standalone.errors import ConfigError
from tests.integration.runs import CLINICAL, outcome, resume, run

KEYS = "privacy.example={epsilon:3,delta:1e-3,clip:1.0}"
TABLE = (*CLINICAL, "data.scaling=client", "algorithm=fedavg", "folder=none")


@pytest.fixture(scope="module")
def table():
    return read_data(described(TABLE))


def private(table, *overrides: str):
    """The federation of a run with noise, built and not trained."""
    config, task = task_for(described([*TABLE, KEYS, *overrides]), table)
    return federate(config, table, task)


REFUSED = [
    (["model.class_weights=[1,2]"], "class weights cancel.*model.class_weights=null"),
    (
        ["algorithm=moon", "model=mlp"],
        "MOON takes steps that see the network's outputs.*fedavg, ditto",
    ),
    (["algorithm=pfedfda", "model=mlp"], "PFedFDA takes steps that see the network's outputs"),
    (["algorithm=fedpac", "model=mlp"], "FedPAC takes steps that see the network's outputs"),
    (["algorithm=fedfomo"], "FedFomo compares losses of patients"),
    (["algorithm=marina"], "MARINA asks for gradients of one draw at several points"),
    (["algorithm=pooled"], "Pooled trains on the patients of all clients"),
    (["algorithm=pfednet"], r"sketch.* \(algorithm.graph.*without noise; change algorithm.graph"),
    (["local.budget=paper"], "each part may take all steps; set local.budget=equal"),
    (["privacy.example.delta=0.2"], r"delta=0.2 does not protect the \d+ patients of"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_would_leave_without_noise_is_refused(table, overrides, message):
    with pytest.raises(ConfigError, match=message):
        private(table, *overrides)


def test_pooled_scaling_is_refused():
    config = described([*TABLE, KEYS, "data.scaling=pooled"])
    data = read_data(config)
    config, task = task_for(config, data)
    with pytest.raises(ConfigError, match=r"data.scaling.*without noise; set data.scaling=client"):
        federate(config, data, task)


CLIENT = "privacy.client={sigma:2.0,delta:1e-3,clip:1.0}"
UNIFORM = "algorithm.weighting=uniform"
CLIENTS = [
    ([], "clients weigh unequally; set algorithm.weighting=uniform"),
    (["algorithm=pfednet", "model=mlp"], "PFedNet sends more than what is averaged"),
    ([UNIFORM, "aggregation=median"], "it bounds sums; set aggregation=mean"),
    ([UNIFORM, "codec@codec.up=topk"], "errors carry over to later rounds"),
    ([UNIFORM, "channel.up.shift=auto", "codec@codec.up=qsgd"], "shifts carry over"),
]


@pytest.mark.parametrize(("overrides", "message"), CLIENTS, ids=lambda v: str(v)[:40])
def test_noise_for_whole_clients_needs_plain_means(table, overrides, message):
    config, task = task_for(described([*TABLE, CLIENT, *overrides]), table)
    with pytest.raises(ConfigError, match=f"privacy.client cannot protect this run: .*{message}"):
        federate(config, table, task)


def test_a_run_hides_whole_clients_in_its_sums(tmp_path, capsys):
    folder = tmp_path / "run"
    run(folder, *TABLE[:-1], CLIENT, UNIFORM, KEYS)
    printed = capsys.readouterr().out
    wanted = epsilon(1.0, 2.0, 3, 1e-3)
    hides = f"(not from the server: set channel.secure=masks): epsilon is {wanted:.3g}"
    assert hides in printed
    assert "clients this is seldom useful, and for at least 50 it may be" in printed
    kept = json.loads((folder / "privacy.json").read_text())
    assert kept["client"] == {"sigma": 2.0, "delta": 1e-3, "clip": 1.0, "epsilon": wanted}
    assert set(kept["example"]["clients"]) == set(read_data(described(TABLE)).clients)


def test_a_methods_page_says_whether_noise_protects_patients(capsys):
    main(["ditto", "moon"])
    printed = capsys.readouterr().out
    assert "privacy.example     covered" in printed
    assert "privacy.example     refused: it takes steps that see the network's outputs" in printed


class Mine(FedAvg):
    """A method without a card of its own may do anything."""


def test_an_undeclared_method_is_refused(table, monkeypatch):
    monkeypatch.setattr("medfed.run.federating.method_of", lambda *_: Mine())
    with pytest.raises(ConfigError, match=r"Mine does not declare .*card.privacy_exposure"):
        private(table)


@pytest.mark.parametrize(
    "text",
    ["{epsilon:3}", "{epsilon:3,delta:1e-3,clip:0}", "{epsilon:x,delta:1e-3,clip:1}", "true",
     "{epsilon:3,delta:1e-3,clip:1,unit:scan}", "{epsilon:3,delta:1e-3,clip:1,sigma:2}"],
)  # fmt: skip
def test_a_mistake_in_a_key_is_one_sentence(text):
    with pytest.raises(ConfigError, match=r"privacy.example=.* cannot be used \(.*Its keys are"):
        described([*TABLE, f"privacy.example={text}"])


def rounds(config, federation) -> None:
    for number in range(config.rounds):
        opened = Round(federation, number)
        is_open = True
        while is_open:
            for client in opened.recipients:
                opened.receive(client, opened.fit(client))
            is_open = opened.close_phase()


DIGITS = (
    "experiment=digits_pfednet", "rounds=1", "local.steps=2", "folder=none", "logger=none",
    "progress=false", "model.network.channels=[4,8]", "model.network.strides=[1,2]",
    "partition.num_clients=4",
)  # fmt: skip
IMAGES = {
    "pfednet": (KEYS, "algorithm.graph.kind=ring"),
    "qupel": (KEYS.replace("}", ",unit:row}"), "algorithm.quantizer=soft"),
    "ppfl": (KEYS.replace("}", ",chunk:4}"), "algorithm.strength=0"),
}


@pytest.fixture(scope="module")
def pictures():
    return read_data(described(DIGITS))


def test_networks_of_pictures_train_with_noise(pictures, subtests):
    for name, more in IMAGES.items():
        with subtests.test(name):
            words = [*DIGITS, f"algorithm={name}", *more]
            config, task = task_for(described(words), pictures)
            federation, _ = federate(config, pictures, task)
            rounds(config, federation)
            for client, one in protections(config, pictures.clients, federation).items():
                assert 0 < federation.clients[client].passes.gradient <= one.draws * one.uses
                assert one.uses == (3 if name == "qupel" else 1)


def test_batch_normalisation_is_refused(pictures):
    words = [*DIGITS, KEYS, "algorithm=fedavg", "model.network.norm=batch"]
    config, task = task_for(described(words), pictures)
    with pytest.raises(ConfigError, match=r"BatchNorm mixes the pat.* set model.network.norm=inst"):
        federate(config, pictures, task)
    federate(config.replacing({"buffers": "frozen"}), pictures, task)


METHODS = {"fedavg": 1, "ditto": 1, "fedper": 1, "fedsgd": 1, "apfl": 2, "perfedavg": 1}


def test_no_method_takes_more_gradients_than_were_planned(table, subtests):
    """What a run takes is what its noise was chosen for."""
    for name, uses in METHODS.items():
        with subtests.test(name):
            config, task = task_for(described([*TABLE, KEYS, f"algorithm={name}"]), table)
            federation, local = federate(config, table, task)
            rounds(config, federation)
            for client, one in protections(config, table.clients, federation).items():
                taken = federation.clients[client].passes.gradient
                assert one.uses == uses
                assert 0.6 * one.draws * uses <= taken <= one.draws * uses
                assert one.epsilon(taken) <= one.epsilon() <= 3
            assert local.gradients.private is not None


def test_a_run_records_and_prints_its_noise(tmp_path, capsys):
    folder = tmp_path / "run"
    summary, _ = run(folder, *TABLE[:-1], KEYS, "model.l2=0.01")
    told = capsys.readouterr().out
    assert "Noise that protects each patient (clipped at 1)" in told
    assert re.search(r"hospital_\d │ +[\d.]+ % │ +6 │ +[\d.]+ │ +3 │ 0.001", told)
    assert "This is a simulation: its noise follows from the seed" in told
    assert "Exact in spite of the noise: the numbers of patients" in told
    kept = json.loads((folder / "privacy.json").read_text())
    assert kept["private"] is False
    for client, one in kept["example"]["clients"].items():
        assert one["gradients"] == one["draws"] == summary["steps"][client] == 6
        assert one["epsilon"] == epsilon(one["rate"], one["noise"], 6, 1e-3)
        assert 2.99 < one["epsilon"] <= 3
    keep_bundle(folder)
    card = next((folder / "bundle").glob("*/docs/model_card.md")).read_text()
    assert re.search(r"protects each training patient: epsilon 3 at delta 0.001 in this", card)
    assert "the model is not private. Metrics and numbers of patients are exact." in card
    again, first = tmp_path / "again", outcome(folder)
    run(again, *TABLE[:-1], KEYS, "model.l2=0.01")
    assert outcome(again) == first  # a simulation can be repeated
    (again / "summary.json").unlink()
    for late in (again / "checkpoints").glob("round_00002*"):
        late.unlink()
    resume(again, *TABLE[:-1], KEYS, "model.l2=0.01")
    assert outcome(again) == first
