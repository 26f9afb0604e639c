"""FedLC: margins by how common a class is at a client calibrate the logits that it trains.

Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated learning with label distribution skew via logits
calibration, ICML 2022, Equation 8. With n_iy the client's training samples of class y and o the
logits, a client minimises

    CE(o_y - tau n_iy^(-1/4), y)      ``margin=power``, the paper's
    CE(o_y + tau log(n_iy / n_i), y)  ``margin=prior``, as in Fed-RoD's common term

so that the shared model learns what the images say, and not how common a class is at whom.

| symbol | here |
|---|---|
| tau | ``strength``; 0 is FedAvg |
| n_iy | ``client.data.label_counts`` |

Deviations:
- A class that a client lacks leaves its softmax: its margin is -1e4 instead of minus infinity,
  which label smoothing would make infinite.
- ``prior=own`` adds the margin to the biases of the model that a client gets, which so predicts for
  its own share of patients; this is no part of the paper. A class that it lacks counts as half a
  sample there, lest its probability be 0. The paper's model is ``prior=even``.
- With one logit per sample, that of class 1 of two, the difference of these margins is added.
"""

from __future__ import annotations

from typing import Literal

from medfed.method import *
from medfed.personalize.fedavg import FedAvg

ABSENT = -1e4


@dataclass(frozen=True)
class FedLC(OnboardingRules, FedAvg):
    """FedAvg with a class-calibrated loss.

    Attributes:
        strength: tau >= 0.
        margin: ``power`` or ``prior``.
        prior: The shares of classes that a delivered model predicts for: ``even`` or ``own``.
    """

    strength: Annotated[float, check_not_negative, Range(0.1, 3.0)] = 1.0
    margin: Literal["power", "prior"] = "power"
    prior: Literal["even", "own"] = "even"
    card: ClassVar[Card] = Card(
        "Zhang et al. 2022", "one model", "nothing; with prior=own its shares of classes",
        tasks="classification", privacy_exposure="outputs",
    )  # fmt: skip

    def margins(self, counts: Tensor, absent: float | None = None) -> Tensor:
        """Returns what is added to the logits.

        Example:
            >>> FedLC().margins(torch.tensor([16, 1, 0])).tolist()
            [-0.5, -1.0, -10000.0]
            >>> FedLC(margin="prior").margins(torch.tensor([2, 2])).exp()
            tensor([0.5000, 0.5000], dtype=torch.float64)
        """
        known = counts.double()
        here = known.clamp(min=absent or 1.0)
        margins = here.pow(-0.25).neg() if self.margin == "power" else (here / known.sum()).log()
        margins = self.strength * margins
        return margins if absent else margins.where(known > 0, torch.tensor(ABSENT).to(margins))

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Trains with the margins of the client's classes."""
        counts = client.data.label_counts
        margins, one = self.margins(counts), self.margins(counts, absent=0.5).diff()

        def calibrated(outputs: Any) -> Tensor:
            if isinstance(outputs, Tensor) and outputs.ndim == 2 and len(counts) > 1:
                if outputs.shape[1] == len(counts):
                    return outputs + margins.to(outputs)
                if (outputs.shape[1], len(counts)) == (1, 2):
                    return outputs + one.to(outputs)
            raise ConfigError(
                "algorithm=fedlc is for classification, with one logit per class; choose "
                "algorithm=fedavg or fedper."
            )

        return client.train(start, outputs=calibrated)

    def personal_model(self, client: Client, message: Message) -> Tensors:
        return self.for_own_classes(client, super().personal_model(client, message))

    def onboard(self, client: Client, message: Message) -> Tensors:
        """The default rule, for the client's shares of classes if ``prior=own``."""
        return self.for_own_classes(client, super().onboard(client, message))

    def for_own_classes(self, client: Client, model: Tensors) -> Tensors:
        """Returns a model whose last biases have the margins of the client's classes."""
        if self.prior == "even":
            return model
        margins = self.margins(client.data.label_counts, absent=0.5)
        name = (client.split.head or client.split.parameters("all"))[-1]
        if model[name].shape == (1,) and len(margins) == 2:
            margins = margins.diff()
        if model[name].shape != margins.shape:
            raise ConfigError(
                f"algorithm.prior=own needs a last layer with a bias per class, and {name} has the "
                f"shape {tuple(model[name].shape)} for {len(margins)} classes; set "
                "algorithm.prior=even."
            )
        return {**model, name: model[name] + margins.to(model[name])}
