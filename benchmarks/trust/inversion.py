"""How well images can be approximated from one message of a small CNN: a table of PSNR in dB.

The attack of J. Geiping et al., "Inverting gradients" (NeurIPS 2020): starting from noise, Adam
changes images until their message points where the received one points (cosine), with few jumps
between neighbouring pixels (total variation). The attacker knows the weights, the labels, the
learning rate and the number of steps, and repeats these steps. Digits of 8 × 8 pixels; a message
passes through medfed's codecs. A useful approximation is far above the mean image of all digits,
which anybody can guess.

Run with ``python benchmarks/trust/inversion.py``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

from medfed.common.tensors import Tensors, flatten
from medfed.federation.wire.channel import Link, decode_part, encode_part
from medfed.federation.wire.codecs.base import Codec
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.stc import STC

RATE, SMOOTH = 0.01, 0.001


class Setting(NamedTuple):
    """What a client sends."""

    name: str
    codec: Codec = Dense()
    batch: int = 1
    steps: int = 1
    noise: float = 0.0


SETTINGS = (
    Setting("fp32"),
    Setting("fp16", Dense("float16")),
    Setting("QSGD, 16 levels", QSGD(levels=16)),
    Setting("five local steps", steps=5),
    Setting("STC 10 %", STC(0.1)),
    Setting("STC 1 %", STC(0.01)),
    Setting("batch 4", batch=4),
    Setting("batch 16", batch=16),
    Setting("clip 1, noise 0.1", noise=0.1),
)


def small_cnn() -> nn.Module:
    """Returns two convolutions that keep places, and a linear head."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 10)),
    )


def message(network: nn.Module, images: Tensor, labels: Tensor, steps: int) -> Tensors:
    """Returns the displacement of the weights, differentiable in the images."""
    start = {n: p.detach() for n, p in network.named_parameters()}
    weights = {n: p.clone().requires_grad_() for n, p in start.items()}
    for _ in range(steps):
        loss = nn.functional.cross_entropy(functional_call(network, weights, images), labels)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {n: w - RATE * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
    return {n: w - start[n] for n, w in weights.items()}


def received(network: nn.Module, images: Tensor, labels: Tensor, setting: Setting) -> Tensor:
    """Returns what the server decodes of a client's message."""
    sent = {n: t.detach() for n, t in message(network, images, labels, setting.steps).items()}
    if setting.noise:
        gradient = flatten(sent) / -RATE
        kept = gradient * min(1.0, 1.0 / float(gradient.norm()))
        return -RATE * (kept + setting.noise * torch.randn_like(kept))
    part, _ = encode_part(sent, "update", Link(setting.codec), rng=np.random.default_rng(0))
    return flatten(decode_part(part, Link(setting.codec))[0])


def invert(
    network: nn.Module, got: Tensor, labels: Tensor, setting: Setting, iterations: int
) -> Tensor:
    """Returns images whose message resembles the received one, in [0, 1]."""
    images = torch.rand(len(labels), 1, 8, 8).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    there = (got != 0).to(got)  # of a sparse message, only what was sent can be compared
    for _ in range(iterations):
        optimizer.zero_grad()
        like = flatten(message(network, images, labels, setting.steps)) * there
        jumps = images.diff(dim=2).abs().mean() + images.diff(dim=3).abs().mean()
        loss = 1 - nn.functional.cosine_similarity(like, got, dim=0) + SMOOTH * jumps
        (images.grad,) = torch.autograd.grad(loss, [images])
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()


def decibels(guess: Tensor, truth: Tensor) -> float:
    """Returns the mean PSNR of images, matched in the best order."""
    errors = torch.cdist(guess.flatten(1), truth.flatten(1)).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(errors)
    return float((-10 * errors[rows, columns].clamp(min=1e-12).log10()).mean())


def measured(setting: Setting, seeds: Sequence[int], iterations: int) -> list[float]:
    """Returns the PSNR of the attack on one message per seed."""
    digits = load_digits()
    every = torch.from_numpy(digits.images).float()[:, None] / 16
    values = []
    for seed in seeds:
        torch.manual_seed(seed)
        network = small_cnn()
        chosen = torch.randperm(len(every))[: setting.batch]
        images, labels = every[chosen], torch.from_numpy(digits.target)[chosen]
        got = received(network, images, labels, setting)
        values.append(decibels(invert(network, got, labels, setting, iterations), images))
    return values


def floor(seeds: Sequence[int]) -> float:
    """Returns the PSNR of the mean image as a guess."""
    every = torch.from_numpy(load_digits().images).float()[:, None] / 16
    mean = every.mean(0, keepdim=True)
    values = []
    for seed in seeds:
        torch.manual_seed(seed)
        small_cnn()  # the same draws
        values.append(decibels(mean, every[torch.randperm(len(every))[:1]]))
    return math.fsum(values) / len(values)


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=5, help="attacked messages per line")
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--only", default="", help="a part of the names of the lines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.messages)
    print("| message | PSNR, dB | lowest and highest |")
    print("|---|---:|---:|")
    print(f"| the mean image, without a message | {floor(seeds):.1f} | |")
    for setting in SETTINGS:
        if options.only in setting.name:
            values = measured(setting, seeds, options.iterations)
            mean = math.fsum(values) / len(values)
            print(f"| {setting.name} | {mean:.1f} | {min(values):.1f} to {max(values):.1f} |")


if __name__ == "__main__":
    main()
