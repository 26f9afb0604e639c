"""MARINA: gradient descent on an estimate that clients update by compressed differences.

Gorbunov, Burlachenko, Li, Richtarik: MARINA: Faster non-convex distributed learning with
compression, ICML 2021, Algorithm 1. In every round but the first, one coin decides for all clients:

    heads, p:   g <- sum_i p_i grad f_i(w)
    tails:      g <- g + sum_i p_i Q(grad f_i(w) - grad f_i(w-)),   w- the w of the round before
    w- <- w,    w <- w - gamma g

| symbol | here |
|---|---|
| w, g | ``server["shared"]``, ``server["gradient"]`` |
| w- | ``state["previous"]`` |
| p, the coin | ``full``; ``seed`` and the round determine the coin |
| gamma | the optimizer's step size in the round |
| Q | the codec ``codec.up``, for ``difference`` alone |
| p_i | ``weighting``; the paper's are 1/N |

Q must be unbiased (``randomk``, ``qsgd``, ``terngrad``), without error feedback and shift; only the
estimate g is biased. Without a codec the method is gradient descent. The paper's p is the share of
a message that Q keeps, and gamma = 1 / (L (1 + sqrt((1 - p) omega / (p N)))) for the variance omega
of Q.

Deviations:
- A gradient covers an epoch; both gradients of a difference use the same batches (as in Algorithm
2).
- BatchNorm's statistics follow the batches of the round's steps, which move no parameter.
- The variant with partial participation, in which all clients take part after heads, is left out.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.gradient_base import GradientMethod


@dataclass(frozen=True)
class MARINA(GradientMethod):
    """One model, one gradient estimate.

    Attributes:
        full: The probability p, in (0, 1], of a round in which clients send whole gradients.
        seed: The run's seed, for the coin.
    """

    full: Annotated[float, within("(0, 1]"), Range(0.05, 0.5)] = 0.1
    seed: int = 0
    parts_compressible: ClassVar[tuple[str, ...]] = ("difference",)
    server_zeros: ClassVar[tuple[str, ...]] = ("gradient",)
    card: ClassVar[Card] = replace(
        GradientMethod.card, paper="Gorbunov et al. 2021", server={"shared": 1, "weights": 1}
    )

    def phases(self, round: int) -> tuple[str, ...]:
        # In the first round there is no g to add a difference to.
        heads = round == 0 or coin(self.full, self.seed, round, "full")
        return ("full",) if heads else ("difference",)

    def closed(self, server: State, replies: Replies) -> State:
        if all(reply.phase == "full" for reply in replies.values()):
            g = self.mean(server, replies, "gradient")
        else:
            g = add(server["gradient"], self.mean(server, replies, "difference"))
        return {**server, "shared": self.stepped(server, replies, g), "gradient": g}

    def fit(self, client: Client, message: Message) -> Message:
        """Returns the gradient at w, or its difference from the gradient at the previous w."""
        w = {**message.parts["shared"], **client.state["personal"]}
        # Both gradients use the same batches: otherwise their difference is mostly noise.
        gradient, part = client.gradient(w, same=True), "gradient"
        if message.phase == "difference":
            before = {**w, **client.state["previous"]}
            gradient, part = subtract(gradient, client.gradient(before, same=True)), "difference"
        parameters = client.split.parameters("shared")
        client.state["previous"] = select(message.parts["shared"], parameters)
        return self.reply(client, message, w, {part: gradient})
