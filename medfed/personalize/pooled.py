"""Central training on the pooled data of all clients: the reference for a federation.

This is what one hospital with all data could reach. One model takes as many gradient steps as all
clients of a round have together, on batches that mix all clients' training samples. Every client
evaluates it on its data, so that it can be compared with any method, client by client.

Deviations from central training as a user would run it: a round is one call of the training loop,
so that with ``local.optimizer_state=fresh`` momentum starts anew every round, as for all methods.
The byte counts cover the model, not the data, which would have to leave the hospitals.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg, displacement


@dataclass(frozen=True)
class Pooled(FedAvg):
    """One model, trained on all training data."""

    trains_centrally: ClassVar[bool] = True
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    # Running statistics belong to the one model, even if other methods keep them local.
    buffers: ClassVar[tuple[tuple[BufferPolicy, BufferPolicy], ...]] = (("local", "averaged"),)
    card: ClassVar[Card] = Card("no federation", "baseline", privacy_exposure="pooled")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal != "none":
            raise ConfigError("algorithm=pooled trains one model; leave algorithm.personal=none.")

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """One client of the cohort trains in place of all."""
        turns = {"clients": float(len(cohort))}
        replies = yield {cohort[0]: Message("fit", {"shared": server["shared"]}, turns)}
        update = replies[cohort[0]].parts["shared"]
        return {**server, "shared": add(server["shared"], update)}

    def fit(self, client: Client, message: Message) -> Message:
        """Takes the steps of all clients of the cohort."""
        start = {**message.parts["shared"], **client.state["personal"]}  # buffers, where frozen
        end = client.train(start, steps=round(message.scalars["clients"]) * client.steps)
        # What is no entry is no one's: the clients take turns, and all of them evaluate the model.
        shared, _ = client.split.split(end)
        return displacement(shared, message.parts["shared"])
