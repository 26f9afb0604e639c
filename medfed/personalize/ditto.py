"""Ditto: FedAvg for a global model, and a personal model that stays close to it.

Li, Hu, Beirami, Smith: Ditto: Fair and robust federated learning through personalization,
ICML 2021, Algorithm 1.

Symbols: w the shared model, v_k ``state["model"]``, λ ``strength``.
Deviation: the personal model has its own share of the round's gradient steps, so that all methods
have equal budgets. The paper does not count them; ``local.budget=paper`` gives each model the whole
budget.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.fedavg import FedAvg, KeepsModel


@dataclass(frozen=True)
class Ditto(KeepsModel, OnboardingRules, FedAvg):
    """FedAvg for w, and v ← v − η(∇f(v) + λ(v − w)) for the personal model.

    Attributes:
        strength: λ ≥ 0, how strongly v is tied to w (0 is local training of v).
    """

    strength: Annotated[float, check_not_negative, Range(0.01, 10.0)] = 1.0
    card: ClassVar[Card] = gradients_only(
        "Li et al. 2021", "second model", "a model", client={"personal": 1, "model": 1}
    )

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        """In addition to FedAvg's state, each client holds its personal model."""
        return {"model": weights}

    def fit(self, client: Client, message: Message) -> Message:
        """Updates v towards the received w, and w as in FedAvg."""
        reply = super().fit(client, message)
        # v is tied to the received w, not to the w that this client has trained.
        tie, steps = self.tie(client, message.parts["shared"]), client.share(1, 2)
        client.state["model"] = client.train(client.state["model"], steps=steps, penalty=tie)
        return reply

    def tie(self, client: Client, w: Tensors) -> Proximity:
        """(λ/2)‖v − w‖² over the shared parameters."""
        return Proximity(self.strength, select(w, client.split.parameters("shared")))

    def least_steps(self, steps: int) -> int:
        """The model that is sent has half of them."""
        return share_of(steps, 0, 2)

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        """Half of the budget goes to the global model."""
        return client.train(start, steps=client.share(0, 2))

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client's v starts from w and is tied to it."""
        start = self.onboarding_start(client, message)
        return client.train(start, penalty=self.tie(client, start))
