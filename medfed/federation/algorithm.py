"""The shape of every method: a generator for the server, one function for the client.

The cohort of a round: all clients, a random fraction, or a fixed list.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from medfed.common.floors import Statistic
from medfed.common.schemas import Count, fit
from medfed.common.seeding import derive_seed
from medfed.common.tensors import State, Tensors, select, weighted_mean
from medfed.federation.aggregation import Aggregation, PhaseReplies, pooled_variances
from medfed.federation.budget import share_of
from medfed.federation.card import Card
from medfed.federation.client import Client, ClientData
from medfed.federation.missing_channels import lacks, mean_where_present, presence
from medfed.federation.split import (
    BufferPolicy,
    Needs,
    Normalization,
    ParameterSplit,
    divide,
    normalization_patterns,
    nothing_personal,
    nothing_to_train,
    patterns_of,
    remainder,
)
from medfed.federation.wire.packet import Message
from medfed.standalone.checks import check_fields, check_known, check_not_negative, within
from medfed.standalone.errors import ConfigError


@dataclass(frozen=True)
class Cohort:
    """Chooses the cohort of a round from the seed and the round's number only.

    Example:
        >>> Cohort().of(["a", "b"], seed=0, round=3)
        ('a', 'b')
        >>> len(Cohort(fraction=0.5).of(["a", "b", "c", "d"], seed=0, round=3))
        2
    """

    # Share of the clients that take part, rounded, at least one.
    fraction: Annotated[float, within("(0, 1]")] = 1.0
    clients: Sequence[str] | None = None  # a fixed list; None chooses from all clients
    # Clients to leave out, by round, such as hospitals that did not answer: ``absences.json`` of a
    # run across sites holds them.
    absent: Mapping[int, Sequence[str]] = field(default_factory=dict)
    # The most gigabytes of client state that a process keeps in memory between rounds; the rest
    # goes to disk, see :mod:`medfed.federation.local_client`. None: no limit.
    memory_gb: Annotated[float | None, check_not_negative] = 4.0

    def __post_init__(self) -> None:
        check_fields("cohort", self)
        try:  # pairs from the command line, where keys are text
            absent = fit(dict(self.absent), dict[Count, list[str]])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "cohort.absent must list clients by the number of a round from 0, such as "
                "cohort.absent=[[3,[CLIENT]]]."
            ) from error
        object.__setattr__(self, "absent", absent)
        if self.clients is not None and not self.clients:
            raise ConfigError("cohort.clients is an empty list; name a client or set it to null.")
        listed = {f"absent, round {number},": names for number, names in self.absent.items()}
        for place, names in {"clients": self.clients or (), **listed}.items():
            if twice := next((n for i, n in enumerate(names) if n in names[:i]), None):
                raise ConfigError(f"cohort.{place} names {twice!r} twice; name each client once.")

    def of(self, known: Sequence[str], seed: int, round: int) -> tuple[str, ...]:
        """Returns the cohort in the order of ``known``."""
        everyone, listed = set(known), None if self.clients is None else set(self.clients)
        named = {"clients": self.clients or (), "absent": set().union(*self.absent.values())}
        for key, name in ((key, name) for key, names in named.items() for name in names):
            if name not in everyone:
                check_known(f"cohort.{key}", name, known)
        pool = [c for c in known if listed is None or c in listed]
        count = max(1, int(self.fraction * len(pool) + 0.5))  # halves up
        members = set(pool)
        if count < len(pool):
            members = set(random.Random(derive_seed(seed, round, "cohort")).sample(pool, count))
        here = members.difference(self.absent.get(round, ()))
        present = tuple(c for c in pool if c in here)
        if not present:
            raise ConfigError(
                f"cohort.absent leaves no client in round {round}; take a client out."
            )
        return present


Outbox = dict[str, Message]
Replies = Mapping[str, Message]
ServerRound = Generator[Outbox, Replies, State]
Start = tuple[State, State]
"""The server's state and one client's, before the first round."""
Weighting = Literal["samples", "uniform"]
PERSONAL_KEYWORDS = ("task", "body", "none", "all", "normalization")


@dataclass(frozen=True)
class ClientInfo:
    """The server's facts about a client before the first round."""

    id: str
    num_samples: int


@dataclass(frozen=True)
class Algorithm(ABC):
    """Hyper-parameters of an algorithm and its two halves. No state lives on ``self``.

    The class variables declare the facts that runtimes, checks and tests need beforehand.

    Attributes:
        personal: The personal part: ``task`` (the task module's own patterns, the head), ``body``
            (all but the head), ``none``, ``all``, ``normalization`` (layers by their type), or glob
            patterns of names and indices of entries, such as ``head.weight[0]``.
        weighting: Client weights p_n in every mean: ``samples`` (n_n/Σn) or ``uniform`` (1/N).
        mask_aware: Weights that read an input channel are averaged over the clients that have it,
            see :mod:`medfed.federation.missing_channels`; each reply then lists the channels that
            its client lacks.
        aggregation: How :meth:`mean` combines the clients, from the section ``aggregation``.
        parts_sent: The only parts that a client's reply may hold.
        parts_averaged: The parts of replies that change the server's state through :meth:`mean`
            only, so that a robust aggregation protects it, and a channel may reveal their sum only.
        parts_compressible: The parts of replies that a lossy codec may encode, which must then be
            unbiased; None: any part, by any codec.
        exact: Names of tensors in messages that no lossy codec may change.
        by_class: Whether it needs one class for every patient; other tasks are refused.
        mixes: Whether it needs canonical parts, whose membership vectors stay in the simplex.
        card: Its state, its messages and the cost of a step; see :class:`Card`.
        averages_moments: Whether a client trains once in a round, what the server then averages, so
            that the server may average the optimizer's state, too. A method does not inherit it.
        fresh_optimizer: Whether it uses :meth:`Client.effective_step_length`, which is undefined
            for an optimizer that keeps momentum over rounds (``local.optimizer_state``).
        sums: Whether it needs two networks whose outputs are added.
        trains_centrally: Whether clients train on the pooled data of all, which no federation does.
        supports_missing_channels: Whether ``mask_aware`` is defined for it. State such as control
            variates is undefined for weights that only some clients train.
        trains_shared: Whether it trains the shared part by itself, so that it must not be empty.
        needs: What its model must have, see :meth:`ParameterSplit.check`; None: any model will do.
        buffers: Pairs of a run's policy of running statistics, and the one that it takes instead.
        normalization: What replaces ``evaluation.normalization`` for its models; None: nothing.

    Raises:
        ConfigError: If a value is unknown, or nothing is averaged that could be mask-aware.
    """

    personal: str | tuple[str, ...] = "none"
    weighting: Weighting = "samples"
    mask_aware: bool = field(default=False, kw_only=True)
    aggregation: Aggregation = field(default=Aggregation(), kw_only=True)
    parts_sent: ClassVar[tuple[str, ...]] = ("shared",)
    parts_averaged: ClassVar[tuple[str, ...]] = ()
    parts_compressible: ClassVar[tuple[str, ...] | None] = None
    exact: ClassVar[tuple[str, ...]] = ()
    by_class: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    card: ClassVar[Card] = Card()
    averages_moments: ClassVar[bool] = False
    fresh_optimizer: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    trains_centrally: ClassVar[bool] = False
    supports_missing_channels: ClassVar[bool] = True
    trains_shared: ClassVar[bool] = False
    needs: ClassVar[Needs | None] = None
    buffers: ClassVar[tuple[tuple[BufferPolicy, BufferPolicy], ...]] = ()
    normalization: ClassVar[Normalization | None] = None

    def __post_init__(self) -> None:
        check_fields("algorithm", self)
        if self.personal not in PERSONAL_KEYWORDS:
            object.__setattr__(self, "personal", patterns_of(self.personal))
        if self.mask_aware and not (self.parts_sent and self.supports_missing_channels):
            raise ConfigError(
                f"algorithm.mask_aware is not for {self.title}, which averages nothing or "
                "keeps a state that would be undefined for weights that only some clients train."
            )

    @property
    def title(self) -> str:
        """The method's name in sentences."""
        return type(self).__name__

    def split(
        self, network: nn.Module, task_patterns: str | Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        """Splits a network's entries by ``personal``.

        Args:
            network: The model. Where single entries of a tensor are personal, they become a
                parameter of it: see :mod:`medfed.federation.split`.
            task_patterns: The personal part that the task module proposes.
            buffers: The run's buffer policy.

        Raises:
            ConfigError: If a pattern matches nothing, or a requested part does not exist.
        """
        task_patterns = patterns_of(task_patterns)
        if self.personal in ("task", "body") and not task_patterns:
            raise nothing_personal(network, self.title)
        if self.personal in ("task", "body"):
            task_patterns = divide(network, task_patterns)
        named: dict[str, Sequence[str]] = {
            "task": task_patterns,
            "body": remainder(network, task_patterns) if self.personal == "body" else (),
            "none": (),
            "all": ("*",),
            "normalization": normalization_patterns(network),
        }
        patterns = named[self.personal] if isinstance(self.personal, str) else self.personal
        patterns = divide(network, patterns)
        empty = {
            "normalization": "personal=normalization finds no normalisation layer with parameters "
            "in this network; choose a model that has some, such as model.network.norm=batch.",
            "body": "personal=body is all but the model's head, and there the head is all; choose "
            "a model of several layers, or name the head by model.personal.",
        }
        if not patterns and self.personal in empty:
            raise ConfigError(empty[self.personal])
        split = ParameterSplit.of(network, patterns, dict(self.buffers).get(buffers, buffers))
        if self.trains_shared and not split.parameters("shared"):
            raise nothing_to_train("shared")
        if self.personal != "none" and not split.parameters("personal"):
            raise nothing_personal(network, self.title)
        head = [n for n in split.parameters("all") if any(fnmatchcase(n, p) for p in task_patterns)]
        split = replace(split, head=tuple(head))
        split.check(self.needs, self.title)
        return split

    def adapted(self, split: ParameterSplit, network: nn.Module) -> Algorithm:
        """Returns the algorithm adapted to this network and split; most need no change."""
        return self

    def vectors(self, split: ParameterSplit, weights: Tensors) -> dict[str, int]:
        """Returns the lengths of the vectors in the method's card.

        Args:
            split: Shared and personal names.
            weights: All entries of the model.
        """
        names = {
            "shared": split.shared,
            "weights": split.parameters("shared"),
            "personal": split.personal,
            "parameters": split.parameters("all"),
            "head": split.head,
            "model": split.names("all"),
        }
        lengths = {v: sum(t.numel() for t in select(weights, n).values()) for v, n in names.items()}
        return {**lengths, "outputs": weights[split.parameters("all")[-1]].numel()}

    def counts(self, clients: int) -> dict[str, float]:
        """Returns the values of names in the method's card: N and hyper-parameters.

        Args:
            clients: N.
        """
        return {**vars(self), "N": clients}

    def check_cohort(self, cohort: Cohort) -> None:
        """Checks that a run's cohorts suit the method.

        Raises:
            ConfigError: If the method needs all clients in every round, and some are left out.
        """
        where = "cohort.absent leaves some out; set it to []"
        if cohort.fraction < 1:
            where = (
                f"cohort.fraction={cohort.fraction} leaves some out; choose cohort.fraction=1, or "
                "cohort.clients=[...] for a federation of a few"
            )
        if self.card.full_cohort and (cohort.fraction < 1 or any(cohort.absent.values())):
            raise ConfigError(f"{self.title} needs all clients in every round, and {where}.")

    def summaries(self, data: ClientData) -> Sequence[Statistic]:
        """Returns what a client's messages hold besides weights, gradients and single numbers.

        Args:
            data: The client's.
        """
        return ()

    def aggregating(self, aggregation: Aggregation, clients: int | None = None) -> Algorithm:
        """Returns the method with another aggregation.

        Args:
            aggregation: The aggregation.
            clients: How many clients there are, if it is known.

        Raises:
            ConfigError: If the method's server takes no means of what clients send, or there are
                too few clients.
        """
        name = type(aggregation).__name__.lower()
        if type(aggregation) is not Aggregation:
            if not self.parts_averaged or self.mask_aware:
                why = (
                    "with algorithm.mask_aware=true averages each weight over other clients"
                    if self.parts_averaged
                    else "combines what clients send in another way than by means"
                )
                raise ConfigError(
                    f"aggregation={name} is for methods whose server takes means, and "
                    f"{self.title} {why}; choose aggregation=mean."
                )
            if clients is not None and clients < aggregation.least:
                raise ConfigError(
                    f"aggregation={name} with these values needs at least {aggregation.least} "
                    f"clients, and there are {clients}; choose aggregation=median, or "
                    "aggregation=mean."
                )
        same = aggregation == self.aggregation
        return self if same else replace(self, aggregation=aggregation)

    def phases(self, round: int) -> tuple[str, ...]:
        """Returns the phases that :meth:`round` will yield, known before the round starts."""
        return ("fit",)

    @abstractmethod
    def init(self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]) -> Start:
        """Returns the server's and one client's state before the first round.

        Args:
            weights: All entries of the initial model, which every client knows.
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

    def answer(self, client: Client, message: Message) -> Message:
        """Returns the reply of :meth:`fit`, with the facts that the server needs."""
        reply = self.fit(client, message)
        if not self.mask_aware or not isinstance(reply, Message):
            return reply  # the caller checks it
        return replace(reply, scalars={**reply.scalars, **lacks(client.data.channels)})

    @abstractmethod
    def broadcast(self, server: State, client: str) -> Message:
        """Returns the part of the server's current result that a client lacks.

        It is delivered before an evaluation and counted once, after the last round.
        """

    @abstractmethod
    def personal_model(self, client: Client, message: Message) -> Tensors:
        """Returns all entries of the model that the client evaluates and exports.

        Args:
            client: The client; its state is read only.
            message: The message from :meth:`broadcast`.
        """

    def completed(self, client: Client, model: Tensors) -> Tensors:
        """Returns the client's model after what is fitted on its validation cases; by default none.

        Validation measures the model without it, and so selects on no case that it is fitted on.

        Args:
            client: The client; its state is read only.
            model: Of :meth:`personal_model` or onboarding, with its statistics of normalisation.
        """
        return model

    def pictures(self, server: State, clients: Sequence[str]) -> Mapping[str, Any]:
        """Returns figures of the server's state, by name; by default none."""
        return {}

    def centers(self, client: Client, message: Message) -> Tensors:
        """Returns the centres of the quantised parameters in ``personal_model``; by default none.

        Args:
            client: The client; its state is read only.
            message: The message from :meth:`broadcast`.
        """
        return {}

    def memberships(self, server: State) -> Tensor | None:
        """Returns the clients' memberships in canonical models over rounds, (R + 1, N, K)."""
        return None

    def least_steps(self, steps: int) -> int:
        """Returns the fewest of a client's steps in a round that one of its messages follows from.

        By default an equal share for each phase.
        """
        return share_of(steps, 0, len(self.phases(0)))

    def max_batches_drawn(self, steps: int, epoch: int) -> int:
        """Returns the most batches that a client draws in a round, where noise protects patients.

        By default those of its steps, of which each of two parts takes at least one.

        Args:
            steps: The client's steps in a round.
            epoch: Batches of an epoch.
        """
        return max(steps, 2)

    @property
    def gradients_per_batch(self) -> int:
        """The most gradients that a client takes of one batch."""
        return 1

    @property
    def passes(self) -> float:
        """Gradient passes per local step, with these hyper-parameters."""
        return self.card.passes

    def weights(self, server: State, clients: Iterable[str]) -> list[float]:
        """Returns each client's weight in a mean; weights need not sum to 1."""
        if self.weighting == "uniform":
            return [1.0 for _ in clients]
        sizes = server.get("num_samples", {})
        if lost := [c for c in clients if c not in sizes]:
            raise ConfigError(
                f"{self.title} weighs clients by their samples, and the server's state has none of "
                f"{lost[0]}; let init return num_samples (client_sizes), and round {{**server, "
                "...}, or set algorithm.weighting=uniform."
            )
        return [float(sizes[c]) for c in clients]

    def part(self, server: State, clients: Iterable[str]) -> float:
        """Returns the clients' part of the weight of all clients."""
        return sum(self.weights(server, clients)) / sum(self.weights(server, server["num_samples"]))

    @property
    def averages_plainly(self) -> bool:
        """Whether :meth:`mean` is the weighted mean."""
        return type(self.aggregation) is Aggregation and not self.mask_aware

    def mean(self, server: State, replies: Mapping[str, Message], part: str) -> Tensors:
        """Returns the mean of a part over the replies, weighted as ``weighting`` says.

        It is what ``aggregation`` takes in its place, or what the channel has summed. Running
        variances become those of all clients' samples together.
        """
        if isinstance(replies, PhaseReplies) and part in replies.means:
            return replies.means[part]
        weights, kinds = self.weights(server, replies), [m.kind(part) for m in replies.values()]
        summed = replies.summed(part) if isinstance(replies, PhaseReplies) else None
        items = [m.parts[part] for m in replies.values()] if summed is None else []
        if summed is not None:
            mean = summed
        elif self.averages_plainly:
            mean = weighted_mean(items, weights)
        elif not self.mask_aware or not (reads := server["reads"]):
            start = server[part] if _are_models(kinds) else None
            mean = self.aggregation.combine(items, weights, start)
        else:
            count = len(next(iter(reads.values())))
            present = torch.stack([presence(m.scalars, count) for m in replies.values()])
            mean = mean_where_present(items, weights, present, reads)
        known = server.get(part, {}) if part in self.parts_averaged else {}
        return pooled_variances(mean, known if _are_models(kinds) else None)


def _are_models(kinds: Sequence[str]) -> bool:
    """Whether most replies hold weights, not displacements; a single client may say anything."""
    return 2 * kinds.count("state") > len(kinds)


def sent_by_each(replies: Replies, part: str) -> Tensors:
    """Returns the single tensor of a part, by client, from the replies that have it."""
    return {c: next(iter(m.parts[part].values())) for c, m in replies.items() if part in m.parts}


def client_sizes(clients: Sequence[ClientInfo]) -> Tensors:
    """Returns the server's entry ``num_samples``, which :meth:`Algorithm.weights` reads."""
    return {c.id: Tensor([c.num_samples]).double() for c in clients}
