"""FedSplit: Peaceman-Rachford splitting, whose fixed point is the joint optimum.

Pathak, Wainwright: FedSplit: An algorithmic framework for fast federated optimization, NeurIPS
2020, Algorithm 1. In every round, at every client, and then at the server:

    y_i = argmin f_i(y) + |y - (2 w - z_i)|^2 / (2 s)
    z_i <- z_i + 2 (y_i - w)
    w <- sum_i p_i z_i

| symbol | here |
|---|---|
| w (the paper's x) | ``server["shared"]`` |
| z_i | ``state["copy"]``, parameters |
| s | ``step``; the paper's is 1 / sqrt(mu L) of mu-convex and L-smooth f_i |
| p_i | ``weighting``; the paper's are 1/N |

The proximal map is at 2 w - z_i. At w it would be another method with another limit.

Deviations:
- The round's steps of the run's optimizer from w approximate the minimum.
- Clients send 2 (y_i - w), the displacement of z_i. All take part in every round, so w moves by its
  mean.
- z_i covers shared parameters. A personal part is trained as in FedPer, averaged statistics are
  averaged as in FedAvg.
- Behind a lossy codec w is no longer the mean of the z_i.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedSplit(FedAvg):
    """FedAvg's exchange around a reflected proximal step.

    Attributes:
        step: s > 0, how far a client may go: the inverse weight of the proximal term.
    """

    step: Annotated[float, check_positive, Range(1.0, 100.0)] = 10.0
    supports_missing_channels: ClassVar[bool] = False
    card: ClassVar[Card] = gradients_only(
        "Pathak, Wainwright 2020", client={"personal": 1, "weights": 1},
        note="for convex losses only", full_cohort=True,
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        return {"copy": select(weights, split.parameters("shared"))}

    def fit(self, client: Client, message: Message) -> Message:
        received, z = message.parts["shared"], client.state["copy"]
        w = select(received, z)
        # The proximal map is around the reflection 2w - z.
        tie = Proximity(1 / self.step, add(w, subtract(w, z)))
        end = client.train({**received, **client.state["personal"]}, penalty=tie)
        shared, client.state["personal"] = client.split.split(end)
        update = subtract(shared, received)
        # z moves by 2 (y - w). Running statistics have no z and move by y - w.
        twice = {n: 2 * update[n] for n in z}
        client.state["copy"] = add(z, twice)
        return Message("fit", {"shared": {**update, **twice}}, kinds={"shared": "update"})
