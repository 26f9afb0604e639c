"""Ditto: FedAvg for a global model, and a personal model that is tied to it.

Li, Hu, Beirami, Smith: Ditto: Fair and robust federated learning through personalization,
ICML 2021, Algorithm 1.

Symbols: w the shared model, v_k ``state["model"]``, λ ``strength``.
Deviation: the personal model has its own share of the round's gradient steps, so that all methods
have equal budgets; the paper does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medfed.errors import ConfigError
from medfed.federation.algorithm import ClientInfo
from medfed.federation.client import Client, share_of
from medfed.federation.message import Message
from medfed.federation.split import ParameterSplit
from medfed.federation.tensors import State, Tensors
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.functional.proximity import Proximity


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg for w, and v ← v − η(∇f(v) + λ(v − w)) beside it.

    Attributes:
        strength: λ ≥ 0, how strongly v is tied to w (0 is local training of v).

    Raises:
        ConfigError: If λ is negative.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.strength >= 0:
            raise ConfigError(f"algorithm.strength must not be negative, not {self.strength}.")

    def init(
        self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]
    ) -> tuple[State, State]:
        """Beside FedAvg's state each client holds its personal model."""
        server, client = super().init(weights, split, clients)
        return server, {**client, "model": weights}

    def fit(self, client: Client, message: Message) -> Message:
        """Updates v towards the received w, and w as in FedAvg."""
        received = message.parts["shared"]
        anchor = {n: received[n] for n in client.split.parameters("shared")}
        reply = super().fit(client, message)
        client.state["model"] = client.train(
            client.state["model"],
            steps=share_of(client.steps, 1, 2),
            penalty=Proximity(self.strength, anchor) if anchor else None,
        )
        return reply

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Half of the budget goes to the global model."""
        return client.train(start, steps=share_of(client.steps, 0, 2))

    def personal_model(self, client: Client, message: Message) -> Tensors:
        """The personal model v."""
        return client.state["model"]

    def join(self, client: Client, message: Message) -> Tensors:
        """A newcomer's v starts from w and is tied to it."""
        start = self.arrival(client, message)
        anchor = {n: start[n] for n in client.split.parameters("shared")}
        return client.train(start, penalty=Proximity(self.strength, anchor) if anchor else None)

    def broadcast(self, server: State, client: str) -> Message:
        """Nothing is lacking: the personal model is already at the client."""
        return Message("deliver")
