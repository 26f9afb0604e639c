"""FedProx: FedAvg with a proximal term that keeps clients close to the server's weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks,
MLSys 2020, Algorithm 2.

Symbols: μ ``mu``, w^t the received weights. The term (μ/2)‖w − w^t‖² is part of the loss that is
differentiated (a term built from detached values would have no gradient).
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with the proximal term (μ/2)‖w − w^t‖².

    Attributes:
        mu: Weight μ > 0 of the proximal term (zero would be FedAvg).
    """

    mu: Annotated[float, check_positive, Range(0.001, 10.0)] = 0.1
    averages_moments: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Li et al. 2020")

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Minimises f(w) + (μ/2)‖w − w^t‖²; the second term covers the shared parameters."""
        received = select(start, client.split.parameters("shared"))
        return client.train(start, penalty=Proximity(self.mu, received))
