"""FedCE's contribution in gradient space, as a run tells it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.contributions import contributions, cosines_with_others
from medfed.federation.reference import run_reference
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbn import FedBN
from medfed.personalize.qupel import QuPeL
from medfed.personalize.scaffold import Scaffold
from medfed.reports.report import report_runs
from medfed.standalone.errors import ConfigError
from tests.contract import harness
from tests.integration.runs import CLINICAL, resume, run
from tests.sites.hospitals import across, direct
from tests.toys import ToyTask, toy_data, toy_federation


def by_numpy(updates, weights):
    p = np.asarray(weights, float) / np.sum(weights)
    rows = np.stack([np.concatenate([np.ravel(v) for v in u.values()]) for u in updates])
    found = []
    for i, own in enumerate(rows):
        others = sum(p[j] * rows[j] for j in range(len(rows)) if j != i)
        found.append(own @ others / np.linalg.norm(own) / np.linalg.norm(others))
    return found


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_a_cosine_is_that_of_the_others_weighted_sum(clients):
    rng = np.random.default_rng(clients)
    updates = [{"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)} for _ in range(clients)]
    weights = rng.integers(1, 9, clients)
    tensors = [{n: torch.from_numpy(v) for n, v in u.items()} for u in updates]
    ours = cosines_with_others(tensors, weights.tolist())
    assert np.allclose(ours, by_numpy(updates, weights), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 2.0]], [math.nan]),
        ([[1.0, 0.0], [0.0, 0.0]], [math.nan, math.nan]),
        ([[1.0, 2.0]] * 3, [1.0, 1.0, 1.0]),
        ([[1.0, 0.0], [-2.0, 0.0]], [-1.0, -1.0]),
    ],
    ids=["alone", "no update", "equal", "opposite"],
)
def test_cosines_at_the_limits(rows, expected):
    updates = [{"w": torch.tensor(row)} for row in rows]
    found = cosines_with_others(updates, [1.0] * len(rows))
    assert np.allclose(found, expected, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("method", [FedAvg(), FedBN(weighting="uniform")], ids=["fedavg", "fedbn"])
def test_a_run_compares_what_single_clients_would_have_moved(method):
    """A round with one client alone moves the server's parameters, in fp32, by its update."""
    whole, *alone = (federation_of(method) for _ in range(4))
    before = {n: t.clone() for n, t in whole.server["shared"].items()}
    buffers = whole.channel.buffers
    whole.compares = True
    run_reference(whole, 1)
    updates = []
    for client, federation in zip(whole.ids, alone, strict=True):
        federation.cohort = Cohort(clients=[client])
        run_reference(federation, 1)
        moved = federation.server["shared"]
        updates.append({n: (moved[n] - before[n]).numpy() for n in moved if n not in buffers})
    weights = whole.algorithm.weights({"num_samples": whole.server["num_samples"]}, whole.ids)
    expected = by_numpy(updates, weights)
    told = contributions(whole.server)
    for client, cosine in zip(whole.ids, expected, strict=True):
        assert told[client]["cosines"] == [pytest.approx(cosine, abs=2e-6)]
        assert told[client]["contribution"] == pytest.approx(max(0.0, 1 - cosine), abs=2e-6)


def federation_of(method, **how):
    task = ToyTask(norm=type(method) is FedBN)
    return toy_federation(method, task, toy_data(batch=4), rounds=3, steps=3, **how)[1]


def test_nothing_else_of_a_run_changes_and_absent_rounds_do_not_count():
    plain, told = (federation_of(Scaffold(), cohort=Cohort(fraction=0.67)) for _ in range(2))
    told.compares = True
    run_reference(plain, 3)
    run_reference(told, 3)
    cosines = told.server.pop("cosines")
    assert plain.digests() == told.digests()
    present = {c: [c in told.members(n) for n in range(3)] for c in told.ids}
    assert {c: (~v.isnan()).tolist() for c, v in cosines.items()} == present
    assert not all(map(all, present.values()))


def test_rounds_that_send_nothing_have_no_cosine():
    federation = federation_of(QuPeL(bits=2, finetune_share=0.34, rounds=3, full_precision=()))
    federation.compares = True
    run_reference(federation, 3)
    for of in contributions(federation.server).values():
        assert of["cosines"][2] is None
        assert None not in of["cosines"][:2]


@pytest.mark.parametrize("method", ["local", "fedpd", "fedproto"])  # nothing, models, features
def test_a_method_without_updates_is_refused_after_a_round(method):
    _, federation, _ = harness.federation(method)
    federation.compares = True
    with pytest.raises(ConfigError, match="averages no updates of this model"):
        run_reference(federation, 1)


def test_a_run_without_updates_is_refused_before_it(tmp_path):
    # The head of a linear model is the whole model, so pFedNet shares nothing of it.
    for method in ("Local", "PFedNet"):
        with pytest.raises(ConfigError, match=f"and {method} averages no updates of this model"):
            run(tmp_path / "run", *CLINICAL, f"algorithm={method.lower()}", ASKED)
    with pytest.raises(ConfigError, match="secure=masks shows the server their sum alone"):
        run(tmp_path / "run", *CLINICAL, *SMALL, "channel.secure=masks", ASKED)


ASKED = "evaluation.contributions=true"
SMALL = ("algorithm=fedavg", "rounds=2", "evaluation.every=1")


def test_the_summary_and_the_report_tell_it_and_a_resumed_run_the_same(tmp_path, capsys):
    words = (*CLINICAL, *SMALL, ASKED)
    run(tmp_path / "whole", *words)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    told = summary["contributions"]
    assert {*told} == {*summary["clients"]}
    for of in told.values():
        assert len(of["cosines"]) == 2
        assert of["contribution"] == pytest.approx(max(0, 1 - np.mean(of["cosines"])), abs=1e-12)
    (tmp_path / "whole" / "checkpoints" / "round_00001.ckpt").unlink()
    (tmp_path / "whole" / "summary.json").unlink()
    resume(tmp_path / "whole", *words)
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["contributions"] == told
    capsys.readouterr()
    report_runs([str(tmp_path / "whole")], tmp_path / "report")
    first = next(iter(told))
    assert "Updates of fedavg unlike the others'" in capsys.readouterr().out
    page = (tmp_path / "report" / "report.html").read_text()
    assert f"{first} {told[first]['contribution']:.2f}" in page


@pytest.mark.parametrize("rate", [0.1, 0.0], ids=["trains", "first round"])
def test_a_coordinator_tells_the_same_of_all_rounds(rate, tmp_path):
    """Also if an earlier round is selected: at the rate 0 all are equal, and the first counts."""
    overrides = (*CLINICAL, *SMALL, ASKED, "partition.num_clients=3", f"optimizer.lr={rate}")
    expected, experiment = run(tmp_path / "simulation", *overrides)
    assert rate or expected["selected_round"] == 0
    assert all(len(of["cosines"]) == 2 for of in expected["contributions"].values())
    names = list(experiment.data.clients)
    transport = direct(tmp_path / "sites", names, *overrides)
    summary = across(tmp_path / "server", transport, names, *overrides)
    assert summary["contributions"] == expected["contributions"]
    assert {*summary["contributions"]} == {*names}
