"""LG-FedAvg: every client has a representation of its own, under a head that all share.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think locally, act globally:
federated learning with local and global representations, 2020, Algorithm 1.

Symbols: theta_l the local representation, the personal part; theta_g the head, the shared part.
A local step moves both, theta_g is averaged. The paper's tasks that train theta_l without labels
are left out. A newcomer trains its representation under the head that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from medfed.federation.card import Card
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """FedAvg over the head; all else is personal."""

    personal: str | tuple[str, ...] = "body"
    card: ClassVar[Card] = Card("Liang et al. 2020", "personal part", "all but the head")
