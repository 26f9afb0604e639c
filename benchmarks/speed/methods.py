"""What a round of each method costs beyond its own gradient passes; what it keeps, and sends.

    python benchmarks/speed/methods.py --network small_cnn --steps 8 --batch-size 32
    python benchmarks/speed/methods.py ditto apfl --rounds 9       # on a DenseNet-BC

Three clients of random patches (1, 32, 32). One side is a round of the plain loop: local steps,
whatever the method computes beside them, dense fp32 messages, the server and the ledger. The other
repeats as many passes of the same network on batches as large: for each step zero_grad, forward,
backward and step; for each further gradient the same without a step; for each forward pass that
alone. How many they were the run itself has counted. Sides alternate, client by client, in one
process on one thread, so that a slow moment of a busy machine meets both; given is the median over
rounds of the ratio of their CPU times, after a round that is not counted. A method that waits in
some rounds (of no pass) is measured in the others.

Memory is what a client holds and not all others do, by the bytes of its storages, and traffic is
what the ledger counts for a client in a round after the first; in brackets, what the method's card
says of either.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfed.commands.methods import yamls
from medfed.config.compose import build, load
from medfed.federation.algorithm import Algorithm
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.card import elements
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.reference import ArrayClient
from medfed.federation.round import Round
from medfed.models.networks.canonical import Canonical
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.personal_part import default_personal
from medfed.models.networks.small import SmallCNN

HEADER = 12  # bytes of a dense part
OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "small_cnn": lambda _: SmallCNN(2, 1, 2),
    "densenet_bc": lambda blocks: densenet_bc(2, 1, 2, block_config=[blocks] * 3, stem="small"),
}


@dataclass(frozen=True)
class Size:
    """How large the federation is."""

    clients: int
    steps: int
    batch: int
    rounds: int
    network: str
    blocks: int


def hospital(index: int, size: Size) -> Any:
    """Random images; two whole batches, so that all passes cost the same."""
    rng = torch.Generator().manual_seed(index)
    images = torch.randn(2 * size.batch, 1, 32, 32, generator=rng)
    labels = torch.randint(0, 2, (2 * size.batch,), generator=rng)
    labels[:2] = torch.arange(2)
    return ArrayClient(f"hospital_{index}", images, labels, size.batch)


def federated(name: str, size: Size) -> tuple[Federation, nn.Module]:
    """The method as its yaml ships it, on a network of its own."""
    method = build(load([f"algorithm={name}", f"rounds={size.rounds + 1}"]).algorithm)
    assert isinstance(method, Algorithm)
    torch.manual_seed(0)
    network = NETWORKS[size.network](size.blocks)
    if method.mixes:
        others = [NETWORKS[size.network](size.blocks) for _ in range(2)]
        network = Canonical([network, *others], default_personal(network))
    federation, _ = assemble(
        method,
        network,
        lambda batch: cross_entropy(network(batch["image"]), batch["label"]),
        [hospital(k, size) for k in range(size.clients)],
        personal=default_personal(network),
        optimizer=OPTIMIZER,
        rounds=size.rounds + 1,
        budget=LocalBudget(steps=size.steps),
    )
    return federation, network


class Bare:
    """Passes and steps, and nothing else."""

    def __init__(self, network: nn.Module) -> None:
        self.network = copy.deepcopy(network).requires_grad_(True).train()
        self.optimizer = OPTIMIZER(self.network.parameters())

    def seconds(self, data: Any, steps: int, gradient: int, forward: int) -> float:
        """CPU seconds of so many steps, and passes among them or beside them."""
        begin = time.process_time()
        batches = cycle(range(0, data.num_samples, data.batch_size))
        for number in range(gradient):
            rows = torch.arange(start := next(batches), start + data.batch_size)
            self.optimizer.zero_grad()
            image, label = data.inputs.index_select(0, rows), data.labels.index_select(0, rows)
            cross_entropy(self.network(image), label).backward()
            if number < steps:
                self.optimizer.step()
        with torch.no_grad():
            for _ in range(forward):
                rows = torch.arange(start := next(batches), start + data.batch_size)
                image, label = data.inputs.index_select(0, rows), data.labels.index_select(0, rows)
                cross_entropy(self.network(image), label)
        return time.process_time() - begin


def counters(client: LocalClient) -> tuple[int, ...]:
    """Steps, gradient passes, forward passes so far."""
    return client.steps_done, *client.passes


def one_round(federation: Federation, bare: Bare, number: int) -> tuple[float, float, Counter[str]]:
    """CPU seconds of a round, those of its bare passes, and their numbers."""
    begin = time.process_time()
    current = Round(federation, number)
    ours, floor = time.process_time() - begin, 0.0
    done: Counter[str] = Counter()
    going = True
    while going:
        replies = {}
        for name in current.recipients:
            client = federation.clients[name]
            before, begin = counters(client), time.process_time()
            replies[name] = current.fit(name)
            ours += time.process_time() - begin
            spent = [b - a for a, b in zip(before, counters(client), strict=True)]
            floor += bare.seconds(client.data, *spent)
            done.update(dict(zip(("steps", "gradient", "forward"), spent, strict=True)))
        begin = time.process_time()
        for name, packet in replies.items():
            current.receive(name, packet)
        going = current.close_phase()
        ours += time.process_time() - begin
    return ours, floor, done


def held(states: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[int, int]:
    """Bytes by place, of the storages of what is a number."""
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for state in states
        for named in state.values()
        for t in named.values()
        if isinstance(t, Tensor) and t.is_floating_point()
    }


def kept(federation: Federation) -> float:
    """Bytes that a client holds and not all others do, on the average."""
    own = [
        held([c.state, {"optimizers": {}, **c._optimizers}]) for c in federation.clients.values()
    ]
    common = set.intersection(*map(set, own))
    sums = [sum(n for place, n in found.items() if place not in common) for found in own]
    return sum(sums) / len(sums)


def sent(federation: Federation, direction: str) -> int:
    """Bytes of a client in a round after the first that exchanges anything, the most."""
    found: Counter[tuple[int, str]] = Counter()
    for e in federation.ledger.entries:
        if e.direction == direction and e.part not in ("scalars", "preprocessing") and e.round:
            found[e.round, e.client] += e.bytes - HEADER
    return max(found.values(), default=0)


def declared(federation: Federation) -> tuple[float, float, float]:
    """Bytes by the card: kept by a client, down, up."""
    method, client = federation.algorithm, next(iter(federation.clients.values()))
    edges = federation.server.get("graph", {}).get("edges")
    names = {"M": 0 if edges is None else len(edges), **method.counts(len(federation.ids))}
    lengths = method.vectors(client.split, client.weights)
    card = method.card
    kept, down, up = (4 * elements(s, lengths, names) for s in (card.client, card.down, card.up))
    return kept, down, up


def measure(name: str, size: Size) -> tuple[float, bool, str]:
    """Returns the ratio, whether memory and bytes are the card's, and a row of the table."""
    federation, network = federated(name, size)
    bare = Bare(network)
    found = [one_round(federation, bare, number) for number in range(size.rounds + 1)][1:]
    ratios = sorted(a / b for a, b, _ in found if b)
    ratio = statistics.median(ratios)
    done = sum((c for *_, c in found), Counter[str]())
    per_step = 1e3 * sum(b for _, b, _ in found) / max(1, done["gradient"] + done["forward"] / 3)
    said, holds = declared(federation), kept(federation)
    travels = [sent(federation, "down"), sent(federation, "up")]
    # Single numbers for each client and each pair of them are not counted.
    small = 8 * (32 + 8 * size.clients + size.clients**2 * (size.rounds + 2))
    as_said = abs(holds - said[0]) <= small and travels == list(said[1:])
    each = size.clients * size.rounds
    passes = f"{done['gradient'] / each:g} + {done['forward'] / each:g}"
    memory = f"{holds / 1e3:.1f} ({said[0] / 1e3:.1f})"
    traffic = [f"{t / 1e3:.1f} ({s / 1e3:.1f})" for t, s in zip(travels, said[1:], strict=True)]
    spread = f"{ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    cells = [name, passes, f"{per_step:.1f}", spread, memory, *traffic]
    return ratio, as_said, "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints a table: passes, time, ratio; memory and bytes measured, and declared in brackets."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("methods", nargs="*", default=list(yamls()))
    parser.add_argument("--network", default="densenet_bc", choices=list(NETWORKS))
    parser.add_argument("--blocks", type=int, default=4, help="layers of each of the three blocks")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(
        given.clients, given.steps, given.batch_size, given.rounds, given.network, given.blocks
    )
    print(f"{size.network}, {size.clients} clients, {size.steps} steps on {size.batch} images")
    print("| method | passes | ms per pass | round / passes | kept, kB | down, kB | up, kB |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    found, others = {}, []
    for name in given.methods:
        found[name], as_said, row = measure(name, size)
        others += [] if as_said else [name]
        print(row, flush=True)
    most = max(found, key=found.__getitem__)
    median = statistics.median(found.values())
    print(f"{len(found)} methods: median {median:.3f}, most {found[most]:.3f} ({most})")
    print(f"above 1.10: {', '.join(n for n, ratio in found.items() if ratio > 1.1) or 'none'}")
    but = f"all but {', '.join(others)}" if others else "all"
    print(f"memory and bytes as the cards say: {but}")


if __name__ == "__main__":
    main()
