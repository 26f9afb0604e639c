"""A client that a trained federation onboards: what the two exchange, and its bytes."""

from __future__ import annotations

from medfed.federation.algorithm import ClientInfo
from medfed.federation.client import ClientData
from medfed.federation.federation import Federation, check_reply, count
from medfed.federation.local_client import LocalClient
from medfed.federation.onboarding import rules_of
from medfed.federation.wire.channel import Memory, Place
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.message import Message

OUTSIDE = -1  # the number of no round


def onboarded_client(federation: Federation, data: ClientData) -> LocalClient:
    """Returns a client in the state that all clients began with; the federation does not know it.

    Args:
        federation: Of at least one client in this process.
        data: The onboarded client's data.
    """
    like = next(iter(federation.clients.values()))
    return LocalClient(data, like.trainer, like.weights, federation.client_start)


def exchange(federation: Federation, client: LocalClient) -> tuple[Message, Ledger]:
    """Takes both halves of a method through its onboarding.

    Every message goes through the channel of the run, as bytes and back. Neither the server's state
    nor what its end of the channel remembers changes.

    Args:
        federation: The trained federation.
        client: The onboarded client, from :func:`onboarded_client`; it remembers what it was sent.

    Returns:
        The message that the onboarded client starts from, and what travelled.
    """
    algorithm, channel, ledger = federation.algorithm, federation.channel, Ledger()
    server: dict[Direction, Memory] = {"up": {}, "down": {}}  # its end of the client's channel
    phase = 0

    def passed_on(message: Message, direction: Direction) -> Message:
        """Sends a message and returns it as the other end decodes it."""
        ends = (server, client.memory)
        sender, receiver = ends if direction == "down" else ends[::-1]
        place = Place(client.id, OUTSIDE, phase)
        packet, sent = channel.encode(message, direction, place, sender[direction])
        decoded, receiver[direction] = channel.decode(packet, direction, receiver[direction])
        sender[direction] = sent
        count(ledger, packet, OUTSIDE, packet.phase, client.id, direction)
        return decoded

    info = ClientInfo(client.id, client.num_samples)
    generator = rules_of(algorithm).onboarding(federation.server, info)
    try:
        question = next(generator)
        while True:
            received = passed_on(question, "down")
            client.begin(0, received.phase, phase)
            reply = algorithm.fit(client, received)
            check_reply(algorithm, reply)
            answer = passed_on(reply, "up")
            phase += 1
            question = generator.send(answer)
    except StopIteration as stop:
        last = passed_on(stop.value, "down")
    client.begin(0, "join", phase)  # a name that is in the seeds of measured results
    return last, ledger
