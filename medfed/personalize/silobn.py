"""SiloBN: running statistics of BatchNorm stay personal, all weights are averaged.

Andreux, Ogier du Terrail, Beguier, Tramel: Siloed federated learning for multi-centric
histopathology datasets, 2020.

FedBN keeps gamma and beta of a normalisation layer, too; SiloBN shares them. The statistics are
those that training gathers: they are evaluated and delivered even where
``evaluation.normalization=reestimated`` estimates those of other methods again.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class SiloBN(FedAvg):
    """FedAvg whose clients keep their running statistics (``buffers=local``)."""

    needs: ClassVar[Needs | None] = "statistics"
    buffers: ClassVar[tuple[tuple[BufferPolicy, BufferPolicy], ...]] = (("averaged", "local"),)
    normalization: ClassVar[Normalization | None] = "kept"
    card: ClassVar[Card] = Card(
        "Andreux et al. 2020", "personal part", "statistics of BatchNorm",
        tasks="all, with BatchNorm", privacy_exposure="statistics",
    )  # fmt: skip
