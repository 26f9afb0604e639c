"""Personal models that are pulled to their mean: one objective with several solvers.

Hanzely, Richtarik: Federated learning of a mixture of global and local models, 2020, Equation 2:

    min sum_i p_i (f_i(x_i) + (lambda/2) |x_i - xbar|^2),   xbar = sum_i p_i x_i

| symbol | here |
|---|---|
| x_i | ``state["model"]`` |
| xbar | ``server["shared"]`` |
| lambda | ``strength`` |
| p_i | ``weighting``; the paper's are 1/N |

BatchNorm's statistics stay with each model; those of xbar are their mean. A hospital that joins
later trains from xbar, tied to it by lambda.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class MixtureMethod(OnboardingRules, FedAvg):
    """A model for each client, and their mean.

    Attributes:
        strength: lambda >= 0.
    """

    strength: Annotated[float, check_not_negative] = 1.0
    supports_missing_channels: ClassVar[bool] = False

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        return super().init(weights, split, clients)[0], {"model": weights}

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client's model starts from the mean and is tied to it."""
        start = self.onboarding_start(client, message)
        mean = select(start, client.split.parameters("shared"))
        return client.train(start, penalty=Proximity(self.strength, mean))
