"""What noise costs: CPU time and memory of a step by network.

    python benchmarks/trust/privacy.py

Prints, for each network, the CPU time of a step with gradients of single patients as a multiple of
a plain step, and the growth of the process's memory in both. Each is measured in a process of its
own. `benchmarks/trust/frontier.py` has what noise costs in accuracy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medfed.federation.engine.gradients import Gradients
from medfed.federation.engine.private import ExamplePrivacy, PrivateGradients
from medfed.federation.engine.working_network import WorkingNetwork
from medfed.federation.split import ParameterSplit
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet

BATCH = 16


def logistic() -> tuple[nn.Module, Tensor, Tensor]:
    """A logistic regression of 13 features."""
    return nn.Linear(13, 2), torch.randn(BATCH, 13), torch.randint(2, (BATCH,))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """A perceptron with 64 hidden units."""
    network = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    return network, torch.randn(BATCH, 30), torch.randint(2, (BATCH,))


def small_cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """The network of the digits, on images of 28 pixels."""
    network = SmallCNN(2, 1, 10, channels=[16, 32, 64], strides=[1, 2, 2], norm="group")
    return network, torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))


def small_unet() -> tuple[nn.Module, Tensor, Tensor]:
    """A U-Net of slices with instance normalisation."""
    network = unet(2, 4, 1, channels=[16, 32, 64, 128], strides=[2, 2, 2], norm="instance")
    label = torch.randint(2, (BATCH, 1, 64, 64)).float()
    return network, torch.randn(BATCH, 4, 64, 64), label


NETWORKS = {"logistic": logistic, "mlp": mlp, "small CNN": small_cnn, "U-Net": small_unet}


def measured(name: str, private: bool, chunk: int | None, steps: int) -> tuple[float, float]:
    """Returns the CPU seconds of a step, and the growth of memory in MB."""
    torch.set_num_threads(1)
    network, image, label = NETWORKS[name]()
    batch = {"image": image, "label": label}

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = network(batch["image"])
        if logits.ndim > 2:
            return F.binary_cross_entropy_with_logits(logits, batch["label"])
        return F.cross_entropy(logits, batch["label"])

    trained = dict(network.named_parameters())
    working = WorkingNetwork(network, ParameterSplit.of(network), torch.optim.SGD)
    gradients = Gradients(loss)
    if private:
        privacy = ExamplePrivacy(1.0, {"a": 1.0}, chunk=chunk)
        gradients.private = PrivateGradients(network, loss, privacy)
        gradients.private._expected, gradients.private._noise = float(BATCH), 1.0
        batch["unit"] = torch.arange(BATCH)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = []
    for _ in range(steps):
        for parameter in trained.values():
            parameter.grad = None
        start = time.process_time()
        gradients.add([batch], trained, working)
        spent.append(time.process_time() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return statistics.median(spent), grown / 1024


def alone(*task: object) -> tuple[float, float]:
    """Measures in a new process, whose memory nothing else has grown."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        return pool.apply(measured, task)


def costs(steps: int, networks: Sequence[str]) -> None:
    """Prints time and memory by network."""
    print(f"{'network':<12}{'chunk':>7}{'plain ms':>10}{'factor':>8}{'plain MB':>10}{'MB':>8}")
    for name in networks:
        plain, room = alone(name, False, None, steps)
        for chunk in (None, 4) if name == "U-Net" else (None,):
            spent, more = alone(name, True, chunk, steps)
            print(
                f"{name:<12}{chunk or 'all':>7}{1e3 * plain:>10.2f}{spent / plain:>8.1f}"
                f"{room:>10.0f}{more:>8.0f}",
                flush=True,
            )


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options = parser.parse_args()
    costs(options.steps, options.networks)


if __name__ == "__main__":
    main()
