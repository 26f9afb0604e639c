"""LG-FedAvg: every client has a personal representation under a shared head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think locally, act globally:
federated learning with local and global representations, 2020, Algorithm 1.

Symbols: theta_l the local representation, the personal part; theta_g the head, the shared part.
A local step moves both, theta_g is averaged. The paper's tasks without labels for theta_l are left
out. A newcomer trains its representation under the received head.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """FedAvg over the head; all other parameters are personal."""

    personal: str | tuple[str, ...] = "body"
    averages_moments: ClassVar[bool] = True
    card: ClassVar[Card] = gradients_only("Liang et al. 2020", "personal part", "all but the head")
