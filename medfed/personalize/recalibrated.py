"""FedAvg whose outputs each client scales and shifts on its own validation cases.

There is no paper; see Guo, Pleiss, Sun, Weinberger: On calibration of modern neural networks, ICML
2017 (temperature), and Platt 1999. With o the shared model's outputs, a client's are a o + b:

    min over a > 0, b of n L(a o + b) + (|b|^2 + (a - 1)^2) / (2 variance)

L is the mean cross-entropy of the client's n validation cases. This is strictly convex, and b sums
to 0. A shift of the classes' shares alone is mended by b exactly, as the
variance grows. Two classes keep their order, and so each client its AUROC.

Unlike ``evaluation.calibration``, which adds rows of calibrated probabilities to the report of any
method, this is the model itself: all metrics see it, and so does whoever exports it. Validation
measures the model before this step, so that rounds and settings are not selected on the cases that
a and b are fitted on. A client without validation cases keeps a = 1, b = 0; so do all with
``privacy.client``. Nothing travels. Other tasks than classification into exclusive classes are
refused: their losses are no likelihoods of which a and b would be the scale and the level.
"""

from __future__ import annotations

import numpy as np

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class Recalibrated(FedAvg):
    """FedAvg with a scale and an intercept per output for each client.

    Attributes:
        variance: Of the scale around 1 and of intercepts around 0: how much few cases may change.
    """

    variance: Annotated[float, check_positive] = 1.0
    by_class: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        "Platt 1999; Guo et al. 2017", "personal part", "scale and intercepts of the outputs",
        tasks="classification",
        note="fitted on validation cases, which themselves measure FedAvg's model",
        privacy_exposure="losses",
    )  # fmt: skip

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
        if next(iter(client.data.eval_batches("val")), None) is None:
            return model
        rows = client.features(model, "val")
        scale, shift = best_scale(rows.outputs.double().cpu(), rows.labels.cpu(), self.variance)
        weight, bias = last_layer(client.split)
        if len(model[bias]) == len(shift) - 1:  # the first class has the logit 0
            shift = shift[1:] - shift[0]
        moved = model[bias] * scale + shift.to(model[bias])
        return {**model, weight: model[weight] * scale, bias: moved}


def best_scale(outputs: Tensor, label: Tensor, variance: float) -> tuple[float, Tensor]:
    """Returns the scale of logits ``(n, K)`` and the intercepts that suit the labels best.

    Example:
        >>> scale, shift = best_scale(torch.zeros(4, 2), torch.tensor([0, 1, 1, 1]), 1e9)
        >>> round(float(shift.diff().exp()), 4)
        3.0
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    z, cases = outputs.numpy(), (np.arange(len(label)), label.numpy())
    start = np.array([1.0] + [0.0] * z.shape[1])

    def cost(point: np.ndarray) -> tuple[float, np.ndarray]:
        log, away = log_softmax(point[0] * z + point[1:], axis=1), point - start
        residual = np.exp(log)
        residual[cases] -= 1
        slope = np.array([(residual * z).sum(), *residual.sum(0)]) + away / variance
        return float(away @ away / (2 * variance) - log[cases].sum()), slope

    bounds = [(SMALLEST, None)] + [(None, None)] * z.shape[1]
    options = {"ftol": 1e-14, "gtol": 1e-9}
    best = minimize(cost, start, method="L-BFGS-B", jac=True, bounds=bounds, options=options).x
    return float(best[0]), torch.tensor(best[1:])


SMALLEST = 1e-3  # scale, so that classes keep their order


def last_layer(split: ParameterSplit) -> tuple[str, str]:
    """Returns the names of the weight and the bias of the last layer."""
    bias = (split.head or split.parameters("all"))[-1]
    return bias.removesuffix("bias") + "weight", bias
