"""Generated mixtures of logistic models: labels follow the true chances, whoever else is there."""

import numpy as np
import pytest
import torch
from scipy.special import expit

from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.tables.mixture import MixtureDataModule
from medfed.standalone.errors import ConfigError


def test_labels_follow_the_true_mixtures():
    """Residuals, alone and times each feature, are within four standard deviations of zero."""
    data = MixtureDataModule(ByCentre(), clients=2, samples=4000, features=5)
    data.setup()
    assert list(data.mixtures) == list(data.clients)
    for client in data.clients.values():
        alpha = np.array(data.mixtures[client.id])
        assert alpha.sum() == pytest.approx(1)
        x, y = client.train["image"].numpy(), client.train["label"].numpy()
        chance = expit(x @ data.thetas.T) @ alpha
        deviation = (y - chance).sum() / np.sqrt((chance * (1 - chance)).sum())
        assert abs(deviation) < 4
        for j in range(5):
            deviation = ((y - chance) * x[:, j]).sum()
            assert abs(deviation) < 4 * np.sqrt((chance * (1 - chance) * x[:, j] ** 2).sum())


def test_a_client_does_not_depend_on_the_number_of_clients():
    few, many = (MixtureDataModule(ByCentre(), clients=n, samples=20) for n in (2, 4))
    few.setup()
    many.setup()
    for name, client in few.clients.items():
        assert torch.equal(client.train["image"], many.clients[name].train["image"])
        assert few.mixtures[name] == many.mixtures[name]


def test_sizes_are_positive():
    with pytest.raises(ConfigError, match=r"data\.models must be positive, not 0"):
        MixtureDataModule(ByCentre(), models=0)
