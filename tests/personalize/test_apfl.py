"""APFL: its limits, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from medfed.personalize.apfl import APFL
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, run

FIXED = {"alpha_lr": 0.0}


def test_a_share_of_one_is_local_training():
    assert gap(run(APFL(alpha=1.0, **FIXED)), run(Local())) < 1e-14


def test_a_share_of_none_is_fedavg():
    mixed, plain = run(APFL(alpha=0.0, **FIXED), momentum=0.9), run(FedAvg(), momentum=0.9)
    assert gap(mixed, plain) == 0
    shares = [e for e in mixed.ledger.entries if e.part == "scalars"]
    assert {e.bytes for e in shares} == {8}
    assert [e for e in mixed.ledger.entries if e not in shares] == plain.ledger.entries


def test_the_shared_model_is_fedavgs_whatever_the_mix():
    mixed, plain = run(APFL(), momentum=0.9), run(FedAvg(), momentum=0.9)
    for name, tensor in plain.server["shared"].items():
        assert torch.equal(mixed.server["shared"][name], tensor)
    assert gap(mixed, plain) > 1e-3


def test_clients_learn_shares_of_their_own():
    federation = run(APFL())
    alphas = [float(c.state["alpha"]["alpha"]) for c in federation.clients.values()]
    assert len(set(alphas)) == 4
    assert all(0 <= a <= 1 for a in alphas)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"alpha": 1.5}, r"algorithm\.alpha must be in \[0, 1\], not 1\.5"),
        ({"alpha": float("nan")}, r"algorithm\.alpha must be in"),
        ({"alpha_lr": -0.1}, r"algorithm\.alpha_lr must not be negative"),
    ],
)
def test_bad_values_are_named(options, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        APFL(**options)
    assert_one_sentence(caught.value)
