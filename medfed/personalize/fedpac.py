"""FedPAC: bodies are averaged and aligned by class, and each client's head is a mixture of heads.

Xu, Tong, Huang: Personalized federated learning with feature alignment and classifier
collaboration, ICLR 2023, Algorithm 1. With z the d features that enter the head g:

    head: steps of g on the task loss, then body: steps on it + lambda mean |z - C_y|^2 / d
    C_y <- sum_i n_iy C_iy / sum_i n_iy,   C_iy the mean of z over the n_iy samples of class y
    g_i <- sum_j a_ij g_j,   a_i on the simplex least in sum_j a_j^2 V_j + |sum_j a_j h_j - h_i|^2

| symbol | here |
|---|---|
| C_y | the quotient of ``server["features"]``'s sums and shares; a class keeps its last ones |
| C_iy | from one pass over the training samples after the local steps |
| h_i | K x d, share of class y times the mean of z over it, at the body that arrives |
| V_i | trace of the covariance of (1[y = k] z)_k, divided by the number of patients |
| g_i | ``server["head/ID"]``, the mixture; ``server["sent/ID"]`` what the last cohort sent |
| lambda | ``strength`` |

Equal distributions give a_ij in proportion to 1 / V_j; hospitals far from all keep their own heads.

Deviations:
- The authors drop eigenvalues below 0.01 where rounding makes the quadratic form indefinite. Here
  the form is a sum of squares, and is minimised as it is.
- V_i is divided by patients, not by samples, as samples of one patient resemble each other.
- A class of fewer than ``least_patients`` patients is not sent, and counts as absent in C and h. A
  hospital without any other class keeps its head, and no other takes it.
- A head's bias is mixed with its weights; h and V do not see it.
- Clients predict by the mixture at the newest body.
"""

from __future__ import annotations

from medfed.functional.mixing import minimum_norm
from medfed.method import *
from medfed.personalize.anchored_base import mixtures
from medfed.personalize.features_base import SHARES, SUMS, SendsFeatures, alignment, newest
from medfed.personalize.fedrep import FedRep

VARIANCE = "variance"


@dataclass(frozen=True)
class FedPAC(OnboardingRules, SendsFeatures, FedRep):
    """FedRep whose features are drawn together by class, and whose heads the server mixes.

    Attributes:
        strength: lambda >= 0; 0 draws no features together.
        head_share: Share of the local steps that go to the head, in (0, 1).
        least_patients: The fewest patients behind a class that leaves a hospital.
    """

    personal: str | tuple[str, ...] = "task"
    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 1.0
    by_class: ClassVar[bool] = True
    parts_sent: ClassVar[tuple[str, ...]] = ("shared", "personal", "features", "compared")
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = Card(
        "Xu et al. 2023", "similar clients", "the head, mixed with those of similar clients",
        {"shared": 1, "personal": 1, "features": 1}, {"shared": 1, "personal": 1, "features": 2},
        extra_passes="two passes of the training samples a round",
        server={"shared": 1, "personal": "2 N + 1", "features": "N + 1"}, tasks="classification",
        note="the server sees each hospital's head and mean features, which masks cannot hide",
        privacy_exposure="outputs",
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        head = select(weights, split.parameters("personal"))
        return {**server, "start": head, **{f"head/{c.id}": head for c in clients}}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Averages bodies and features, and mixes the heads of the cohort."""
        replies = yield {c: self.sent_to(c, server, "fit") for c in cohort}
        known = {n: t for n, t in server.items() if not n.startswith(("sent/", "compared/"))}
        heads = {c: add(server[f"head/{c}"], m.parts["personal"]) for c, m in replies.items()}
        compared = {c: compared_by(message) for c, message in replies.items()}
        return {
            **self.closed(known, replies),
            "features": newest(self.mean_sums(server, replies), server["features"]),
            **{f"sent/{c}": head for c, head in heads.items()},
            **{f"compared/{c}": sums for c, sums in compared.items()},
            **{f"head/{c}": mixed_head(c, heads, compared) for c in heads},
        }

    def sent_to(self, client: str, server: State, phase: str) -> Message:
        """Returns the body, the means of all classes and the client's mixture."""
        return Message(phase, {**self.outgoing(server), "personal": server[f"head/{client}"]})

    def fit(self, client: Client, message: Message) -> Message:
        """Trains head and body, and replies with them and both sums; at onboarding the head."""
        start, received = self.personal_model(client, message), message.parts["personal"]
        rows = client.features(start)
        if message.phase == "alone":
            end = client.train(start, update="personal")
            client.state["shared"] = message.parts["shared"]
            reply = Message("alone")
        else:
            aims = message.parts.get("features", {})
            term = alignment(self.strength, aims)
            end = self.local_steps(client, start, batch_penalty=term)
            reply = self.displaced(client, message, end)
            reply = self.with_features(reply, self.sums_of(client, client.features(end)))
        sums = self.sums_of(client, rows)
        moved = {"personal": subtract(select(end, received), received), "compared": sums}
        kinds = {**reply.kinds, "personal": "update", "compared": "update"}
        scalars = {VARIANCE: variance_of(rows, sums)}
        return replace(reply, parts={**reply.parts, **moved}, scalars=scalars, kinds=kinds)

    def broadcast(self, server: State, client: str) -> Message:
        message = self.sent_to(client, server, "deliver")
        return replace(message, parts={n: message.parts[n] for n in ("shared", "personal")})

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """The body, and the mixture in place of the client's head."""
        return {**super().personal_model(client, message), **message.parts["personal"]}

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        """A newcomer trains its head alone; it is mixed with those of the last cohort."""
        reply = yield Message("alone", {"shared": server["shared"], "personal": server["start"]})
        heads, compared = (
            {n.removeprefix(place): t for n, t in server.items() if n.startswith(place)}
            for place in ("sent/", "compared/")
        )
        heads[client.id] = add(server["start"], reply.parts["personal"])
        compared[client.id] = compared_by(reply)
        return Message("deliver", {"personal": mixed_head(client.id, heads, compared)})

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        return {**client.weights, **client.state["shared"], **message.parts["personal"]}

    def onboard(self, client: Client, message: Message) -> Tensors:
        return with_statistics(client, self.onboarding_start(client, message))


def variance_of(rows: Features, sums: Tensors) -> float:
    """Returns V_i: how far h_i lies from its expectation, squared, of the classes that are sent.

    Example:
        >>> z, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
        >>> sums = {SUMS: torch.tensor([[2.0], [0.0]]), SHARES: torch.tensor([1.0, 0.0])}
        >>> variance_of(Features(z, labels, torch.tensor([7, 8]), z), sums)
        0.5
    """
    known = (sums[SHARES] > 0)[rows.labels]
    square = (rows.z.double().square().sum(1) * known).mean() - sums[SUMS].double().square().sum()
    return max(0.0, float(square)) / len(rows.patients.unique())


def compared_by(reply: Message) -> Tensors:
    """Returns h, the shares of the classes, and V of a reply."""
    variance = torch.tensor(reply.scalars[VARIANCE], dtype=torch.float64)
    return {**reply.parts["compared"], VARIANCE: variance}


def mixed_head(client: str, heads: State, compared: State) -> Tensors:
    """Returns a client's mixture of the heads of all who sent a class; else its own head."""
    known = [c for c in heads if compared[c][SHARES].any()]
    if client not in known:
        return heads[client]
    sums = torch.stack([compared[c][SUMS] for c in known])
    variances = torch.stack([compared[c][VARIANCE] for c in known])
    weights = head_weights(sums, variances, known.index(client))
    return mixtures([heads[c] for c in known], weights[None])[0]


def head_weights(sums: Tensor, variances: Tensor, client: int) -> Tensor:
    """Returns a_i, the weights of all heads in a client's mixture; sums h are ``(N, K, d)``.

    Example:
        >>> sums = torch.tensor([[[0.0]], [[0.0]], [[9.0]]])
        >>> head_weights(sums, torch.tensor([1.0, 3.0, 1.0]), client=0).round(decimals=2)
        tensor([0.7400, 0.2500, 0.0100], dtype=torch.float64)
    """
    gaps = (sums - sums[client]).flatten(1).double().cpu()
    form = gaps @ gaps.T + variances.double().cpu().diag()
    start = torch.full((len(sums),), 1 / len(sums), dtype=torch.float64)
    return torch.from_numpy(minimum_norm(form.numpy(), start.numpy()))
