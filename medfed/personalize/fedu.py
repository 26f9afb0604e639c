"""FedU: one Laplacian step a round pulls the models of neighbouring clients together.

T. Dinh, Vu, Tran, Dao, Zhang: FedU: A unified framework for federated multi-task learning with
Laplacian regularization, 2021 (arXiv:2102.07148), Algorithm 1:

    min over w_1 ... w_N of sum_k f_k(w_k) + (lambda/2) sum_{edges} a_kl |w_k - w_l|^2

    w_k <- R gradient steps from w_k,                                             k in S
    w_k <- w_k - eta R lambda sum_l a_kl (w_k - w_l), all at the old values,      k in S

| symbol | here |
|---|---|
| w_k | ``server["model/ID"]`` |
| a_kl = a_lk | ``graph``; 1, or the similarity of the sketches (``graph.weighted``) |
| lambda | ``strength`` |
| R; eta R | the round's steps; ``client.effective_step_length``, their way |

Each edge counts once in the objective; the form with a sum over all k and l has twice the gradient.
With several steps a round the fixed point is off by about eta R.

Deviations:
- eta R is the actual way of the run's optimizer: with momentum it is longer.
- eta R lambda is at most 1 / (the Laplacian's largest eigenvalue): from twice that on the printed
  step would diverge. In a complete graph the limit gives the mean of all models.
- A client that has not taken part yet has no edge.
- ``personal`` entries and running statistics stay with their client and are not coupled.
"""

from __future__ import annotations

from functools import partial

from medfed.functional.mixing import laplacian_steps
from medfed.method import *
from medfed.personalize.anchored_base import KnownModels, mean_of, mixtures, models_of
from medfed.personalize.client_pictures import draw_graph
from medfed.personalize.similarity import SimilarityGraph


@dataclass(frozen=True)
class FedU(KnownModels):
    """Every client has its model; the server pulls neighbours together.

    Attributes:
        strength: lambda >= 0 (0 is local training).
        graph: The similarity graph.
    """

    strength: Annotated[float, check_not_negative, Range(0.001, 1.0)] = 0.03
    graph: SimilarityGraph = field(default_factory=SimilarityGraph)
    parts_sent: ClassVar[tuple[str, ...]] = ("sketch", "model")
    card: ClassVar[Card] = replace(
        KnownModels.card, paper="T. Dinh et al. 2021", keeps="a model, pulled to neighbours"
    )

    def summaries(self, data: ClientData) -> Sequence[Statistic]:
        return self.graph.summaries(data)

    def phases(self, round: int) -> tuple[str, ...]:
        """First asks clients for missing sketches, then trains."""
        return ("sketch", "fit") if self.graph.needs_sketches else ("fit",)

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        server, client = super().init(weights, split, clients)
        graph = self.graph.build([c.id for c in clients], {})
        return {**server, "sketches": {}, "graph": graph}, client

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Sends models, receives them trained, and takes the step on the Laplacian."""
        server = self.joined(server, cohort)
        if self.graph.needs_sketches:
            sketches = yield {c: Message("sketch") for c in cohort if c not in server["sketches"]}
            server["sketches"] = {**server["sketches"], **sent_by_each(sketches, "sketch")}
            server["graph"] = self.graph.build(list(server["num_samples"]), server["sketches"])
        models = models_of(server)
        replies = yield {c: Message("fit", {"model": models[c]}) for c in cohort}
        models |= {c: add(models[c], m.parts["model"]) for c, m in replies.items()}
        reach = {c: m.scalars["reach"] for c, m in replies.items()}
        # w_k - eta R lambda sum_l a_kl (w_k - w_l), all at the old values.
        steps = [self.strength * reach.get(c, 0.0) for c in models]
        rows = laplacian_steps(self.weights_of(server, list(models)), steps)
        changed = mixtures(list(models.values()), rows[[c in reach for c in models]])
        for client, mixture in zip((c for c in models if c in reach), changed, strict=True):
            server[f"model/{client}"] = mixture
        return server

    def weights_of(self, server: State, clients: list[str]) -> Tensor:
        """Returns a_kl between some clients, ``(n, n)`` float64."""
        order = {c: place for place, c in enumerate(server["num_samples"])}
        places = [order[c] for c in clients]
        return self.graph.weights(len(order), server["graph"])[places][:, places]

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        """One more for the reach; a sketch may be a model that the client trains."""
        return steps * (1 + self.graph.needs_sketches) + 1

    def fit(self, client: Client, message: Message) -> Message:
        model = {**client.state["model"], **message.parts.get("model", {})}
        if message.phase == "sketch":
            return Message("sketch", {"sketch": self.graph.describe(client, model)})
        client.state["model"] = client.train(model)
        first = partial(client.gradient, model, update="shared", batches=1)
        reach = client.effective_step_length(client.steps, lambda: flatten(first()))
        update = subtract(select(client.state["model"], message.parts["model"]), model)
        return Message("fit", {"model": update}, {"reach": reach}, {"model": "update"})

    def broadcast(self, server: State, client: str) -> Message:
        """Returns the client's model once it has taken part; neighbours may have moved it since."""
        models = models_of(server)
        return Message("deliver", {"model": models[client]} if client in models else {})

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        """Takes a sketch; returns the mean of the nearest neighbours and their number.

        If the graph does not use sketches, all clients are neighbours.
        """
        models = models_of(server)
        near = yield from self.graph.find_neighbours(list(models), server["sketches"])
        mean = mean_of([models[c] for c in near])
        return Message("deliver", {"model": mean}, {"neighbours": float(len(near))})

    def onboard(self, client: Client, message: Message) -> Tensors:
        """Trains tied to the fixed neighbours: (lambda/2) sum_l |w - w_l|^2."""
        weight = self.strength * message.scalars["neighbours"]
        tie = Proximity(weight, message.parts["model"])
        return client.train(self.onboarding_start(client, message), penalty=tie)

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Any]:
        return {"graph": draw_graph(clients, server["graph"])}
