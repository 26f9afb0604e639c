"""FedFomo: each client weighs other clients' models by their gain on its validation data.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized federated learning with first order model
optimization, ICLR 2021, Algorithm 1 and Equations 3 to 5. Let v be the client's model before its
last training, and theta_n the models that it receives, including its model after that training:

    r_n = (L_i(v) - L_i(theta_n)) / |theta_n - v|,   a_n = max(r_n, 0) / sum_m max(r_m, 0)
    v <- v + sum_n a_n (theta_n - v), then local steps

| symbol | here |
|---|---|
| theta_n | ``server["model/n"]``; at client i ``state["model"]`` |
| v | ``state["before"]`` |
| L_i | the loss on the client's validation data |
| P, row by row | ``server["affinity"]``: sums of r_n, which decide who receives which models |
| M, epsilon | ``models``, ``explore`` |

If no model gains anything, v stays. P starts at 0; its diagonal is not used.
**Privacy**: clients see one another's models; the server forwards them unchanged.

Deviations:
- The server sends the M best of a row with probability 1 - epsilon, else M at random; epsilon is
  the same in all rounds.
- Clients send the displacement of their model, and r_n as numbers.
"""

from __future__ import annotations

from medfed.functional.graph import epsilon_greedy, gain_per_distance, helpful_mean, with_gains
from medfed.method import *
from medfed.personalize.anchored_base import moved_models
from medfed.personalize.local import Local


@dataclass(frozen=True)
class FedFomo(TrainsOn, Local):
    """Every client keeps a whole model and mixes in the models that help it.

    Attributes:
        models: M, how many of the others' models a client receives in a round.
        explore: epsilon in [0, 1], how often they are chosen at random.
        seed: The run's seed, for these choices.
    """

    models: Annotated[int, check_count] = 5
    explore: Annotated[float, within("[0, 1]"), Range(0.1, 0.9, log=False)] = 0.3
    seed: int = 0
    parts_sent: ClassVar[tuple[str, ...]] = ("model",)
    supports_missing_channels: ClassVar[bool] = False
    card: ClassVar[Card] = Card(
        "Zhang et al. 2021", "similar clients", "a model, mixed with those that help",
        down={"shared": "M"}, extra_passes="M + 2 losses on validation", server={"shared": "N"},
        client={"model": 2}, privacy_exposure="losses",
    )  # fmt: skip

    def counts(self, clients: int) -> dict[str, float]:
        """Adds M, at most the number of other clients."""
        return {**super().counts(clients), "M": min(self.models, clients - 1)}

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        models = {f"model/{c.id}": select(weights, split.shared) for c in clients}
        affinity = {c.id: torch.zeros(len(clients), dtype=torch.float64) for c in clients}
        return {**models, "affinity": affinity}, {"model": weights, "before": weights}

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends models; each client replies with its new model and its gains from the others."""
        affinity, outbox = server["affinity"], {}
        for client in cohort:
            rng = numpy_rng(self.seed, round, client, "models")
            chosen = epsilon_greedy(affinity, client, self.models, self.explore, rng)
            outbox[client] = Message("fit", {f"model_{n}": server[f"model/{n}"] for n in chosen})
        replies = yield outbox
        affinity = with_gains(affinity, {c: m.scalars for c, m in replies.items()})
        return {**server, **moved_models(server, replies), "affinity": affinity}

    def fit(self, client: Client, message: Message) -> Message:
        """Mixes in the models that help, then trains."""
        mixture, gains = self.mix(client, message)
        known, names = client.state["model"], client.split.shared
        client.state |= {"before": mixture, "model": client.train(mixture)}
        update = subtract(select(client.state["model"], names), known)
        return Message("fit", {"model": update}, gains, {"model": "update"})

    def mix(self, client: Client, message: Message) -> tuple[Tensors, dict[str, float]]:
        """Returns v + sum_n a_n (theta_n - v), and r_n by client."""
        v, theta = client.state["before"], client.state["model"]
        received = {p.removeprefix("model_"): {**theta, **t} for p, t in message.parts.items()}
        thetas = {client.id: theta, **received}
        point, before = select(v, client.split.parameters("all")), client.loss_at(v, split="val")
        gained = {n: before - client.loss_at(t, split="val") for n, t in thetas.items()}
        gains = {n: gain_per_distance(gained[n], point, t) for n, t in thetas.items()}
        # What is not sent is equal in all of them, and stays so to the last bit.
        sent = {n: select(t, client.split.shared) for n, t in thetas.items()}
        return {**theta, **helpful_mean(v, sent, gains)}, gains

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        yield from ()
        order = numpy_rng(self.seed, client.id, "models").permutation(list(server["affinity"]))
        parts = {f"model_{n}": server[f"model/{n}"] for n in order[: self.models]}
        return Message("deliver", parts)

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        return self.mix(client, message)[0]

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        """Draws what clients gained from one another's models; nothing in the first round."""
        from medfed.personalize.client_pictures import draw_matrix

        rows = torch.stack([server["affinity"][c] for c in clients])
        title = "Gains on validation data, summed"
        return {"affinity": draw_matrix(clients, rows, title)} if rows.any() else {}
