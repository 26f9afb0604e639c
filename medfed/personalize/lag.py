"""LAG: gradient descent where a client sends only gradients that have changed enough.

Chen, Giannakis, Sun, Yin: LAG: Lazily aggregated gradient for communication-efficient distributed
learning, NeurIPS 2018, Algorithm 1 (LAG-WK) with the rule of Equation 15a:

    client i sends d_i = grad f_i(w_k) - s_i and s_i <- grad f_i(w_k), unless
        |d_i|^2 <= (1 / eta^2) sum_{d=1..D} (xi / D) |w_{k+1-d} - w_{k-d}|^2
    g <- g + sum_{who sent} p_i d_i,   w <- w - eta g

| symbol | here |
|---|---|
| w, g (the paper's nabla) | ``server["shared"]``, ``server["gradient"]`` |
| s_i | ``state["sent"]`` |
| squares of the last D steps of w; the last w | ``state["moves"]``; ``state["previous"]`` |
| D, xi (D times the paper's xi_d) | ``memory``, ``laziness`` |
| eta | the optimizer's step size in the round |
| p_i | ``weighting``; the paper's are 1/N of a sum of losses, where the rule is the same |

A client whose gradient has not changed enough sends no part, so the ledger shows what is saved.

Deviations: a gradient covers an epoch. BatchNorm's statistics follow the batches of the round's
steps, which move no parameter, and travel in every round. A lossy codec on top would let s_i and g
drift apart, so ``codec.up`` may only round.
"""

from __future__ import annotations

from medfed.method import *
from medfed.personalize.gradient_base import GradientMethod


@dataclass(frozen=True)
class LAG(GradientMethod):
    """One model, one sum of the gradients that were sent last.

    Attributes:
        laziness: xi >= 0; 0 is gradient descent.
        memory: D, the past steps that a change is compared with.
    """

    laziness: Annotated[float, check_not_negative, Range(0.1, 10.0)] = 1.0
    memory: Annotated[int, check_count] = 10
    parts_sent: ClassVar[tuple[str, ...]] = ("difference", "statistics")
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    parts_compressible: ClassVar[tuple[str, ...]] = ()
    server_zeros: ClassVar[tuple[str, ...]] = ("gradient",)
    client_zeros: ClassVar[tuple[str, ...]] = ("sent",)
    card: ClassVar[Card] = replace(
        GradientMethod.card, paper="Chen et al. 2018",
        extra_passes="an epoch's gradient, BatchNorm's batches", up={"weights": 1, "statistics": 1},
        at_most=True, server={"shared": 1, "weights": 1}, client={"personal": 1, "weights": 1},
        privacy_exposure="gradients",
    )  # fmt: skip

    def client_start(self, weights: Tensors, split: ParameterSplit) -> State:
        moves = {"squares": torch.zeros(self.memory, dtype=torch.float64)}
        return {"previous": select(weights, split.parameters("shared")), "moves": moves}

    def closed(self, server: State, replies: Replies) -> State:
        """Adds the changes that were sent to g, then takes the step."""
        g = server["gradient"]
        if sent := {c: m for c, m in replies.items() if "difference" in m.parts}:
            g = add(g, self.mean(server, sent, "difference"), self.part(server, sent))
        return {**server, "shared": self.stepped(server, replies, g), "gradient": g}

    def fit(self, client: Client, message: Message) -> Message:
        """Returns how the gradient has changed since it was last sent, if that is enough."""
        w = {**message.parts["shared"], **client.state["personal"]}
        gradient = client.gradient(w)
        here, before = select(w, gradient), client.state["previous"]
        squares = client.state["moves"]["squares"]
        squares = torch.cat([_square(subtract(here, before))[None].to(squares), squares[:-1]])
        change = subtract(gradient, client.state["sent"])
        least = self.laziness / self.memory * float(squares.sum()) / client.learning_rate**2
        sends = float(_square(change)) > least or not bool(squares.any())
        client.state = {**client.state, "previous": here, "moves": {"squares": squares}}
        if sends:
            client.state["sent"] = gradient
        return self.reply(client, message, w, {"difference": change} if sends else {})


def _square(tensors: Tensors) -> Tensor:
    return flatten(tensors).double().square().sum()
