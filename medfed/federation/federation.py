"""The federation, how it is made, and its round, which every runtime drives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from medfed.common.arguments import check_arguments, check_kind
from medfed.common.seeding import derive_seed
from medfed.common.streams import globals_seeded
from medfed.common.tensors import State, Tensors, digest, states_on, weighted_mean
from medfed.federation import inputs
from medfed.federation.aggregation import (
    Norms,
    Outlier,
    PhaseReplies,
    find_outliers,
    pooled_variances,
    second_moments,
)
from medfed.federation.algorithm import Algorithm, ClientInfo, Cohort, Outbox, Replies
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch, ClientData
from medfed.federation.contributions import check_contributions, cosines_in, with_round
from medfed.federation.duties import (
    check_generator,
    check_message,
    check_model,
    check_outbox,
    check_phases,
    check_reply,
    check_start,
    check_state,
    check_weights,
)
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.engine.private import ClientPrivacy
from medfed.federation.local_client import LocalClient, bytes_of
from medfed.federation.missing_channels import entries_reading
from medfed.federation.optimizers import OptimizerFactory, SchedulerFactory
from medfed.federation.split import BufferPolicy, Normalization, ParameterSplit
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.codecs.base import MAX_UNCHECKED
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import KINDS, Message, Packet
from medfed.standalone.checks import check_count
from medfed.standalone.errors import CodecError, ConfigError, NonFiniteError

PART = "optimizer"  # of messages: the state of the clients' optimizers, which the server averages


class Federation:
    """The server's state, the clients of this process, and the channel between them.

    `clients`: those that this process trains. `everyone`: all clients of the federation on all
    ranks, in order. `trainer`: the training loop; a server without clients has its network, too.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: State,
        clients: Mapping[str, LocalClient],
        everyone: Sequence[ClientInfo],
        trainer: LocalTrainer,
        channel: Channel | None = None,
        cohort: Cohort | None = None,
        seed: int = 0,
    ) -> None:
        self.cohort = cohort or Cohort()
        algorithm.check_cohort(self.cohort)
        self.algorithm = algorithm
        self.server = server
        self.clients = dict(clients)
        self.ids = [c.id for c in everyone]
        self.samples: Mapping[str, int] = {c.id: c.num_samples for c in everyone}
        self._all_samples = sum(self.samples.values())
        self.channel = channel or Channel()
        self.ledger = Ledger()
        self.seed = seed
        # The state of the server's end of the channel, by direction and client.
        self.memory: dict[Direction, State] = {"up": {}, "down": {}}
        # What this process's clients lack of the result, sent by a server elsewhere.
        self.arrived: dict[str, Packet] = {}
        self.far: list[Outlier] = []  # parts of replies far longer than those of the others
        self.compares = False  # whether each client's update is compared with the others'
        self.client_start: State = next((dict(c.state) for c in self.clients.values()), {})
        self.absent_folder: Path | None = None  # for the state of absent clients; None: in memory
        self.noise: ClientPrivacy | None = None  # what clients add to their replies, if protected
        self.channel.seed = seed
        self.trainer = trainer
        # Whether the server averages the optimizers' state.
        self.averages_moments = trainer.budget.optimizer_state == "averaged"
        # No lossy codec may change buffers; every client has the same model.
        self.channel.buffers = trainer.split.buffers.union(algorithm.exact)

    def to(self, device: torch.device) -> None:
        """Moves all states to a device, but for those that clients keep between their turns."""
        self.channel.device = device
        weights = {name: client.weights for name, client in self.clients.items()}
        states = {"server": self.server, "start": self.client_start, "weights": weights}
        kept = states_on({**states, **self.memory}, device)
        self.server, self.client_start = kept["server"], kept["start"]
        self.memory = {d: kept[d] for d in self.memory}
        for name, client in self.clients.items():
            client.weights = kept["weights"][name]

    def bytes_between_rounds(self) -> int:
        """The approximate size of one client's state between rounds, with optimizer and channel.

        The estimate for an optimizer is two numbers per parameter, as Adam keeps them.
        """
        if not self.clients:
            return 0
        client = next(iter(self.clients.values()))
        optimizer = 0 if client.fresh_optimizer else 2
        modes = [link.mode(kind) for link in self.channel.links.values() for kind in KINDS]
        lossy = min(2, len(modes) - modes.count("plain"))
        state = sum(bytes_of(named.values()) for named in self.client_start.values())
        return state + (optimizer + lossy) * bytes_of(client.weights.values())

    def members(self, round: int) -> tuple[str, ...]:
        """Returns the cohort of a round."""
        return self.cohort.of(self.ids, self.seed, round)

    def share(self, client: str) -> float:
        """Returns a client's weight among all clients, whether they take part or not."""
        if self.algorithm.weighting == "uniform":
            return 1 / len(self.ids)
        return self.samples[client] / self._all_samples

    @property
    def most_elements(self) -> int:
        """A bound above any reply: many models, or the minimum that a receiver always accepts."""
        size = sum(map(Tensor.numel, self.trainer.model.entries.values()))
        return max(MAX_UNCHECKED, 64 * size)

    def open(self, round: int) -> Round:
        """Starts a round: its first messages are encoded, and wait for their clients."""
        return Round(self, round)

    def answer(
        self, client: str, packet: Packet, number: int, position: int, noisy: int | None = None
    ) -> Packet:
        """The client's half of one exchange: decodes the packet, trains, and encodes its reply.

        `position`: of the phase within the round. `noisy`: how many clients at least add noise to
        the sum, if the round's cohort is not known here.
        """
        place = MessageContext(client, number, position, self.share(client))
        with naming(client, number, packet.phase), self.clients[client].loaded() as local:
            message, received = self.channel.decode(packet, "down", local.memory["down"])
            local.begin(number, packet.phase, position)
            local.adopt(message.parts.get(PART, {}))
            draws = derive_seed(self.seed, number, client, packet.phase, position, "answer")
            kept = _unchanged(self.algorithm, local.state, "group {} of the client's state")
            whole = _unchanged(self.algorithm, message.parts, "part {} of a message")
            with kept, whole, globals_seeded(draws, local.trainer.model.device):
                reply = self.algorithm.answer(local, message)
            check_reply(self.algorithm, reply, packet.phase)
            check_state(self.algorithm, "fit", local.state)
            reply = second_moments(reply, message, self.algorithm.parts_averaged)
            if self.averages_moments:
                reply = with_moments(reply, local.shared_moments())
            if self.noise is not None:
                count = noisy or len(self.members(number))
                reply = self.noise.protect(reply, count, client, number, position, "noise")
            encoded, sent = self.channel.encode(reply, "up", place, local.memory["up"])
            # Only now: a client that fails earlier keeps the state on which both ends agree.
            local.memory = {"down": received, "up": sent}
        if self.absent_folder is not None:
            local.offload(self.absent_folder)
        return encoded

    def delivery(self, client: str) -> Packet:
        """Returns the part of the current result that a client lacks; changes neither end."""
        with _unchanged(self.algorithm, self.server, "group {} of the server's state"):
            message = self.algorithm.broadcast(self.server, client)
        check_message(self.algorithm, "broadcast returns", message)
        kept = self.memory["down"].get(client)
        return self.channel.encode(message, "down", MessageContext(client), kept)[0]

    def delivered(self, client: str) -> Message:
        """Returns the part that a client of this process lacks, as it would decode it."""
        kept = self.clients[client].memory["down"]
        # At a hospital's site the server's state is elsewhere, and its packet has arrived.
        packet = self.arrived.get(client) or self.delivery(client)
        return self.channel.decode(packet, "down", kept)[0]

    def personal_model(self, client: str, split: str = "test") -> Tensors:
        """Returns the model that a client of this process evaluates on a split; changes no state.

        It is the client's model after decoding, including the losses of a lossy codec.
        """
        with self.clients[client].loaded() as local:
            passes = local.passes
            delivered = self.delivered(client)
            with _unchanged(self.algorithm, local.state, "group {} of the client's state"):
                model = self.algorithm.personal_model(local, delivered)
            local.passes = passes  # of an evaluation, which are not the training's
            entries, other = local.trainer.model.entries, local.moved_other_state
            check_model(self.algorithm, client, entries, other, model)
            return self.as_evaluated(local, model, split)

    def as_evaluated(self, local: LocalClient, model: Tensors, split: str = "test") -> Tensors:
        """Returns a client's model as it is evaluated on a split.

        Its statistics of normalisation are those that the run wants; what the method fits on
        validation cases is in it, unless the split is that of validation.
        """
        if self.noise is not None:
            return model
        if (self.algorithm.normalization or local.trainer.normalization) == "reestimated":
            model = local.trainer.reestimated(local.data, model)
        return model if split == "val" else self.algorithm.completed(local, model)

    def centers(self, client: str) -> Tensors:
        """Returns the centres of a client's quantised parameters, by name; changes no state."""
        with self.clients[client].loaded() as local:
            return self.algorithm.centers(local, self.delivered(client))

    def memberships(self) -> Tensor | None:
        """Returns the clients' memberships in canonical models over rounds, if there are any."""
        return self.algorithm.memberships(self.server)

    def pictures(self) -> Mapping[str, Any]:
        """Returns figures of the server's state, by name, if there are any."""
        return self.algorithm.pictures(self.server, self.ids)

    def count_delivery(self, round: int, clients: Sequence[str] | None = None) -> None:
        """Adds the delivery of the final result to every client, or to some, to the ledger."""
        for client in self.ids if clients is None else clients:
            self.ledger.count(self.delivery(client).sizes(), round, "deliver", client, "down")

    def digests(self) -> dict[str, str]:
        """Returns a hash of the states of the server and of each client of this process.

        The states of both ends of the channel are included.
        """
        kept = {f"{d}/{c}": named for d, state in self.memory.items() for c, named in state.items()}
        hashes = {"server": _digest(self.server, kept)}
        return hashes | {
            f"client/{c}": _digest(local.state, local.memory) for c, local in self.clients.items()
        }


class Round:
    """Drives the generator of one round through its phases.

    A runtime calls :meth:`fit` for every client of :attr:`recipients`, in any order and in any
    process, passes each reply to :meth:`receive`, then calls :meth:`close_phase`; after the last
    phase the server's new state is in the federation.
    """

    def __init__(self, federation: Federation, number: int) -> None:
        self.federation = federation
        self.number = number
        self.cohort = federation.members(number)
        if federation.channel.sums is not None and len(self.cohort) < FEWEST:
            raise ConfigError(
                f"channel.secure=masks needs {FEWEST} clients in every round, and round "
                f"{number + 1} has {len(self.cohort)}; let more take part (cohort), or set "
                "channel.secure=null."
            )
        phases = federation.algorithm.phases(number)
        self.expected = check_phases(federation.algorithm, phases)
        self.position, self.phase = 0, ""  # of the open phase: its place within the round, and name
        generator = federation.algorithm.round(federation.server, self.cohort, number)
        self._generator = check_generator(federation.algorithm, generator)
        self._outbox: Outbox = {}
        self._reached = False  # whether any client has had a message
        self._moments = federation.server.get(PART, {}) if federation.averages_moments else None
        self.recipients: list[str] = []  # of the open phase, in the order of the cohort
        self.sent: dict[str, Packet] = {}  # the packets to these
        self._cosines: dict[str, float] = {}
        self._waiting: dict[str, Packet] = {}  # replies that came before those of earlier clients
        self._advance(None)  # a generator runs only when it is advanced

    def fit(self, client: str) -> Packet:
        """Delivers a client's message, trains, and returns its encoded reply."""
        return self.federation.answer(client, self.sent[client], self.number, self.position)

    def receive(self, client: str, packet: Packet) -> None:
        """Takes a recipient's reply; the replies may come in any order.

        They are decoded, and what is averaged is added up, in the order of the cohort: so every
        runtime has the same bits and the same ledger.
        """
        self._waiting[client] = packet
        clients, replies = self.recipients, self._replies
        while len(replies) < len(clients) and (turn := clients[len(replies)]) in self._waiting:
            with naming(turn, self.number, self.phase):
                self._decode(turn, self._waiting.pop(turn))

    def _decode(self, client: str, packet: Packet) -> None:
        channel, ledger = self.federation.channel, self.federation.ledger
        message, after = channel.decode(packet, "up", self._memory.get(client))
        if after:
            self._memory[client] = after
        if channel.sums is not None:
            self._packets[client] = packet
        self._replies.add(client, message, packet.parts)
        where = self.number, self.phase, client
        down, up = self.sent[client].sizes(), packet.sizes()
        ledger.count(down, *where, "down")
        ledger.count(up, *where, "up")

    def close_phase(
        self, check: Callable[[Mapping[str, Message], Norms], None] = lambda *_: None
    ) -> bool:
        """Hands the replies to the server; returns whether the round has another phase.

        Each recipient has sent one. `check` gets the decoded replies and the norms of their parts
        before the server; what it raises ends the round.
        """
        federation, replies = self.federation, self._replies
        # The next phase sends other weights; those of a large model would wait for it.
        self.sent = {}
        federation.channel.forget()
        check(replies, replies.norms)
        federation.far += find_outliers(replies.norms, self.number, self.phase)
        if federation.compares and not self._cosines:
            names = federation.trainer.split.parameters("all")
            parameters = {*names} - federation.channel.buffers
            method, server = federation.algorithm, federation.server
            self._cosines = cosines_in(replies, method, server, parameters)
        replies.means.update(self._means())
        if self._moments is not None and self.recipients:
            weights = federation.algorithm.weights(federation.server, self.recipients)
            self._moments = weighted_mean(
                (m.parts.get(PART, {}) for m in replies.values()), weights
            )
        # All ends of the channel or none: an error before this changes nothing.
        federation.memory["up"] = self._memory
        self.position += 1
        return self._advance(replies)

    def _advance(self, replies: Replies | None) -> bool:
        """Lets the server's half go on to its next outbox; returns whether there is one."""
        # A generator that returns ends the round: its value is the server's new state.
        new, algorithm = list[Any](), self.federation.algorithm
        with _unchanged(algorithm, self.federation.server, "group {} of the server's state"):
            try:
                outbox = self._generator.send(replies)  # type: ignore[arg-type]  # None starts it
            except StopIteration as stop:
                new.append(stop.value)  # not the error: its traceback keeps all states in memory
        if new:
            self._end(new.pop())
            return False
        self._send(outbox)
        return True

    def _end(self, server: State) -> None:
        """Puts the server's new state into the federation."""
        federation = self.federation
        if self.position != len(self.expected):
            raise ConfigError(
                f"{type(federation.algorithm).__name__} ended round {self.number + 1} before "
                f"its phase {self.expected[self.position]}."
            ) from None
        if self.cohort and not self._reached:
            raise ConfigError(
                f"{type(federation.algorithm).__name__}.round sent no message, so that no client "
                f"has trained in round {self.number + 1}; yield {{client: Message}}."
            )
        check_state(federation.algorithm, "round", server)
        moments = {} if self._moments is None else {PART: self._moments}
        if federation.compares:
            method, ids = federation.algorithm, federation.ids
            moments |= with_round(federation.server, self._cosines, ids, method)
        federation.server = {**server, **moments}

    def _means(self) -> Mapping[str, Tensors]:
        """Returns the means of the parts that are summed."""
        means: dict[str, Tensors] = {}
        if (sums := self.federation.channel.sums) is None:
            return means
        for name in sums.parts:
            senders = [c for c in self.recipients if name in self._packets[c].parts]
            if senders and (senders != self.recipients or len(senders) < FEWEST):
                raise ValueError(f"{len(senders)} clients send {name}, which must be a sum of all.")
            if senders:
                parts = [self._packets[c].parts[name] for c in senders]
                share = sum(map(self.federation.share, senders))
                mean = sums.mean(parts, share, str(self.federation.channel.device))
                start = self._outbox[senders[0]].parts.get(name, {})
                update = parts[0].kind == "update"
                means[name] = pooled_variances(mean, None if update else start)
        return means

    def _send(self, outbox: Outbox) -> None:
        """Checks and encodes the messages of a phase, which clients then read in :attr:`sent`."""
        name = type(self.federation.algorithm).__name__
        if self.position >= len(self.expected):
            raise ConfigError(f"{name} yields more phases than {self.expected}.")
        self.phase = self.expected[self.position]
        check_outbox(self.federation.algorithm, outbox)
        members = set(self.cohort)
        for client, message in outbox.items():
            if message.phase != self.phase or client not in members:
                raise ConfigError(
                    f"{name} sent phase {message.phase!r} to {client} where phase {self.phase!r} "
                    "to members of the cohort was announced."
                )
        outbox = {c: with_moments(message, self._moments) for c, message in outbox.items()}
        self._outbox = outbox
        self.recipients = [c for c in self.cohort if c in outbox]
        self._reached |= bool(self.recipients)
        # A copy, swapped in at the end: a message that cannot be encoded must not leave half a
        # state.
        channel, kept = self.federation.channel, dict(self.federation.memory["down"])
        for client in self.recipients:
            with naming(client, self.number, self.phase):
                place = MessageContext(client, self.number, self.position)
                before = kept.get(client)
                self.sent[client], after = channel.encode(outbox[client], "down", place, before)
                if after:
                    kept[client] = after
        self.federation.memory["down"] = kept
        self._expect_replies()

    def _expect_replies(self) -> None:
        """Prepares for the replies of the open phase."""
        federation, algorithm = self.federation, self.federation.algorithm
        adds = algorithm.averages_plainly and not federation.compares
        averaged = algorithm.parts_averaged if adds else ()
        clients = self.recipients if averaged else []
        weights = algorithm.weights(federation.server, clients)
        self._replies = PhaseReplies(check_weights(algorithm, clients, weights), averaged)
        self._memory = dict(federation.memory["up"])
        self._packets: dict[str, Packet] = {}  # whose parts are summed


def assemble(
    algorithm: Algorithm,
    network: nn.Module,
    loss: Callable[[Batch], Tensor],
    clients: Iterable[ClientData],
    *,
    personal: str | Sequence[str] = (),
    buffers: BufferPolicy = "averaged",
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None = None,
    rounds: Annotated[int, check_count] = 1,
    budget: LocalBudget | None = None,
    channel: Callable[[Algorithm], Channel] | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    measure: Callable[[Iterable[Batch]], float] | None = None,
    everyone: Sequence[ClientInfo] | None = None,
    shape: Sequence[int] | None = None,
    normalization: Normalization = "reestimated",
    compares: bool = False,
) -> tuple[Federation, LocalTrainer]:
    """Makes a federation: split, training loop, initial states, clients.

    `everyone`: all clients of the federation, if not all are in this process. `compares`: whether
    each client's update is compared with the others'.
    """
    inputs.check_network(network)
    check_kind("algorithm", algorithm, Algorithm, " such as Ditto()")
    sgd = " such as partial(torch.optim.SGD, lr=0.1)"
    check_kind("optimizer", optimizer, OptimizerFactory, sgd)
    clients = inputs.check_clients(clients)
    check_arguments(assemble, {n: v for n, v in locals().items() if n != "sgd"})
    inputs.check_labels(algorithm, clients)
    split = algorithm.split(network, personal, buffers)
    check_kind(f"What {algorithm.title}.split returns", split, ParameterSplit)
    algorithm = algorithm.adapted(split, network)
    check_kind("What adapted returns", algorithm, Algorithm)
    inputs.check_optimizer(optimizer, scheduler, rounds, network)
    checked = inputs.CheckedLoss(loss, network)
    local = LocalTrainer(
        network, checked, split, optimizer, scheduler, rounds, budget, seed, measure
    )
    local.model.other.add_loss(loss)
    weights = local.model.initial()
    if everyone is None:
        if not clients:
            raise ConfigError("There is no client; give at least one.")
        everyone = [ClientInfo(c.id, c.num_samples) for c in clients]
    server, state = check_start(algorithm, algorithm.init(weights, split, everyone))
    if algorithm.mask_aware:
        shape = shape or clients[0].train_inputs(1).shape[1:]
        server = {**server, "reads": entries_reading(network, shape)}
    local_clients = {c.id: LocalClient(c, local, weights, state) for c in clients}
    sent = Channel() if channel is None else channel(algorithm)
    if not split.parameters("shared"):
        inputs.check_averages(algorithm, sent)
    if local.budget.optimizer_state == "averaged":
        inputs.check_averages_moments(algorithm, sent)
    cohort = cohort or Cohort()
    cohort.of([c.id for c in everyone], seed, 0)  # an unknown client is named here
    made = Federation(algorithm, server, local_clients, everyone, local, sent, cohort, seed)
    if compares:
        check_contributions(algorithm, sent, split)
    made.compares, local.normalization = compares, normalization
    return made, local


@contextmanager
def _unchanged(algorithm: Algorithm, state: Mapping[str, Tensors], what: str) -> Iterator[None]:
    """Raises ConfigError if a function of a method changes tensors that it is given in place."""
    # By weak references: what the function replaces is not kept in memory.
    before = [(g, weakref.ref(t), t._version) for g, named in state.items() for t in named.values()]
    del state
    yield
    after = [(group, reference(), version) for group, reference, version in before]
    if changed := [g for g, t, version in after if t is not None and t._version != version]:
        raise ConfigError(
            f"{type(algorithm).__name__} changes the {what.format(changed[0])} in place, which "
            "others read later; make new tensors."
        )


def _digest(state: State, memory: State) -> str:
    whole = state | {f"memory/{group}": named for group, named in memory.items()}
    return digest({f"{g}/{n}": t for g, named in whole.items() for n, t in named.items()})


@contextmanager
def naming(client: str, round: int, phase: str) -> Iterator[None]:
    """Adds client, round and phase to any error in its body."""
    try:
        yield
    except (NonFiniteError, CodecError) as error:
        where = f"Client {client}, round {round + 1}, phase {phase}"
        named = type(error)(f"{where}: {str(error).rstrip('.')}.")
        named.client = client
        raise named from error
    except Exception as error:
        error.add_note(f"(client {client}, round {round + 1}, phase {phase})")
        raise


def with_moments(message: Message, moments: Tensors | None) -> Message:
    """Returns a message with the state of an optimizer, if there is any.

    With ``local.optimizer_state=averaged`` each reply of a round also holds Adam's moments, or the
    momentum, of the shared parameters; the server sends their mean back with the next model. The
    state of personal parameters stays with the client.
    """
    return replace(message, parts={**message.parts, PART: moments}) if moments else message
