"""How much and how fast a client trains in one round: steps, step sizes, optimizer state.

Channels last: the layout of convolution weights in which a CPU's kernels are fastest.

Only the live network has this layout. States, messages, checkpoints and bundles hold tensors in
ordinary layout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from medfed.common.tensors import Tensors
from medfed.standalone.checks import check_fields, check_positive, within
from medfed.standalone.errors import ConfigError

ChannelsLast = bool | Literal["auto"]
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEWEST = 5


def channels_last_pays(network: nn.Module) -> bool:
    """Returns whether channels last probably speeds up a network on a CPU.

    This needs five or more 2-D or 3-D convolutions: in networks of two or three, it gains or loses
    a tenth, depending on the size of the images. And it needs that no layer is an instance
    normalisation, which restores ordinary layout at a higher cost than the convolutions save.

    Example:
        >>> deep = [nn.Conv2d(1, 1, 3) for _ in range(5)]
        >>> channels_last_pays(nn.Sequential(*deep)), channels_last_pays(nn.Conv2d(1, 2, 3))
        (True, False)
        >>> channels_last_pays(nn.Sequential(*deep, nn.InstanceNorm2d(1)))
        False
    """
    modules = list(network.modules())
    return sum(_kernels(m) is not None for m in modules) >= _FEWEST and not any(
        isinstance(m, _InstanceNorm) for m in modules
    )


def lay_out(network: nn.Module, wanted: ChannelsLast) -> None:
    """Sets the layout of the kernels of all 2-D and 3-D convolutions, in place.

    The outputs of a convolution follow its kernels, and the layers behind it follow its outputs.
    `network`: the live network; its parameters remain the same objects.

    Example:
        >>> layer = nn.Conv2d(2, 2, 3)
        >>> lay_out(layer, True)
        >>> layer.weight.stride(), layer(torch.ones(1, 2, 3, 3)).is_contiguous()
        ((18, 1, 6, 2), True)
    """
    if wanted == "auto":
        on_cpu = all(p.device.type == "cpu" for p in network.parameters())
        wanted = on_cpu and channels_last_pays(network)
    for module in network.modules():
        if (kernels := _kernels(module)) is not None:
            form = _FORMATS[kernels.ndim] if wanted else torch.contiguous_format
            # Not `contiguous`, which skips kernels of one channel: they have both layouts, but
            # their strides decide the layout of the outputs.
            kernels.data = kernels.data.clone(memory_format=form)


def ordinary(tensor: Tensor) -> Tensor:
    """Returns a detached copy in ordinary layout.

    Example:
        >>> last = torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
        >>> ordinary(last).stride()
        (18, 9, 3, 1)
    """
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _kernels(module: nn.Module) -> Tensor | None:
    if not isinstance(module, _ConvNd):
        return None
    kernels = module._parameters.get("weight")  # adapters compute it from others
    return kernels if kernels is not None and kernels.ndim in _FORMATS else None


# Makes an optimizer of parameters, or groups of them; one that needs two arguments also gets the
# network.
OptimizerFactory = Callable[..., torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Passes(NamedTuple):
    """Passes of batches through the network: the cost of training.

    A gradient step takes one gradient; a method may use more, or losses without gradients.
    """

    gradient: int = 0  # forward and backward
    forward: int = 0  # forward only


MANY = within("[1, 1000000000]")  # steps, epochs or batches; with more, no round would end.


@dataclass(frozen=True)
class LocalBudget:
    """How much a client trains in one round, for every algorithm.

    Example:
        >>> LocalBudget(epochs=2).of(num_samples=33, batch_size=16)
        6
        >>> LocalBudget(epochs=2, accumulate=2).of(num_samples=33, batch_size=16)
        4
    """

    steps: Annotated[int | None, MANY] = None  # gradient steps per round; ``None`` uses ``epochs``
    # Passes over the client's training data per round, if ``steps`` is ``None``.
    epochs: Annotated[int, MANY] = 1
    # Batches per step, whose gradients are averaged by their samples. For a loss that is a mean
    # over samples this equals one larger batch. Each is a separate gradient pass, and layers that
    # normalise batches process each by itself.
    accumulate: Annotated[int, MANY] = 1
    # Largest norm of a step's gradient, penalties included; ``None`` for no clipping.
    clip: Annotated[float | None, check_positive] = None
    # ``fresh`` for each call of ``train``, ``kept`` by the client, or ``averaged`` by the server
    # (:mod:`medfed.federation.moments`).
    optimizer_state: Literal["fresh", "kept", "averaged"] = "fresh"
    # ``equal``: a method that trains several models or parts in a round divides the steps among
    # them; ``paper``: each gets all steps, as papers count.
    budget: Literal["equal", "paper"] = "equal"
    # Whether convolutions compute in channels-last layout, which changes results by rounding;
    # ``auto``: on a CPU if it is probably faster.
    channels_last: ChannelsLast = False
    # Whether ``torch.compile`` compiles the loss for batches of full size, which changes results by
    # rounding and takes minutes before the first step.
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "accumulate"):
            if not isinstance(value := getattr(self, name), Integral | None):
                raise ConfigError(f"local.{name} must be a whole number, not {value!r}.")
        check_fields("local", self)

    def of(self, num_samples: int, batch_size: int) -> int:
        """Returns the gradient steps of one round for a client of this size."""
        return self.of_batches(math.ceil(num_samples / batch_size))

    def of_batches(self, batches: int) -> int:
        """Returns the gradient steps of one round for a client whose epoch has these batches."""
        return self.steps or self.epochs * math.ceil(batches / self.accumulate)


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
    tried, dummy = (optimizer([nn.Parameter(torch.zeros(1))]) for _ in range(2))
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
    kept = {n: v for n, v in options.items() if n in dummy.defaults and n != "lr"}
    rates = []
    for _ in range(rounds):
        rates.append(float(dummy.param_groups[0]["lr"]))
        dummy.step()
        if schedule:
            schedule.step()
        if changed := [n for n, v in kept.items() if options[n] != v]:
            raise ConfigError(
                f"{type(schedule or dummy).__name__} changes {changed[0]}, but a schedule may "
                "only change the step size; switch that off"
            )
    return rates


SETTLED = 1000  # steps after which momentum no longer grows


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
        far, near = (_along_ones(optimizer, rate, SETTLED + n)[0] for n in (steps, 0))
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
    kept: dict[Any, dict[str, Any]] = optimizer.state_dict()["state"]
    saved = {}
    for index, fields in kept.items():
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
