"""Quantised local training: every client runs QuPeL's centralised Algorithm 1.

Ozkara, Singh, Data, Diggavi: QuPeL: Quantized personalization with applications to federated
learning, 2021, Algorithm 1:

    min over x, c of f(x) + f(Q_c(x)) + lambda R(x, c),  R(x, c) = min over z in C of |z - x|_1 / 2

| symbol | here |
|---|---|
| x, c | ``state["model"]``, ``state["centers"]`` |
| lambda(t) = slope * t, t the round from 1 | ``strength`` |
| eta_1 | the optimizer's step size; the proximal map follows the optimizer's step |
| eta_2 | ``center_lr``, divided by 10 at each of ``center_drops`` |
| P | ``sharpness`` of the soft quantiser |

A local step: x <- prox_x(x - eta_1 grad f(x)), then c <- prox_c(c - eta_2 h) with h the gradient
with respect to the centres at the quantised new x, on the same batch. With the soft quantiser the
gradient of f(Q_c(x)) joins that of f(x), as a plain step of eta_1 even where the optimizer has
momentum; with the hard one its derivative is zero, and parameters that are not quantised follow
grad f(x) alone.

Deviation: prox_c is exact. The printed linearisation has the sign reversed and overshoots.
"""

from __future__ import annotations

from typing import Literal

from medfed.method import *
from medfed.personalize.quantized_base import FULL, ProximalStep, QuantizedMethod


@dataclass(frozen=True)
class Quantized(QuantizedMethod):
    """Proximal steps of the weights and of their centres.

    Attributes:
        quantizer: ``hard``, or ``soft`` with a finite sharpness.
        sharpness: P > 0 of the soft quantiser.
        strength: Slope of lambda(t) >= 0.
        center_lr: eta_2 >= 0.
        center_drops: Shares of the rounds, ascending in (0, 1), at which eta_2 is divided by 10.
    """

    quantizer: Literal["hard", "soft"] = "hard"
    sharpness: Annotated[float, within("(0, inf)")] = 100.0
    strength: Annotated[float, check_not_negative, Range(1e-4, 0.01)] = 1e-4
    center_lr: Annotated[float, check_not_negative] = 1e-4
    center_drops: tuple[float, ...] = (0.5, 0.75)
    card: ClassVar[Card] = replace(
        QuantizedMethod.card, paper="Ozkara et al. 2021, Algorithm 1", passes=2
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        drops = list(self.center_drops)
        if drops != sorted(drops) or not all(0 < d < 1 for d in drops):
            shares = "shares of the rounds between 0 and 1, ascending"
            raise ConfigError(f"algorithm.center_drops must be {shares}, not {drops}.")

    @property
    def passes(self) -> float:
        """The card's without that of centres that stay, and with that of the soft quantiser."""
        if {self.bits, *(self.client_bits or {}).values()} == {FULL}:
            return self.card.passes - 1
        return self.card.passes - (self.center_lr == 0) + (self.quantizer == "soft")

    @property
    def gradients_per_batch(self) -> int:
        """Each pass of a step is of the same batch."""
        return int(self.passes)

    def scalars(self, round: int) -> dict[str, float]:
        """Returns the round's pull to the centres, lambda(t), and their step size, eta_2(t).

        Example:
            >>> algorithm = Quantized(strength=0.5, center_lr=1.0, rounds=4)
            >>> [sorted(algorithm.scalars(t).values()) for t in range(4)]
            [[0.5, 1.0], [1.0, 1.0], [0.1, 1.5], [0.01, 2.0]]
        """
        passed = sum(round >= share * self.rounds for share in self.center_drops)
        return {"strength": self.strength * (round + 1), "center_lr": self.center_lr / 10**passed}

    def step(self, client: Client, message: Message, centers: Tensors) -> ProximalStep:
        """Returns the proximal step of this round, from the client's current model."""
        strength, center_lr = (message.scalars[k] for k in ("strength", "center_lr"))
        sharpness = self.sharpness if self.quantizer == "soft" else None
        model, lr = client.state["model"], client.learning_rate
        return ProximalStep(model, centers, strength, lr, center_lr, sharpness)

    def advance(self, client: Client, message: Message, centers: Tensors) -> None:
        step = self.step(client, message, centers)
        client.state["model"] = client.train(client.state["model"], after_step=step)
        client.state["centers"] = step.centers
