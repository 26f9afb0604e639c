"""CPU time of a round of PPFL next to a round of FedAvg on the same network and data.

The head of a classifier is canonical, K = 4 of them, their probabilities or their parameters are
mixed, and the memberships' gradient is taken on one minibatch. Rounds of both methods alternate in
one process and are compared by the ratio of their medians. Run with
``python benchmarks/speed/ppfl_overhead.py``; ``--steps`` sets the local steps of a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfed.federation.algorithm import Algorithm, ClientInfo
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.models.networks.canonical import Canonical, Mix
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.personal_part import default_personal
from medfed.models.networks.small import SmallCNN
from medfed.personalize.fedavg import FedAvg
from medfed.personalize.ppfl import PPFL

COUNT, CLIENTS, SIDE = 4, 4, 32
MIXES: tuple[Mix, ...] = ("outputs", "parameters")
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small_cnn": lambda: SmallCNN(2, 1, 2),
    "densenet_bc": lambda: densenet_bc(2, 1, 2, block_config=(4, 4, 4), stem="small"),
}


class RandomImages:
    """Images and labels of one client; what they show does not matter here."""

    def __init__(self, index: int, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(index)
        self.id = f"c{index}"
        self.batch_size = batch_size
        self.num_samples = 4 * batch_size
        self.image = torch.randn(self.num_samples, 1, SIDE, SIDE, generator=generator)
        self.label = torch.randint(0, 2, (self.num_samples,), generator=generator)
        self.label_counts = self.label.bincount(minlength=2)
        self.channels = torch.ones(1)

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields a shuffled epoch."""
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed))
        for rows in order.split(self.batch_size):
            yield {"image": self.image[rows], "label": self.label[rows]}

    def train_inputs(self, limit: int) -> Tensor:
        """Returns the first images."""
        return self.image[:limit]

    def patients_behind(self, limit: int) -> int:
        """Each image is a patient's."""
        return min(limit, self.num_samples)

    def eval_batches(self, split: Literal["train", "val", "test"]) -> Iterator[Batch]:
        """Yields everything at once."""
        yield {"image": self.image, "label": self.label}


def federate(algorithm: Algorithm, network: nn.Module, steps: int, batch_size: int) -> Federation:
    """A federation of clients with random images."""
    split = algorithm.split(network, default_personal(network), "averaged")
    trainer = LocalTrainer(
        network,
        lambda batch: cross_entropy(network(batch["image"]), batch["label"]),
        split,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        budget=LocalBudget(steps=steps),
    )
    data = [RandomImages(i, batch_size) for i in range(CLIENTS)]
    weights, everyone = trainer.model.initial(), [ClientInfo(d.id, d.num_samples) for d in data]
    server, state = algorithm.init(weights, split, everyone)
    clients = {d.id: LocalClient(d, trainer, weights, state) for d in data}
    return Federation(algorithm, server, clients, everyone)


def canonical(name: str, mix: Mix) -> Canonical:
    """The network with K heads."""
    networks = [NETWORKS[name]() for _ in range(COUNT)]
    return Canonical(networks, default_personal(networks[0]), mix)


def round_time(federation: Federation, number: int) -> float:
    """CPU seconds of a round."""
    start = time.process_time()
    run_reference(federation, number + 1, start=number)
    return time.process_time() - start


def compare(name: str, mix: Mix, steps: int, batch_size: int, rounds: int) -> tuple[float, float]:
    """Median CPU seconds of a round of FedAvg and of PPFL, alternating."""
    fedavg = federate(FedAvg(), NETWORKS[name](), steps, batch_size)
    ppfl = federate(PPFL(), canonical(name, mix), steps, batch_size)
    pairs = [(round_time(fedavg, t), round_time(ppfl, t)) for t in range(rounds + 1)][1:]
    plain, mixed = zip(*pairs, strict=True)
    return statistics.median(plain), statistics.median(mixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"K = {COUNT}, {CLIENTS} clients, {options.steps} steps on {options.batch_size} images")
    for name in options.networks:
        for mix in MIXES:
            plain, mixed = compare(name, mix, options.steps, options.batch_size, options.rounds)
            print(
                f"{name:12} {mix:10} FedAvg {1e3 * plain:7.1f} ms, PPFL {1e3 * mixed:7.1f} ms, "
                f"ratio {mixed / plain:.2f}"
            )


if __name__ == "__main__":
    main()
