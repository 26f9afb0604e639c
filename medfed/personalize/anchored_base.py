"""Shared by methods whose server knows every client's model and may send each an anchor.

    w_i <- about argmin f_i(w) + (s/2) |w - a_i|^2, from w_i

The methods differ in how the server computes a_i from all models (FedAMP, FPFC). FedU's server
moves the models itself.

| symbol | here |
|---|---|
| w_i | ``state["model"]``; at the server ``server["model/ID"]``, its tied parameters |
| a_i | the part ``model`` that goes down |

A client that has not taken part yet has no influence. Clients send the displacement of w_i. Entries
that are not tied (``personal``) and running statistics stay with their client, for every setting of
the buffers: an anchor changes a model through the penalty only. A client that joins later first
trains by itself, sends its w, receives an anchor, and continues training.
"""

from __future__ import annotations

from abc import abstractmethod

from medfed.method import *


@dataclass(frozen=True)
class KnownModels(OnboardingRules, Algorithm):
    """Clients keep whole models; the server keeps the tied parameters of all."""

    parts_sent: ClassVar[tuple[str, ...]] = ("model",)
    supports_missing_channels: ClassVar[bool] = False
    card: ClassVar[Card] = gradients_only(
        family="similar clients", down={"weights": 1}, up={"weights": 1},
        server={"weights": "N + 1"}, client={"model": 1},
    )  # fmt: skip

    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """All models start equal; the server stores a model when its client first takes part."""
        start = select(weights, split.parameters("shared"))
        return {"num_samples": client_sizes(clients), "start": start}, {"model": weights}

    def joined(self, server: State, cohort: Sequence[str]) -> State:
        """Returns the server's state in which all of the cohort have a model."""
        new = [name for c in cohort if (name := f"model/{c}") not in server]
        return {**server, **dict.fromkeys(new, server["start"])}

    def personal_model(self, client: Client, message: Message) -> Tensors:
        return {**client.state["model"], **message.parts.get("model", {})}

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        """Replaces the tied entries by those that arrived; keeps the rest."""
        return {**client.state["model"], **message.parts["model"]}


@dataclass(frozen=True)
class AnchoredMethod(KnownModels):
    """Each client is tied to its anchor."""

    tied_by: ClassVar[str] = "strength"  # the hyper-parameter s, the weight of the penalty

    @abstractmethod
    def anchors(self, server: State, cohort: Sequence[str]) -> dict[str, Tensors]:
        """Returns a_i of clients that the server knows."""

    @abstractmethod
    def anchor_of(self, server: State, model: Tensors) -> Tensors:
        """Returns the anchor of an onboarded client, whose model the server has received."""

    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Anchors go out; how far each model moved comes back."""
        server = self.joined(server, cohort)
        anchors, scalars = self.anchors(server, cohort), self.scalars(server)
        replies = yield {c: Message("fit", {"model": anchors[c]}, scalars) for c in cohort}
        return {**server, **moved_models(server, replies)}

    def scalars(self, server: State) -> dict[str, float]:
        """Returns the tie of this round, where it is none of the hyper-parameters."""
        return {}

    def fit(self, client: Client, message: Message) -> Message:
        """Trains the client's model tied to its anchor; without one before onboarding."""
        if message.phase == "alone":
            client.state["model"] = client.train(client.weights, steps=client.share(0, 2))
            sent = select(client.state["model"], client.split.parameters("shared"))
            return Message("alone", {"model": sent})
        before = client.state["model"]
        client.state["model"] = self.tied_steps(client, message, client.steps)
        update = subtract(select(client.state["model"], message.parts["model"]), before)
        return Message("fit", {"model": update}, kinds={"model": "update"})

    def tied_steps(self, client: Client, message: Message, steps: int) -> Tensors:
        """Steps from the client's own model on f_i(w) + (s/2) |w - a|^2."""
        weight = message.scalars.get("tie", getattr(self, self.tied_by))
        tie = Proximity(weight, message.parts["model"])
        return client.train(client.state["model"], steps=steps, penalty=tie)

    def broadcast(self, server: State, client: str) -> Message:
        return Message("deliver")

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        """The onboarded client sends the model that it trained alone and receives its anchor."""
        reply = yield Message("alone")
        anchor = self.anchor_of(server, reply.parts["model"])
        return Message("deliver", {"model": anchor}, self.scalars(server))

    def onboard(self, client: Client, message: Message) -> Tensors:
        """Takes the second half of the steps, tied to the anchor."""
        return self.tied_steps(client, message, client.share(1, 2))


def mean_of(models: Sequence[Tensors]) -> Tensors:
    """Returns the unweighted mean of models."""
    return weighted_mean(models, [1.0] * len(models))


def rows_of(models: Iterable[Tensors]) -> Tensor:
    """Returns models as the rows of a matrix (N, d)."""
    return torch.stack([flatten(model) for model in models])


def mixtures(models: Sequence[Tensors], weights: Tensor) -> list[Tensors]:
    """Returns sums of N models weighted by each row of ``(n, N)`` weights, all by one product.

    Example:
        >>> models = [{"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([4.0, 1.0])}]
        >>> mixtures(models, torch.tensor([[0.25, 0.75]]))
        [{'w': tensor([3., 1.])}]
    """
    rows, layout = rows_of(models), layout_of(models[0])
    # Copies: a view that is kept would keep the whole product.
    return [{n: t.clone() for n, t in cut(row, layout).items()} for row in weights.to(rows) @ rows]


def models_of(server: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Returns the models of the clients that have taken part, in the order of the clients."""
    return {c: server[f"model/{c}"] for c in server["num_samples"] if f"model/{c}" in server}


def moved_models(server: Mapping[str, Tensors], replies: Replies) -> dict[str, Tensors]:
    """Returns the server's copies of the models, moved by the clients' displacements."""
    return {f"model/{c}": add(server[f"model/{c}"], m.parts["model"]) for c, m in replies.items()}
