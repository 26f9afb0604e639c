"""How near to the true mixtures anybody could come on the data of ``experiment=synthetic_ppfl``.

The true logistic models are given, and each client's mixture alone is fitted to its training rows,
by maximum likelihood (SciPy). What is left of the distance is the noise of the labels; PPFL, which
has to find the models as well, can hardly come nearer. Run with
``python benchmarks/evidence/mixture_floor.py``; ``--samples 200`` shows what fewer rows would cost.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.tables.mixture import MixtureDataModule
from medfed.run.memberships import half_l1

Floats = NDArray[np.float64]


def fit(likelihoods: Floats) -> Floats:
    """Returns the mixture (K,) of largest likelihood, of the rows' likelihoods (N, K)."""
    count = likelihoods.shape[1]
    found = minimize(
        lambda c: -np.log(likelihoods @ c + 1e-300).mean(),
        np.full(count, 1 / count),
        jac=lambda c: -(likelihoods / (likelihoods @ c + 1e-300)[:, None]).mean(0),
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda c: c.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-10, "maxiter": 200},
    )
    return np.asarray(found.x)


def floor(clients: int, samples: int, seed: int) -> float:
    """Returns the mean half L1 distance over the clients of one seed."""
    data = MixtureDataModule(ByCentre(), seed=seed, clients=clients, samples=samples)
    data.setup()
    rows = []
    for client in data.clients.values():
        image, label = client.train["image"], client.train["label"]
        assert isinstance(image, Tensor)
        assert isinstance(label, Tensor)
        chance = expit(image.double().numpy() @ data.thetas.T)
        rows.append(fit(np.where(label.numpy()[:, None] == 1, chance, 1 - chance)))
    truth = np.array([data.mixtures[name] for name in data.clients])
    return float(half_l1(np.array(rows), truth).mean())


def main() -> None:
    """Prints the floor of every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--samples", type=int, default=1000, help="rows per client, all splits")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    found = [floor(options.clients, options.samples, seed) for seed in range(options.seeds)]
    for seed, value in enumerate(found):
        print(f"seed {seed}: half L1 with the true models given {value:.3f}")
    print(f"mean {np.mean(found):.3f}")


if __name__ == "__main__":
    main()
