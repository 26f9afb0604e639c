"""FedDyn: a linear term in each client's loss makes all agree on the joint optimum.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated learning based on dynamic
regularization, ICLR 2021, Algorithm 1:

    theta_i = argmin f_i(theta) - <gamma_i, theta> + (alpha/2) |theta - w|^2,   from theta = w
    gamma_i <- gamma_i - alpha (theta_i - w)
    h <- h - alpha sum_S p_i (theta_i - w)
    w <- sum_S p_i theta_i / sum_S p_i - h / alpha

| symbol | here |
|---|---|
| w (the paper's theta^t), h | ``server["shared"]``, ``server["drift"]`` |
| gamma_i (the paper's grad L_i of the last round) | ``state["dual"]`` |
| alpha | ``strength`` |
| p_i | ``weighting``, over all clients; the paper's are 1/N |

h is the mean of all gamma_i, including those of absent clients. The proximal term is squared;
without the square its gradient would have length 1 everywhere.

Deviations:
- The linear and the proximal term are one: (alpha/2) |theta - (w + gamma_i / alpha)|^2.
- The round's steps of the run's optimizer approximate the minimum. No displacement is divided by a
  number of steps, so momentum needs no correction: if gamma_i is the gradient, no client moves. The
  length of Adam's steps is not the gradient's, so they end near the optimum, not at it.
- p_i replaces 1/N, so that the sum of p_i f_i is minimised.
- h and gamma_i cover shared parameters. A personal part is trained as in FedPer, averaged
  statistics are averaged as in FedAvg.
- Behind a lossy codec h is no longer the mean of the gamma_i.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """FedAvg whose local losses are regularised anew in every round.

    Attributes:
        strength: alpha > 0; a small alpha takes large steps, as w goes h / alpha beyond the mean.
    """

    strength: Annotated[float, check_positive, Range(0.001, 1.0)] = 0.1
    supports_missing_channels: ClassVar[bool] = False
    server_zeros: ClassVar[tuple[str, ...]] = ("drift",)
    client_zeros: ClassVar[tuple[str, ...]] = ("dual",)
    card: ClassVar[Card] = gradients_only(
        "Acar et al. 2021", server={"shared": 1, "weights": 1},
        client={"personal": 1, "weights": 1},
    )  # fmt: skip

    def closed(self, server: State, replies: Replies) -> State:
        """Moves h by the cohort's part of all clients, w to the mean and by -h / alpha."""
        mean = self.mean(server, replies, "shared")
        # Only the cohort's part, as the gamma_i of absent clients do not change.
        drift = add(server["drift"], mean, -self.strength * self.part(server, replies))
        shared = add(server["shared"], mean)
        corrected = add(select(shared, drift), drift, -1 / self.strength)
        return {**server, "shared": {**shared, **corrected}, "drift": drift}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        dual = client.state["dual"]
        w = select(start, dual)
        # (alpha/2) |x - w|^2 - <gamma, x> is a square around w + gamma / alpha plus a constant.
        anchor = add(w, dual, 1 / self.strength)
        end = client.train(start, penalty=Proximity(self.strength, anchor))
        # At a minimum of the local loss this is the gradient of f_i there.
        client.state["dual"] = add(dual, subtract(select(end, dual), w), -self.strength)
        return end
