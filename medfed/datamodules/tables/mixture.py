"""PPFL's synthetic problem: linear models that clients mix in different proportions."""

from __future__ import annotations

import torch

from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import Batch, ClientData
from medfed.datamodules.extending import *
from medfed.datamodules.partitions.base import Partition
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.table import Outcome


class MixtureDataModule(FederatedDataModule):
    """Generated rows; ``image`` is (B, F), ``label`` (B,) int64, or float32 if continuous.

    Source: PPFL, synthetic data. theta_k ~ U[-1, 1]^F are K models, no constant, and alpha_i ~
    Dirichlet(concentration) are client i's true memberships, kept in ``mixtures``. Rows x are
    standard normal (the project's choice). Outcomes follow canonical models with mixed outputs:

    - ``classes``: logistic models, 1 with probability sum_k alpha_ik sigmoid(theta_k x);
    - ``continuous``: linear models, normal around sum_k alpha_ik theta_k x.
    """

    @checked("data")
    def __init__(
        self,
        partition: Partition,
        *,
        clients: Annotated[int, check_positive] = 300,
        samples: Annotated[int, check_positive] = 100,
        features: Annotated[int, check_positive] = 150,
        models: Annotated[int, check_positive] = 3,
        concentration: Annotated[float, check_positive] = 0.4,
        outcome: Outcome = "classes",
        noise: Annotated[float, check_not_negative] = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(partition, **{"batch_size": 128, "eval_batch_size": 1024, **common})
        self.names = [f"hospital_{i:03d}" for i in range(clients)]
        self.rows = samples
        self.models = models
        self.concentration = concentration
        self.channel_names = tuple(f"x{j}" for j in range(features))
        self.outcome = outcome
        self.noise = noise
        self.class_names = ("0", "1") if outcome == "classes" else ("outcome",)
        kind = "logistic" if outcome == "classes" else "linear"
        sizes = f"{clients} hospitals of {samples} rows"
        mixed = f"{models} {kind} models of {features} features"
        self.description = f"Data: generated, {sizes} that mix {mixed}."
        self.thetas = numpy_rng(self.seed, "mixture", "models").uniform(-1, 1, (models, features))
        self._rows_of = {name: self._draw(name) for name in self.names}

    def _draw(self, name: str) -> Batch:
        """Draws a client's mixture, rows and labels."""
        from scipy.special import expit

        rng = numpy_rng(self.seed, "mixture", name)
        alpha = rng.dirichlet([self.concentration] * self.models)
        self.mixtures[name] = tuple(alpha.tolist())
        image = rng.standard_normal((self.rows, self.in_channels))
        scores = image @ self.thetas.T
        if self.outcome == "classes":
            label = torch.from_numpy(rng.random(self.rows) < expit(scores) @ alpha).long()
        else:
            error = self.noise * rng.standard_normal(self.rows)
            label = torch.from_numpy(scores @ alpha + error).float()
        return {"image": torch.from_numpy(image).float(), "label": label}

    def list_patients(self) -> list[Patient]:
        """Every row is a patient of its hospital."""
        classes = self.outcome == "classes"
        return [
            Patient(f"{name}_row_{j}", centre=name, label=label if classes else None)
            for name in self.names
            for j, label in enumerate(self._rows_of[name]["label"].tolist())
        ]

    def build_clients(self, plans: Mapping[str, ClientPlan]) -> dict[str, ClientData]:
        """Takes the rows of every client; see the base class."""
        if not set(plans) <= set(self.names):
            raise ConfigError("Generated mixtures belong to hospitals; use partition=centre.")
        blocks = {n: {s: self._block(n, p, s) for s in SPLITS} for n, p in plans.items()}
        return {name: self.labelled_client(name, p, blocks[name]) for name, p in plans.items()}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: features unchanged."""
        kind = {"kind": "table", "features": list(self.channel_names), "indicators": []}
        return {**super().preprocessing(client), "input": kind}

    def _block(self, name: str, plan: ClientPlan, split: Split) -> Batch:
        rows = self._rows_of[name]
        numbers = [int(p.rpartition("_")[2]) for p in plan.patients[split]]
        index = torch.tensor(numbers, dtype=torch.long)
        return {
            "image": rows["image"][index] * plan.channels,
            "label": rows["label"][index],
            "case": torch.arange(len(index)),
        }
