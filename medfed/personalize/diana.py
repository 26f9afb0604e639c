"""DIANA with momentum and a proximal step: gradient descent on compressed gradient differences.

Mishchenko, Gorbunov, Takac, Richtarik: Distributed learning with compressed gradient differences,
2019 (arXiv:1901.09269), Algorithm 1:

    min sum_i p_i f_i(w) + R(w),   R(w) = l1 |w|_1 + (l2 / 2) |w|^2
    g = sum_i p_i (h_i + C(grad f_i(w) - h_i)),   h_i <- h_i + a C(grad f_i(w) - h_i)
    v <- beta v + g,   w <- prox_{gamma R / (1 - beta)}(w - gamma v)

| symbol | here |
|---|---|
| w, v | ``server["shared"]``, ``server["momentum"]`` |
| C; a, h_i | the codec ``codec.up``; ``channel.up.shift``, memory of the channel at both ends |
| beta, l1, l2 | ``beta``, ``l1``, ``l2`` |
| gamma | the optimizer's step size in the round |
| p_i | ``weighting``; the paper's are 1/N |

C must be unbiased (``randomk``, ``qsgd``, ``terngrad``). Without a codec the method is heavy-ball
proximal gradient descent.

Deviations:
- The printed prox_{gamma R} weakens R by 1 - beta: at rest v is g / (1 - beta).
- A gradient covers an epoch. BatchNorm's statistics follow the batches of the round's steps, which
  move no parameter.
"""

from __future__ import annotations

from torch.nn.functional import softshrink

from medfed.method import *
from medfed.personalize.gradient_base import GradientMethod, rate_of


@dataclass(frozen=True)
class DIANA(GradientMethod):
    """One model, stepped by the server.

    Attributes:
        beta: The momentum, in [0, 1).
        l1: Weight of |w|_1.
        l2: Weight of |w|^2 / 2.
    """

    beta: Annotated[float, within("[0, 1)"), Range(0.5, 0.97, log=False)] = 0.9
    l1: Annotated[float, check_not_negative] = 0.0
    l2: Annotated[float, check_not_negative] = 0.0
    parts_sent: ClassVar[tuple[str, ...]] = ("gradient", "statistics")
    parts_averaged: ClassVar[tuple[str, ...]] = parts_sent
    parts_compressible: ClassVar[tuple[str, ...]] = ("gradient",)
    server_zeros: ClassVar[tuple[str, ...]] = ("momentum",)
    card: ClassVar[Card] = replace(
        GradientMethod.card, paper="Mishchenko et al. 2019",
        extra_passes="an epoch's gradient, BatchNorm's batches", up={"weights": 1, "statistics": 1},
        server={"shared": 1, "weights": 1}, privacy_exposure="gradients",
    )  # fmt: skip

    def closed(self, server: State, replies: Replies) -> State:
        """Moves v by the mean gradient, then w."""
        v = add(self.mean(server, replies, "gradient"), server["momentum"], self.beta)
        rate = rate_of(replies)
        ahead = add(select(server["shared"], v), v, -rate)
        way = rate / (1 - self.beta)
        moved = {n: softshrink(t, way * self.l1) / (1 + way * self.l2) for n, t in ahead.items()}
        shared = {**server["shared"], **moved, **self.statistics(server, replies)}
        return {**server, "shared": shared, "momentum": v}

    def fit(self, client: Client, message: Message) -> Message:
        w = {**message.parts["shared"], **client.state["personal"]}
        return self.reply(client, message, w, {"gradient": client.gradient(w)})
