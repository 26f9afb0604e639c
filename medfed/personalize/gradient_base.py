"""Shared by methods whose clients reply with gradients of one model and take no step."""

from __future__ import annotations

from statistics import median

from medfed.method import *
from medfed.personalize.fedavg import FedAvg


@dataclass(frozen=True)
class GradientMethod(FedAvg):
    """One model, whose BatchNorm statistics follow the batches of the round's steps."""

    supports_missing_channels: ClassVar[bool] = False
    parts_sent: ClassVar[tuple[str, ...]] = ("gradient", "difference", "statistics")
    parts_averaged: ClassVar[tuple[str, ...]] = parts_sent
    card: ClassVar[Card] = Card(
        passes=0, extra_passes="an epoch's gradient at two points, BatchNorm's batches",
        note="one gradient a round: needs many rounds", full_cohort=True,
        privacy_exposure="several",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal != "none":
            raise ConfigError(f"{self.title} has one model for all; leave algorithm.personal=none.")

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        return epoch

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        lengths = super().vectors(split, weights)
        return {**lengths, "statistics": lengths["shared"] - lengths["weights"]}

    def reply(self, client: Client, message: Message, model: Tensors, parts: State) -> Message:
        """Returns a client's gradients, and the displacement of its statistics if there are any."""
        statistics = statistics_at(client, model)
        personal = {n: t for n, t in statistics.items() if n not in client.split.shared}
        client.state["personal"] = {**client.state["personal"], **personal}
        if shared := {n: t for n, t in statistics.items() if n not in personal}:
            parts = {**parts, "statistics": subtract(shared, model)}
        kinds = dict.fromkeys(parts, "update")
        return Message(message.phase, parts, {"rate": client.learning_rate}, kinds)  # type: ignore[arg-type]

    def stepped(self, server: State, replies: Replies, direction: Tensors) -> Tensors:
        """Returns the shared part after a step of the clients' rate against a direction."""
        moved = add(select(server["shared"], direction), direction, -rate_of(replies))
        return {**server["shared"], **moved, **self.statistics(server, replies)}

    def statistics(self, server: State, replies: Replies) -> Tensors:
        """Returns the new shared statistics: means, as in FedAvg."""
        if not all("statistics" in m.kinds for m in replies.values()):
            return {}
        mean = self.mean(server, replies, "statistics")
        return add(select(server["shared"], mean), mean)


def rate_of(replies: Replies) -> float:
    """Returns the clients' rate; all are equal, unless a site sends another number."""
    return median(m.scalars["rate"] for m in replies.values())
