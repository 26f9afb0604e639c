"""Clients whose data and training are in this process; one network serves all of them.

:class:`LocalClient` trains, and holds the client's state between rounds; :func:`on_disk` keeps that
of many clients in memory-mapped files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import Tensor

from medfed.common.arguments import check_arguments
from medfed.common.tensors import State, Tensors, distinct, map_state, states_on
from medfed.federation.budget import Passes, batches_of, share_of
from medfed.federation.client import (
    ClientData,
    Features,
    GradientOptions,
    Split,
    TrainOptions,
)
from medfed.federation.duties import check_steps
from medfed.federation.engine.batches import on_gpu
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.optimizers import effective_step_length
from medfed.federation.other_state import OTHER
from medfed.federation.split import of_one_sample
from medfed.standalone.errors import CheckpointError, ConfigError

Groups = dict[str, State]
_T = TypeVar("_T")
_MAIN = torch.device("cpu")


def on_disk(groups: Mapping[str, State], folder: Path) -> Groups:
    """Returns states whose tensors are mapped from a file in a folder, and are read when used.

    The file loses its name at once, so the system frees it with the last tensor or the process,
    even after a crash.
    """
    if not distinct(groups.values()):
        return dict(groups)
    copies = {group: map_state(state, _alone) for group, state in groups.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".states-") as file:
            torch.save(copies, file)
            file.flush()
            loaded: Groups = torch.load(file.name, mmap=True, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"The state of a client cannot be written to {folder} ({error}); make room there, or "
            "raise cohort.memory_gb to keep it in memory."
        ) from error
    return loaded


def bytes_of(tensors: Any) -> int:
    """Returns how many bytes tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _alone(tensor: Tensor) -> Tensor:
    """Returns a tensor with memory of its own: to save a view would save the larger tensor, too."""
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


class LocalClient:
    """Implements :class:`medfed.federation.client.Client` on a shared :class:`LocalTrainer`."""

    def __init__(
        self, data: ClientData, trainer: LocalTrainer, weights: Tensors, state: State
    ) -> None:
        self.id = data.id
        self.data = data
        self.trainer, self.split = trainer, trainer.split
        self.weights = weights
        self.state: State = dict(state)
        # The state of this end of the channel, by direction; empty without lossy codecs.
        self.memory: State = {"up": {}, "down": {}}
        self.loss: float | None = None
        self.steps_done = 0  # gradient steps so far
        # Passes of batches through the network so far, including those of the steps.
        self.passes = Passes()
        self._optimizers: State = {}
        # The tensors of a state on a device, by their ids, with equal ones in main memory.
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self.phase_index = 0
        self.passes_move_state = False
        self.moved_other_state = False  # whether training has changed what is no entry
        self._round, self._phase, self._calls = 0, "", 0
        self._losses: list[tuple[float, int]] = []  # of this round's calls, with their steps

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return self.data.num_samples

    @property
    def steps(self) -> int:
        """The budget of local gradient steps of one round."""
        return self.trainer.budget.of_batches(batches_of(self.data))

    @property
    def expected_work(self) -> float:
        """The estimated cost of a round: its samples times the passes."""
        batch = min(self.data.batch_size, self.num_samples) * self.trainer.budget.accumulate
        return float(self.steps * max(1, batch))

    @property
    def learning_rate(self) -> float:
        """The optimizer's step size in this round."""
        return self.trainer.rates[min(self._round, len(self.trainer.rates) - 1)]

    def effective_step_length(self, steps: int, along: Callable[[], Tensor] | None = None) -> float:
        """See :meth:`medfed.federation.client.Client.effective_step_length`."""
        self.trainer.check_one_rate()
        return effective_step_length(
            self.trainer.probe, self.learning_rate, steps, self.fresh_optimizer, along
        )

    def begin(self, round: int, phase: str, index: int) -> None:
        """Sets the round and phase of the next calls, which determine their random numbers."""
        if index == 0 or round != self._round:
            self._losses = []
        self._round, self._phase, self.phase_index, self._calls = round, phase, index, 0
        self.passes_move_state = False

    @property
    def training_loss(self) -> float | None:
        """The mean loss of this round's steps; None where the method took none by ``train``."""
        steps = sum(count for _, count in self._losses)
        return sum(loss * count for loss, count in self._losses) / steps if steps else None

    def adopt(self, moments: Tensors) -> None:
        """Puts the mean of the clients' optimizers in place of the state of shared parameters."""
        if moments:
            slot = f"{self._phase}/1"
            self._optimizers[slot] = {**self._optimizers.get(slot, {}), **moments}

    def shared_moments(self) -> Tensors:
        """Takes out what the server averages: the optimizer's state of the shared parameters."""
        state = self._optimizers[f"{self._phase}/1"]  # empty where it remembers nothing
        groups = self.trainer.model.plan("all").optimizer.param_groups
        parts = [group["name"] for group in groups for _ in group["params"]]
        shared = [n for n, t in state.items() if parts[int(n.split("/")[0])] == "shared"]
        return {n: state.pop(n) for n in shared if state[n].is_floating_point()}

    def share(self, index: int, parts: int) -> int:
        """See :meth:`medfed.federation.client.Client.share`."""
        return self.steps if self._as_papers else share_of(self.steps, index, parts)

    def shares(self, first: float) -> tuple[int, int]:
        """See :meth:`medfed.federation.client.Client.shares`."""
        if self._as_papers:
            return self.steps, self.steps
        steps = min(max(1, round(first * self.steps)), max(1, self.steps - 1))
        return steps, max(1, self.steps - steps)

    def train(
        self, start: Mapping[str, Tensor], *, steps: int | None = None, **how: Unpack[TrainOptions]
    ) -> Tensors:
        """See :meth:`medfed.federation.client.Client.train`."""
        key, slot = self._key(), f"{self._phase}/{self._calls}"
        steps = self.steps if steps is None else steps
        check_steps(steps)
        check_arguments(TrainOptions, how, "Client.train: ")
        # One optimizer for each call of a phase: a method's second call may train another part.
        # A copy, so that a failed call leaves the state of the last round.
        memory = None if self.fresh_optimizer else dict(self._optimizers.get(slot, {}))
        rate = self.learning_rate
        run = partial(self.trainer.run, self.data, start, key, rate, steps, memory, **how)
        # A method's functions may remember what they were called with.
        end, self.loss = self._counted(run, again=not any(map(callable, how.values())))
        self.moved_other_state |= OTHER in end
        if memory is not None:
            self._optimizers[slot] = memory
        self.steps_done += steps
        self._losses.append((self.loss, steps))
        return end

    def gradient(
        self, at: Mapping[str, Tensor], *, same: bool = False, **over: Unpack[GradientOptions]
    ) -> Tensors:
        """See :meth:`medfed.federation.client.Client.gradient`."""
        key = self._where() if same else self._key()
        gradient = self._counted(partial(self.trainer.gradient, self.data, at, key, **over))
        self.passes_move_state |= self.trainer.model.has_moved(at)
        return gradient

    def loss_at(
        self, at: Mapping[str, Tensor], *, batches: int | None = None, split: Split = "train"
    ) -> float:
        """See :meth:`medfed.federation.client.Client.loss_at`."""
        # One key for all calls of a phase, so that their losses use the same batches.
        key = self._where()
        return self._counted(partial(self.trainer.mean_loss, self.data, at, key, batches, split))

    def features(
        self, at: Mapping[str, Tensor], split: Split = "train", limit: int | None = None
    ) -> Features:
        """See :meth:`medfed.federation.client.Client.features`."""
        return self._counted(partial(self.trainer.features, self.data, at, split, limit))

    def with_buffers(self, model: Tensors, buffers: Tensors) -> Tensors:
        """See :meth:`medfed.federation.client.Client.with_buffers`."""
        return self.trainer.model.with_buffers(model, buffers)

    def _counted(self, work: Callable[[], _T], again: bool = True) -> _T:
        """Returns what the shared trainer does, and counts its passes as this client's.

        `again`: whether it may begin anew where the device's memory is full.
        """

        def counted() -> tuple[Passes, _T]:
            return self.trainer.gradients.passes, work()

        try:
            (back, on), done = self.trainer.residents.making_room(counted, again)
        except ValueError as error:
            if (sentence := of_one_sample(error)) is None:
                raise
            raise ConfigError(f"Client {self.id} {sentence}.") from error
        now, mine = self.trainer.gradients.passes, self.passes
        self.passes = Passes(mine.gradient + now.gradient - back, mine.forward + now.forward - on)
        return done

    @property
    def _as_papers(self) -> bool:
        return self.trainer.budget.budget == "paper"

    @property
    def fresh_optimizer(self) -> bool:
        """Whether optimizers lose their state from call to call."""
        return self.trainer.budget.optimizer_state == "fresh"

    def _key(self) -> tuple[str | int, ...]:
        self._calls += 1
        return (*self._where(), self._calls)

    def _where(self) -> tuple[str | int, ...]:
        return (self._round, self.id, self._phase, self.phase_index)

    @property
    def _states(self) -> Groups:
        return {"state": self.state, "optimizers": self._optimizers, "memory": self.memory}

    def state_dict(self) -> dict[str, Any]:
        """Returns the client's state in main memory, loadable with ``weights_only=True``.

        What stays on a device is copied, once until it changes.
        """
        return states_on(self._states, _MAIN, self._twins)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the state from :meth:`state_dict`, in main memory, where it waits."""
        self._put({group: saved[group] for group in self._states}, _MAIN)
        self.trainer.residents.states.pop(self, None)
        self._twins.clear()

    def bytes_between_rounds(self, models: int) -> int:
        """The approximate size of its state, with as many models in memories of the channel.

        The estimate for an optimizer is two numbers per parameter, as Adam keeps them.
        """
        state = (tensor for named in self.state.values() for tensor in named.values())
        copies = models if self.fresh_optimizer else models + 2
        return bytes_of(state) + copies * bytes_of(self.weights.values())

    def offload(self, folder: Path | None = None) -> None:
        """Moves the client's state to main memory, or to disk until it is read."""
        saved = self.state_dict()
        self.load_state_dict(on_disk(saved, folder) if folder else saved)

    @contextmanager
    def loaded(self) -> Iterator[Self]:
        """Has the client's state on the network's device in its body.

        A state that has changed there, or was there before, may stay.
        """
        device, residents = self.trainer.model.device, self.trainer.residents
        stays = residents.states.pop(self, None) is not None
        may = self.trainer.budget.resident_states and on_gpu(device)
        if device == _MAIN and not (stays or may):
            yield self
            return
        residents.making_room(lambda: self._put(self._states, device))
        try:
            yield self
        finally:
            tensors = distinct(self._states.values())
            self._twins = {n: self._twins[n] for n in tensors if n in self._twins}
            if may and (stays or len(self._twins) < len(tensors)):
                residents.keep(self, bytes_of(tensors.values()))
            else:
                self.offload()

    def _put(self, states: Groups, device: torch.device) -> None:
        for named in (named for state in states.values() for named in state.values()):
            if OTHER in named:  # is read in main memory
                self._twins[id(named[OTHER])] = named[OTHER], named[OTHER]
        moved = states_on(states, device, self._twins)
        self.state, self._optimizers, self.memory = moved.values()
