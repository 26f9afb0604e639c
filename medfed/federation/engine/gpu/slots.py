"""Experimental: several clients train in parallel on a GPU, in slots that take turns.

It has only run on CPUs, where it gains nothing.

A small network's step leaves most of a GPU idle, however fast it is launched. Each slot has its
weights, captured graphs and stream. A thread launches its client's steps; only one thread runs at a
time and passes control to the next slot after each step. So the GPU works for all slots in
parallel, while Python code and shared objects serve one client at a time. Each slot carries the
state of the default random generators, so every client gets the same random numbers as by itself,
and results are equal bit for bit with any number of slots.

Only steps run on a slot's stream. A method's other work, such as decoding, mixing and encoding,
runs on the default stream, so that tensors shared by clients need no further care.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from medfed.common.errors import first_line
from medfed.common.streams import has_global_stream, stand_in
from medfed.federation.engine.loop import LocalTrainer, Turns

_log = logging.getLogger(__name__)


class Backend:
    """What slots need of a device; of the CPU: nothing, as it is done when it returns."""

    def stream(self) -> Any:
        """Returns a stream of its own."""
        return None

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Launches on a stream, which waits for the usual one before, and the usual one after."""
        yield

    def is_done(self, stream: Any) -> bool:
        """Returns whether all that was launched on a stream is done."""
        return True

    def random(self) -> list[torch.Tensor]:
        """Returns the states of the default generators."""
        return [torch.default_generator.get_state()]

    def set_random(self, states: Sequence[torch.Tensor]) -> None:
        """Puts back what `random` returned."""
        torch.default_generator.set_state(states[0])


class Cuda(Backend):
    """A GPU.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> torch.cuda.Stream:
        """Returns a stream of its own."""
        return torch.cuda.Stream(self.device)

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Launches on a stream, which waits for the usual one before, and the usual one after."""
        usual = torch.cuda.current_stream(self.device)
        stream.wait_stream(usual)
        # The current device and stream are those of a thread.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield
        usual.wait_stream(stream)

    def is_done(self, stream: torch.cuda.Stream) -> bool:
        """Returns whether all that was launched on a stream is done."""
        return stream.query()

    def random(self) -> list[torch.Tensor]:
        """Returns the states of the default generators; that of a GPU is kept by the CPU."""
        return [*super().random(), torch.cuda.get_rng_state(self.device)]

    def set_random(self, states: Sequence[torch.Tensor]) -> None:
        """Puts back what `random` returned."""
        super().set_random(states)
        torch.cuda.set_rng_state(states[1], self.device)


class Stopped(BaseException):
    """Ends a slot whose turn never comes again."""


class Slot(Turns):
    """A trainer with a network of its own, whose steps run on a stream of its own.

    Args:
        turns: Whose turn it is.
        number: Which slot this is.
        trainer: The trainer.
    """

    def __init__(self, turns: Slots, number: int, trainer: LocalTrainer) -> None:
        self.trainer = trainer
        self.turn = threading.Semaphore(0)
        self._turns, self._number = turns, number
        self._stream: Any = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Takes steps on the slot's stream."""
        backend = self._turns.backend
        self._stream = backend.stream() if self._stream is None else self._stream
        with backend.on(self._stream):
            yield

    def pause(self) -> None:
        """Hands on to the next slot, and waits until it is this one's turn again."""
        self._turns.hand_on(self._number)

    def finish(self) -> None:
        """Hands on until the steps of this slot are done."""
        while self._turns.several and not self._turns.backend.is_done(self._stream):
            self.pause()


class Slots:
    """Runs jobs in several slots at once.

    Args:
        trainers: One for each slot.
        backend: Of the device.
    """

    def __init__(self, trainers: Sequence[LocalTrainer], backend: Backend | None = None) -> None:
        self.trainers = list(trainers)
        self.backend = backend or Backend()
        self._slots = [Slot(self, n, trainer) for n, trainer in enumerate(trainers)]
        self._ring: deque[int] = deque()
        self._random: list[list[torch.Tensor]] = []
        self._stopped = False

    @property
    def several(self) -> bool:
        """Whether more than one slot still has work."""
        return len(self._ring) > 1

    def move(self, device: torch.device) -> None:
        """Moves all networks to a device."""
        shared = None
        for trainer in self.trainers:
            trainer.network.to(device)
            if isinstance(trainer, LocalTrainer):
                trainer.model.entries  # noqa: B018  # looked up: the trainer notices where it is
                if trainer.gpu is not None:  # room for samples is the GPU's, not a slot's
                    shared = trainer.gpu.samples = shared or trainer.gpu.samples
        if device.type == "cuda":
            self.backend = Cuda(device)

    def run(self, jobs: Sequence[Callable[[LocalTrainer], None]]) -> None:
        """Runs each job in whichever slot is free first.

        After a job has failed none begins, and the error of the first in order is raised.

        Args:
            jobs: What is done by a trainer.
        """
        count = min(len(self._slots), len(jobs))
        if not count:
            return
        errors: dict[int, BaseException] = {}
        waiting = iter(list(enumerate(jobs)))
        done = threading.Event()

        global_stream = has_global_stream()

        def work(number: int) -> None:
            stand_in(global_stream)
            slot = self._slots[number]
            slot.turn.acquire()
            try:
                self._enter(number)
                for job, do in waiting:
                    try:
                        do(self.trainers[number])
                    except Exception as error:
                        errors[job] = error
                    if errors:
                        break
            except Stopped:
                pass
            self._ring.remove(number)
            if self._ring:
                self._slots[self._ring[0]].turn.release()
            else:
                done.set()

        begun = self.backend.random()
        self._ring, self._stopped = deque(range(count)), False
        self._random = [begun for _ in range(count)]
        usual: list[Turns] = []
        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
        for slot, thread in zip(self._slots, threads, strict=False):
            usual.append(slot.trainer.turns)
            slot.trainer.turns = slot
            thread.start()
        self._slots[0].turn.release()
        try:
            while not done.wait(0.2):  # this thread hears of signals, also of those to others
                pass
        finally:
            self._stopped = True
            for slot, thread, turns in zip(self._slots, threads, usual, strict=False):
                thread.join()
                slot.trainer.turns = turns
            self.backend.set_random(begun)
        if errors:
            raise errors[min(errors)]

    def hand_on(self, number: int) -> None:
        """Hands on from a slot to the next one; returns when it is its turn again."""
        if self._stopped:
            raise Stopped
        self._ring.rotate(-1)
        following = self._ring[0]
        if following == number:
            return
        self._random[number] = self.backend.random()
        self._slots[following].turn.release()
        self._slots[number].turn.acquire()
        self._enter(number)

    def _enter(self, number: int) -> None:
        if self._stopped:
            raise Stopped
        self.backend.set_random(self._random[number])


def slots_of(local: LocalTrainer, count: int) -> Slots | None:
    """Returns slots, of which the first has a trainer itself and the others copies of it.

    Where it cannot be copied there is one slot, and a line says why.

    Args:
        local: The trainer, before it has trained.
        count: How many.

    Returns:
        ``None`` for one slot.
    """
    if count == 1:
        return None
    _log.warning("local.slots=%d is experimental: it has not run on a GPU yet.", count)
    try:
        return Slots([local, *(twin(local) for _ in range(count - 1))])
    except Exception as error:
        reason = first_line(error)
        _log.warning(
            "local.slots=%d is not used: the network cannot be copied (%s).", count, reason
        )
        return None


def twin(local: LocalTrainer) -> LocalTrainer:
    """Returns a trainer like another one, with a network, loss and measure of its own.

    Args:
        local: The trainer, before it has trained.

    Raises:
        TypeError: If one of them is a function that keeps the network to itself.
    """
    parts = (local.network, local.gradients.loss, local.measure)
    network, loss, measure = copy.deepcopy(parts)  # together, so that the loss is of the copy
    # A function is copied as itself: it would go on with the network of the other slot.
    if loss is local.gradients.loss or (measure is not None and measure is local.measure):
        raise TypeError("its loss is a function that keeps the network to itself")
    return local.twin(network, loss, measure)
