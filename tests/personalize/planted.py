"""Clients in groups that disagree: the same inputs, the labels permuted group by group."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from medfed.federation.federation import Federation
from medfed.federation.reference import run_reference
from medfed.models.networks.canonical import Canonical
from medfed.personalize.ppfl import PPFL
from tests.toys import ToyData, toy_federation

CLASSES, FEATURES = 3, 6


class PlantedTask(pl.LightningModule):
    """Classification by K canonical heads behind a common layer, or by K whole networks."""

    personal = ("membership",)

    def __init__(self, count: int, seed: int, parts: str = "*", mix: str = "outputs"):
        super().__init__()
        networks = []
        for k in range(count):
            torch.manual_seed(1000 * seed + k)
            networks.append(
                nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, CLASSES)).double()
            )
        self.network = Canonical(networks, [parts], mix, "softmax")

    def loss(self, batch: dict) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch["image"]), batch["label"])

    def evaluate(self, batches: Iterable[dict], *, test: bool = False) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(np.mean([self.loss(b).item() for b in batches]))}


def planted(seed: int, groups: int = 3, each: int = 3, samples: int = 40) -> list[ToyData]:
    """Clients of one cluster per class; group g calls class y by its name y + g modulo 3."""
    rng = np.random.default_rng(seed)
    centres = 2.5 * rng.normal(size=(CLASSES, FEATURES))
    data = []
    for i in range(groups * each):
        label = np.arange(samples) % CLASSES
        x = torch.tensor(centres[label] + rng.normal(size=(samples, FEATURES)))
        y = torch.tensor((label + i % groups) % CLASSES)
        data.append(ToyData(f"c{i}", x, y, batch_size=20))
    return data


def federate(
    algorithm: PPFL, seed: int, count: int = 3, rounds: int = 30, parts: str = "*", **changes
) -> Federation:
    """Trains the planted clients."""
    mix = changes.pop("mix", "outputs")
    _, federation, _ = toy_federation(
        algorithm,
        PlantedTask(count, seed, parts, mix),
        planted(seed),
        **{"rounds": rounds, "steps": 5, "lr": 0.3, **changes},
    )
    return run_reference(federation, rounds)


def groups(federation: Federation) -> list[int]:
    """The argmax membership of every client."""
    return [int(federation.server["membership"][c].argmax()) for c in federation.ids]
