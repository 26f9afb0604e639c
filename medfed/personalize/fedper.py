"""FedPer: the head stays personal, body and head are trained jointly.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated learning with personalization layers, 2019,
Algorithms 1 and 2. Symbols: W_B the shared part, W_P the personal part.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedAvg over the body; by default the task module names the personal part."""

    personal: str | tuple[str, ...] = "task"
    averages_moments: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Arivazhagan et al. 2019", "personal part", "the head")
