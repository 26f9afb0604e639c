"""Gradients of several clients at once by torch.func, against one client after the other.

What stacking weights could gain before it costs anything else: a gradient of each client's batch
under weights of its own. Sides alternate in one process; the ratio is of CPU time, medians.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median

import torch
from monai.networks.nets import UNet
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from medfed.common.tensors import gradient_of


def perceptron() -> nn.Module:
    """Returns a network for tables."""
    return nn.Sequential(
        nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def cnn() -> nn.Module:
    """Returns a small network for images."""
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1))


def unet() -> nn.Module:
    """Returns a small U-Net."""
    built: nn.Module = UNet(
        2, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=0, norm=None
    )
    return built


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "table, 16 x 30": (perceptron, (16, 30)),
    "CNN, 16 x 1 x 32 x 32": (cnn, (16, 1, 32, 32)),
    "U-Net, 8 x 1 x 32 x 32": (unet, (8, 1, 32, 32)),
}


def main() -> None:
    """Prints a line per network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (make, shape) in NETWORKS.items():
        torch.manual_seed(0)
        networks = [make() for _ in range(options.clients)]
        batches = torch.randn(options.clients, *shape)
        stacked, _ = stack_module_state(networks)
        base = copy.deepcopy(networks[0]).to("meta")

        def loss(weights: dict[str, Tensor], batch: Tensor, base: nn.Module = base) -> Tensor:
            outputs: Tensor = functional_call(base, weights, (batch,))
            return outputs.square().mean()

        def together(
            stacked: dict[str, Tensor] = stacked, batches: Tensor = batches
        ) -> dict[str, Tensor]:
            found: dict[str, Tensor] = vmap(grad(loss))(stacked, batches)
            return found

        def one_by_one(
            networks: list[nn.Module] = networks, batches: Tensor = batches
        ) -> list[list[Tensor]]:
            found = []
            for network, batch in zip(networks, batches, strict=True):
                network.zero_grad()
                network(batch).square().mean().backward()
                found.append([gradient_of(p) for p in network.parameters()])
            return found

        away = max(
            float((a - b).detach().abs().max())
            for n, a in enumerate(zip(*together().values(), strict=True))
            for a, b in zip(a, one_by_one()[n], strict=True)
        )
        times: tuple[list[float], list[float]] = ([], [])
        sides: tuple[Callable[[], object], ...] = (one_by_one, together)
        for _ in range(options.repeat):
            for side, taken in zip(sides, times, strict=True):
                began = time.process_time()
                side()
                taken.append(time.process_time() - began)
        ratio = median(times[1]) / median(times[0])
        print(
            f"{name:<24} stacked takes {ratio:.2f} of one by one ({1e3 * median(times[0]):.1f} ms "
            f"for {options.clients} clients), gradients differ by {away:.0e}"
        )


if __name__ == "__main__":
    main()
