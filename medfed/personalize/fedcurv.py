"""FedCurv: clients stay near each other's models where those are certain.

Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: Overcoming forgetting in federated
learning on non-IID data, 2019 (arXiv:1910.07796), Equation 4:

    min_w f_i(w) + strength sum_{j in S, j != i} (w - w_j)^T diag(I_j) (w - w_j)

with w_j and I_j the model and the diagonal Fisher information of each client of the last round.
Only sums travel down: u = sum_j I_j and v = sum_j I_j w_j; a client subtracts its own terms.

| symbol | here |
|---|---|
| u, v | ``server["fisher"]``, ``server["pull"]`` |
| I_i, I_i w_i | ``state["fisher"]``, ``state["pull"]`` |
| S | ``server["last"]`` |

Deviations:
- I_i is B times the mean of the squared gradients of ``fisher_batches`` batches of B samples at
  w_i: with B = 1 the paper's; else an estimate, which is right where the mean gradient is 0.
- Personal entries and statistics are not tied.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FedCurv(FedAvg):
    """FedAvg with a quadratic penalty around the others' last models.

    Attributes:
        strength: The weight of the penalty; 0 is FedAvg.
        fisher_batches: Batches for the Fisher information.
    """

    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 0.1
    fisher_batches: Annotated[int, check_count] = 1
    supports_missing_channels: ClassVar[bool] = False
    server_zeros: ClassVar[tuple[str, ...]] = ("fisher", "pull")
    client_zeros: ClassVar[tuple[str, ...]] = server_zeros
    parts_sent: ClassVar[tuple[str, ...]] = ("shared", "fisher")
    # The sums of Fisher information and pulls take each client's reply, not a mean.
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = Card(
        "Shoham et al. 2019", down={"shared": 1, "weights": 2}, up={"shared": 1, "weights": 1},
        extra_passes="a batch, for the Fisher information", server={"shared": 1, "weights": 2},
        client={"personal": 1, "weights": 2}, privacy_exposure="several",
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        return {**server, "last": {}}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends w, u and v; receives displacements and Fisher information."""
        parts = {part: server[part] for part in ("shared", "fisher", "pull")}
        last = {c: float(c in server["last"]) for c in cohort}
        replies = yield {c: Message("fit", parts, {"last": last[c]}) for c in cohort}
        zero = {n: torch.zeros_like(t) for n, t in server["fisher"].items()}
        fisher, pull = zero, zero
        for reply in replies.values():
            fisher = add(fisher, reply.parts["fisher"])
            model = add(select(server["shared"], zero), select(reply.parts["shared"], zero))
            pull = add(pull, {n: t * model[n] for n, t in reply.parts["fisher"].items()})
        took_part = {c: torch.ones(()) for c in replies}
        return {**self.closed(server, replies), "fisher": fisher, "pull": pull, "last": took_part}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains under the penalty, then estimates the Fisher information at the end."""
        received, last = message.parts, message.scalars["last"]
        others = {p: add(received[p], client.state[p], -last) for p in ("fisher", "pull")}
        # A rounded sum minus a client's own term must not bend the loss downwards.
        others["fisher"] = {n: t.clamp(min=0) for n, t in others["fisher"].items()}
        start = {**received["shared"], **client.state["personal"]}
        end = client.train(start, penalty=Curvature(self.strength, **others))
        total = {n: torch.zeros_like(t) for n, t in others["fisher"].items()}
        for _ in range(self.fisher_batches):
            gradient = client.gradient(end, update="shared", batches=1)
            total = add(total, {n: t.square() for n, t in gradient.items()})
        size = min(client.data.batch_size, client.data.num_samples) / self.fisher_batches
        fisher = {n: size * t for n, t in total.items()}
        shared, personal = client.split.split(end)
        pull = {n: t * shared[n] for n, t in fisher.items()}
        client.state = {"personal": personal, "fisher": fisher, "pull": pull}
        parts = {"shared": subtract(shared, received["shared"]), "fisher": fisher}
        return Message("fit", parts, kinds={"shared": "update", "fisher": "update"})


@dataclass(frozen=True)
class Curvature:
    """The penalty s sum_j (w - w_j)^T diag(I_j) (w - w_j), but for a constant.

    Attributes:
        strength: s.
        fisher: sum_j I_j.
        pull: sum_j I_j w_j.

    Example:
        >>> one = {"w": torch.tensor([2.0])}
        >>> Curvature(0.5, one, {"w": torch.tensor([6.0])})({"w": torch.tensor([3.0])})
        tensor(-9.)
    """

    strength: float
    fisher: Mapping[str, Tensor]
    pull: Mapping[str, Tensor]

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        w, v = parameters, self.pull
        terms = [(u * w[n].square() - 2 * v[n] * w[n]).sum() for n, u in self.fisher.items()]
        return self.strength * torch.stack(terms).sum() if terms else torch.zeros(())
