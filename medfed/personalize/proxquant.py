"""ProxQuant: gradient steps, each followed by a proximal map towards fixed centres.

Bai, Wang, Liberty: ProxQuant: Quantized neural networks via proximal operators, ICLR 2019,
Algorithm 1:

    x <- prox_{eta lambda(t) R}(x - eta grad f(x)),  R(x) = min over z in C of |z - x|_1

Symbols: lambda(t) = slope * t with t the round from 1, ``strength``; eta, the optimizer's step
size. The map follows the optimizer's step. As in QuPeL, R is half of the paper's R.

With one bit the centres are plus and minus the mean magnitude of the initial weights (the paper's
are plus and minus 1, which leaves the scale to BatchNorm); with more they are k-means of the
initial weights, where the paper fits them anew in each step. Every client trains locally.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.quantized_base import ProximalStep, QuantizedMethod, scaled_centers


@dataclass(frozen=True)
class ProxQuant(QuantizedMethod):
    """Proximal steps towards fixed centres.

    Attributes:
        strength: Slope of lambda(t) >= 0.
    """

    strength: Annotated[float, check_not_negative, Range(0.001, 0.1)] = 1e-3
    card: ClassVar[Card] = replace(QuantizedMethod.card, paper="Bai et al. 2019")

    def scalars(self, round: int) -> dict[str, float]:
        return {"strength": self.strength * (round + 1)}

    def first_centers(self, x: Tensor, bits: int) -> Tensor:
        """The scaled signs, or k-means of the initial weights."""
        return scaled_centers(x, bits)

    def advance(self, client: Client, message: Message, centers: Tensors) -> None:
        step = ProximalStep({}, centers, message.scalars["strength"], client.learning_rate)
        client.state["model"] = client.train(client.state["model"], after_step=step)
        client.state["centers"] = step.centers
