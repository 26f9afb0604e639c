"""FedAvg and the methods that change only what it averages: limits, and values they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medfed.personalize.fedavg import FedAvg
from medfed.personalize.fedbn import FedBN
from medfed.personalize.fedper import FedPer
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, models, run
from tests.sweeps import sweep
from tests.toys import ToyData, toy_data, toy_federation


@sweep("weighting", ["samples", "uniform"])
@sweep("kind", [FedAvg, FedPer, FedBN])
def test_one_client_trains_alone(kind, weighting):
    """Averaging over one client does nothing, whatever of the model is personal."""
    data = toy_data(4, dtype=torch.float64)[2:3]
    personal = {} if kind is not FedBN else {"personal": "none"}
    federation = run(kind(weighting=weighting, **personal), data, momentum=0.9)
    assert gap(federation, run(Local(), data, momentum=0.9)) < 1e-14


def test_equal_clients_train_as_if_alone():
    source = toy_data(4, dtype=torch.float64)[2]
    data = [ToyData(f"c{i}", source.x, source.y) for i in range(3)]
    assert gap(run(FedAvg(), data), run(Local(), data)) < 1e-14
    assert gap(run(FedAvg()), run(Local())) > 1e-2


def test_fedper_without_personal_part_is_fedavg():
    assert np.array_equal(models(run(FedPer(personal="none"))), models(run(FedAvg())))
    assert gap(run(FedPer()), run(FedAvg())) > 1e-2


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: FedAvg(weighting="equal"), "algorithm.weighting='equal'"),
        (lambda: toy_federation(FedPer(personal="haed.*")), "haed"),
    ],
)
def test_bad_values_are_named(make, culprit):
    with pytest.raises(ConfigError, match=culprit) as caught:
        make()
    assert_one_sentence(caught.value)
