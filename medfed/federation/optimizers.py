"""Optimizers: how they are made, how far and how fast they step, and what they remember.

Plain SGD over small tensors steps here, without what PyTorch does around it. PyTorch's own step
records itself for profilers, groups tensors by device and checks its options, which takes longer
than the step of a small network. The arithmetic here is the same, bit for bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors, ordinary
from medfed.standalone.errors import ConfigError

# Makes an optimizer of parameters, or groups of them; one that needs two arguments also gets the
# network.
OptimizerFactory = Callable[..., torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
# Optimizers whose steps over many tensors together equal those one by one, bit for bit.
_EITHER_WAY = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax),
)
_LARGEST_RATE = 1e30  # 32 bits hold no larger steps
_SMALL, _SPARSE = 2**16, attrgetter("is_sparse")
_OTHER_RULES = ("weight_decay", "dampening", "nesterov", "maximize", "differentiable", "fused")


def faster(
    kind: type[torch.optim.Optimizer], device: str, size: float
) -> Literal["foreach", "fused"] | None:
    """Returns the option of an optimizer that makes its steps faster on a kind of device.

    On a CPU, steps over all tensors together need less Python, but large ones would fall out of the
    cache. On a GPU, one kernel takes the whole step. `size`: elements of a tensor in the mean.

    Example:
        >>> faster(torch.optim.SGD, "cpu", 100), faster(torch.optim.AdamW, "cuda", 1e6)
        ('foreach', 'fused')
        >>> faster(torch.optim.SGD, "cpu", 1e6), faster(torch.optim.Rprop, "cuda", 100)
        (None, None)
    """
    if device == "cpu":
        return "foreach" if kind in _EITHER_WAY and size < _SMALL else None
    return "fused" if kind in _EITHER_WAY[:3] and device == "cuda" else None


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Returns the optimizer's step, or its equal for plain SGD with ``foreach``.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> weight.grad = torch.tensor([2.0])
        >>> step_of(torch.optim.SGD([weight], lr=0.25, foreach=True))()
        >>> weight.tolist()
        [0.5]
    """
    plain = type(optimizer) is torch.optim.SGD and all(
        group["foreach"] and not any(group[rule] for rule in _OTHER_RULES)
        for group in optimizer.param_groups
    )
    return partial(_plain_step, optimizer) if plain else optimizer.step


def _plain_step(optimizer: torch.optim.Optimizer) -> None:
    ready: list[tuple[float, float, list[Tensor], list[Tensor], list[Any]]] = []
    for group in optimizer.param_groups:
        moving = [p for p in group["params"] if p.grad is not None]
        along: list[Tensor] = [p.grad for p in moving]
        buffers = list[Any]()
        if momentum := group["momentum"]:
            buffers = [optimizer.state[p].get("momentum_buffer") for p in moving]
        if any(map(_SPARSE, along)) or any(b is None for b in buffers):
            optimizer.step()  # of all groups; it begins the momentum, too
            return
        if moving:
            ready.append((group["lr"], momentum, moving, along, buffers))
    with torch.no_grad():
        for rate, momentum, moving, along, buffers in ready:
            if momentum:
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, along)
            torch._foreach_add_(moving, buffers or along, alpha=-rate)


def takes_network(factory: OptimizerFactory) -> bool:
    """Returns whether a factory of optimizers needs the network, as a second argument.

    Example:
        >>> takes_network(torch.optim.SGD), takes_network(lambda params, network: None)
        (False, True)
    """
    try:
        arguments = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(a.kind in places and a.default is a.empty for a in arguments) == 2


def of_kind(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    """Returns a factory of such optimizers with its default values, for any parameters.

    Example:
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> of_kind(sgd)([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
        0.5
    """
    known = inspect.signature(type(optimizer)).parameters
    return partial(type(optimizer), **{n: v for n, v in optimizer.defaults.items() if n in known})


def learning_rates(
    optimizer: OptimizerFactory, scheduler: SchedulerFactory | None, rounds: int
) -> list[float]:
    """Returns the step size of each round: the schedule advances by one per round.

    `scheduler`: makes a schedule of an optimizer; ``None`` for a constant step size.

    Example:
        >>> from functools import partial
        >>> sgd = partial(torch.optim.SGD, lr=0.5)
        >>> learning_rates(sgd, partial(torch.optim.lr_scheduler.StepLR, step_size=1), 2)
        [0.5, 0.05]
    """
    # Of two dimensions, as some optimizers are for matrices alone.
    tried, dummy = (optimizer([nn.Parameter(torch.zeros(1, 1))]) for _ in range(2))
    options = dummy.param_groups[0]
    for parameter in tried.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    tried.step()  # which fails for optimizers that need a closure or sparse gradients
    if "lr" not in options:
        raise ConfigError(
            f"{type(dummy).__name__} has no step size lr, which the run sets in every round"
        )
    options["lr"] = dummy.defaults.get("lr", options["lr"])  # a group may have a rate of its own
    schedule = scheduler(dummy) if scheduler else None
    usual = {n: v for n, v in options.items() if n in dummy.defaults and n != "lr"}
    rates = []
    for _ in range(rounds):
        rates.append(float(dummy.param_groups[0]["lr"]))
        dummy.step()
        if schedule:
            schedule.step()
        if changed := [n for n, v in usual.items() if options[n] != v]:
            raise ConfigError(
                f"{type(schedule or dummy).__name__} changes {changed[0]}, but a schedule may "
                "only change the step size; switch that off"
            )
    if not all(abs(rate) < _LARGEST_RATE for rate in rates):
        raise ConfigError(f"a learning rate must be a number below {_LARGEST_RATE:g}")
    return rates


STEADY = 1000  # steps after which momentum no longer grows


def effective_step_length(
    optimizer: OptimizerFactory,
    rate: float,
    steps: int,
    fresh: bool = True,
    along: Callable[[], Tensor] | None = None,
) -> float:
    """Returns how far this many steps go along a constant unit gradient.

    A displacement divided by this number is a mean of the gradients on the way. Plain SGD goes
    ``steps * rate``, with momentum it goes farther. Weight decay counts as a part of the gradient.
    `along`: gives a gradient for optimizers that need one: for steps not proportional to the
    gradient, the way along it if it were constant, per unit of its length; with momentum from
    earlier rounds, the limit of the way.

    Example:
        >>> from functools import partial
        >>> sgd = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
        >>> round(effective_step_length(sgd, rate=0.1, steps=2), 9)
        0.25
        >>> adam = partial(torch.optim.Adam)
        >>> gradient = torch.tensor([4.0])
        >>> round(effective_step_length(adam, rate=0.1, steps=2, along=lambda: gradient), 6)
        0.05
    """
    one, remembers = _along_ones(optimizer, rate, steps)
    two, _ = _along_ones(optimizer, rate, steps, size=2.0)
    if not math.isclose(two, 2 * one, rel_tol=1e-9):
        if along is None:
            raise ConfigError(
                "The algorithm reads gradients off displacements, which needs steps in proportion "
                "to the gradient; choose optimizer=sgd."
            )
        gradient = along().double()
        if not (square := float(gradient @ gradient)):
            return steps * rate
        return float(_walk(optimizer, rate, gradient, steps)[0] @ gradient) / square
    if not fresh and remembers:
        if along is None:
            raise ConfigError(
                "The algorithm reads gradients off displacements, which momentum of earlier rounds "
                "would blur; choose local.optimizer_state=fresh."
            )
        far, near = (_along_ones(optimizer, rate, STEADY + n)[0] for n in (steps, 0))
        return far - near
    return one


# All clients of a round need the same value, and settling a momentum takes 1,000 steps.
@lru_cache(maxsize=256)
def _along_ones(
    optimizer: OptimizerFactory, rate: float, steps: int, size: float = 1.0
) -> tuple[float, bool]:
    """The way along a constant gradient, and whether the optimizer keeps state."""
    end, memory = _walk(optimizer, rate, torch.full((1,), size, dtype=torch.float64), steps)
    return float(end), bool(memory)


def _walk(
    optimizer: OptimizerFactory, rate: float, gradient: Tensor, steps: int
) -> tuple[Tensor, Tensors]:
    """Steps along a constant gradient; returns the way, turned, and the optimizer's state."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    walking = optimizer([parameter])
    for options in walking.param_groups:
        options |= {"lr": rate, "weight_decay": 0.0}
    for _ in range(steps):
        parameter.grad = gradient
        walking.step()
    return -parameter.detach(), save_optimizer(walking)


def save_optimizer(optimizer: torch.optim.Optimizer) -> Tensors:
    """Returns an optimizer's state as flat tensors named ``index/field``, numbers with a #."""
    state: dict[Any, dict[str, Any]] = optimizer.state_dict()["state"]
    saved = {}
    for index, fields in state.items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                saved[f"{index}/{field}"] = ordinary(value)
            elif isinstance(value, int | float):
                exact = torch.int64 if isinstance(value, int) else torch.float64
                saved[f"{index}/{field}#"] = torch.tensor(value, dtype=exact)
    return saved


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Restores the state from :func:`save_optimizer`; any other state is dropped."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for name, value in saved.items():
        index, field = name.split("/", 1)
        parameter, field, number = parameters[int(index)], field.removesuffix("#"), "#" in field
        if number:
            put: Any = value.item()
        elif value.shape == parameter.shape:
            put = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in its layout
        else:
            put = value.clone()
        optimizer.state[parameter][field] = put


def remembers_elsewhere(optimizer: OptimizerFactory) -> bool:
    """Returns whether an optimizer keeps more than its saved state between steps.

    Example:
        >>> remembers_elsewhere(torch.optim.Adam)
        False
    """

    def walk(broken: bool) -> Tensor:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
        walking = optimizer([parameter])
        for number in range(6):
            if broken and number == 3:
                saved, walking = save_optimizer(walking), optimizer([parameter])
                restore_optimizer(walking, saved)
            parameter.grad = parameter.detach() * torch.tensor([1.0, -2.0, 0.5 * number])
            walking.step()
        return parameter.detach()

    return not torch.equal(walk(False), walk(True))
