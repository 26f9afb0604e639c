"""Canonical models from the command line: shipped experiments, and what cannot be one."""

from __future__ import annotations

import pytest
import torch

from medfed.config.compose import load
from medfed.models.networks.canonical import Canonical
from medfed.run.finished import reopen
from medfed.standalone.errors import ConfigError
from tests.integration.runs import CLINICAL, imaging, outcome, run

PPFL = (*CLINICAL, "algorithm=ppfl", "model.network.spread=0.1")


def test_ppfl_chooses_canonical_parts_and_others_none():
    assert load(["algorithm=ppfl"]).canonical.mix == "outputs"
    assert load(["algorithm=ppfl", "canonical=parameters"]).canonical.mix == "parameters"
    assert load(["experiment=digits_pfednet", "algorithm=ppfl"]).canonical.count == 4
    assert not load(["algorithm=fedavg"]).canonical


@pytest.mark.parametrize("mix", ["outputs", "parameters"])
def test_a_run_on_tables_and_its_models(mix, tmp_path):
    options = (*PPFL, f"canonical={mix}", "canonical.count=3", "algorithm.strength=0.01")
    summary, experiment = run(tmp_path / "a", *options)
    run(tmp_path / "b", *options)
    assert outcome(tmp_path / "a")["hashes"] == outcome(tmp_path / "b")["hashes"]
    assert summary["federation"]["loss"]["mean"] < 1
    rows = torch.stack(list(experiment.module.federation.server["membership"].values()))
    assert rows.shape == (5, 3)
    torch.testing.assert_close(rows.sum(1), torch.ones(5))
    assert (rows - 1 / 3).abs().max() > 1e-3
    again = reopen(tmp_path / "a")
    assert isinstance(again.task.network, Canonical)


def test_a_mixture_of_linear_models_predicts(tmp_path):
    """The shipped experiment made small; only the mixture is determined, not its parts."""
    options = ("data.clients=6", "data.features=5", "data.samples=60", "data.noise=0.1")
    more = ("rounds=12", "optimizer.lr=0.1", "algorithm.membership_lr=0.3", "evaluation.every=12")
    more = (*more, "logger=none", "progress=false")
    summary, _ = run(tmp_path / "a", "experiment=synthetic_linear", *options, *more)
    assert summary["selection"] == ["rmse", "min"]
    assert summary["federation"]["r2"]["mean"] > 0.8
    worst = max(c["rmse"] for c in summary["clients"].values())
    assert summary["federation"]["rmse"]["worst"] == worst


def test_the_first_instance_is_the_network_of_a_plain_run(tmp_path):
    """So that methods with and without canonical parts are compared from one start."""
    starts = []
    for name in ("fedavg", "ppfl"):
        options = (*PPFL, f"algorithm={name}", "rounds=1", "optimizer.lr=0")
        _, experiment = run(tmp_path / name, *options)
        starts.append(experiment.module.federation.server["shared"])
    weight = "network.linear.weight"
    assert torch.equal(starts[0]["linear.weight"], starts[1][f"canonical.0.{weight}"])
    assert not torch.equal(starts[0]["linear.weight"], starts[1][f"canonical.1.{weight}"])


def test_a_segmentation_network_with_canonical_expanding_paths(tmp_path):
    """BatchNorm statistics stay local, as the experiment has it."""
    _, experiment = run(
        tmp_path / "run",
        *imaging(tmp_path / "data"),
        "algorithm=ppfl",
        "algorithm.affinity.kind=channel",
        "canonical.count=2",
    )
    federation = experiment.module.federation
    split = next(iter(federation.clients.values())).split
    assert {n for n in split.personal if n not in split.buffers} == {"membership"}
    heads = [n for n in split.shared if n.startswith("canonical.")]
    assert len(heads) == 2 * len([n for n in heads if n.startswith("canonical.0.")]) > 0
    assert all(torch.isfinite(t).all() for t in federation.server["shared"].values())
    first, second = (federation.personal_model(c) for c in federation.ids)
    moved = [n for n in split.buffers if not torch.equal(first[n], second[n])]
    assert moved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("canonical=none",), r"needs a model with a canonical part"),
        (("algorithm=fedavg", "canonical=outputs"), r"FedAvg would train the membership vectors"),
        (
            ("algorithm=pfednet", "canonical=parameters"),
            r"choose canonical=none, or algorithm=ppfl or ifca",
        ),
        (("model.network.spread=0",), r"start as equals .* model\.network\.spread=0\.1"),
        (("canonical.parts=[lineer.*]",), r"'lineer\.\*' matches no parameter \(did you mean"),
        (("canonical.count=0",), r"canonical\.count must be 1 or more, not 0"),
        (("canonical.count=few",), r"canonical\.count must be a whole number, not 'few'"),
    ],
)
def test_mistakes_are_one_sentence(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *PPFL, *options)
    assert not (tmp_path / "run").exists()
