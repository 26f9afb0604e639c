"""FedProx: its limits, and values it refuses."""

from __future__ import annotations

import math

import pytest

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedprox import FedProx
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, run


def test_a_vanishing_strength_is_fedavg():
    fedavg = run(FedAvg())
    gaps = [gap(run(FedProx(mu=mu)), fedavg) for mu in (1e-1, 1e-6, 1e-12)]
    assert gaps[0] > 1e-3
    assert gaps[1] == pytest.approx(gaps[0] * 1e-5, rel=0.2)
    assert gaps[2] < 1e-11


def test_nothing_shared_is_nothing_to_be_tied_to():
    assert gap(run(FedProx(personal="all")), run(Local())) < 1e-14


@pytest.mark.parametrize("mu", [0.0, math.nan])
def test_bad_values_are_named(mu):
    with pytest.raises(ConfigError, match=r"algorithm\.mu") as caught:
        FedProx(mu=mu)
    assert_one_sentence(caught.value)
