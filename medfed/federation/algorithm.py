"""The shape of every algorithm: a generator for the server, one function for the client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from matplotlib.figure import Figure
from torch import Tensor, nn

from medfed.errors import ConfigError
from medfed.federation.client import Client, with_statistics
from medfed.federation.message import Message
from medfed.federation.split import (
    BufferPolicy,
    ParameterSplit,
    normalization_patterns,
)
from medfed.federation.tensors import State, Tensors, weighted_mean

Outbox = dict[str, Message]
Replies = dict[str, Message]
ServerRound = Generator[Outbox, Replies, State]
Onboarding = Generator[Message, Message, Message]
Weighting = Literal["samples", "uniform"]
PERSONAL_KEYWORDS = ("task", "none", "all", "normalization")


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client before the first round."""

    id: str
    num_samples: int


@dataclass(frozen=True)
class Algorithm(ABC):
    """Hyper-parameters of an algorithm and its two halves. No state lives on ``self``.

    Attributes:
        personal: The personal part: ``task`` (the task module's own patterns), ``none``,
            ``all``, ``normalization`` (layers found by type), or glob patterns of names.
        weighting: Client weights p_n in every mean: ``samples`` (n_n/Σn) or ``uniform`` (1/N).
        leaves: The parts that may leave a client; no other may be in a reply.
        mixes: Whether it keeps the membership vectors of canonical models in the simplex.

    Raises:
        ConfigError: If a value is unknown.
    """

    personal: str | tuple[str, ...] = "none"
    weighting: Weighting = "samples"
    leaves: ClassVar[tuple[str, ...]] = ("shared",)
    mixes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.weighting not in ("samples", "uniform"):
            raise ConfigError(
                f"algorithm.weighting={self.weighting!r} is unknown; choose samples or uniform."
            )
        if isinstance(self.personal, str) and self.personal not in PERSONAL_KEYWORDS:
            object.__setattr__(self, "personal", (self.personal,))
        if isinstance(self.personal, list):
            object.__setattr__(self, "personal", tuple(self.personal))

    def split(
        self, network: nn.Module, task_patterns: Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        """Divides a network's entries as ``personal`` says.

        Args:
            network: The model.
            task_patterns: The personal part that the task module proposes.
            buffers: The run's buffer policy.

        Raises:
            ConfigError: If a pattern matches nothing.
        """
        patterns: Sequence[str]
        if self.personal == "task":
            patterns = task_patterns
        elif self.personal == "none":
            patterns = ()
        elif self.personal == "all":
            patterns = ("*",)
        elif self.personal == "normalization":
            patterns = normalization_patterns(network)
            if not patterns:
                raise ConfigError(
                    "personal=normalization finds no normalisation layer with parameters in this "
                    "network; choose a model that has some, such as model.network.norm=batch."
                )
        else:
            patterns = self.personal
        return ParameterSplit.of(network, patterns, buffers)

    def adapted(self, split: ParameterSplit, network: nn.Module) -> Algorithm:
        """Returns the algorithm for this network, split like this; most need no change."""
        return self

    def phases(self, round: int) -> tuple[str, ...]:
        """Returns the phases that :meth:`round` will yield, known before the round starts."""
        return ("fit",)

    @abstractmethod
    def init(
        self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]
    ) -> tuple[State, State]:
        """Returns the server's and one client's state before the first round.

        Args:
            weights: All entries of the initial model, known to everybody.
            split: Shared and personal names.
            clients: All clients, in order.
        """

    @abstractmethod
    def round(self, server: State, cohort: Sequence[str], round: int) -> ServerRound:
        """Yields an outbox per phase, receives the replies, and returns the new server state.

        Args:
            server: The server's state; it is replaced, never changed in place.
            cohort: The clients of this round, in order.
            round: The round's number, from 0.
        """

    @abstractmethod
    def fit(self, client: Client, message: Message) -> Message:
        """The client's half: answers one message."""

    @abstractmethod
    def broadcast(self, server: State, client: str) -> Message:
        """Returns what a client still lacks of the server's present result.

        It is delivered before an evaluation and counted once, after the last round.
        """

    @abstractmethod
    def personal_model(self, client: Client, message: Message) -> Tensors:
        """Returns all entries of the model that the client evaluates and exports.

        Args:
            client: The client; its state is read only.
            message: What :meth:`broadcast` sent.
        """

    def onboarding(self, server: State, newcomer: ClientInfo) -> Onboarding:
        """The server's half of welcoming a client that was not there when the others trained.

        It may yield questions, which the newcomer answers by :meth:`fit`, and returns what the
        newcomer starts from: the shared part, unless a method has more to give.

        Args:
            server: The server's state, which stays as it is and does not know the newcomer.
            newcomer: The client.
        """
        yield from ()
        shared = server.get("shared")
        return Message("deliver", {"shared": shared} if shared else {})

    def arrival(self, client: Client, message: Message) -> Tensors:
        """Returns the model of a newcomer before it trains: what it got, the rest as it began.

        Args:
            client: The newcomer, in the state that all clients began with.
            message: What :meth:`onboarding` returned.
        """
        got = message.parts
        return {**client.weights, **got.get("shared", {}), **got.get("personal", {})}

    def join(self, client: Client, message: Message) -> Tensors:
        """The newcomer's half: returns its model, by the method's own rule.

        That is to train the personal part for ``client.steps`` steps; where there is none, the
        shared model as it is; and where nothing is shared, to train alone.

        Args:
            client: The newcomer, in the state that all clients began with.
            message: What :meth:`onboarding` returned.
        """
        start = self.arrival(client, message)
        if not message.parts:
            return client.train(start)
        if client.split.parameters("personal"):
            return client.train(start, update="personal")
        return with_statistics(client, start)

    def fine_tune(self, client: Client, message: Message) -> Tensors:
        """A comparison for :meth:`join`: all that arrived trains, for as many steps."""
        return client.train(self.arrival(client, message))

    def alone(self, client: Client) -> Tensors:
        """Another one: the initial weights train for as many steps, nothing is received."""
        return client.train(client.weights)

    def pictures(self, server: State, clients: Sequence[str]) -> dict[str, Figure]:
        """Returns pictures of the server's state, by name; none unless an algorithm has some."""
        return {}

    def centers(self, client: Client, message: Message) -> Tensors:
        """Returns the centres of the parameters that :meth:`personal_model` gives quantised.

        Args:
            client: The client; its state is read only.
            message: What :meth:`broadcast` sent.

        Returns:
            Sorted centres (m,) by parameter name; none unless the algorithm learns some.
        """
        return {}

    def memberships(self, server: State) -> Tensor | None:
        """Returns all clients' memberships in canonical models over rounds, where there are any.

        Returns:
            (R + 1, N, K), the start and every round so far, or ``None``.
        """
        return None

    def mean(self, server: State, replies: Mapping[str, Message], part: str) -> Tensors:
        """Returns the mean of a part over the replies, weighted as ``weighting`` says."""
        weights = [
            float(server["num_samples"][c]) if self.weighting == "samples" else 1.0 for c in replies
        ]
        return weighted_mean([m.parts[part] for m in replies.values()], weights)


def client_sizes(clients: Sequence[ClientInfo]) -> Tensors:
    """Returns the server-state entry from which :meth:`Algorithm.mean` takes its weights."""
    return {c.id: Tensor([c.num_samples]).double() for c in clients}
