"""Fine-tuning: FedAvg for most of the run, then every client trains its copy of the model.

This is the simplest personalisation; see Yu, Bagdasaryan, Shmatikov: Salvaging federated learning
by local adaptation, arXiv:2002.04758 (where it is called FT).

Deviation: the paper trains on after the federated run. Here the last ``local_share`` of the run's
rounds is local, so that methods are compared on equal budgets, and every local round is validated
like any other: if local training does harm, an earlier round is selected.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class FineTune(TrainsOn, FedAvg):
    """FedAvg whose last rounds are local.

    Attributes:
        local_share: Share of the run's rounds that is local, in [0, 1]; 0 is FedAvg, 1 is local
            training. Any share above 0 gives at least one round.
        rounds: Rounds of the whole run.
    """

    local_share: Annotated[float, within("[0, 1]"), Range(0.05, 0.5, log=False)] = 0.2
    rounds: Annotated[int, check_count] = 10
    card: ClassVar[Card] = gradients_only(
        "Yu et al. 2020", "personal part", "a copy, in the last rounds",
        client={"personal": 1, "model": 1},
    )  # fmt: skip

    @property
    def first_local(self) -> int:
        """The first local round, from 0; ``rounds`` if there is none.

        Example:
            >>> [FineTune(local_share=s, rounds=10).first_local for s in (0, 0.01, 0.2, 1)]
            [10, 9, 8, 0]
        """
        local = round(self.local_share * self.rounds)
        return self.rounds - (max(1, local) if self.local_share else 0)

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """In addition to FedAvg's state, the server records which clients have their copy."""
        server, client = super().init(weights, split, clients)
        return {**server, "copied": {}}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """A round of FedAvg, or a local round, before which a client gets the model once."""
        if round < self.first_local:
            return (yield from super().round(server, cohort, round))
        yield {client: self._go(server, client) for client in cohort}
        return {**server, "copied": {**server["copied"], **dict.fromkeys(cohort, torch.ones(1))}}

    def _go(self, server: State, client: str) -> Message:
        # All clients start from the initial model, which is not sent.
        if client in server["copied"] or self.first_local == 0:
            return Message("fit")
        return Message("fit", {"shared": server["shared"]}, {"keep": 1.0})

    def fit(self, client: Client, message: Message) -> Message:
        """As in FedAvg, or trains the client's copy and replies with nothing."""
        if message.parts and "keep" not in message.scalars:
            return super().fit(client, message)
        if message.parts:
            start = self.personal_model(client, message)
        else:
            start = client.state.get("model", client.weights)
        client.state["model"] = client.train(start)
        return Message("fit")

    def broadcast(self, server: State, client: str) -> Message:
        if client in server["copied"]:
            return Message("deliver")
        return super().broadcast(server, client)

    def personal_model(self, client: Client, message: Message) -> Tensors:
        if message.parts:
            return super().personal_model(client, message)
        return client.state["model"]
