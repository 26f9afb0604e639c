"""FedPD: every client has a copy of the model, and dual variables make the copies agree.

Zhang, Hong, Dhople, Yin, Liu: FedPD: A federated learning framework with adaptivity to non-IID
data, IEEE Transactions on Signal Processing 2021, Algorithm 1. In every round, at every client:

    x_i = argmin f_i(x) + <lambda_i, x - x0_i> + |x - x0_i|^2 / (2 eta)
    lambda_i <- lambda_i + (x_i - x0_i) / eta
    x_i+ = x_i + eta lambda_i

One coin decides for all: with probability 1 - p every client sends, and x0_i <- w = sum_i p_i x_i+;
else none does, and x0_i <- x_i+.

| symbol | here |
|---|---|
| w | ``server["shared"]`` |
| x0_i, lambda_i | ``state["anchor"]``, ``state["dual"]`` |
| eta | ``eta``, not the step size of the optimizer |
| p, the coin | ``skip``; ``seed`` and the round determine the coin |
| p_i | ``weighting``; the paper's are 1/N |

With p = 0 it is FedDyn with alpha = 1 / eta and gamma_i = -lambda_i, iterate by iterate, and
reaches the joint optimum. With a constant p > 0 it does not: the copies drift while none is sent.

Deviations:
- The linear and the proximal term are one: |x - (x0_i - eta lambda_i)|^2 / (2 eta).
- The round's steps of the run's optimizer from x0_i approximate the minimum (the paper's Oracle I).
- lambda_i covers shared parameters. A personal part is trained as in FedPer, averaged statistics
are
  averaged as in FedAvg.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedPD(FedAvg):
    """Primal and dual steps at the clients; the server averages in some rounds.

    Attributes:
        eta: How far a client may go, > 0: the inverse weight of the proximal term.
        skip: The share p of rounds in which nothing is sent, in [0, 1).
        seed: The run's seed, for the coin.
    """

    eta: Annotated[float, check_positive, Range(1.0, 100.0)] = 10.0
    skip: Annotated[float, within("[0, 1)")] = 0.0
    seed: int = 0
    supports_missing_channels: ClassVar[bool] = False
    client_zeros: ClassVar[tuple[str, ...]] = ("dual",)
    card: ClassVar[Card] = gradients_only(
        "Zhang et al. 2021", client={"personal": 1, "weights": 1}, full_cohort=True
    )

    def phases(self, round: int) -> tuple[str, ...]:
        """``fit`` if all clients send, ``silent`` if the coin says that none does."""
        return ("silent",) if coin(self.skip, self.seed, round, "silent") else ("fit",)

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends w if it is new, and takes the mean of what comes back."""
        (phase,) = self.phases(round)
        # After a silent round w is not new: each client continues from its x_i+.
        fresh = round == 0 or self.phases(round - 1) == ("fit",)
        parts = {"shared": server["shared"]} if fresh else {}
        replies = yield {c: Message(phase, parts) for c in cohort}
        if phase == "silent":
            return server
        return {**server, "shared": self.mean(server, replies, "shared")}

    def fit(self, client: Client, message: Message) -> Message:
        """x_i, lambda_i and x_i+, which is sent or kept."""
        start, dual = message.parts.get("shared") or client.state["anchor"], client.state["dual"]
        # <lambda, x - x_0> and |x - x_0|^2 / (2 eta) are one square around x_0 - eta lambda.
        tie = Proximity(1 / self.eta, add(select(start, dual), dual, -self.eta))
        end = client.train({**start, **client.state["personal"]}, penalty=tie)
        shared, client.state["personal"] = client.split.split(end)
        dual = add(dual, subtract(shared, start), 1 / self.eta)
        plus = {**shared, **add(select(shared, dual), dual, self.eta)}
        silent = message.phase == "silent"
        client.state |= {"dual": dual, "anchor": plus if silent else {}}
        return Message(message.phase, {} if silent else {"shared": plus})
