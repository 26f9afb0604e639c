"""The client whose data and training are in this process: one network serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor

from medfed.common.tensors import State, Tensors, map_state
from medfed.federation.budget import Passes, reach
from medfed.federation.client import ClientData, How, share_of
from medfed.federation.shelf import on_disk
from medfed.federation.split import ParameterSplit, Update
from medfed.federation.training import LocalTrainer


class LocalClient:
    """Implements :class:`medfed.federation.client.Client` on a shared :class:`LocalTrainer`.

    Args:
        data: The client's data.
        trainer: The training loop, one for all clients of this process.
        weights: The initial model, the same object for all clients.
        state: The algorithm's initial state of a client.

    Attributes:
        memory: What this end of the channel remembers, by direction; empty without lossy codecs.
        steps_done: Gradient steps so far.
        passes: Passes of batches through the network so far, those of the steps among them.
    """

    def __init__(
        self, data: ClientData, trainer: LocalTrainer, weights: Tensors, state: State
    ) -> None:
        self.id = data.id
        self.data = data
        self.trainer = trainer
        self.weights = weights
        self.state: State = dict(state)
        self.memory: State = {"up": {}, "down": {}}
        self.loss: float | None = None
        self.steps_done = 0
        self.passes = Passes()
        self._optimizers: State = {}
        self.phase_index = 0
        self._round, self._phase, self._calls = 0, "", 0

    @property
    def split(self) -> ParameterSplit:
        """The shared and the personal names."""
        return self.trainer.split

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return self.data.num_samples

    @property
    def steps(self) -> int:
        """The budget of local gradient steps of one round."""
        return self.trainer.budget.of(self.data.num_samples, self.data.batch_size)

    @property
    def expected_work(self) -> float:
        """What a round costs as far as it is known beforehand: its samples, passes counted."""
        batch = min(self.data.batch_size, self.num_samples) * self.trainer.budget.accumulate
        return float(self.steps * max(1, batch))

    @property
    def learning_rate(self) -> float:
        """The optimizer's step size in this round."""
        return self.trainer.rates[min(self._round, len(self.trainer.rates) - 1)]

    def reach(self, steps: int, along: Callable[[], Tensor] | None = None) -> float:
        """See :meth:`medfed.federation.client.Client.reach`."""
        return reach(self.trainer.make_optimizer, self.learning_rate, steps, self._fresh, along)

    def begin(self, round: int, phase: str, index: int) -> None:
        """Says what the next calls belong to; their randomness is drawn from it."""
        self._round, self._phase, self.phase_index, self._calls = round, phase, index, 0

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
        self, start: Mapping[str, Tensor], *, steps: int | None = None, **how: Unpack[How]
    ) -> Tensors:
        """See :meth:`medfed.federation.client.Client.train`."""
        key, slot = self._key(), f"{self._phase}/{self._calls}"
        steps = self.steps if steps is None else steps
        memory = None if self._fresh else dict(self._optimizers.get(slot, {}))
        rate = self.learning_rate
        with self._counted():
            end, self.loss = self.trainer.run(self.data, start, key, rate, steps, memory, **how)
        if memory is not None:
            self._optimizers[slot] = memory
        self.steps_done += steps
        return end

    def gradient(
        self,
        at: Mapping[str, Tensor],
        *,
        update: Update = "all",
        batches: int | None = None,
        same: bool = False,
    ) -> Tensors:
        """See :meth:`medfed.federation.client.Client.gradient`."""
        key = self._where() if same else self._key()
        with self._counted():
            return self.trainer.gradient(self.data, at, key, update, batches)

    def loss_at(
        self,
        at: Mapping[str, Tensor],
        *,
        batches: int | None = None,
        split: Literal["train", "val"] = "train",
    ) -> float:
        """See :meth:`medfed.federation.client.Client.loss_at`."""
        # One key for all calls of a phase, so that their losses are of the same batches.
        with self._counted():
            return self.trainer.mean_loss(self.data, at, self._where(), batches, split)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts what the trainer, which all clients share, does meanwhile as this client's."""
        before = self.trainer.passes
        yield
        new = (done - old for done, old in zip(self.trainer.passes, before, strict=True))
        self.passes = Passes(*map(sum, zip(self.passes, new, strict=True)))

    @property
    def _as_papers(self) -> bool:
        return self.trainer.budget.budget == "paper"

    @property
    def _fresh(self) -> bool:
        return self.trainer.budget.optimizer_state == "fresh"

    @property
    def keeps_optimizer(self) -> bool:
        """Whether optimizers go on from round to round."""
        return not self._fresh

    def _key(self) -> tuple[str | int, ...]:
        self._calls += 1
        return (*self._where(), self._calls)

    def _where(self) -> tuple[str | int, ...]:
        return (self._round, self.id, self._phase, self.phase_index)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the client itself keeps, loadable with ``weights_only=True``."""
        return {"state": self.state, "optimizers": self._optimizers, "memory": self.memory}

    def put_down(self, folder: Path) -> None:
        """Has what the client keeps lie on disk until somebody reads it.

        Args:
            folder: See :func:`medfed.federation.shelf.on_disk`.
        """
        kept = on_disk(self.state_dict(), folder)
        self.state, self._optimizers, self.memory = kept.values()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Puts back what :meth:`state_dict` returned, where it belongs between turns."""
        self._keep(saved, self.home)

    @property
    def home(self) -> torch.device:
        """Where what the client keeps is while others are at work."""
        return torch.device("cpu") if self.trainer.budget.offload else self.trainer.device

    @contextmanager
    def present(self) -> Iterator[Self]:
        """Has what the client keeps where its network is, while it is at work."""
        self._move(self.trainer.device)
        try:
            yield self
        finally:
            self._move(self.home)

    def _move(self, device: torch.device) -> None:
        if self.trainer.budget.offload:
            self._keep(self.state_dict(), device)

    def _keep(self, saved: Mapping[str, Any], device: torch.device) -> None:
        self.state, self._optimizers, self.memory = (
            map_state(saved[group], lambda t: t.to(device))
            for group in ("state", "optimizers", "memory")
        )
