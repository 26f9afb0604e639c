"""What channels-last layout, bfloat16 and compiling do to a local step, and to its numbers.

    python benchmarks/speed/layouts.py
    python benchmarks/speed/layouts.py --compile     # minutes of compiling

One step (forward, backward, SGD) of the default networks on one thread of a CPU, beside the step in
ordinary layout and single precision; the sides alternate, and given is the ratio of the medians of
their CPU times. "Off" is how far the gradient of all weights at the start is from that of double
precision, as a share of its norm: PyTorch's channels-last normalisation adds up with less care.

With ``--compile`` a second table has the CPU seconds of compiling, and the ratio when they are
spread over 5 and 50 rounds of 100 steps, as five hospitals of 20 steps take.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfed.federation.budget import lay_out
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet

LEVELS: dict[str, Any] = {"channels": [8, 16, 32, 64, 128], "strides": [2, 2, 2, 2]}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "densenet_bc_small_stem": (lambda: densenet_bc(2, 1, 2, stem="small"), (16, 1, 32, 32)),
    "densenet_bc": (lambda: densenet_bc(2, 1, 2), (16, 1, 64, 64)),
    "small_cnn": (lambda: SmallCNN(2, 1, 2), (32, 1, 32, 32)),
    "unet_2d": (lambda: unet(2, 4, 4, num_res_units=1, **LEVELS), (16, 4, 64, 64)),
    "unet_3d": (lambda: unet(3, 4, 4, num_res_units=1, **LEVELS), (2, 4, 32, 32, 32)),
}


class Side:
    """One way to take a step.

    Args:
        network: The network, which is copied.
        way: ``double``, ``ordinary``, ``channels last``, ``bf16`` (in channels-last layout) or
            ``compiled``.
    """

    def __init__(self, network: nn.Module, way: str) -> None:
        self.kind = torch.float64 if way == "double" else torch.float32
        self.network: Any = copy.deepcopy(network).to(self.kind)
        lay_out(self.network, way not in ("double", "ordinary"))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01)
        self.half, self.seconds = way == "bf16", list[float]()
        self.loss: Any = self._loss
        if way == "compiled":
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.network(image), label)

    def gradient(self, image: Tensor, label: Tensor) -> Tensor:
        """Returns the gradient of all weights as one vector."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            loss = self.loss(image.to(self.kind), label)
        loss.backward()
        found = [p.grad for p in self.network.parameters()]
        return torch.cat([g.reshape(-1) for g in found if g is not None])

    def step(self, image: Tensor, label: Tensor) -> None:
        """Takes a step and keeps its CPU seconds."""
        begin = time.process_time()
        self.gradient(image, label)
        self.optimizer.step()
        self.seconds.append(time.process_time() - begin)


def used() -> float:
    """CPU seconds of this process and of compilers that it has started."""
    own, others = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose time is taken
    ways = ["ordinary", "channels last", "bf16", *(["compiled"] if args.compile else [])]
    heads = ["network", "images", "ordinary, ms", "off"]
    print("| " + " | ".join([*heads, *(f"{w} | off" for w in ways[1:])]) + " |")
    for name in args.networks:
        make, shape = NETWORKS[name]
        torch.manual_seed(0)
        network, image = make().train(), torch.randn(*shape)
        classes = 4 if "unet" in name else 2
        label = torch.randint(classes, (shape[0], *(shape[2:] if "unet" in name else ())))
        sides = {way: Side(network, way) for way in ways}
        true = Side(network, "double").gradient(image, label)
        off = {}
        for way, side in sides.items():
            begin = used()
            gap = (side.gradient(image, label) - true).norm() / true.norm()
            off[way], first = f"{float(gap):.0e}", used() - begin
        for _ in range(args.steps + 2):
            for side in sides.values():
                side.step(image, label)
        took = {way: statistics.median(side.seconds[2:]) for way, side in sides.items()}
        plain = took["ordinary"]
        cells = [name, "×".join(map(str, shape)), f"{1e3 * plain:.1f}", off["ordinary"]]
        for way in ways[1:]:
            cells += [f"{took[way] / plain:.2f}", off[way]]
        print("| " + " | ".join(cells) + " |", flush=True)
        if args.compile:  # the last way
            spread = [(first + n * took["compiled"]) / (n * plain) for n in (500, 5000)]
            told = (f"compiling {first:.0f} s", *(f"{ratio:.2f}" for ratio in spread))
            print(f"{name}, 5 and 50 rounds of 100 steps: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
