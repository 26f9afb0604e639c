"""BinaryRelax: gradients are taken between a free copy of the weights and its projection.

Yin, Zhang, Lyu, Osher, Qi, Xin: BinaryRelax: A relaxation approach for training deep neural
networks with quantized weights, SIAM Journal on Imaging Sciences 2018, Algorithm 1:

    y <- y - eta grad f(x),   x <- (lambda Q(y) + y) / (lambda + 1),   lambda <- growth * lambda

and x <- Q(y) in the last phase. This is a baseline for QuPeL; every client trains locally.

| symbol | here |
|---|---|
| x, y | ``state["model"]``, ``state["free"]`` |
| lambda at the start, growth per round | ``strength``, ``growth`` |
| last phase | ``finetune_share`` of the rounds; assignments may still change in it |

The step of y is the optimizer's step at x. With one bit Q(y) is the exact projection
on scaled signs: plus and minus mean |y|. Deviation: with more bits the centres are free, not
multiples of one scale, and follow y by one step of Lloyd's iteration per local step.
"""

from __future__ import annotations

from medfed.functional.quantize import assign, center_gradient, quantize
from medfed.method import *
from medfed.personalize.quantized_base import TUNE, QuantizedMethod, finite, scaled_centers


@dataclass(frozen=True)
class BinaryRelax(QuantizedMethod):
    """Relaxed projections that harden over the rounds.

    Attributes:
        strength: lambda > 0 in the first round.
        growth: Factor >= 1 of lambda per round.
    """

    strength: Annotated[float, check_positive, Range(0.1, 10.0)] = 1.0
    growth: Annotated[float, within("[1, inf)")] = 1.1
    card: ClassVar[Card] = replace(
        QuantizedMethod.card, paper="Yin et al. 2018", client={"model": 1, "quantised": 1}
    )

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        return server, {**client, "free": select(weights, self.names)}

    def scalars(self, round: int) -> dict[str, float]:
        """Gives 1 / (lambda + 1), the share of the free copy.

        Example:
            >>> algorithm = BinaryRelax(strength=1.0, growth=3.0)
            >>> [algorithm.scalars(t)["free"] for t in range(2)]
            [0.5, 0.25]
        """
        if self.phases(round) == (TUNE,):
            return {"free": 0.0}
        return {"free": 1 / (1 + self.strength * self.growth**round)}

    def first_centers(self, x: Tensor, bits: int) -> Tensor:
        return scaled_centers(x, bits)

    def advance(self, client: Client, message: Message, centers: Tensors) -> None:
        state = client.state
        free = select(state["free"], centers)
        step = RelaxedStep(state["model"], free, centers, message.scalars["free"])
        state["model"] = client.train(state["model"], after_step=step)
        state["free"], state["centers"] = step.free, step.centers

    def tune(self, client: Client, message: Message) -> None:
        """The last phase: the same steps with x = Q(y)."""
        self.advance(client, message, self.present_centers(client, message))


class RelaxedStep:
    """Moves the free copy by the optimizer's step, and the weights between it and Q of it."""

    def __init__(self, start: Tensors, free: Tensors, centers: Tensors, share: float) -> None:
        self.centers, self.free, self._share = dict(centers), dict(free), share
        self._before = {n: start[n] for n in centers}

    def __call__(self, weights: Mapping[str, Tensor], grad_at: GradientAt) -> None:
        """Takes the part of a local step that follows the optimizer's."""
        with finite(weights, self.centers):
            for name, centers in self.centers.items():
                free = self.free[name] + (weights[name] - self._before[name])
                centers = projected(free, centers)
                weights[name].copy_(torch.lerp(quantize(free, centers), free, self._share))
                self.free[name], self.centers[name] = free, centers
                self._before[name] = weights[name].clone()


def projected(y: Tensor, centers: Tensor) -> Tensor:
    """Returns the centres of Q(y), sorted: exact for two, else by one step of Lloyd's iteration.

    Example:
        >>> projected(torch.tensor([-3.0, 1.0]), torch.tensor([0.0, 9.0]))
        tensor([-2.,  2.])
        >>> projected(torch.tensor([0.0, 1.0, 6.0]), torch.tensor([0.0, 4.0, 8.0, 9.0]))
        tensor([0.5000, 6.0000, 8.0000, 9.0000])
    """
    if len(centers) == 2:
        return scaled_centers(y, 1)
    counts = torch.bincount(assign(y, centers).flatten(), minlength=len(centers))
    means = center_gradient(y, y, centers) / counts.clamp(min=1)
    return torch.where(counts > 0, means, centers.double()).to(centers).sort().values
