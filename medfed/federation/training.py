"""The one training loop. It alone calls ``backward``; speed is won here once for all methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from medfed.errors import ConfigError, NonFiniteError
from medfed.federation.budget import (
    LocalBudget,
    OptimizerFactory,
    SchedulerFactory,
    learning_rates,
    restore_optimizer,
    save_optimizer,
)
from medfed.federation.client import AfterStep, Batch, ClientData, Penalty
from medfed.federation.live import Place, Plan, gradient_of, places, to_device
from medfed.federation.normalization import normalises_batches, training_mode
from medfed.federation.seeding import derive_seed, seeded
from medfed.federation.split import ParameterSplit, Update, float_entries
from medfed.federation.tensors import Tensors, select


class LocalTrainer:
    """Runs local steps of any client on one network, whose weights it overwrites.

    Args:
        network: The model; its entries are named as in ``split``.
        loss: Gives the scalar loss of a batch under ``network``.
        split: Shared and personal names.
        optimizer: Makes an optimizer of a list of parameters.
        scheduler: Makes a schedule over rounds; ``None`` for a constant step size.
        rounds: Length of the schedule.
        budget: Local steps, clipping and optimizer state.
        seed: Seed of the run.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Batch], Tensor],
        split: ParameterSplit,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        rounds: int = 1,
        budget: LocalBudget | None = None,
        seed: int = 0,
    ) -> None:
        self.network = network
        self.loss = loss
        self.split = split
        self.budget = budget or LocalBudget()
        self.seed = seed
        self.rates = learning_rates(optimizer, scheduler, rounds)
        self.backward: Callable[[Tensor], None] = torch.Tensor.backward
        self._make_optimizer = optimizer
        self._plans: dict[Update, Plan] = {}
        self._entries: Tensors = {}
        self._places: list[Place] = []
        self._entries_device: torch.device | None = None

    @property
    def entries(self) -> Tensors:
        """The network's live parameters and float buffers."""
        # A network that is moved keeps its parameters but gets new buffers, also on the way back.
        moved = self._entries_device != self.device
        if moved or not all(held.get(name) is t for held, name, t in self._places):
            self._entries = float_entries(self.network)
            self._places = places(self.network)
            self._entries_device = self.device
            self._plans.clear()
        return self._entries

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    def initial(self) -> Tensors:
        """Returns a copy of the network's present entries."""
        return {n: t.detach().clone() for n, t in self.entries.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all entries into the network."""
        entries = self.entries
        with torch.no_grad():
            torch._foreach_copy_(list(entries.values()), [weights[n] for n in entries])

    def _prepare(self, update: Update, rate: float) -> Plan:
        """Lets exactly the trained parameters require gradients and resets their optimizer."""
        entries = self.entries
        if update not in self._plans:
            self._plans[update] = self._plan(entries, update)
        plan = self._plans[update]
        for group, trained in ((plan.trained.values(), True), (plan.fixed, False)):
            for parameter in group:
                parameter.requires_grad_(trained)
                parameter.grad = None
        plan.optimizer.state.clear()
        for options in plan.optimizer.param_groups:
            options["lr"] = rate
        return plan

    def _plan(self, entries: Tensors, update: Update) -> Plan:
        """Looks up what an update trains and makes its optimizer."""
        trained = select(entries, self.split.parameters(update))
        outside = self.split.buffers.union(trained)
        return Plan(
            trained,
            [t for n, t in entries.items() if n not in outside],
            select(entries, self.split.names(update)),
            self._make_optimizer(list(trained.values())),  # type: ignore[arg-type]
        )

    def run(
        self,
        data: ClientData,
        start: Mapping[str, Tensor],
        key: tuple[str | int, ...],
        rate: float,
        *,
        update: Update,
        steps: int,
        penalty: Penalty | None,
        after_step: AfterStep | None,
        memory: Tensors | None,
    ) -> tuple[Tensors, float]:
        """Runs ``steps`` gradient steps; see :meth:`medfed.federation.client.Client.train`.

        Args:
            data: The client's data.
            start: All entries at the start.
            key: Distinguishes this call from all others in the run, for its randomness.
            rate: The step size.
            update: The part that may change.
            steps: Number of steps.
            penalty: A term added to the loss.
            after_step: Called after each step.
            memory: The optimizer's state, continued and updated in place; ``None`` for fresh.

        Returns:
            All entries at the end, and the mean loss.
        """
        if not self.split.parameters(update):
            raise ConfigError(f"update={update!r} has no parameter to train; check personal.")
        self.load(start)
        trained, _, changing, optimizer = self._prepare(update, rate)
        if memory:
            restore_optimizer(optimizer, memory)
        seed = derive_seed(self.seed, *key, "train")
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        with (
            training_mode(self.network, self.split.policy == "frozen"),
            seeded(seed, self.device),
        ):
            for batch in self._batches(data, seed, steps):
                optimizer.zero_grad()
                total += self._backward(batch, trained, penalty)
                if self.budget.clip is not None:
                    clip_grad_norm_(trained.values(), self.budget.clip)
                optimizer.step()
                if after_step is not None:
                    with torch.no_grad():
                        after_step(trained, partial(self._gradient_at, batch, trained))
        if not math.isfinite(mean := float(total) / steps):
            raise NonFiniteError(
                "the training loss became NaN or infinite; lower optimizer.lr or set local.clip"
            )
        if memory is not None:
            memory.clear()
            memory.update(save_optimizer(optimizer))
        return {**start, **{n: t.detach().clone() for n, t in changing.items()}}, mean

    def _backward(
        self, batch: Batch, trained: Mapping[str, Tensor], penalty: Penalty | None
    ) -> Tensor:
        """Adds the gradients of one batch and returns the loss without the penalty."""
        with torch.enable_grad():
            loss = self.loss(batch)
            whole = loss if penalty is None else loss + penalty(trained)
            self.backward(whole)
        return loss.detach()

    def _gradient_at(
        self, batch: Batch, trained: Mapping[str, Tensor], at: Mapping[str, Tensor]
    ) -> Tensors:
        """Returns the gradient of ``batch`` at other parameters and puts the present ones back.

        Statistics of the batch were taken by the step itself; they are not taken twice.
        """
        names = list(trained)
        live = [trained[n] for n in names]
        buffers = [self.entries[n] for n in self.split.buffers]
        statistics = [t.clone() for t in buffers]
        kept = [t.detach().clone() for t in live]
        torch._foreach_copy_(live, [at[n] for n in names])
        for tensor in live:
            tensor.grad = None
        self._backward(batch, trained, None)
        gradients = {n: gradient_of(trained[n]).clone() for n in names}
        torch._foreach_copy_(live, kept)
        if buffers:
            torch._foreach_copy_(buffers, statistics)
        return gradients

    def gradient(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        key: tuple[str | int, ...],
        update: Update,
        batches: int | None = None,
    ) -> Tensors:
        """Returns the gradient of the mean loss over an epoch, or its first batches."""
        trained = self._prepare(update, 0.0).trained
        sums = {n: torch.zeros_like(t) for n, t in trained.items()}
        seen = 0
        for batch, size in self._pass(data, at, key, batches):
            for tensor in trained.values():
                tensor.grad = None
            self._backward(batch, trained, None)
            torch._foreach_add_(
                list(sums.values()), [gradient_of(t) for t in trained.values()], alpha=size
            )
            seen += size
        torch._foreach_div_(list(sums.values()), seen)
        return sums

    def mean_loss(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        key: tuple[str | int, ...],
        batches: int | None = None,
    ) -> float:
        """Returns the mean loss over an epoch, or its first batches: the one of `gradient`."""
        total, seen = torch.zeros((), device=self.device, dtype=torch.float64), 0
        with torch.no_grad():
            for batch, size in self._pass(data, at, key, batches):
                total += self.loss(batch) * size
                seen += size
        return float(total) / seen

    def _pass(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        key: tuple[str | int, ...],
        batches: int | None,
    ) -> Iterator[tuple[Batch, int]]:
        """Yields an epoch's batches with their sizes, the network in training mode at ``at``."""
        self.load(at)
        seed, seen = derive_seed(self.seed, *key, "gradient"), 0
        with training_mode(self.network, self.split.policy == "frozen"), seeded(seed, self.device):
            for batch in islice(self._epoch(data, seed), batches):
                seen += (size := len(next(iter(batch.values()))))
                yield batch, size
        if not seen:
            raise ConfigError(f"Client {data.id} has no training batch.")

    def _batches(self, data: ClientData, seed: int, steps: int) -> Iterator[Batch]:
        """Yields exactly ``steps`` batches, epoch after epoch."""
        done = epoch = 0
        while done < steps:
            before = done
            for batch in islice(self._epoch(data, derive_seed(seed, "epoch", epoch)), steps - done):
                yield batch
                done += 1
            if done == before:
                raise ConfigError(f"Client {data.id} has no training batch.")
            epoch += 1

    def _epoch(self, data: ClientData, seed: int) -> Iterator[Batch]:
        """Yields an epoch's batches, where they are needed.

        A last batch of one sample is passed over where BatchNorm has to make statistics of it.
        """
        lone = self.split.policy != "frozen" and normalises_batches(self.network)
        lone = lone and data.num_samples > data.batch_size > 1
        for batch in data.train_batches(seed):
            if not (lone and len(next(iter(batch.values()))) == 1):
                yield to_device(batch, self.device)
