"""The plain loop, which every other runtime equals bit for bit, and ``federate`` for your code.

Neither configurations nor Lightning are needed:

>>> from medfed.personalize.ditto import Ditto
>>> clients = [ArrayClient(c, torch.randn(20, 3), torch.randn(20, 1)) for c in ("a", "b")]
>>> def loss(network, batch):
...     return (network(batch["image"]) - batch["label"]).square().mean()
>>> done = federate(Ditto(strength=0.1), nn.Linear(3, 1), loss, clients, rounds=2)
>>> done.model("a")(torch.zeros(1, 3)).shape, done.ledger.total(direction="up")
(torch.Size([1, 1]), 112)

The module also onboards a client to a trained federation, and counts the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from medfed.common.arguments import check_arguments
from medfed.common.streams import globals_kept
from medfed.common.tensors import Tensors
from medfed.federation import inputs
from medfed.federation.algorithm import Algorithm, ClientInfo, Cohort
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch, ClientData
from medfed.federation.duties import check_reply
from medfed.federation.federation import Federation
from medfed.federation.hospital import ArrayClient, Batched, Hospital
from medfed.federation.local_client import LocalClient
from medfed.federation.onboarding import rules_of
from medfed.federation.optimizers import OptimizerFactory
from medfed.federation.other_state import copied, filled
from medfed.federation.round import Round
from medfed.federation.split import BufferPolicy, Normalization
from medfed.federation.wire.channel import Channel, Memory, MessageContext
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import Message, Packet
from medfed.functional.points import Chooser, common
from medfed.standalone.checks import check_count, check_known
from medfed.standalone.errors import ConfigError

Loss = Callable[[nn.Module, Batch], Tensor]

__all__ = ["ArrayClient", "Federated", "Hospital", "federate", "run_reference"]


@dataclass(frozen=True)
class Federated:
    """The result of a federation."""

    federation: Federation  # all states, for a closer look
    network: nn.Module  # the initial network

    @property
    def ledger(self) -> Ledger:
        """Every byte that travelled in the rounds, without a delivery of the last result."""
        return self.federation.ledger

    def losses(self, split: Literal["train", "val", "test"] = "test") -> dict[str, float]:
        """Returns each client's mean loss on one of its splits, by its personal model."""
        fed = self.federation
        measure, model = fed.trainer.evaluated, fed.personal_model
        losses = {n: measure(c.data, model(n, split), split) for n, c in fed.clients.items()}
        fed.trainer.model.other.restore(None)  # a user's loss stays as it was given
        return losses

    def levels(self, split: Literal["train", "val", "test"] = "val") -> dict[str, float]:
        """Returns what to add to each client's logit of class 1, so that its level is right.

        It is fitted to the client's cases of a split, and drawn towards 0 as far as the clients
        are alike; 0 with fewer than 10 cases.
        """
        chooser, cases = Chooser(2, None, "shift"), dict[str, list[dict[str, float]]]()
        for name, client in self.federation.clients.items():
            network, cases[name] = self.model(name), []
            for batch in client.data.eval_batches(split):
                with torch.no_grad():
                    logits = network(batch["image"])
                if logits.shape[1:] != (2,):
                    raise ConfigError(
                        f"Levels are of two classes, with logits (B, 2), not {tuple(logits.shape)}."
                    )
                chances, labels = logits.double().softmax(1).tolist(), batch["label"].tolist()
                cases[name] += [
                    {"label": y, "probability/0": p, "probability/1": q}
                    for (p, q), y in zip(chances, labels, strict=True)
                ]
        others = common({name: chooser.choose(rows) for name, rows in cases.items()})
        points = {name: chooser.choose(rows, others=others) for name, rows in cases.items()}
        return {name: point.get("shift", 0.0) for name, point in points.items()}

    def weights(self, client: str) -> Tensors:
        """Returns a client's personal model: the tensors of its state dict, by name.

        Other state, which no state dict names, is in ``other state``, if there is any.
        """
        check_known("client", client, self.federation.clients)
        return self.federation.trainer.model.whole(self.federation.personal_model(client))

    def model(self, client: str) -> nn.Module:
        """Returns a new network with a client's personal weights, in evaluation mode."""
        return filled(copied(self.network), self.weights(client)).eval()


def federate(
    algorithm: Algorithm,
    network: nn.Module,
    loss: Loss,
    clients: Iterable[ClientData],
    *,
    rounds: Annotated[int, check_count] = 10,
    steps: int | None = None,
    lr: float | None = None,
    optimizer: OptimizerFactory | None = None,
    personal: str | Sequence[str] = (),
    buffers: BufferPolicy = "averaged",
    channel: Channel | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    after_round: Callable[[int, Federated], None] | None = None,
    normalization: Normalization = "reestimated",
) -> Federated:
    """Federates an algorithm over your own clients and network, by the plain loop.

    The results equal those of a run under Lightning with the same weights, batches and seed.

    Args:
        algorithm: Any of :mod:`medfed.personalize`, or your own; ``medfed.federate`` takes a
            method's name, too, such as ``"fedavg"``, for the method with its default values.
        network: Your network; a copy of it is trained, from its present weights.
        loss: Of a batch under a network: ``loss(network, batch)``.
        clients: :class:`ArrayClient`, :class:`Hospital`, or any object with the interface
            :class:`medfed.federation.client.ClientData`.
        rounds: Federated rounds.
        steps: Gradient steps per client and round; ``None``: an epoch.
        lr: Step size of SGD, 0.1 by default; an optimizer has its own.
        optimizer: Makes an optimizer of a list of parameters.
        personal: The personal part for algorithms that ask for one: a pattern of parameter names,
            such as ``"class_layers.*"``, or several.
        buffers: BatchNorm statistics: ``averaged``, ``local`` or ``frozen``.
        channel: Codecs; dense fp32 by default.
        cohort: The clients that take part in a round; all by default.
        seed: Seed of all random choices.
        after_round: Called with each round's number and the federation so far.
        normalization: ``reestimated``: BatchNorm statistics of each client's model are estimated
            again from 20 of its training batches; ``kept``: they are those of the training.

    Raises:
        ConfigError: If the algorithm does not fit the network, or a name is unknown.
        NonFiniteError: If a loss becomes NaN or infinite; client, round and phase are named.
    """
    if torch.is_inference_mode_enabled():
        raise ConfigError("Nothing trains within torch.inference_mode(); call medfed outside it.")
    inputs.check_network(network)
    if lr is not None and optimizer is not None:
        raise ConfigError(
            f"lr={lr} is the step size of SGD, which the optimizer replaces; give the step size to "
            "the optimizer, as in partial(torch.optim.AdamW, lr=0.001)."
        )
    inputs.check_loss(loss)
    only_here = {"steps": steps, "lr": lr, "channel": channel, "after_round": after_round}
    check_arguments(federate, {"loss": loss, **only_here})
    before, network = copied(network), copied(network)
    federation, _ = assemble(
        algorithm,
        network,
        partial(loss, network),
        clients,
        personal=personal,
        buffers=buffers,
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1 if lr is None else lr),
        rounds=rounds,
        budget=LocalBudget(steps=steps),
        channel=None if channel is None else lambda _: channel,
        cohort=cohort,
        seed=seed,
        normalization=normalization,
    )
    initial = next(iter(federation.clients.values())).weights
    for name, parameter in before.named_parameters():  # both need not be in memory
        if name in initial and parameter.is_contiguous():
            parameter.data = initial[name]
    done = Federated(federation, before)
    run_reference(federation, rounds, after_round and (lambda number: after_round(number, done)))
    return done


def run_reference(
    federation: Federation,
    rounds: int,
    after_round: Callable[[int], None] | None = None,
    start: int = 0,
) -> Federation:
    """Runs rounds client by client, in one process, without Lightning.

    `rounds`: the number of rounds of the whole run. Returns the same federation.
    """
    device = federation.trainer.model.device if federation.trainer else torch.device("cpu")
    try:
        for number in range(start, rounds):
            current, is_open = Round(federation, number), True
            while is_open:
                with globals_kept(device):
                    for client in current.recipients:
                        current.receive(client, current.fit(client))
                is_open = current.close_phase()
            del current  # its replies: of a large model, they would wait for the next round
            if after_round:
                after_round(number)
    finally:
        federation.trainer.residents.release()
        federation.trainer.model.other.restore(None)  # a user's loss stays as it was given
    return federation


OUTSIDE = -1  # the number of no round


def onboarded_client(federation: Federation, data: ClientData) -> LocalClient:
    """Returns a client in the initial state of all clients; it does not join the federation.

    `federation`: a federation with at least one client in this process.
    """
    like = next(iter(federation.clients.values()))
    if isinstance(data, Batched):
        data = inputs.Beside(data, [c.data for c in federation.clients.values()])
    return LocalClient(data, like.trainer, like.weights, federation.client_start)


class Newcomer:
    """The client's half of a method's onboarding.

    `federation`: a federation whose channel and method it uses. `client`: the onboarded client, in
    the initial state of all; its end of the channel changes.
    """

    def __init__(self, federation: Federation, client: LocalClient) -> None:
        self.federation, self.client = federation, client
        self.phase = 0  # how many questions it has answered
        self.ledger = Ledger()  # what it has received and sent

    def answer(self, packet: Packet) -> Packet:
        """Answers a question of the server."""
        algorithm, client = self.federation.algorithm, self.client
        message = self._received(packet)
        client.begin(0, message.phase, self.phase)
        reply = algorithm.fit(client, message)
        check_reply(algorithm, reply, message.phase)
        place, memory = MessageContext(client.id, OUTSIDE, self.phase), client.memory
        encoded, memory["up"] = self.federation.channel.encode(reply, "up", place, memory["up"])
        self.ledger.count(encoded.sizes(), OUTSIDE, encoded.phase, client.id, "up")
        self.phase += 1
        return encoded

    def begin(self, packet: Packet) -> Message:
        """Returns the last message, from which the client then starts."""
        message = self._received(packet)
        # This name is part of the seeds of published results.
        self.client.begin(0, "join", self.phase)
        return message

    def _received(self, packet: Packet) -> Message:
        memory = self.client.memory
        message, memory["down"] = self.federation.channel.decode(packet, "down", memory["down"])
        self.ledger.count(packet.sizes(), OUTSIDE, packet.phase, self.client.id, "down")
        return message


def outsiders_model(federation: Federation, client: LocalClient) -> Tensors | None:
    """Returns the model that a hospital gets which brings no patient; None if there is none."""
    rules = rules_of(federation.algorithm)
    try:
        next(rules.onboarding(federation.server, ClientInfo(client.id, 0)))
    except StopIteration as stop:
        parts = stop.value.parts
        if {*client.weights} <= {*parts.get("shared", {}), *parts.get("personal", {})}:
            return rules.onboarding_start(client, stop.value)
    return None  # a part of the model, or the answer to a question, takes patients


def question(
    federation: Federation, info: ClientInfo, send: Callable[[Packet], Packet], ledger: Ledger
) -> Packet:
    """Runs the server's half of a method's onboarding; the server's state does not change.

    `send`: sends a message, and returns its answer. Returns the last message, which needs none.
    """
    algorithm, channel, phase = federation.algorithm, federation.channel, 0
    memory: dict[Direction, Memory] = {"up": {}, "down": {}}  # its end of the client's channel

    def encoded(message: Message) -> Packet:
        place = MessageContext(info.id, OUTSIDE, phase)
        packet, memory["down"] = channel.encode(message, "down", place, memory["down"])
        ledger.count(packet.sizes(), OUTSIDE, packet.phase, info.id, "down")
        return packet

    generator = rules_of(algorithm).onboarding(federation.server, info)
    try:
        message = next(generator)
        while True:
            packet = send(encoded(message))
            answer, memory["up"] = channel.decode(packet, "up", memory["up"])
            check_reply(algorithm, answer, message.phase)
            ledger.count(packet.sizes(), OUTSIDE, packet.phase, info.id, "up")
            phase += 1
            message = generator.send(answer)
    except StopIteration as stop:
        return encoded(stop.value)


def run_onboarding(federation: Federation, client: LocalClient) -> tuple[Message, Ledger]:
    """Runs both halves of a method's onboarding, of a client from :func:`onboarded_client`.

    Of the ends of the channel and the states, only the client's end changes.
    """
    newcomer, ledger = Newcomer(federation, client), Ledger()
    info = ClientInfo(client.id, client.num_samples)
    return newcomer.begin(question(federation, info, newcomer.answer, ledger)), ledger
