"""A hospital that joins when the others have trained: both halves of it, over the wire.

They are those of :mod:`medfed.federation.onboarded` in two processes. The newcomer is given what
the method's own rule gives, trains on its own patients, measures its own test patients, and keeps
the model. Nothing of the federation changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from medfed.common.errors import CodecError, SiteError
from medfed.common.names import shown
from medfed.common.tensors import Tensors, to_device
from medfed.datamodules.base import Exchanged
from medfed.federation.algorithm import ClientInfo
from medfed.federation.federation import Federation, check_reply, count
from medfed.federation.lightning.module import FederatedModule, Measures
from medfed.federation.local_client import LocalClient
from medfed.federation.onboarded import OUTSIDE
from medfed.federation.onboarding import rules_of
from medfed.federation.wire.channel import Memory, Place
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.message import Message
from medfed.federation.wire.packet import Packet
from medfed.run.federating import preprocessing
from medfed.sites.calls import Caller, agree_again, compare_models
from medfed.sites.wire import Facts


def onboard(
    caller: Caller,
    federation: Federation,
    site: str,
    answers: Sequence[bytes],
    steps: int,
    job: str = "0",
    like: Facts | None = None,
) -> tuple[int, dict[str, float], Ledger]:
    """Takes a newcomer through the method's own rule; the coordinator's half.

    Args:
        caller: Reaches it.
        federation: The trained federation, as it is at the coordinator.
        site: The newcomer, which no round has known.
        answers: What all sites were answered before the first round.
        steps: Gradient steps that it may take.
        job: Names the federation.
        like: What a site of the federation has said of its data and model, to compare.

    Returns:
        Its training samples, its metrics on its test patients, and what travelled.

    Raises:
        SiteError: If it does not answer, or not as agreed, or has trained with the others.
    """
    if site in federation.ids:
        raise SiteError(f"Site {shown(site)} has trained with the others, and need not join.")
    exchanged: list[Exchanged] = []
    greeted = agree_again(caller, site, answers, exchanged)
    if isinstance(greeted, str):
        raise SiteError(f"{shown(site)}: {greeted}.")
    try:
        facts = Facts.of(greeted.content["facts"])
    except CodecError as error:
        raise SiteError(f"{shown(site)} has more to agree on than the run asked.") from error
    if like is not None:
        compare_models(like, facts, "the run", site)
    info = ClientInfo(site, facts.num_samples)
    channel, ledger = federation.channel, Ledger(preprocessing(exchanged))
    memory: dict[Direction, Memory] = {"up": {}, "down": {}}
    everyone = _as_content(federation)
    phase = 0

    def asked(message: Message, last: bool) -> tuple[Any, bytes]:
        place = Place(site, OUTSIDE, phase)
        packet, memory["down"] = channel.encode(message, "down", place, memory["down"])
        count(ledger, packet, OUTSIDE, packet.phase, site, "down")
        content = {"last": last, "steps": steps, "clients": everyone, "job": job}
        request = caller.request(
            "onboard", site, phase=phase, content=content, body=packet.to_bytes()
        )
        reply = caller.one(request, caller.terms.timeout)
        if isinstance(reply, str):
            raise SiteError(f"{shown(site)}: {reply}.")
        return reply.content["metrics"], reply.body

    generator = rules_of(federation.algorithm).onboarding(federation.server, info)
    try:
        question = next(generator)
        while True:
            _, body = asked(question, last=False)
            packet = Packet.from_bytes(body, federation.most_elements)
            answer, memory["up"] = channel.decode(packet, "up", memory["up"])
            check_reply(federation.algorithm, answer)
            count(ledger, packet, OUTSIDE, packet.phase, site, "up")
            phase += 1
            question = generator.send(answer)
    except StopIteration as stop:
        metrics, _ = asked(stop.value, last=True)
    except (CodecError, ValueError) as error:
        raise SiteError(
            f"{shown(site)}: its message cannot be used: {str(error).rstrip('.')}."
        ) from error
    return info.num_samples, dict(metrics), ledger


def _as_content(federation: Federation) -> list[dict[str, Any]]:
    sizes = federation.server.get("num_samples", {})
    return [{"id": c, "num_samples": int(sizes[c]) if c in sizes else 1} for c in federation.ids]


class Newcomer:
    """The newcomer's half.

    Args:
        module: The federation as it is there: with this client alone, in the state that all began
            with.
        site: Its name.
        steps: Gradient steps that it may take.

    Attributes:
        ledger: What it has received and sent.
    """

    def __init__(self, module: FederatedModule, site: str, steps: int) -> None:
        self.module = module
        self.client: LocalClient = module.federation.clients[site]
        module.local.budget = replace(module.local.budget, steps=steps)
        self.phase = 0
        self.ledger = Ledger()

    def answer(self, packet: Packet) -> Packet:
        """Answers a question of the coordinator's."""
        federation, client = self.module.federation, self.client
        message, received = federation.channel.decode(packet, "down", client.memory["down"])
        count(self.ledger, packet, OUTSIDE, packet.phase, client.id, "down")
        client.begin(0, message.phase, self.phase)
        reply = federation.algorithm.fit(client, message)
        check_reply(federation.algorithm, reply)
        place = Place(client.id, OUTSIDE, self.phase)
        encoded, sent = federation.channel.encode(reply, "up", place, client.memory["up"])
        count(self.ledger, encoded, OUTSIDE, encoded.phase, client.id, "up")
        client.memory = {"down": received, "up": sent}
        self.phase += 1
        return encoded

    def learn(self, packet: Packet) -> tuple[Tensors, dict[str, float]]:
        """Trains by the method's own rule on the last message.

        Returns:
            The model, and its metrics on the test patients.
        """
        federation, client, module = self.module.federation, self.client, self.module
        message, _ = federation.channel.decode(packet, "down", client.memory["down"])
        count(self.ledger, packet, OUTSIDE, packet.phase, client.id, "down")
        client.begin(0, "join", self.phase)
        model = rules_of(federation.algorithm).onboard(client, message)
        module.local.load(model)
        batches = (to_device(batch, module.device) for batch in client.data.eval_batches("test"))
        with torch.no_grad():
            if not isinstance(module.task, Measures):
                return model, module.task.evaluate(batches, test=True)
            meter = module.task.measured(batches, test=True)
        module.cases[client.id] = meter.cases()
        return model, meter.compute()
