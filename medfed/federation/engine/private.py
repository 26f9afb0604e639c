"""Gradients that protect each patient or row: clipped one by one, summed, and with noise.

Abadi et al.: Deep learning with differential privacy, CCS 2016, Algorithm 1. Each patient enters a
batch by chance, so that batches differ in size and may be empty; a sum is divided by the expected
number of patients. :mod:`medfed.functional.privacy` says what the noise amounts to.

Deviation: a patient's contribution is the gradient of the mean loss over the patient's samples in
the batch, so that patients with more samples do not count more.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from medfed.common.seeding import derive_seed, torch_rng
from medfed.common.tensors import Tensors
from medfed.federation.client import Batch
from medfed.federation.wire.packet import Message
from medfed.standalone.errors import ConfigError

_log = logging.getLogger(__name__)
Unit = Literal["patient", "row"]
ROOM = 1 << 26  # numbers of single gradients that are kept at once, unless a chunk is given


@runtime_checkable
class Drawable(Protocol):
    """Data of a client whose patients or rows can be drawn."""

    id: str

    @property
    def num_samples(self) -> int:
        """Number of training samples."""

    @property
    def batch_size(self) -> int:
        """Expected samples of a draw."""

    def units(self, unit: Unit) -> Tensor:
        """Returns the number of each training sample's patient, or of its row, (N,) from 0."""

    def train_batch(self, seed: int, number: int, index: Tensor) -> Batch:
        """Returns the samples with the given numbers (B,), altered by the batch's number."""


class FromSeed:
    """Random numbers that anybody who knows the seed can repeat: for simulations."""

    def __init__(self, seed: int) -> None:
        self._random = torch_rng(seed)

    def normal(self, like: Tensor) -> Tensor:
        """Returns normal numbers with the shape, the type and the device of a tensor."""
        return torch.randn(like.shape, generator=self._random, dtype=like.dtype).to(like.device)

    def uniform(self, count: int) -> Tensor:
        """Returns numbers in [0, 1), in double precision."""
        return torch.rand(count, generator=self._random, dtype=torch.float64)


class FromSystem:
    """Random numbers from the operating system, which nobody can repeat: for hospitals."""

    def normal(self, like: Tensor) -> Tensor:
        """As from a seed, by the Box-Muller transform."""
        radius, angle = self.uniform(2 * like.numel()).chunk(2)
        numbers = (-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()
        return numbers.reshape(like.shape).to(like)

    def uniform(self, count: int) -> Tensor:
        """As from a seed."""
        if not count:
            return torch.zeros(0, dtype=torch.float64)
        whole = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
        return (whole >> 11 & (1 << 53) - 1).double() / 2**53


Randomness = FromSeed | FromSystem


@dataclass(frozen=True)
class ExamplePrivacy:
    """How the clients of a process protect their patients."""

    clip: float  # the longest contribution of a patient or row to a sum
    # Standard deviation of the noise in multiples of ``clip``, by client.
    noises: Mapping[str, float]
    unit: Unit = "patient"  # what is drawn, clipped and protected
    # Samples whose gradients are kept at once; ``None``: as many as :data:`ROOM` allows.
    chunk: int | None = None
    # Whether draws and noise come from the operating system, not from the run's seed.
    system: bool = False

    def randomness(self, *key: object) -> Randomness:
        """Returns random numbers of a purpose."""
        return FromSystem() if self.system else FromSeed(derive_seed(*key))


@dataclass(frozen=True)
class ClientPrivacy:
    """Clips what a client sends and adds its share of the noise of a sum.

    McMahan, Ramage, Talwar, Zhang: Learning differentially private recurrent language models, ICLR
    2018, Algorithm 1, with fixed denominators.

    Deviations: every client adds noise, so that no server needs to be trusted with it: the noises
    of N clients with 1/N of the variance add up to that of the sum. The cohort follows from the
    run's seed, so that its choice hides nobody.
    """

    clip: float  # the longest displacement of a client, over all its parts
    sigma: float  # standard deviation of the noise of a sum, in multiples of ``clip``
    seed: int | None = None  # seed of the run; ``None``: the noise comes from the operating system

    def protect(self, reply: Message, clients: int, *key: object) -> Message:
        """Returns a reply with bounded and noisy parts."""
        if states := [part for part in reply.parts if reply.kind(part) != "update"]:
            raise ConfigError(
                f"privacy.client bounds displacements, and the part {states[0]} holds weights; "
                "choose algorithm=fedavg or fedper."
            )
        tensors = [t for named in reply.parts.values() for t in named.values()]
        norm = torch.stack(torch._foreach_norm(tensors)).norm() if tensors else torch.zeros(())
        factor = float((self.clip / norm).clamp(max=1.0))
        noise = self.clip * self.sigma / math.sqrt(clients)
        random = FromSystem() if self.seed is None else FromSeed(derive_seed(self.seed, *key))
        parts = {
            part: {n: factor * t + noise * random.normal(t) for n, t in named.items()}
            for part, named in reply.parts.items()
        }
        return replace(reply, parts=parts)


class PrivateGradients:
    """Computes clipped and noisy gradients of the data's loss."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Batch], Tensor],
        privacy: ExamplePrivacy,
        penalty: Callable[[], Tensor] | None = None,
    ) -> None:
        self.privacy, self.penalty = privacy, penalty
        self._model = _Loss(network, loss)
        self._expected, self._noise = 1.0, 0.0
        self._random: Randomness = FromSystem()

    def begin(self, data: Drawable, seed: int) -> None:
        """Starts one call of a client."""
        if data.id not in self.privacy.noises:
            raise ConfigError(
                f"Client {data.id} was not part of the run, so privacy.example gives it no "
                "noise; train a run without privacy.example to let hospitals join."
            )
        count = int(data.units(self.privacy.unit).max()) + 1
        self._expected = rate_of(data) * count
        noise = self.privacy.noises[data.id]
        self._noise = noise * self.privacy.clip if noise else 0.0  # no bound needs no noise
        self._random = self.privacy.randomness(seed, "noise")

    def batches(self, data: Drawable, seed: int) -> Iterator[Batch]:
        """Yields as many draws as an epoch has batches; ``unit`` numbers a batch's patients."""
        units, random = data.units(self.privacy.unit), self.privacy.randomness(seed, "draws")
        for number in range(math.ceil(data.num_samples / data.batch_size)):
            drawn = random.uniform(int(units.max()) + 1) < rate_of(data)
            index = drawn[units].nonzero().squeeze(1)
            yield {**data.train_batch(seed, number, index), "unit": units[index]}

    def add(self, batch: Batch, trained: Mapping[str, Tensor], share: float) -> Tensor:
        """Adds a draw's noisy gradient to the parameters' gradients."""
        weights = {n: t.detach() for n, t in trained.items()}
        sums = {n: torch.zeros_like(t) for n, t in weights.items()}
        total = next(iter(sums.values())).new_zeros(())
        for group in self._groups(batch, weights):
            gradients, losses = self._each(weights, group)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            # A sum that is not finite would show that such a patient was drawn.
            finite = norms.isfinite() & losses.isfinite()
            factors = (self.privacy.clip / norms).clamp(max=1.0).where(finite, 0.0)
            if not bool(finite.all()):
                _log.warning(
                    "%d patients of a draw count as zero: their gradients are not finite.",
                    int((~finite).sum()),
                )
                losses = losses.where(finite, 0.0)
                gradients = {
                    name: g.where(finite.view(-1, *[1] * (g.dim() - 1)), 0.0)
                    for name, g in gradients.items()
                }
            # Mixed precision would round the products, and a patient's could exceed the bound.
            with torch.autocast(factors.device.type, enabled=False):
                for name, gradient in gradients.items():
                    sums[name] += torch.tensordot(factors, gradient, dims=1)
            total = total + losses.sum()
        for name, parameter in trained.items():
            if self._noise:
                sums[name] += self._noise * self._random.normal(sums[name])
            noisy = sums[name] * (share / self._expected)
            parameter.grad = noisy if parameter.grad is None else parameter.grad + noisy
        return total * (share / self._expected)

    def _groups(self, batch: Batch, weights: Tensors) -> Iterator[Batch]:
        """Yields patients with equally many samples, as (patients, samples, ...)."""
        unit = batch["unit"]
        samples = {n: t for n, t in batch.items() if n != "unit"}
        _, inverse, counts = unit.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        size = sum(t.numel() for t in weights.values())
        chunk = self.privacy.chunk or max(1, ROOM // size)
        for count in counts.unique().tolist():
            rows = order[counts[inverse[order]] == count].reshape(-1, count)
            for some in rows.split(max(1, chunk // count)):
                yield {n: t[some] for n, t in samples.items()}

    def _each(self, weights: Tensors, group: Batch) -> tuple[Tensors, Tensor]:
        """Returns the gradient of each patient, (patients, ...) by name, and its loss."""
        one = grad_and_value(self._loss_at)
        try:
            each: tuple[Tensors, Tensor] = vmap(one, (None, 0), randomness="different")(
                weights, group
            )
            return each
        except RuntimeError:  # a network or a loss with an operation that vmap does not know
            patients = range(len(next(iter(group.values()))))
            done = [one(weights, {n: t[k] for n, t in group.items()}) for k in patients]
        gradients = {n: torch.stack([g[n] for g, _ in done]) for n in weights}
        return gradients, torch.stack([loss for _, loss in done])

    def _loss_at(self, weights: Tensors, samples: Batch) -> Tensor:
        entries = {f"network.{n}": t for n, t in weights.items()}
        loss: Tensor = functional_call(self._model, entries, (samples,))
        return loss


def rate_of(data: Drawable) -> float:
    """Returns the chance of each patient or row to enter a draw."""
    return min(1.0, data.batch_size / data.num_samples)


class _Loss(nn.Module):
    """The loss as a module, so that its network's parameters can be replaced in a call."""

    def __init__(self, network: nn.Module, loss: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, batch: Batch) -> Tensor:
        """Returns the loss of a batch."""
        return self._loss(batch)
