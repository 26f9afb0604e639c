"""A hospital that joins after the others have trained: the rules for its model.

They work for every method. A method with another rule inherits :class:`OnboardingRules` in addition
to :class:`Algorithm`. No rule changes the server's state.
"""

from __future__ import annotations

from collections.abc import Generator

from medfed.common.tensors import State, Tensors
from medfed.federation.algorithm import Algorithm, ClientInfo
from medfed.federation.client import Client, with_statistics
from medfed.federation.wire.packet import Message

Exchange = Generator[Message, Message, Message]


class OnboardingRules:
    """How an onboarded client gets its model: the server's and the client's half."""

    def onboarding(self, server: State, client: ClientInfo) -> Exchange:
        """The server's half; returns the onboarded client's start: what all clients receive.

        It may yield messages, which the onboarded client answers by ``fit``.

        Args:
            server: The server's state, without the onboarded client.
            client: The onboarded client.
        """
        yield from ()
        parts = {name: server[name] for name in ("shared", "features") if server.get(name)}
        return Message("deliver", parts)

    def onboarding_start(self, client: Client, message: Message) -> Tensors:
        """Returns the onboarded client's model before training: received and initial entries.

        Args:
            client: The onboarded client, in the initial state of all clients.
            message: The message from :meth:`onboarding`.
        """
        got = message.parts
        return {**client.weights, **got.get("shared", {}), **got.get("personal", {})}

    def onboard(self, client: Client, message: Message) -> Tensors:
        """The onboarded client's half; returns its model by the method's rule.

        By default it trains the personal part for ``client.steps`` steps. Without a personal part
        it is the shared model unchanged; without a shared part it trains locally.
        """
        start = self.onboarding_start(client, message)
        if not message.parts:
            return client.train(start)
        if client.split.parameters("personal"):
            return client.train(start, update="personal")
        return with_statistics(client, start)

    def fine_tune(self, client: Client, message: Message) -> Tensors:
        """A comparison for :meth:`onboard`: trains all received entries, for as many steps."""
        return client.train(self.onboarding_start(client, message))

    def alone(self, client: Client) -> Tensors:
        """Another comparison: trains the initial weights for as many steps, without the server."""
        return client.train(client.weights)


class TrainsOn(OnboardingRules):
    """An onboarded client trains all received entries."""

    def onboard(self, client: Client, message: Message) -> Tensors:
        """As in the comparison."""
        return self.fine_tune(client, message)


def rules_of(algorithm: Algorithm) -> OnboardingRules:
    """Returns a method's rules, or the default ones."""
    return algorithm if isinstance(algorithm, OnboardingRules) else OnboardingRules()
