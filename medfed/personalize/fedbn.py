"""FedBN: normalisation layers stay personal, everything else is averaged.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated learning on non-IID features via local batch
normalization, ICLR 2021, Algorithm 1.

Normalisation layers are recognised by their type; their running statistics stay with their
parameters.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg over all but the normalisation layers."""

    personal: str | tuple[str, ...] = "normalization"
    averages_moments: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Li et al. 2021", "personal part", "normalisation")
