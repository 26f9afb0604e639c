"""ADIANA: accelerated gradient descent; clients send a few entries of their gradients.

Li, Kovalev, Qian, Richtarik: Acceleration for compressed gradient descent in distributed and
federated optimization, ICML 2020, Algorithm 2 with the constants of its theorem. In a round:

    x = theta1 z + theta2 a + (1 - theta1 - theta2) y
    g = h + sum_i p_i C(grad f_i(x) - h_i)
    h_i <- h_i + alpha C'(grad f_i(a) - h_i),   h <- h + alpha sum_i p_i C'(grad f_i(a) - h_i)
    y+ = x - eta g
    z <- beta z + (1 - beta) x + (gamma / eta) (y+ - x)
    a <- y with probability q,   y <- y+

| symbol | here |
|---|---|
| y, z, a (the paper's w), h | ``server["shared"]``, ``"momentum"``, ``"anchor"``, ``"shift"`` |
| h_i | ``state["shift"]`` |
| C, C' | a share ``keep`` of the entries, chosen at random per message, times its inverse |
| eta, mu | ``lr``, the optimizer's step size, constant over rounds; ``convexity`` |
| q (the paper's p), the coin | follows from N and omega; the coin from ``seed`` and the round |
| p_i | ``weighting``; the paper's are 1/N |

omega = 1 / keep - 1, alpha = keep, theta2 = 1/2, theta1 = min(1/4, sqrt(eta mu / q)), gamma =
eta / (2 (theta1 + eta mu)), beta = 1 - gamma mu, q = min(1, max(1, sqrt(N / (32 omega)) - 1) / (2
(1 + omega))). The theorem asks for eta <= 1 / (2 L) and N / (64 omega (2 q (omega + 1) + 1)^2 L) of
L-smooth, mu-convex f_i; in our experiments four times this step size and more worked, too.

Deviations:
- The server sends a random number that determines which entries are sent, so no positions are.
  The theory does not cover a lossy codec on top, so ``codec.up`` may only round. DIANA itself is
  ``channel.up.shift``.
- A gradient covers an epoch, and both gradients use the same batches. BatchNorm's statistics follow
  the batches of the round's steps, which move no parameter. The model that is evaluated is y.
"""

from __future__ import annotations

from medfed.functional.sketches import acceleration, number_kept, only, random_entries
from medfed.method import *
from medfed.personalize.gradient_base import GradientMethod


@dataclass(frozen=True)
class ADIANA(GradientMethod):
    """One model, with a momentum and an anchor.

    Attributes:
        keep: The share of the entries that a client sends, in (0, 1].
        convexity: mu > 0, of the clients' losses.
        lr: eta > 0.
        seed: The run's seed: it determines the coin and the entries that are sent.
    """

    keep: Annotated[float, within("(0, 1]")] = 0.25
    convexity: Annotated[float, check_positive, Range(0.001, 0.1)] = 0.01
    lr: Annotated[float, check_positive] = 0.1
    seed: int = 0
    parts_sent: ClassVar[tuple[str, ...]] = ("gradient", "shift", "statistics")
    parts_compressible: ClassVar[tuple[str, ...]] = ()
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    server_zeros: ClassVar[tuple[str, ...]] = ("shift",)
    client_zeros: ClassVar[tuple[str, ...]] = ("shift",)
    card: ClassVar[Card] = replace(
        GradientMethod.card, paper="Li et al. 2020", down={"shared": 1, "weights": 1},
        up={"kept": 2, "statistics": 1}, server={"shared": 1, "weights": 3},
        client={"personal": 1, "weights": 1},
    )  # fmt: skip

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        lengths = super().vectors(split, weights)
        return {**lengths, "kept": number_kept(lengths["weights"], self.keep)}

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        start = select(weights, split.parameters("shared"))
        return {**server, "momentum": start, "anchor": start}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends x and the anchor, takes the two steps, and moves the anchor if the coin says so."""
        z, a, h = (server[group] for group in ("momentum", "anchor", "shift"))
        y, size, eta, mu = select(server["shared"], z), numel(layout_of(z)), self.lr, self.convexity
        alpha, theta, gamma, q = acceleration(eta, mu, size, self.keep, len(cohort))
        x = {n: theta * z[n] + a[n] / 2 + (0.5 - theta) * y[n] for n in z}
        parts = {"shared": {**server["shared"], **x}, "anchor": a}
        draws = {c: derive_seed(self.seed, round, c, "entries") for c in cohort}
        replies = yield {c: Message("fit", parts, {"draw": float(draws[c])}) for c in cohort}
        g = add(h, self.sent(server, replies, draws, "gradient"))
        shift = add(h, self.sent(server, replies, draws, "shift"), alpha)
        ahead = add(x, g, -eta)
        z = {n: z[n] + gamma * (mu * (x[n] - z[n]) + (ahead[n] - x[n]) / eta) for n in z}
        anchor = y if coin(q, self.seed, round, "anchor") else a
        shared = {**server["shared"], **ahead, **self.statistics(server, replies)}
        return {**server, "shared": shared, "momentum": z, "anchor": anchor, "shift": shift}

    def sent(self, server: State, replies: Replies, draws: dict[str, int], part: str) -> Tensors:
        """The mean of what clients sent, with zeros where they sent nothing."""
        total, sizes = torch.zeros_like(flatten(server["shift"])), self.weights(server, replies)
        for (client, reply), weight in zip(replies.items(), sizes, strict=True):
            # The client's number gives the same entries again, so their positions are not sent.
            where = random_entries(total, self.keep, torch_rng(draws[client], part))
            total[where] += weight / sum(sizes) * reply.parts[part]["entries"]
        return cut(total, layout_of(server["shift"]))

    def fit(self, client: Client, message: Message) -> Message:
        """Returns some entries of both gradients minus h_i, and the new h_i."""
        x, shift = {**message.parts["shared"], **client.state["personal"]}, client.state["shift"]
        points = {"gradient": x, "shift": {**x, **message.parts["anchor"]}}
        parts: State = {}
        for part, point in points.items():
            gap = flatten(subtract(client.gradient(point, same=True), shift))
            where = random_entries(gap, self.keep, torch_rng(int(message.scalars["draw"]), part))
            # Scaled by 1/keep, so that the expectation is the whole gap.
            parts[part] = {"entries": gap[where] * (len(gap) / len(where))}
        # For the entries that are sent, alpha C' is the gap itself.
        client.state["shift"] = add(shift, cut(only(gap, where), layout_of(shift)))
        return self.reply(client, message, x, parts)
