"""A round, which every runtime drives: the server's half, and the client's half of an exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from medfed.common.seeding import derive_seed
from medfed.common.streams import globals_seeded
from medfed.common.tensors import State, Tensors, weighted_mean
from medfed.federation import aggregation, duties
from medfed.federation.algorithm import Outbox, Replies
from medfed.federation.contributions import cosines_in, with_round
from medfed.federation.federation import Federation
from medfed.federation.wire.channel import MessageContext, naming
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.packet import Message, Packet
from medfed.standalone.errors import ConfigError

PART = "optimizer"  # of messages: the state of the clients' optimizers, which the server averages


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
        algorithm = federation.algorithm
        self.expected = duties.check_phases(algorithm, algorithm.phases(number))
        self.position, self.phase = 0, ""  # of the open phase: its place within the round, and name
        generator = algorithm.round(federation.server, self.cohort, number)
        self._generator = duties.check_generator(algorithm, generator)
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
        return answer(self.federation, client, self.sent[client], self.number, self.position)

    def receive(self, client: str, packet: Packet) -> None:
        """Takes a recipient's reply; the replies may come in any order.

        They are decoded, and what is averaged is added up, in the order of the cohort: so every
        runtime has the same bits and the same ledger.
        """
        self._waiting[client] = packet
        clients, replies = self.recipients, self._replies
        channel, ledger = self.federation.channel, self.federation.ledger
        while len(replies) < len(clients) and (turn := clients[len(replies)]) in self._waiting:
            packet, where = self._waiting.pop(turn), (self.number, self.phase, turn)
            with naming(turn, self.number, self.phase):
                message, after = channel.decode(packet, "up", self._memory.get(turn))
                if after:
                    self._memory[turn] = after
                if channel.sums is not None:
                    self._packets[turn] = packet
                replies.add(turn, message, packet.parts)
                sent, received = self.sent[turn].sizes(), packet.sizes()
                ledger.count(sent, *where, "down")
                ledger.count(received, *where, "up")

    def close_phase(
        self, check: Callable[[Mapping[str, Message], aggregation.Norms], None] = lambda *_: None
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
        federation.far += aggregation.find_outliers(replies.norms, self.number, self.phase)
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
        with duties.unchanged(algorithm, self.federation.server, "group {} of the server's state"):
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
        duties.check_state(federation.algorithm, "round", server)
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
                means[name] = aggregation.pooled_variances(mean, None if update else start)
        return means

    def _send(self, outbox: Outbox) -> None:
        """Checks and encodes the messages of a phase, which clients then read in :attr:`sent`."""
        name = type(self.federation.algorithm).__name__
        if self.position >= len(self.expected):
            raise ConfigError(f"{name} yields more phases than {self.expected}.")
        self.phase = self.expected[self.position]
        duties.check_outbox(self.federation.algorithm, outbox)
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
        channel, memories = self.federation.channel, dict(self.federation.memory["down"])
        for client in self.recipients:
            with naming(client, self.number, self.phase):
                place = MessageContext(client, self.number, self.position)
                before = memories.get(client)
                self.sent[client], after = channel.encode(outbox[client], "down", place, before)
                if after:
                    memories[client] = after
        self.federation.memory["down"] = memories
        # For the replies of the open phase.
        federation, algorithm = self.federation, self.federation.algorithm
        adds = algorithm.averages_plainly and not federation.compares
        averaged = algorithm.parts_averaged if adds else ()
        clients = self.recipients if averaged else []
        weights = algorithm.weights(federation.server, clients)
        self._replies = aggregation.PhaseReplies(
            duties.check_weights(algorithm, clients, weights), averaged
        )
        self._memory = dict(federation.memory["up"])
        self._packets: dict[str, Packet] = {}  # whose parts are summed


def answer(
    federation: Federation,
    client: str,
    packet: Packet,
    number: int,
    position: int,
    noisy: int | None = None,
) -> Packet:
    """The client's half of one exchange: decodes the packet, trains, and encodes its reply.

    `position`: of the phase within the round. `noisy`: how many clients at least add noise to
    the sum, if the round's cohort is not known here.
    """
    # A weight is for sums alone.
    share = None if federation.channel.sums is None else federation.share(client)
    place = MessageContext(client, number, position, share)
    with naming(client, number, packet.phase), federation.clients[client].loaded() as local:
        device = local.trainer.model.device
        message, received = federation.channel.decode(packet, "down", local.memory["down"])
        local.begin(number, packet.phase, position)
        local.adopt(message.parts.get(PART, {}))
        draws = derive_seed(federation.seed, number, client, packet.phase, position, "answer")
        guard = duties.unchanged(
            federation.algorithm, local.state, "group {} of the client's state"
        )
        whole = duties.unchanged(federation.algorithm, message.parts, "part {} of a message")
        with guard, whole, globals_seeded(draws, device):
            reply = federation.algorithm.answer(local, message)
        duties.check_reply(federation.algorithm, reply, packet.phase)
        duties.check_state(federation.algorithm, "fit", local.state)
        reply = aggregation.second_moments(reply, message, federation.algorithm.parts_averaged)
        if federation.averages_moments:
            reply = with_moments(reply, local.shared_moments())
        if federation.noise is not None:
            count = noisy or len(federation.members(number))
            reply = federation.noise.protect(reply, count, client, number, position, "noise")
        encoded, sent = federation.channel.encode(reply, "up", place, local.memory["up"])
        # Only now: a client that fails earlier keeps the state on which both ends agree.
        local.memory = {"down": received, "up": sent}
    if federation.absent_folder is not None:
        local.offload(federation.absent_folder)
    return encoded


def with_moments(message: Message, moments: Tensors | None) -> Message:
    """Returns a message with the state of an optimizer, if there is any.

    With ``local.optimizer_state=averaged`` each reply of a round also holds Adam's moments, or the
    momentum, of the shared parameters; the server sends their mean back with the next model. The
    state of personal parameters stays with the client.
    """
    return replace(message, parts={**message.parts, PART: moments}) if moments else message
