"""The training loop: the local step of every method and every client.

A client's call of ``train`` calls :meth:`LocalTrainer.run`. It loads the client's weights into the
shared network. Each step takes batches, lets autograd add the gradient of their loss and of the
method's penalty, clips it, and has the optimizer move the parameters. Then the method may change
them and compute further gradients. ``gradients.py`` calls ``backward``. All of this happens on the
network's device.

One network serves all clients of a process in turn, see ``working_network.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Literal, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from medfed.common.seeding import derive_seed
from medfed.common.streams import globals_seeded, seeded
from medfed.common.tensors import Tensors, forget, gradient_of, select, to_device, weighted_sum
from medfed.federation import optimizers
from medfed.federation import split as splitting
from medfed.federation.budget import LocalBudget
from medfed.federation.client import (
    Batch,
    BatchPenalty,
    ClientData,
    Features,
    GradientOptions,
    Outputs,
    Split,
    TrainOptions,
)
from medfed.federation.engine.batches import Residents, on_gpu
from medfed.federation.engine.gradients import Gradients, StepGradient, WatchedForward, size_of
from medfed.federation.engine.graphs import GraphedSteps, obstacle
from medfed.federation.engine.private import Drawable
from medfed.federation.engine.working_network import TrainableSet, WorkingNetwork
from medfed.federation.other_state import OTHER
from medfed.standalone.errors import ConfigError, NonFiniteError
from medfed.standalone.outputs import heads

_log = logging.getLogger(__name__)
Key = tuple[str | int, ...]
Groups = Iterator[list[Batch]]  # the batches of each step
Step = Callable[[list[Batch]], Tensor | float]  # returns their loss
T = TypeVar("T")

STATISTICS_BATCHES = 20
"""From how many training batches statistics of normalisation are estimated again."""


class LocalTrainer:
    """Runs local steps of any client on one network, whose weights it overwrites."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Batch], Tensor],
        split: splitting.ParameterSplit,
        optimizer: optimizers.OptimizerFactory,
        scheduler: optimizers.SchedulerFactory | None = None,
        rounds: int = 1,
        budget: LocalBudget | None = None,
        seed: int = 0,
        measure: Callable[[Iterable[Batch]], float] | None = None,
    ) -> None:
        self.split, self.budget, self.seed = split, budget or LocalBudget(), seed
        # Gives the loss of evaluation batches; without, it is their mean in evaluation mode.
        self.measure = measure
        self.model = WorkingNetwork(network, self.split, optimizer, self.budget.channels_last)
        self.network, self._of_network = network, optimizers.takes_network(optimizer)
        self.rates = optimizers.learning_rates(self.probe, scheduler, rounds)
        self.gradients = Gradients(loss, self.budget.compile)
        # ``kept``: a model has the statistics of its training, else those of the client's data.
        self.normalization: splitting.Normalization = "kept"
        self.residents = Residents(self.budget.resident_gib * 2**30)
        self._warned = set[tuple[str, str]]()

    @property
    def probe(self) -> optimizers.OptimizerFactory:
        """Makes optimizers like the run's of any parameters, to see how far they step."""
        if not self._of_network:
            return self.model.make_optimizer
        return optimizers.of_kind(self.model.plan("all").optimizer)

    def check_one_rate(self) -> None:
        """Checks that all parameters of a part have one step size."""
        groups = self.model.plan("all").optimizer.param_groups
        if len({group[splitting.OWN_RATE] for group in groups}) > 1:
            raise ConfigError(
                "The algorithm reads gradients off displacements, which needs one step size for "
                "all layers; give the optimizer no groups with rates of their own."
            )

    def run(
        self,
        data: ClientData,
        start: Mapping[str, Tensor],
        key: Key,
        rate: float,
        steps: int,
        memory: Tensors | None,
        **how: Unpack[TrainOptions],
    ) -> tuple[Tensors, float]:
        """Runs ``steps`` gradient steps; see :meth:`medfed.federation.client.Client.train`.

        `key` identifies this call in the run, for its random numbers; `memory` is the optimizer's
        state, continued and updated in place, or ``None`` for a fresh one. Returns all entries at
        the end, and the mean over the steps of their batches' losses.
        """
        self.model.load(start)
        plan = self._begin(data, how.get("update", "all"))
        with plan.training(rate, how.get("rates"), memory):
            mean = self._steps(data, plan, key, steps, how)
            if not math.isfinite(mean):
                with self.gradients.precision():
                    mixed = torch.is_autocast_enabled(self.model.device.type)
                raise _diverged(data, mixed)
            if memory is not None:
                memory.clear()
                memory.update(optimizers.save_optimizer(plan.optimizer))
        changing: Iterable[str] = plan.changing
        if how.get("statistics"):
            changing = {*changing, *self.split.buffers.intersection(self.split.personal)}
        # Copies, as the next client overwrites the network. Unchanged entries are those of `start`.
        end = {**start, **self.model.changed(changing)}
        if not end[OTHER].numel() and OTHER not in start:
            del end[OTHER]
        return end, mean

    def _begin(self, data: ClientData, update: splitting.Update) -> TrainableSet:
        """Returns the plan of training a part on a client's data."""
        self.gradients.begin(data.batch_size)
        if self.budget.resident_states and not on_gpu(self.model.device):
            self._say_once("resident_states", "the network is on no GPU")
        if self.gradients.private is None:
            self.residents.admit(data, self.model.device)
        return self.model.plan(update)

    def _steps(
        self, data: ClientData, plan: TrainableSet, key: Key, steps: int, how: TrainOptions
    ) -> float:
        """Takes all steps of a call; returns the mean loss of their batches."""
        seed = derive_seed(self.seed, *key, "train")
        # Batches are keyed by their epoch, dropout by the whole call: more steps change no batch.
        stream = _endless(self._groups, data, seed)
        if self.gradients.private is not None:
            self.gradients.private.begin(_drawable(data), seed)
        step = self._stepper(plan, how, stream)
        with self.model.training(), globals_seeded(seed, self.model.device):
            losses = [step(group) for group in islice(stream, steps)]
        return sum(map(float, losses)) / steps  # read at the end: a GPU would wait at every step

    def _stepper(self, plan: TrainableSet, how: TrainOptions, stream: Groups) -> Step:
        """Returns what takes a step on a group of batches, and returns the group's loss."""
        penalty, term, outputs = how.get("penalty"), how.get("batch_penalty"), how.get("outputs")
        watched = self._watch(plan, term, outputs) if term or outputs else None
        direction, after_step = how.get("direction"), how.get("after_step")
        live = stream, plan.trained, self.model, partial(self._watch, plan)

        def along_gradient(group: Sequence[Batch]) -> Tensor:
            forget(plan.parameters)
            loss = self.gradients.add(group, plan.trained, self.model, penalty, watched)
            self._descend(plan)
            return loss

        def along_direction(group: list[Batch]) -> Tensor | float:
            assert direction is not None
            at = StepGradient(self.gradients, [group], *live, taken=False)
            with torch.no_grad():
                along = direction(plan.trained, at)
            for name, tensor in plan.trained.items():
                tensor.grad = along[name]
            self._descend(plan)
            return torch.nan if at.loss is None else at.loss

        step: Step = along_gradient if direction is None else along_direction
        if self.budget.graphs is True:
            step = self._graphed(plan, how, along_gradient) or step
        if after_step is None:
            return step

        def step_and_after(group: list[Batch]) -> Tensor | float:
            loss = step(group)
            with torch.no_grad():
                after_step(plan.trained, StepGradient(self.gradients, [group], *live))
            return loss

        return step_and_after

    def _graphed(
        self, plan: TrainableSet, how: TrainOptions, step: Callable[[Sequence[Batch]], Tensor]
    ) -> GraphedSteps | None:
        say = partial(self._say_once, "graphs")
        if reason := obstacle(how, self.budget, plan.optimizer, self.network, self.gradients):
            say(reason)
            return None
        plan.graphed = plan.graphed or GraphedSteps(plan, self.model, self.gradients, step, say)
        graphed: GraphedSteps = plan.graphed
        graphed.begin()
        return graphed

    def _say_once(self, key: str, reason: str) -> None:
        if (key, reason) not in self._warned:
            self._warned.add((key, reason))
            _log.warning("local.%s=true has no effect on some steps: %s.", key, reason)

    def _descend(self, plan: TrainableSet) -> None:
        # The norm covers all trained parameters, over all groups.
        if self.budget.clip is not None:
            clip_grad_norm_(plan.parameters, self.budget.clip)
        plan.step()

    def _watch(
        self, plan: TrainableSet, penalty: BatchPenalty | None, outputs: Outputs | None = None
    ) -> WatchedForward:
        if self.gradients.compiled_loss is not None:
            self._say_once("compile", "this method watches each pass")
        head = self.split.head
        return WatchedForward(self.network, plan.trained, head, penalty, outputs, self.gradients)

    def gradient(
        self, data: ClientData, at: Mapping[str, Tensor], key: Key, **over: Unpack[GradientOptions]
    ) -> Tensors:
        """Returns the gradient of the mean loss over an epoch, or its first batches."""
        plan = self._begin(data, over.get("update", "all"))
        sums = {n: t.new_zeros(t.shape) for n, t in plan.trained.items()}
        count = 0
        with plan.training(0.0):
            for batch, size in self._pass(data, at, key, over.get("batches")):
                forget(plan.parameters)
                self.gradients.add([batch], plan.trained, self.model)
                # By samples, as the last batch may be smaller, but the sizes of draws are secret;
                # in the order of the batches.
                weight = size if self.gradients.private is None else 1
                weighted_sum(sums, {n: gradient_of(t) for n, t in plan.trained.items()}, weight)
                count += weight
        torch._foreach_div_(list(sums.values()), count)
        return sums

    def mean_loss(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        key: Key,
        batches: int | None,
        split: Split,
    ) -> float:
        """Returns the mean loss over an epoch, or its first batches, as in `gradient`."""
        if split == "val":
            return self.evaluated(data, at, split, batches)
        total, count = torch.zeros((), device=self.model.device, dtype=torch.float64), 0
        with torch.no_grad():
            for batch, size in self._pass(data, at, key, batches):
                total += self.gradients.loss_of(batch) * size
                count += size
        return float(total) / count

    def evaluated(
        self,
        data: ClientData,
        at: Mapping[str, Tensor],
        split: Literal["train", "val", "test"],
        batches: int | None = None,
    ) -> float:
        """Returns the mean loss over a split, or its first batches, in evaluation mode."""
        evaluated = list(islice(data.eval_batches(split), batches))
        if not evaluated:
            raise ConfigError(
                f"Client {data.id} has no {split} data; give it some (data.{split}_fraction), or "
                "leave the client out (cohort.clients)."
            )
        self.model.load(at)
        if self.measure is not None:
            self.gradients.forward_passes += len(evaluated)
            return self.measure(evaluated)
        self.network.eval()
        sizes, device = [size_of(batch) for batch in evaluated], self.model.device
        with torch.no_grad(), seeded(device=device):  # some networks draw in evaluation, too
            losses = [self.gradients.loss_of(to_device(b, device)) for b in evaluated]
        # Read at the end: a GPU would wait at every batch.
        return sum(n * float(v) for n, v in zip(sizes, losses, strict=True)) / sum(sizes)

    def features(
        self, data: ClientData, at: Mapping[str, Tensor], split: Split, limit: int | None
    ) -> Features:
        """Returns features and outputs; see :meth:`medfed.federation.client.Client.features`."""
        rows, device, count = list[Features](), self.model.device, 0
        normalizes = self.normalization == "kept"
        self.model.load(at if normalizes else self.reestimated(data, dict(at)))
        self.network.eval()
        head, live, nothing = self.split.head, Tensors(), torch.zeros(())
        watch = WatchedForward(self.network, live, head, lambda *_: nothing, None, self.gradients)
        with torch.no_grad(), seeded(device=device):  # some networks draw in evaluation, too
            for batch in data.eval_batches(split):
                moved = to_device(batch, device)
                with watch.watching():
                    self.gradients.loss_of(moved)
                label, outputs = moved["label"], heads(watch(live), moved["image"])[0]
                z = watch(live, features=True) if head else outputs.flatten(1)[:, :0]
                z = z.float() if z.dtype.itemsize < 4 else z
                one = label if label.ndim == 1 else label.flatten(1)[:, :0]
                first, count = count, count + len(label)
                alone = torch.arange(first, count, device=device)
                rows.append(Features(z, one, moved.get("case", alone), outputs))
                if limit is not None and count >= limit:
                    break
        return Features(*(torch.cat(parts)[:limit] for parts in zip(*rows, strict=True)))

    def reestimated(self, data: ClientData, model: Tensors) -> Tensors:
        """Returns a model with the statistics of normalisation that a client's batches have.

        They are the means over :data:`STATISTICS_BATCHES` training batches. The network is in
        evaluation mode, except the layers that gather statistics.
        """
        with self.model.training():
            layers = splitting.gathering(self.network)
        if not layers or self.gradients.private is not None:
            return model
        self.model.load(model)
        seed = derive_seed(self.seed, data.id, "statistics")
        batches = islice(_endless(self._epoch, data, seed), STATISTICS_BATCHES)
        momenta = {name: layer.momentum for name, layer in layers.items()}
        self.network.eval()
        try:
            with torch.no_grad(), seeded(seed, self.model.device):
                for number, batch in enumerate(batches, 1):
                    for layer in layers.values():
                        layer.train().momentum = 1 / number
                    self.gradients.loss_of(batch)
        except ValueError as error:
            if splitting.of_one_sample(error) is None:
                raise
            return model  # a single sample has no variance
        finally:
            for name, layer in layers.items():
                layer.eval().momentum = momenta[name]
        keys = ("running_mean", "running_var")
        names = {f"{name}.{key}".lstrip(".") for name in layers for key in keys}
        now = self.model.changed(names & self.split.buffers)
        return {**model, **select(now, now.keys() - {OTHER})}

    def _pass(
        self, data: ClientData, at: Mapping[str, Tensor], key: Key, batches: int | None
    ) -> Iterator[tuple[Batch, int]]:
        """Yields an epoch's batches with their sizes, the network in training mode at ``at``."""
        self.model.load(at)
        seed = derive_seed(self.seed, *key, "gradient")
        if self.gradients.private is not None:
            self.gradients.private.begin(_drawable(data), seed)
        with self.model.training(), globals_seeded(seed, self.model.device):
            for batch in islice(self._epoch(data, seed), batches):
                yield batch, size_of(batch)

    def _groups(self, data: ClientData, seed: int) -> Groups:
        """Yields the batches of each step of one epoch; the last step may have fewer."""
        batches = self._epoch(data, seed)
        while group := list(islice(batches, self.budget.accumulate)):
            yield group

    def _epoch(self, data: ClientData, seed: int) -> Iterator[Batch]:
        """Yields an epoch's batches on the network's device."""
        # BatchNorm cannot normalise one sample: a last batch of one is skipped, unless the batch
        # size is 1 or the client has no more samples.
        lone = self.split.policy != "frozen" and self.model.normalises
        lone = lone and data.num_samples > data.batch_size > 1
        private, device, empty = self.gradients.private, self.model.device, True
        elsewhere = device.type != "cpu"
        if private is None:
            batches = self.residents.of(data).train_batches(seed)
        else:
            batches = private.batches(_drawable(data), seed)
        for batch in batches:
            if not (lone and size_of(batch) == 1):
                empty = False
                yield to_device(batch, device) if elsewhere else batch
        if empty:  # otherwise the stream of epochs would loop for ever without a batch
            raise ConfigError(f"Client {data.id} has no training batch.")


def _diverged(data: ClientData, mixed: bool) -> NonFiniteError:
    """Returns the error of a loss that is not finite: by samples, by mixed precision, or else."""
    for batch in data.train_batches(0):
        for name in ("image", "label"):
            if isinstance(values := batch.get(name), Tensor) and not bool(values.isfinite().all()):
                return NonFiniteError(
                    f"the training loss became NaN or infinite, as a training {name} holds NaN or "
                    "infinity; mend that sample, or leave it out"
                )
    full = "train with trainer.precision=32-true, " if mixed else ""
    return NonFiniteError(
        f"the training loss became NaN or infinite; {full}lower optimizer.lr or set local.clip"
    )


def _endless(
    epoch: Callable[[ClientData, int], Iterator[T]], data: ClientData, seed: int
) -> Iterator[T]:
    """Yields what epochs of a client's data consist of, epoch after epoch."""
    return chain.from_iterable(epoch(data, derive_seed(seed, "epoch", n)) for n in count())


def _drawable(data: ClientData) -> Drawable:
    if not isinstance(data, Drawable):
        raise ConfigError(
            f"The patients of client {data.id} cannot be drawn one by one; train without "
            "privacy.example."
        )
    return data
