"""The one training loop; speed is won here once for all methods.

Losses compiled by ``torch.compile``, for batches of full size.

The live network that all clients of a process train, one after the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, count, islice
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from medfed.common.errors import ConfigError, NonFiniteError, first_line
from medfed.common.seeding import derive_seed
from medfed.common.streams import seeded
from medfed.common.tensors import Tensors, gradient_of, select, to_device
from medfed.federation.budget import (
    LocalBudget,
    OptimizerFactory,
    SchedulerFactory,
    lay_out,
    learning_rates,
    ordinary,
    save_optimizer,
)
from medfed.federation.client import Batch, ClientData, Direction, How, Penalty
from medfed.federation.engine.gradients import Gradients, Look, StepGradient
from medfed.federation.engine.graphs import Graphs, graphs_for
from medfed.federation.engine.plan import Feed, Plan, unfit
from medfed.federation.engine.slots import Alone, Lane
from medfed.federation.split import (
    ParameterSplit,
    Update,
    float_entries,
    normalises_batches,
    nothing_to_train,
    training_mode,
)


def compiled(loss: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Returns a loss that is compiled when it is first called, once per structure of its batches.

    Shapes are fixed, so that which code computes a batch depends on the batch alone and not on
    those before it: a resumed run equals itself. Random numbers are those of uncompiled code.

    Args:
        loss: Gives the scalar loss of a batch.

    Raises:
        ConfigError: If there is no C++ compiler; and later, if PyTorch cannot compile the loss.
    """
    from torch._dynamo.exc import TorchDynamoException  # slow to import
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "local.compile=true needs a C++ compiler on this machine; install g++ (Debian: "
            "apt-get install g++) or choose local.compile=false."
        ) from error
    quick = torch.compile(loss, dynamic=False, options={"fallback_random": True})

    def tried(batch: Batch) -> Tensor:
        try:
            return quick(batch)
        except TorchDynamoException as error:
            raise ConfigError(
                f"PyTorch cannot compile the loss of this model ({first_line(error)}); choose "
                "local.compile=false."
            ) from error

    return tried


Part = Literal["shared", "personal"]
Rates = Mapping[Part, float]
PARTS: tuple[Part, ...] = ("shared", "personal")  # as in an update of all


class LiveNetwork(Gradients):
    """One network whose weights are overwritten, what of it is trained, and batches beside it.

    Args:
        network: The model; its entries are named as in ``split``.
        loss: Gives the scalar loss of a batch under ``network``.
        split: Shared and personal names.
        optimizer: Makes an optimizer of a list of parameters.
        budget: Accumulation, layout, compiling.

    Attributes:
        feed: Brings batches to the network's device.
        in_place: Whether optimizer state and step sizes keep their places in memory.
        graphs: Takes steps as captured graphs; ``None``: they run one by one.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Batch], Tensor],
        split: ParameterSplit,
        optimizer: OptimizerFactory,
        budget: LocalBudget,
    ) -> None:
        super().__init__(loss)
        self.network = network
        self.split = split
        self.budget = budget
        self.make_optimizer = optimizer
        if budget.compile:
            self.quick = compiled(loss)
        self.feed = Feed()
        self.in_place = False
        self.forget()

    def forget(self) -> None:
        """Forgets all that is kept of the network, as after another one has taken its place."""
        self.graphs: Graphs | None = None
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._entries: Tensors = {}
        self._held: list[tuple[dict[str, Any], str, Tensor | None]] = []
        self._entries_device: torch.device | None = None
        self._modules: list[nn.Module] = []
        self._first: nn.Parameter = next(self.network.parameters())
        self._normalises = False
        self._said = False

    @property
    def entries(self) -> Tensors:
        """The network's live parameters and float buffers, but those that never change."""
        # A network that is moved keeps its parameters but gets new buffers, also on the way back.
        moved = self._entries_device != self.device
        if moved or not all(where.get(name) is t for where, name, t in self._held):
            self._first = next(self.network.parameters())
            lay_out(self.network, self.budget.channels_last)
            found, base = float_entries(self.network), self.split.base
            self._entries = {n: t for n, t in found.items() if n not in base}
            # Where it keeps each of its tensors, to notice when it keeps another there.
            self._held = [
                (where, name, tensor)
                for module in self.network.modules()
                for where in (module._parameters, module._buffers)
                for name, tensor in where.items()
            ]
            self._entries_device = self.device
            self._modules = list(self.network.modules())
            self._normalises = normalises_batches(self.network)
            self._plans.clear()
            wanted = self.budget.graphs if self.quick is None else False  # a rival, not a part
            self.graphs = graphs_for(self.device, self.graphs, wanted)
        return self._entries

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._first.device

    def initial(self) -> Tensors:
        """Returns a copy of the network's present entries."""
        return {n: ordinary(t) for n, t in self.entries.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all entries into the network."""
        entries = self.entries
        with torch.no_grad():
            torch._foreach_copy_(list(entries.values()), [weights[n] for n in entries])

    def _mode(self) -> AbstractContextManager[None]:
        """Training, with whatever statistics never change."""
        return training_mode(self.network, self.split.policy, self.split.base, self._modules)

    def _prepare(
        self,
        update: Update,
        rate: float,
        rates: Rates | None = None,
        memory: Tensors | None = None,
    ) -> Plan:
        """Lets exactly the trained parameters require gradients and resets their optimizer."""
        entries, parts = self.entries, [p for p in PARTS if rates and update in (p, "all")]
        parts = [p for p in parts if self.split.parameters(p)]
        key = (update, *parts)
        if key not in self._plans:
            self._plans[key] = self._plan(entries, update, parts)
        plan = self._plans[key]
        if not type(plan.optimizer).__module__.startswith("torch.optim."):
            del self._plans[key]  # what it keeps beside its state is of one client's call alone
        self.begin()
        plan.begin([rates[p] for p in parts] if rates else [rate], memory)
        return plan

    def _plan(self, entries: Tensors, update: Update, parts: Sequence[Part]) -> Plan:
        trained = select(entries, self.split.parameters(update))
        outside = self.split.buffers.union(trained)
        groups = [
            {"params": list(select(entries, self.split.parameters(p)).values())} for p in parts
        ]
        optimizer = self.make_optimizer(groups or list(trained.values()))  # type: ignore[arg-type]
        fused = self.graphs is not None or self.device.type == "cuda"
        if fused and (reason := unfit(optimizer)) is not None:
            fused = False
            if self.graphs is not None:
                self.graphs.decline(reason)
        return Plan(
            trained,
            [t for n, t in entries.items() if n not in outside],
            select(entries, self.split.names(update)),
            [entries[n] for n in self.split.buffers],
            optimizer,
            self.in_place or fused,
            fused,
        )

    def _groups(self, data: ClientData, seed: int) -> Iterator[list[Batch]]:
        """Yields the batches of one step after the other, of one epoch: the last may be fewer."""
        batches = self._epoch(data, seed)
        while group := list(islice(batches, self.budget.accumulate)):
            yield group

    def _epoch(self, data: ClientData, seed: int) -> Iterator[Batch]:
        """Yields an epoch's batches, where they are needed.

        A last batch of one sample is passed over where BatchNorm has to make statistics of it.
        """
        lone = self.split.policy != "frozen" and self._normalises
        lone = lone and data.num_samples > data.batch_size > 1
        empty = True
        for batch in self.feed.batches(data, seed, self.device):
            if not (lone and len(next(iter(batch.values()))) == 1):
                empty = False
                yield batch
        if empty:
            raise ConfigError(f"Client {data.id} has no training batch.")


_log = logging.getLogger(__name__)
Key = tuple[str | int, ...]


class LocalTrainer(LiveNetwork):
    """Runs local steps of any client on one network, whose weights it overwrites.

    Args:
        network: The model; its entries are named as in ``split``.
        loss: Gives the scalar loss of a batch under ``network``.
        split: Shared and personal names.
        optimizer: Makes an optimizer of a list of parameters.
        scheduler: Makes a schedule over rounds; ``None`` for a constant step size.
        rounds: Length of the schedule.
        budget: Local steps, accumulation, clipping and optimizer state.
        seed: Seed of the run.
        measure: Gives the loss of evaluation batches; by default the mean of their losses in
            evaluation mode.

    Attributes:
        lane: Where steps run, and who has his turn after each.
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
        measure: Callable[[Iterable[Batch]], float] | None = None,
    ) -> None:
        super().__init__(network, loss, split, optimizer, budget or LocalBudget())
        self.seed = seed
        self.rates = learning_rates(optimizer, scheduler, rounds)
        self.measure = measure
        self.lane: Lane = Alone()

    def run(
        self,
        data: ClientData,
        start: Mapping[str, Tensor],
        key: Key,
        rate: float,
        steps: int,
        memory: Tensors | None,
        **how: Unpack[How],
    ) -> tuple[Tensors, float]:
        """Runs ``steps`` gradient steps; see :meth:`medfed.federation.client.Client.train`.

        Args:
            data: The client's data.
            start: All entries at the start.
            key: Distinguishes this call from all others in the run, for its randomness.
            rate: The step size.
            steps: Number of steps.
            memory: The optimizer's state, continued and updated in place; ``None`` for fresh.
            how: See :class:`medfed.federation.client.How`.

        Returns:
            All entries at the end, and the mean over the steps of their batches' losses.
        """
        update = how.get("update", "all")
        if not self.split.parameters(update):
            raise nothing_to_train(update)
        with self.lane.working():
            plan, mean = self._train(data, start, key, rate, steps, memory, how)
        if not math.isfinite(mean):
            raise NonFiniteError(
                "the training loss became NaN or infinite; lower optimizer.lr or set local.clip"
            )
        if memory is not None:
            memory.clear()
            memory.update(save_optimizer(plan.optimizer))
        changing = plan.changing
        if how.get("statistics"):
            local = self.split.buffers.intersection(self.split.personal)
            changing = {**changing, **select(self.entries, local)}
        with torch.no_grad():
            return {**start, **{n: ordinary(t) for n, t in changing.items()}}, mean

    def _train(
        self,
        data: ClientData,
        start: Mapping[str, Tensor],
        key: Key,
        rate: float,
        steps: int,
        memory: Tensors | None,
        how: How,
    ) -> tuple[Plan, float]:
        """Takes the steps of :meth:`run`; returns what was trained, and the mean loss."""
        update = how.get("update", "all")
        self.load(start)
        self.full = data.batch_size
        plan = self._prepare(update, rate, how.get("rates"), memory)
        seed = derive_seed(self.seed, *key, "train")
        epochs = (self._groups(data, derive_seed(seed, "epoch", epoch)) for epoch in count())
        stream = chain.from_iterable(epochs)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        penalty, direction, after_step = (
            how.get("penalty"),
            how.get("direction"),
            how.get("after_step"),
        )
        look = self._look(plan.trained, how)
        kind = self.graphs and (update, *(how.get("rates") or ()), self.precision, plan.places())
        with self._mode(), seeded(seed, self.device):
            for group in islice(stream, steps):
                if direction is None:
                    loss = self._replayed(plan, group, penalty, look, kind)
                    total += self._step(plan, group, penalty, look) if loss is None else loss
                else:
                    total += self._directed(plan, group, stream, direction)
                if after_step is not None:
                    with torch.no_grad():
                        at = StepGradient(self, group, stream, plan.trained, plan.buffers)
                        after_step(plan.trained, at)
                self.lane.pause()
        self.lane.finish()
        return plan, float(total) / steps

    def _step(
        self, plan: Plan, group: Sequence[Batch], penalty: Penalty | None, look: Look | None
    ) -> Tensor:
        """Takes one gradient step over tensors that stay where they are; returns its loss."""
        plan.clear()
        loss = self.add(group, plan.trained, plan.buffers, penalty, look)
        self._move(plan)
        return loss

    def _replayed(
        self,
        plan: Plan,
        group: Sequence[Batch],
        penalty: Penalty | None,
        look: Look | None,
        kind: Hashable,
    ) -> Tensor | None:
        """Takes one gradient step by a captured graph, if there is one, and returns its loss."""
        if self.graphs is None or not plan.fused:
            return None
        if look is not None or self.half:
            what = "a term that sees batches or outputs" if look else "float16, which rescales,"
            self.graphs.decline(f"{what} needs Python in every step")
            return None
        before = self._gradient_passes

        def step(batches: Sequence[Batch], term: Penalty | None) -> Tensor:
            return self._step(plan, batches, term, None)

        def changes() -> list[Tensor]:
            return [*plan.kept(), *self.network.buffers()]

        loss = self.graphs.take(kind, group, penalty, step, changes)
        plan.clear()  # what a graph keeps of them is its own
        self._gradient_passes = before + (0 if loss is None else len(group))
        return loss

    def _directed(
        self,
        plan: Plan,
        group: Sequence[Batch],
        stream: Iterator[Sequence[Batch]],
        direction: Direction,
    ) -> Tensor | float:
        """Takes one step along what a method puts in place of the gradient; returns its loss."""
        at = StepGradient(self, group, stream, plan.trained, plan.buffers, taken=False)
        with torch.no_grad():
            found = direction(plan.trained, at)
        for name, tensor in plan.trained.items():
            tensor.grad = found[name]
        self._move(plan)
        return torch.nan if at.loss is None else at.loss

    def _move(self, plan: Plan) -> None:
        if self.budget.clip is not None:
            clip_grad_norm_(plan.live, self.budget.clip)
        plan.optimizer.step()

    def _look(self, trained: Tensors, how: How) -> Look | None:
        penalty, outputs = how.get("batch_penalty"), how.get("outputs")
        if penalty is None and outputs is None:
            return None
        if self.quick is not None and not self._said:
            self._said = True
            _log.warning(
                "local.compile=true has no effect on steps of this method, which looks into the "
                "network's passes."
            )
        return Look(self.network, trained, self.split.head, penalty, outputs, self)

    def gradient(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        key: Key,
        update: Update,
        batches: int | None = None,
    ) -> Tensors:
        """Returns the gradient of the mean loss over an epoch, or its first batches."""
        plan, self.full = self._prepare(update, 0.0), data.batch_size
        sums = {n: torch.zeros_like(ordinary(t)) for n, t in plan.trained.items()}
        seen = 0
        for batch, size in self._pass(data, at, key, batches):
            plan.clear()
            self.add([batch], plan.trained, plan.buffers)
            torch._foreach_add_(
                list(sums.values()), [gradient_of(t) for t in plan.live], alpha=size
            )
            seen += size
        torch._foreach_div_(list(sums.values()), seen)
        return sums

    def mean_loss(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        key: Key,
        batches: int | None = None,
        split: Literal["train", "val"] = "train",
    ) -> float:
        """Returns the mean loss over an epoch, or its first batches: the one of `gradient`."""
        if split == "val":
            return self._validation(data, at, batches)
        total, seen = torch.zeros((), device=self.device, dtype=torch.float64), 0
        with torch.no_grad():
            for batch, size in self._pass(data, at, key, batches):
                total += self.loss_of(batch) * size
                seen += size
        return float(total) / seen

    def _validation(self, data: ClientData, at: Mapping[str, Tensor], batches: int | None) -> float:
        found = list(islice(data.eval_batches("val"), batches))
        if not found:
            raise ConfigError(
                f"Client {data.id} has no validation data, which the algorithm needs; raise "
                "data.val_fraction, or leave the client out by cohort.clients."
            )
        self.load(at)
        if self.measure is not None:
            self.count_forward(len(found))
            return self.measure(found)
        self.network.eval()
        sizes = [len(next(iter(batch.values()))) for batch in found]
        with torch.no_grad():
            losses = [float(self.loss_of(to_device(batch, self.device))) for batch in found]
        return sum(n * v for n, v in zip(sizes, losses, strict=True)) / sum(sizes)

    def _pass(
        self, data: ClientData, at: Mapping[str, Tensor], key: Key, batches: int | None
    ) -> Iterator[tuple[Batch, int]]:
        """Yields an epoch's batches with their sizes, the network in training mode at ``at``."""
        self.load(at)
        seed = derive_seed(self.seed, *key, "gradient")
        with self._mode(), seeded(seed, self.device):
            for batch in islice(self._epoch(data, seed), batches):
                yield batch, len(next(iter(batch.values())))
