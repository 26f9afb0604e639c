"""A client that joins a trained federation: the exchange that leads to its model, and its bytes."""

from __future__ import annotations

from medfed.federation.algorithm import ClientInfo
from medfed.federation.channel import Memory, Place
from medfed.federation.client import ClientData
from medfed.federation.federation import Federation, check_reply
from medfed.federation.ledger import Direction, Entry, Ledger
from medfed.federation.local_client import LocalClient
from medfed.federation.message import Message
from medfed.federation.packet import Packet

OUTSIDE = -1  # the number of no round


def newcomer(federation: Federation, data: ClientData) -> LocalClient:
    """Returns a client in the state that all clients began with; the federation does not know it.

    Args:
        federation: Of at least one client in this process.
        data: The newcomer's data.
    """
    like = next(iter(federation.clients.values()))
    return LocalClient(data, like.trainer, like.weights, federation.client_start)


def welcome(federation: Federation, client: LocalClient) -> tuple[Message, Ledger]:
    """Takes both halves of a method through its onboarding.

    Every message goes through the channel of the run, as bytes and back. Neither the server's state
    nor what its end of the channel remembers changes.

    Args:
        federation: The trained federation.
        client: The newcomer, from :func:`newcomer`; it remembers what it was sent.

    Returns:
        The message that :meth:`Algorithm.join` starts from, and what travelled.
    """
    algorithm = federation.algorithm
    ends = _Ends(federation, client)
    generator = algorithm.onboarding(federation.server, ClientInfo(client.id, client.num_samples))
    try:
        question = next(generator)
        while True:
            received = ends.pass_on(question, "down")
            client.begin(0, received.phase, ends.phase)
            reply = algorithm.fit(client, received)
            check_reply(algorithm, reply)
            answer = ends.pass_on(reply, "up")
            ends.phase += 1
            question = generator.send(answer)
    except StopIteration as stop:
        last = ends.pass_on(stop.value, "down")
    client.begin(0, "join", ends.phase)
    return last, ends.ledger


class _Ends:
    """Both ends of the channel to one newcomer, and the ledger between them."""

    def __init__(self, federation: Federation, client: LocalClient) -> None:
        self.channel = federation.channel
        self.client = client
        self.server: dict[Direction, Memory] = {"up": {}, "down": {}}
        self.ledger = Ledger()
        self.phase = 0

    def pass_on(self, message: Message, direction: Direction) -> Message:
        """Sends a message and returns it as the other end decodes it."""
        place = Place(self.client.id, OUTSIDE, self.phase)
        own, other = self.server, self.client.memory
        sender, receiver = (own, other) if direction == "down" else (other, own)
        packet, sent = self.channel.encode(message, direction, place, sender[direction])
        decoded, kept = self.channel.decode(packet, direction, receiver[direction])
        sender[direction], receiver[direction] = sent, kept
        self._count(packet, direction)
        return decoded

    def _count(self, packet: Packet, direction: Direction) -> None:
        dense = packet.dense_sizes()
        for part, size in packet.sizes().items():
            entry = Entry(OUTSIDE, packet.phase, self.client.id, direction, part, size, dense[part])
            self.ledger.add(entry)
