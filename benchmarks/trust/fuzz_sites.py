"""Hostile peers of a run across sites: of a hospital's site, and of the coordinator.

A federation of three sites runs in this process, every message as bytes. Between its rounds one
site is sent requests that nobody means: valid ones with bits flipped, ends cut off or numbers
replaced by extreme ones; those of somebody who knows the format, but not the key of the session,
which the coordinator alone has; requests for other sites; exact copies of earlier ones; heads of
absurd length. Each must be answered by a reply that says what became of it; anything that is raised
is a crash. Within its rounds the coordinator gets
replies that are torn, of others, of earlier requests, or hold parts, shapes, metrics or counts
that no site has. It must repeat the round without the site.

Nothing may be lost by any of it: in the end the states of all must be those of a simulation whose
cohort lacks whoever was left out.

Run with ``python benchmarks/trust/fuzz_sites.py``; 10,000 requests by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from fuzz_mutations import mutated  # type: ignore[import-not-found]  # beside this file
from torch import Tensor, nn

from medfed.common.tensors import digest
from medfed.federation.algorithm import ClientInfo, Cohort
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.reference import ArrayClient, run_reference
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.sparse import TopK
from medfed.federation.wire.codecs.stc import STC
from medfed.federation.wire.packet import EncodedPart, Packet
from medfed.personalize.fedrep import FedRep
from medfed.sites.attendance import Attendance, SitesProgress
from medfed.sites.calls import Caller, Terms, agree_on_data, greet
from medfed.sites.coordinator import Coordinator
from medfed.sites.policy import NO_LIMITS
from medfed.sites.site import Site
from medfed.sites.wire import HEAD_LIMIT, KINDS, Facts, Greeting, Reply, Request, framed
from medfed.standalone.errors import MedfedError

SITES = ("north", "south", "west")
TERMS = Terms(timeout=60, hello=60, grace=0.01, probe=1.0, patience=1e4, faults=10**9)


def data(name: str) -> ArrayClient:
    """A client's samples."""
    rng = torch.Generator().manual_seed(SITES.index(name))
    inputs = torch.randn(12 + 4 * SITES.index(name), 3, generator=rng)
    return ArrayClient(name, inputs, inputs.sum(1, keepdim=True), batch_size=4)


def network() -> nn.Module:
    """The agreed network, at the agreed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


class Task:
    """What is trained."""

    def __init__(self) -> None:
        self.network = network()

    def loss(self, batch: Batch) -> Tensor:
        """The squared error."""
        loss: Tensor = (self.network(batch["image"]) - batch["label"]).square().mean()
        return loss

    def evaluate(self, batches: Iterable[Batch], *, test: bool = False) -> dict[str, float]:
        """The mean squared error."""
        return {"loss": sum(float(self.loss(batch)) for batch in batches)}


def assembled(
    names: Sequence[str], everyone: Sequence[ClientInfo] | None, cohort: Cohort | None = None
) -> tuple[Task, Federation, LocalTrainer]:
    """A federation of some clients in this process."""
    task = Task()
    federation, local = assemble(
        FedRep(),
        task.network,
        task.loss,
        [data(name) for name in names],  # type: ignore[misc]  # as for `reference.federate`
        personal=["1.*"],
        optimizer=partial(torch.optim.SGD, lr=0.02),
        rounds=1000,
        budget=LocalBudget(steps=4),
        channel=lambda _: Channel(Link(STC(0.2)), Link(TopK(0.3))),
        cohort=cohort,
        everyone=everyone,
    )
    return task, federation, local


class Desk:
    """What a site is made of."""

    def __init__(self, name: str) -> None:
        self.name, self.policy = name, NO_LIMITS
        self.members, self.joins, self.parts, self.rounds = None, 0, (), 1 << 20
        self.messages = 1

    def greeting(self) -> Greeting:
        """See :class:`medfed.sites.site.ConfiguredSite`."""
        return Greeting({}, {})

    def agree(self, number: int, answer: bytes) -> bytes | None:
        """See :class:`medfed.sites.site.ConfiguredSite`."""
        return None

    def patients_behind(self) -> tuple[str, list[str]]:
        """See :class:`medfed.sites.site.ConfiguredSite`."""
        return "", []

    def facts(self) -> Facts:
        """See :class:`medfed.sites.site.ConfiguredSite`."""
        weights = dict(network().named_parameters())
        return Facts(data(self.name).num_samples, digest(weights), {"shape": [3]})

    def join(self, everyone: Sequence[ClientInfo]) -> FederatedModule:
        """See :class:`medfed.sites.site.ConfiguredSite`."""
        return FederatedModule(*assembled([self.name], everyone))


class Wire:
    """Passes requests to sites in this process, and records and forges replies."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self._lock = threading.Lock()  # one site at a time
        self.requests: dict[str, list[bytes]] = {name: [] for name in sites}
        self.replies: list[tuple[Request, bytes]] = []
        self.forge: Callable[[Request, bytes], bytes] = lambda _, reply: reply

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :class:`medfed.sites.wire.Transport`."""
        asked = Request.from_bytes(request)
        with self._lock:
            reply = self.sites[site].answer(request)
        self.requests[site].append(request)
        self.replies.append((asked, reply))
        return self.forge(asked, reply)


def foreign(rng: random.Random, wire: Wire, site: str) -> bytes:
    """Returns a request to a site that nobody means."""
    own = wire.requests[site]
    kind = rng.randrange(8)
    if kind < 4:
        chosen: bytes = mutated(rng, own[-30:], 24)
        if rng.random() < 0.5:
            return chosen
        session = Request.from_bytes(own[-1]).session.encode()
        return framed(chosen[20:].replace(session, rng.randbytes(8).hex().encode()))
    if kind == 4:
        return rng.choice(own)  # of the past
    if kind == 5:
        return rng.choice(wire.requests[rng.choice([s for s in SITES if s != site])])
    if kind == 6:
        length = rng.choice((HEAD_LIMIT + 1, 2**31, 2**32 - 1))
        return framed(length.to_bytes(4, "little"), rng.randbytes(50))
    changes: dict[str, Any] = rng.choice(
        [
            {"site": SITES[0]},
            {"round": rng.randrange(2**31)},
            {"at": rng.randrange(50), "attempt": rng.randrange(9)},
            {"phase": rng.randrange(2**31)},
            {"body": rng.randbytes(60)},
            {"kind": rng.choice(KINDS)},
        ]
    )
    changes |= {"session": rng.randbytes(8).hex()}
    return changed(rng.choice(own), **changes)


def changed(message: bytes, **changes: Any) -> bytes:
    """Returns a message with other members of its head, or another body."""
    size = int.from_bytes(message[20:24], "little")
    head, body = json.loads(message[24 : 24 + size]), message[24 + size :]
    body = changes.pop("body", body)
    text = json.dumps({**head, **changes}).encode()
    return framed(len(text).to_bytes(4, "little"), text, body)


def forged(rng: random.Random, wire: Wire, asked: Request, reply: bytes) -> bytes:
    """Returns a reply that no honest site gives to a request."""
    found, kind = Reply.from_bytes(reply), rng.randrange(6)
    if kind == 0:
        return reply[: rng.randrange(len(reply))] if rng.random() < 0.5 else rng.randbytes(40)
    if kind == 1:  # an earlier one, of itself or another
        return next(old for request, old in wire.replies if request != asked)
    if kind == 2:
        name = rng.choice(("site", "session", "round", "attempt", "phase", "at", "kind"))
        value = getattr(found, name)
        if name == "kind":
            return changed(reply, kind="commit" if value != "commit" else "load")
        return changed(reply, **{name: value + 1 if isinstance(value, int) else value + "x"})
    if kind == 3:
        return framed((2**32 - 1).to_bytes(4, "little"), reply[24:])
    if found.body:
        return changed(reply, body=spoilt(rng, found.body))
    wrong: dict[str, Any] = {"evaluate": {"metrics": {"gain": 1e9}}}
    return changed(reply, **wrong.get(asked.kind, {"steps": -1, "passes": [1, 2, 3]}))


def spoilt(rng: random.Random, body: bytes) -> bytes:
    """Returns a message with parts, shapes or bytes that none has."""
    packet = Packet.from_bytes(body)
    part, own = next(iter(packet.parts.items()))
    (name, shape, dtype), *rest = own.layout
    choices = [
        dataclasses.replace(packet, phase="other"),
        dataclasses.replace(packet, parts={**packet.parts, "secret": own}),
        dataclasses.replace(packet, parts={part: dataclasses.replace(own, content=own.data[:-1])}),
        dataclasses.replace(
            packet, parts={part: EncodedPart(own.kind, own.data, ((name, (9, *shape), dtype),))}
        ),
        dataclasses.replace(
            packet,
            parts={part: EncodedPart(own.kind, own.data, ((f"{name}x", shape, dtype), *rest))},
        ),
    ]
    return (
        body[: rng.randrange(len(body))] if rng.random() < 0.2 else rng.choice(choices).to_bytes()
    )


def attack(wire: Wire, rng: random.Random, count: int) -> tuple[Counter[str], float]:
    """Sends a site requests; returns what became of them, and the slowest one's seconds."""
    outcome: Counter[str] = Counter()
    slowest = 0.0
    for _ in range(count):
        request = foreign(rng, wire, "south")
        began = time.process_time()
        try:
            reply = Reply.from_bytes(wire.sites["south"].answer(request))
            outcome[reply.status] += 1
        except Exception as error:
            outcome[f"crash: {type(error).__name__}"] += 1
        slowest = max(slowest, time.process_time() - began)
    return outcome, slowest


def main() -> None:
    """Runs both attacks and says what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="requests to the site")
    parser.add_argument("--rounds", type=int, default=50, help="rounds, each with one forged reply")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    rng, outcome, slowest, forgeries = random.Random(options.seed), Counter[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        desks = {name: cast(Any, Desk(name)) for name in SITES}
        wire = Wire({name: Site(desk, Path(folder, name)) for name, desk in desks.items()})
        caller = Caller(wire, SITES, TERMS)
        greet(caller)
        facts, answers, _ = agree_on_data(caller, (_ for _ in ()))  # type: ignore[arg-type]
        everyone = [ClientInfo(c, facts[c].num_samples) for c in SITES]
        _, federation, _ = assembled([], everyone)
        attendance = Attendance(
            caller, federation, facts, answers, "fuzzed", SitesProgress.new(SITES)
        )
        coordinator = Coordinator(attendance)
        attendance.begin()
        for number in range(options.rounds):
            left = [rng.randrange(1, 4)]

            def forge(asked: Request, reply: bytes, left: list[int] = left) -> bytes:
                if asked.site != "west" or asked.kind not in ("fit", "evaluate", "commit"):
                    return reply
                left[0] -= 1
                return reply if left[0] else forged(rng, wire, asked, reply)

            wire.forge = forge
            coordinator.round(number)
            forgeries += left[0] <= 0
            wire.forge = lambda _, reply: reply
            found, slow = attack(wire, rng, options.inputs // options.rounds)
            outcome, slowest = outcome + found, max(slowest, slow)
        hashes = coordinator.digests(options.rounds)
    absent = coordinator.progress.absent
    try:
        _, simulation, _ = assembled(SITES, None, Cohort(absent=absent))
        wanted = run_reference(simulation, options.rounds).digests()
    except MedfedError as error:
        raise SystemExit(f"error: {error}") from error
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(outcome.items()))
    print(f"requests to a site: {outcome.total():,} ({told}), slowest {slowest:.3f} s")
    crashes = sum(count for name, count in outcome.items() if name.startswith("crash"))
    print(f"crashes: {crashes}")
    left_out = Counter(site for _, site, _ in coordinator.progress.left_out)
    print(f"forged replies: {forgeries}; rounds without the site that forged: {left_out['west']}")
    print(f"rounds without the site that was attacked: {left_out['south']}")
    print(f"states as in a simulation of the same cohorts: {'yes' if hashes == wanted else 'no'}")


if __name__ == "__main__":
    main()
