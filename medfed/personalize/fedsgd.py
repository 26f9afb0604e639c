"""FedSGD: one gradient-descent step per round, on the mean of all clients' gradients.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks
from decentralized data, AISTATS 2017, Section 2, the baseline of Algorithm 1 (E = 1, B = infinity):

    w <- w - eta sum_k (n_k / n) grad f_k(w)

Symbols: w ``shared``, eta the optimizer's step size in the round, n_k/n ``weighting="samples"``.

A gradient covers an epoch, for every batch size: a training step would use one minibatch and the
optimizer's momentum, which is another method. The optimizer's momentum, its weight decay and
``local.clip`` are not used.

Deviations: clients send -eta grad f_k(w), a displacement as in FedAvg. A personal part takes a
gradient step at its client. BatchNorm's statistics follow the batches of the round's steps, which
move no parameter.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """FedAvg whose clients take one gradient-descent step."""

    card: ClassVar[Card] = gradients_only(
        "McMahan et al. 2017", passes=0, extra_passes="an epoch's gradient, BatchNorm's batches",
        note="one gradient a round: needs many rounds",
    )  # fmt: skip

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        return epoch

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        gradient = client.gradient(start)
        moved = add(select(start, gradient), gradient, -client.learning_rate)
        return {**start, **statistics_at(client, start), **moved}
