"""How much and how fast a client trains in one round: steps, step sizes, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfed.errors import ConfigError
from medfed.federation.tensors import Tensors

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class LocalBudget:
    """How much a client trains in one round, whatever the algorithm does with it.

    Attributes:
        steps: Gradient steps per round; ``None`` where ``epochs`` counts.
        epochs: Passes over the client's training data per round, where ``steps`` is ``None``.
        clip: Largest gradient norm; ``None`` for no clipping.
        optimizer_state: ``fresh`` for each call of ``train``, or ``kept`` by the client.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> LocalBudget(epochs=2).of(num_samples=33, batch_size=16)
        6
    """

    steps: int | None = None
    epochs: int = 1
    clip: float | None = None
    optimizer_state: Literal["fresh", "kept"] = "fresh"

    def __post_init__(self) -> None:
        if (self.steps is not None and self.steps < 1) or self.epochs < 1:
            raise ConfigError("local.steps and local.epochs must be at least 1.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"local.clip must be positive or null, not {self.clip}.")
        if self.optimizer_state not in ("fresh", "kept"):
            raise ConfigError(
                f"local.optimizer_state must be fresh or kept, not {self.optimizer_state!r}."
            )

    def of(self, num_samples: int, batch_size: int) -> int:
        """Returns the gradient steps of one round for a client of that size."""
        return self.steps or self.epochs * math.ceil(num_samples / batch_size)


def learning_rates(
    optimizer: OptimizerFactory, scheduler: SchedulerFactory | None, rounds: int
) -> list[float]:
    """Returns the step size of each round: the schedule advances by one per round.

    Args:
        optimizer: Makes an optimizer of a list of parameters.
        scheduler: Makes a schedule of an optimizer; ``None`` for a constant step size.
        rounds: Number of rounds.

    Example:
        >>> from functools import partial
        >>> sgd = partial(torch.optim.SGD, lr=0.5)
        >>> learning_rates(sgd, partial(torch.optim.lr_scheduler.StepLR, step_size=1), 2)
        [0.5, 0.05]
    """
    dummy = optimizer([nn.Parameter(torch.zeros(1))])
    schedule = scheduler(dummy) if scheduler else None
    rates = []
    for _ in range(rounds):
        rates.append(float(dummy.param_groups[0]["lr"]))
        dummy.step()
        if schedule:
            schedule.step()
    return rates


def save_optimizer(optimizer: torch.optim.Optimizer) -> Tensors:
    """Returns an optimizer's state as flat tensors named ``index/field``."""
    kept: dict[Any, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{index}/{field}": value.detach().clone()
        for index, fields in kept.items()
        for field, value in fields.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Puts back what :func:`save_optimizer` returned."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in saved.items():
        index, field = name.split("/", 1)
        optimizer.state[parameters[int(index)]][field] = value.clone()
