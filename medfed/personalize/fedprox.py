"""FedProx: FedAvg whose local loss is tied to the server's weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks,
MLSys 2020, Algorithm 2.

Symbols: μ ``mu``, w^t the received weights. The term (μ/2)‖w − w^t‖² is part of the loss that is
differentiated (a term built from detached values would have no gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

from medfed.errors import ConfigError
from medfed.federation.client import Client, Penalty
from medfed.federation.tensors import Tensors
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.functional.proximity import Proximity


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with the proximal term (μ/2)‖w − w^t‖².

    Attributes:
        mu: Weight μ > 0 of the proximal term (zero would be FedAvg).

    Raises:
        ConfigError: If μ is not positive.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu > 0:
            raise ConfigError(
                f"algorithm.mu must be positive, not {self.mu}; for μ = 0 choose algorithm=fedavg."
            )

    def penalty(self, client: Client, start: Tensors) -> Penalty | None:
        """(μ/2)‖w − w^t‖² over the shared parameters."""
        buffers = client.split.buffers
        anchor = {n: start[n] for n in client.split.shared if n not in buffers}
        return Proximity(self.mu, anchor) if anchor else None
