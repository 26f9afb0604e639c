"""Per-FedAvg: learns a shared model that one local gradient step adapts well to each client.

Fallah, Mokhtari, Ozdaglar: Personalized federated learning with theoretical guarantees: a
model-agnostic meta-learning approach, NeurIPS 2020, Algorithm 1, for F_i(w) = f_i(w - alpha grad
f_i(w)). A local step takes fresh batches D, D', D'':

    w~ = w - alpha grad f_i(w; D),   g = grad f_i(w~; D')
    first order:   d = g
    Hessian-free:  d = g - alpha/(2 delta) [grad f_i(w + delta g; D'') - grad f_i(w - delta g; D'')]
    w <- w - beta d

| symbol | here |
|---|---|
| alpha, delta | ``inner_lr``, ``delta`` |
| beta | the optimizer's step size; the optimizer steps along d |
| w - alpha grad f_i(w) | ``state["adapted"]``, the client's model for prediction |

The finite difference is at w, not at w~. ``variant=fo`` costs two gradients a step, ``hf`` four.

Deviations:
- The evaluated model takes its step of alpha in a separate phase, from the round's mean, on one
  batch. The next round starts from this mean, which is not sent again. An absent client keeps
  the model of its last round.
- Running statistics come from the batches at w.
"""

from __future__ import annotations

from typing import Literal

from medfed.method import *
from medfed.personalize.fedavg import FedAvg, displacement


@dataclass(frozen=True)
class PerFedAvg(OnboardingRules, FedAvg):
    """FedAvg whose local steps lower the loss after one further step on the client.

    Attributes:
        variant: ``fo`` (first order) or ``hf`` (Hessian-free).
        inner_lr: alpha >= 0; 0 is FedAvg.
        delta: The step of the finite difference, positive.
    """

    variant: Literal["fo", "hf"] = "fo"
    inner_lr: Annotated[float, check_not_negative, Range(0.001, 0.1)] = 0.01
    delta: Annotated[float, check_positive] = 1e-3
    card: ClassVar[Card] = gradients_only(
        "Fallah et al. 2020", "second model", "one step from the shared model", passes=2,
        extra_passes="a batch, to adapt; hf: two more a step",
        client={"personal": 1, "parameters": 1},
    )  # fmt: skip

    def phases(self, round: int) -> tuple[str, ...]:
        """A phase of meta-steps, then one of the step from their mean."""
        return ("fit", "adapt")

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        """Each gradient of a step has a batch of its own, except the last two of ``hf``."""
        return (2 if self.variant == "fo" else 3) * steps + 1

    @property
    def gradients_per_batch(self) -> int:
        return 1 if self.variant == "fo" else 2

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        held = {c.id: torch.ones(1) for c in clients}
        return {**server, "held": held}, {**client, "held": server["shared"], "adapted": weights}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """As in FedAvg; then sends the new model."""
        w, held = {"shared": server["shared"]}, server["held"]
        # Clients of the last cohort received this model to adapt it.
        replies = yield {c: Message("fit", {} if c in held else w) for c in cohort}
        w = {"shared": add(server["shared"], self.mean(server, replies, "shared"))}
        yield {c: Message("adapt", w) for c in cohort}
        return {**server, **w, "held": dict.fromkeys(cohort, torch.ones(1))}

    def fit(self, client: Client, message: Message) -> Message:
        """Takes meta-steps on the shared part, or the step to the evaluated model."""
        held = message.parts.get("shared", client.state["held"])
        start = {**held, **client.state["personal"]}
        if message.phase == "adapt":
            client.state |= {"held": held, "adapted": self.adapt(client, start)}
            return Message("adapt")
        shared, client.state["personal"] = client.split.split(self.local_steps(client, start))
        return displacement(shared, held)

    def adapt(self, client: Client, w: Tensors) -> Tensors:
        """Takes a step of alpha on one batch."""
        gradient = client.gradient(w, batches=1)
        return {**w, **add(select(w, gradient), gradient, -self.inner_lr)}

    def local_steps(self, client: Client, start: Tensors) -> Tensors:
        return client.train(start, direction=self.direction)

    def direction(self, w: Mapping[str, Tensor], grad_at: GradientAt) -> Tensors:
        g = grad_at(add(w, grad_at(w), -self.inner_lr), fresh=1)
        if self.variant == "fo":
            return g
        up, down = (grad_at(add(w, g, way * self.delta), fresh=2) for way in (1, -1))
        return add(g, subtract(up, down), -self.inner_lr / (2 * self.delta))

    def broadcast(self, server: State, client: str) -> Message:
        return Message("deliver")

    def personal_model(self, client: Client, message: Message) -> Tensors:
        return client.state["adapted"]

    def onboard(self, client: Client, message: Message) -> Tensors:
        """An onboarded client takes one step from the shared model, like all."""
        return self.adapt(client, self.onboarding_start(client, message))
