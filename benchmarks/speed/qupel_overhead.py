"""CPU time of a local step of QuPeL next to a plain step of the same network.

QuPeL takes two gradients per step, at the weights and at the quantised weights, so that twice a
plain step is its floor. Rounds of one client alternate in one process and are compared by the ratio
of their medians; the time of the second gradient, with its change of weights, is also given. Run
with ``python benchmarks/speed/qupel_overhead.py``; ``--steps`` sets the local steps of a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from medfed.federation.algorithm import Algorithm, ClientInfo
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Batch
from medfed.federation.engine import loop as training
from medfed.federation.engine.gradients import StepGradient
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.unet import unet
from medfed.personalize.local import Local
from medfed.personalize.qupel import QuPeL

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "densenet_bc": lambda: densenet_bc(2, 1, 2, block_config=(4, 4, 4), stem="small"),
    "unet": lambda: unet(2, 4, 3, num_res_units=0),
}


class RandomImages:
    """Images and labels of one client; what they show does not matter here."""

    def __init__(self, name: str, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.id, self.batch_size, self.num_samples = "c0", batch_size, 2 * batch_size
        shape = (4, 64, 64) if name == "unet" else (1, 32, 32)
        self.image = torch.randn(self.num_samples, *shape, generator=generator)
        labels = (self.num_samples, 3, 64, 64) if name == "unet" else (self.num_samples,)
        self.label = torch.randint(0, 2, labels, generator=generator)
        self.label_counts, self.channels = torch.ones(2), torch.ones(shape[0])

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


class Timed(StepGradient):
    """Counts the CPU seconds of second gradients."""

    seconds: ClassVar[float] = 0.0

    def __call__(self, *where: Any, **how: Any) -> Any:
        """Takes the time."""
        start = time.process_time()
        found = super().__call__(*where, **how)
        Timed.seconds += time.process_time() - start
        return found


training.StepGradient = Timed  # type: ignore[attr-defined, misc]


def loss(network: nn.Module, batch: Batch) -> Tensor:
    """Of classes, or of a mask per channel."""
    out: Tensor = network(batch["image"])
    if out.ndim == 2:
        return cross_entropy(out, batch["label"])
    return binary_cross_entropy_with_logits(out, batch["label"].float())


def federate(algorithm: Algorithm, name: str, steps: int, batch_size: int) -> Federation:
    """A federation of one client with random images."""
    network = NETWORKS[name]()
    split = algorithm.split(network, (), "averaged")
    algorithm = algorithm.adapted(split, network)
    trainer = LocalTrainer(
        network,
        partial(loss, network),
        split,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        budget=LocalBudget(steps=steps),
    )
    data, weights = RandomImages(name, batch_size), trainer.model.initial()
    info = [ClientInfo(data.id, data.num_samples)]
    server, state = algorithm.init(weights, split, info)
    client = LocalClient(data, trainer, weights, state)
    return Federation(algorithm, server, {data.id: client}, info)


def round_time(federation: Federation, number: int) -> float:
    """CPU seconds of a round."""
    start = time.process_time()
    run_reference(federation, number + 1, start=number)
    return time.process_time() - start


def compare(name: str, steps: int, batch_size: int, rounds: int) -> str:
    """Median CPU time of a step of both, alternating."""
    plain = federate(Local(), name, steps, batch_size)
    algorithm = QuPeL(bits=2, strength=1e-3, rounds=1000)
    quantised = federate(algorithm, name, steps, batch_size)
    times, second = [], []
    for number in range(rounds + 1):
        Timed.seconds = 0.0
        times.append((round_time(plain, number), round_time(quantised, number)))
        second.append(Timed.seconds)
    bare, both = (statistics.median(t) / steps for t in zip(*times[1:], strict=True))
    extra = statistics.median(second[1:]) / steps
    return (
        f"{name:12} plain {1e3 * bare:6.1f} ms, QuPeL {1e3 * both:6.1f} ms per step, second "
        f"gradient {1e3 * extra:6.1f} ms, ratio {both / bare:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"2 bits, {options.steps} steps on {options.batch_size} images per round")
    for name in options.networks:
        print(compare(name, options.steps, options.batch_size, options.rounds))


if __name__ == "__main__":
    main()
