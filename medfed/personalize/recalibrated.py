"""FedAvg whose outputs each client scales and shifts on its own validation cases.

There is no paper; see Guo, Pleiss, Sun, Weinberger: On calibration of modern neural networks, ICML
2017 (temperature), and Platt 1999. With o the shared model's outputs, a client's are a o + b:

    min over a > 0, b of n L(a o + b) + (|b|^2 + (a - 1)^2) / (2 variance)

L is the task's mean loss over the client's n validation cases; for cross-entropy this is strictly
convex, and b sums to 0. A shift of the classes' shares alone is mended by b exactly, as the
variance grows. Two classes keep their order, and so each client its AUROC.

Unlike ``evaluation.calibration``, which adds rows of calibrated probabilities to the report of any
method, this is the model itself: all metrics see it, and so does whoever exports it. Validation
measures the model before this step, so that rounds and settings are not selected on the cases that
a and b are fitted on. A client without validation cases keeps a = 1, b = 0; with
``privacy.client`` all do. Nothing travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class Recalibrated(FedAvg):
    """FedAvg with a scale and an intercept per output for each client.

    Attributes:
        variance: Of the scale around 1 and of intercepts around 0: how much few cases may change.

    Raises:
        ConfigError: If a value is out of range, or the last layer has no bias.
    """

    variance: Annotated[float, check_positive] = 1.0
    card: ClassVar[Card] = Card(
        "Platt 1999; Guo et al. 2017",
        "personal part",
        "scale and intercepts of the outputs",
        note="fitted on validation cases, which themselves measure FedAvg's model",
        touches="losses",
    )

    def adapted(self, split: ParameterSplit, network: nn.Module) -> Algorithm:
        """Checks that the last layer has a bias."""
        known = dict(network.named_parameters())
        weight, bias = last_layer(split)
        if weight not in known or known[bias].ndim != 1:
            raise ConfigError(
                "algorithm=recalibrated needs a last layer with weights and a bias, and the last "
                f"parameter is {bias}; choose evaluation.calibration=shift."
            )
        return self

    def completed(self, client: Client, model: Tensors) -> Tensors:
        """Returns a model whose last layer has the best scale and intercepts."""
        from scipy.optimize import minimize

        cases = sum(len(batch["label"]) for batch in client.data.eval_batches("val"))
        if not cases:
            return model
        weight, bias = last_layer(client.split)

        def at(point: np.ndarray) -> Tensors:
            scale, shift = float(point[0]), torch.as_tensor(point[1:]).to(model[bias])
            moved = {weight: model[weight] * scale, bias: model[bias] * scale + shift}
            return {**model, **moved}

        def cost(point: np.ndarray) -> float:
            away = float((point[0] - 1) ** 2 + point[1:] @ point[1:])
            return cases * client.loss_at(at(point), split="val") + away / (2 * self.variance)

        start = np.array([1.0] + [0.0] * len(model[bias]))
        bounds = [(EPSILON, None)] + [(None, None)] * len(model[bias])
        options = {"eps": EPSILON, "maxiter": 50}
        return at(minimize(cost, start, jac="3-point", bounds=bounds, options=options).x)


EPSILON = 1e-3
"""The step of differences, as losses are of single precision; and the smallest scale."""


def last_layer(split: ParameterSplit) -> tuple[str, str]:
    """Returns the names of the weight and the bias of the last layer."""
    bias = (split.head or split.parameters("all"))[-1]
    return bias.removesuffix("bias") + "weight", bias
