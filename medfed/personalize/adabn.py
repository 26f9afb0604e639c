"""AdaBN: FedAvg's model with each client's own statistics of BatchNorm.

Li, Wang, Shi, Liu, Hou: Revisiting batch normalization for practical domain adaptation, 2016.

The weights are those of FedAvg. Before a model is evaluated or delivered, one pass over a client's
training inputs, without their labels, estimates its running statistics again, as plain means over
batches. This removes gain and offset of a scanner exactly where the first layer normalises.

By default ``evaluation.normalization=reestimated`` does the same for every method, and ``adabn`` is
``fedavg``. With ``kept``, ``adabn`` alone has re-estimated statistics.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class AdaBN(FedAvg):
    """FedAvg with re-estimated running statistics, whatever ``evaluation.normalization`` says."""

    needs: ClassVar[Needs | None] = "statistics"
    normalization: ClassVar[Normalization | None] = "reestimated"
    card: ClassVar[Card] = Card(
        "Li et al. 2016", "personal part", "statistics of BatchNorm, estimated again",
        tasks="all, with BatchNorm", note="equals fedavg unless evaluation.normalization=kept",
        privacy_exposure="statistics",
    )  # fmt: skip
