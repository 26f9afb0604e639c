"""Local training: clients train without communication. Personalization must beat this baseline.

There is no paper: this is the limit of every personalized method at coupling zero.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import KeepsModel


@dataclass(frozen=True)
class Local(KeepsModel, Algorithm):
    """Each client trains its own model with the round's whole budget."""

    parts_sent: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[Card] = gradients_only(
        "the limit of all", "baseline", "everything", down={}, up={}, server={}, client={"model": 1}
    )

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        return {}, {"model": weights}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends empty messages, which only start the round."""
        yield {client: Message("fit") for client in cohort}
        return server

    def fit(self, client: Client, message: Message) -> Message:
        client.state["model"] = client.train(client.state["model"])
        return Message("fit")
