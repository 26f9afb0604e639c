"""FedALA: before each round a client learns, weight by weight, how much of the new model to take.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive local aggregation for personalized federated
learning, AAAI 2023, Algorithm 1 and Equations 4 to 6. With w received and v_i the client's last
model, the round starts from w in the lower layers, and in the top layers from

    v~ = v_i + (w - v_i) * W_i,   W_i <- clip(W_i - eta_W grad f_i(v~) * (w - v_i), 0, 1)

| symbol | here |
|---|---|
| v_i | ``state["local"]``, the client's model for prediction |
| W_i | ``state["weights"]``, of the top layers' parameters, 1 at the start |
| top p layers | the task's head |
| eta_W, s | ``weights_lr``, ``share`` of the training data for a pass of W_i |

W_i = 1 throughout is FedAvg, W_i = 0 keeps the head at the client. In a client's first round there
is no v_i: it starts from w. In its second round W_i is learned until it settles; later rounds take
one pass.

Deviations:
- W_i has settled when no element moves by more than ``tolerance`` in a pass; the paper and its code
  wait for the spread of the last losses.
- Learning W_i uses new batches, in addition to the round's steps.
"""

from __future__ import annotations

import math

from medfed.method import *
from medfed.personalize.fedavg import WithLocalModel


@dataclass(frozen=True)
class FedALA(TrainsOn, WithLocalModel):
    """FedAvg whose clients start from a learned mixture of the new head and their last head.

    Attributes:
        weights_lr: eta_W >= 0; 0 is FedAvg with local models.
        share: s in (0, 1].
        first_passes: The most passes that W_i may take to settle.
        tolerance: W_i has settled if no element moves farther than this, >= 0.
    """

    weights_lr: Annotated[float, check_not_negative, Range(0.1, 10.0)] = 1.0
    share: Annotated[float, within("(0, 1]")] = 0.8
    first_passes: Annotated[int, check_count] = 10
    tolerance: Annotated[float, check_not_negative] = 0.01
    local_model: ClassVar[str] = "local"
    needs: ClassVar[Needs | None] = "head"
    card: ClassVar[Card] = Card(
        "Zhang et al. 2023", "second model", "its last model, whose head it mixes in",
        extra_passes="an epoch, to learn the mixture",
        client={"personal": 1, "model": 1, "head": 1}, privacy_exposure="several",
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        return {**super().client_start(weights, split), "weights": {}}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        if client.state["local"]:
            start = {**start, **self.aggregate(client, start)}
        client.state["local"] = client.train(start)
        return client.state["local"]

    def aggregate(self, client: Client, w: Tensors) -> Tensors:
        """Learns W_i and returns the head v~."""
        local = select(client.state["local"], client.split.head)
        gap, learnt = subtract(select(w, local), local), client.state["weights"]
        weights = learnt or {n: torch.ones_like(t) for n, t in local.items()}
        batches = math.ceil(self.share * client.data.num_samples / client.data.batch_size)
        for _ in range(1 if learnt else self.first_passes):
            before = weights
            for _ in range(batches):
                mixture = {n: t + gap[n] * weights[n] for n, t in local.items()}
                g = client.gradient({**w, **mixture}, batches=1)
                weights = {n: t - self.weights_lr * g[n] * gap[n] for n, t in weights.items()}
                weights = {n: t.clamp(0, 1) for n, t in weights.items()}
            moved = [float(m.abs().max()) for m in subtract(weights, before).values()]
            if max(moved) <= self.tolerance:
                break
        client.state["weights"] = weights
        return {n: t + gap[n] * weights[n] for n, t in local.items()}
