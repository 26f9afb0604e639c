"""FedAvg: local steps from the server's weights, averaged.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks
from decentralized data, AISTATS 2017, Algorithm 1.

Symbols: w ``shared``, w_k − w ``update``, n_k/n ``weighting="samples"``.

Deviation: clients send the displacement w_k − w instead of w_k. The mean is the same, and a lossy
codec acts on something small. Entries that the split declares personal stay with the client. FedAvg
itself declares none (except buffers that the run keeps local); FedPer and FedBN declare some.
"""

from __future__ import annotations

from medfed.method import *


def displacement(after: Tensors, before: Tensors, new: bool = False) -> Message:
    """Returns the reply that holds how far the shared part has moved.

    So a lossy codec spends its bits on the change. If `new`, nobody else has the tensors of
    `after`, and the result takes their memory.
    """
    moved = weighted_sum(after, before, -1) if new else subtract(after, before)
    return Message("fit", {"shared": moved}, kinds={"shared": "update"})


class KeepsModel:
    """The client's state holds its whole personal model, so the server delivers nothing."""

    def broadcast(self, server: State, client: str) -> Message:
        """Returns nothing: the client already has its personal model."""
        return Message("deliver")

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """The model that the client keeps."""
        return client.state["model"]


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Averages the shared part; the personal part, if any, is trained jointly and kept.

    Attributes:
        server_zeros: The server's states that start as zeros of the shared parameters' shapes.
        client_zeros: Such states of a client.
    """

    averages_moments: ClassVar[bool] = True
    parts_averaged: ClassVar[tuple[str, ...]] = ("shared",)
    server_zeros: ClassVar[tuple[str, ...]] = ()
    client_zeros: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = gradients_only("McMahan et al. 2017")

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """The server holds the shared part, each client its personal part."""
        shared, personal = split.split(weights)
        # Of one number each in memory, as every client may refer to them for all rounds.
        like = select(weights, split.parameters("shared"))
        zero = {n: t.new_zeros([min(s, 1) for s in t.shape]).expand_as(t) for n, t in like.items()}
        server = {"shared": shared, "num_samples": client_sizes(clients)}
        client = {"personal": personal, **dict.fromkeys(self.client_zeros, zero)}
        more = self.client_start(weights, split)
        return {**server, **dict.fromkeys(self.server_zeros, zero)}, {**client, **more}

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        """Returns what a client has at the start besides its personal part and zeros."""
        return {}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Adds the mean displacement: w ← w + Σ_k p_k (w_k − w)."""
        phase, scalars = self.phases(round)[0], self.scalars(round)
        replies = yield {c: Message(phase, self.outgoing(server), scalars) for c in cohort}
        return self.closed(server, replies)

    def outgoing(self, server: State) -> dict[str, Tensors]:
        """Returns the parts that the server sends to each client."""
        return {"shared": server["shared"]}

    def scalars(self, round: int) -> dict[str, float]:
        """Returns the numbers that the server sends with the shared part."""
        return {}

    def closed(self, server: State, replies: Replies) -> State:
        """Returns the server's state after the replies."""
        return {**server, "shared": self.moved(server, replies)}

    def moved(self, server: State, replies: Replies) -> Tensors:
        """Returns the shared part plus the mean of the replies."""
        return add(server["shared"], self.mean(server, replies, "shared"))

    def fit(self, client: Client, message: Message) -> Message:
        """Trains from the received shared part and replies with its displacement."""
        start = {**message.parts["shared"], **client.state["personal"]}
        return self.displaced(client, message, self.local_steps(client, start))

    def displaced(self, client: Client, message: Message, end: Tensors) -> Message:
        """Keeps the personal part of a trained model; returns the shared part's displacement."""
        shared, client.state["personal"] = client.split.split(end)
        # A method with one of these of its own may use what it has trained elsewhere.
        seams = ("fit", "local_steps", "displaced")
        new = all(getattr(type(self), name) is getattr(FedAvg, name) for name in seams)
        return displacement(shared, message.parts["shared"], new)

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Trains one client; variants of FedAvg override this."""
        return client.train(start)

    def broadcast(self, server: State, client: str) -> Message:
        """The shared part."""
        return Message("deliver", self.outgoing(server))

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """Joins the shared part and the entries that the client keeps."""
        return {**message.parts["shared"], **client.state["personal"]}


@dataclass(frozen=True)
class WithLocalModel(FedAvg):
    """FedAvg whose clients also keep a local model, from their first round on.

    Attributes:
        local_model: The name of the client's state that holds it.
    """

    local_model: ClassVar[str] = "model"

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        return {**server, "heard": {}}, client

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        return {self.local_model: {}}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        server = yield from super().round(server, cohort, round)
        return {**server, "heard": {**server["heard"], **dict.fromkeys(cohort, torch.ones(1))}}

    def broadcast(self, server: State, client: str) -> Message:
        """Returns nothing once the client has a local model."""
        known = client in server["heard"]
        return Message("deliver") if known else super().broadcast(server, client)

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """Returns the client's local model; before its first round FedAvg's."""
        return client.state[self.local_model] or super().personal_model(client, message)
