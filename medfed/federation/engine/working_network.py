"""The network of a process: it serves all clients in turn and holds the weights loaded last.

Its entries, the entries that a kind of training changes, and their optimizer are determined once,
so a client's turn costs only the copies. Only this network may have its kernels in channels-last
layout: states, messages, checkpoints and bundles hold tensors in ordinary layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from medfed.common.tensors import Tensors, forget, ordinary, overwrite, select
from medfed.federation import optimizers
from medfed.federation import split as splitting
from medfed.federation.budget import ChannelsLast
from medfed.federation.other_state import NOTHING, OTHER, OtherState

Rates = Mapping[Literal["shared", "personal"], float]
# The layout of convolution weights in which a CPU's kernels are fastest.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_FEWEST = 5  # convolutions of a network which that layout speeds up


@dataclass
class TrainableSet:
    """The tensors that one kind of training trains, fixes and changes."""

    trained: Tensors  # the network's parameters that it trains
    fixed: list[Tensor]  # all its other entries that are parameters
    changing: list[str]  # names of the entries that it changes
    optimizer: torch.optim.Optimizer  # in groups of shared and of personal parameters
    graphed: Any = None  # its steps as CUDA graphs; None without

    def __post_init__(self) -> None:
        self.parameters = list(self.trained.values())
        devices = {t.device.type for t in self.parameters}
        size = sum(map(Tensor.numel, self.parameters)) / max(1, len(self.parameters))
        way = optimizers.faster(type(self.optimizer), "+".join(devices), size)
        for options in self.optimizer.param_groups:
            chosen = options.get("foreach") is not None or options.get("fused") is not None
            if way is not None and not chosen and not options.get("differentiable"):
                options[way] = True
        self.step = optimizers.step_of(self.optimizer)

    @contextmanager
    def training(
        self, rate: float, rates: Rates | None = None, memory: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Puts gradients, step sizes and optimizer state in place for one client's training."""
        for group, needed in ((self.parameters, True), (self.fixed, False)):
            for parameter in group:
                # Checking is cheaper than setting, and mostly there is nothing to set.
                if parameter.requires_grad is not needed:
                    parameter.requires_grad_(needed)
        forget([*self.fixed, *self.parameters])
        for options in self.optimizer.param_groups:
            usual = rates[options["name"]] if rates else rate
            options["lr"] = options[splitting.OWN_RATE] * usual
        optimizers.restore_optimizer(self.optimizer, memory or {})
        try:
            yield
        finally:
            # Those of a large model would wait for the next turn.
            forget(self.parameters)
            self.optimizer.state.clear()
            # A parameter that is left without gradients is one that its owner has frozen.
            for parameter in self.fixed:
                parameter.requires_grad_(True)


class WorkingNetwork:
    """A network whose weights the training client overwrites."""

    def __init__(
        self,
        network: nn.Module,
        split: splitting.ParameterSplit,
        optimizer: optimizers.OptimizerFactory,
        channels_last: ChannelsLast = False,
    ) -> None:
        if not split.parameters("all"):
            raise splitting.nothing_to_train("all")
        self.network, self.split, self.make_optimizer = network, split, optimizer
        if optimizers.takes_network(optimizer):
            self.make_optimizer = lambda parameters: optimizer(parameters, network)
        self.normalises = False  # whether a layer computes statistics of a batch
        self._channels_last = channels_last
        self._plans: dict[splitting.Update, TrainableSet] = {}
        self._entries: Tensors = {}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._device: torch.device | None = None
        self._modes: list[tuple[nn.Module, bool]] = []
        self._stilled: list[nn.Module] = []
        self._first: nn.Parameter = next(network.parameters())
        self.other = OtherState(network, split.names("all"))
        # Who hands over a network in training mode, with parts in evaluation mode, wants it so.
        self._evaluating = [m for m in network.modules() if network.training and not m.training]

    @property
    def entries(self) -> Tensors:
        """The network's live parameters and float buffers, except those that never change."""
        # A network that is moved keeps its parameters but gets new buffers, also on the way back.
        moved = self._device != self.device
        if moved or any(self._live(n) is not t for n, t in self._entries.items()):
            self._find_tensors()
        return self._entries

    def _live(self, name: str) -> Tensor:
        """Returns the tensor that stands in the network now: a pass may have replaced a buffer."""
        where, leaf = self._places[name]
        return where[leaf]  # type: ignore[no-any-return]

    def _find_tensors(self) -> None:
        """Finds the network's tensors again; all plans of the old ones become invalid."""
        self._first = next(self.network.parameters())
        if self._device != self.device:
            self._device = self.device
            self.other.follow()
        # Before its tensors are listed: the layout gives each kernel other memory.
        lay_out(self.network, self._channels_last)
        every, base = splitting.float_entries(self.network), self.split.base
        self._entries = {n: t for n, t in every.items() if n not in base}
        self._places = {
            n: (where, leaf)
            for name, module in self.network.named_modules()
            for where in (module._parameters, module._buffers)
            for leaf in where
            if (n := f"{name}.{leaf}".lstrip(".")) in self._entries
        }
        self.normalises = any(isinstance(m, _BatchNorm) for m in self.network.modules())
        self._plans.clear()
        self._modes.clear()

    @property
    def device(self) -> torch.device:
        """Where the network is now; Lightning may move it."""
        return self._first.device

    def initial(self) -> Tensors:
        """Returns a copy of the network's current entries."""
        return {n: ordinary(t) for n, t in self.entries.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all entries into the network, with its other state, or the initial one."""
        for name in self.split.buffers if self._places else ():
            where, leaf = self._places[name]
            if self._device == self.device and where[leaf].shape == self._entries[name].shape:
                where[leaf] = self._entries[name]  # which the last pass may have replaced
        entries = self.entries
        splitting.check_whole(entries, weights, "What a client trains or evaluates")
        self.other.restore(weights.get(OTHER))
        with torch.no_grad():
            torch._foreach_copy_(list(entries.values()), [weights[n] for n in entries])

    def changed(self, names: Iterable[str]) -> Tensors:
        """Returns copies of entries as they are now, and the other state."""
        plain = torch.contiguous_format
        with torch.no_grad():
            entries = {n: self._live(n).clone(memory_format=plain) for n in names}
        return {**entries, OTHER: self.other.packed()}

    def with_buffers(self, weights: Tensors, buffers: Tensors) -> Tensors:
        """Returns a model whose other state has other values of buffers."""
        self.load(weights)
        for name, value in buffers.items():
            place, _, leaf = name.rpartition(".")
            self.network.get_submodule(place)._buffers[leaf] = value
        return {**weights, OTHER: self.other.packed()}

    def has_moved(self, weights: Mapping[str, Tensor]) -> bool:
        """Returns whether passes have changed other state since the weights were loaded."""
        now, before = self.other.packed(), weights.get(OTHER, NOTHING)
        return not torch.equal(now, before.cpu())

    def statistics(self) -> Tensors:
        """Returns copies of all that a pass changes by itself."""
        return self.changed(self.split.buffers)

    def put_back(self, statistics: Tensors) -> None:
        """Undoes the changes of passes since :meth:`statistics`."""
        self.other.restore(statistics[OTHER])
        overwrite({n: self._live(n) for n in self.split.buffers}, statistics)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Sets training mode, with fixed statistics where they never change."""
        # Only the whole network is told to train: what its own `train` leaves in evaluation mode
        # stays so. The walk through a deep network takes as long as a small step.
        if not self._modes or any(m.training is not mode for m, mode in self._modes):
            self.network.train()
            for module in self._evaluating:
                module.eval()
            self._modes = [(m, m.training) for m in self.network.modules()]
            fixed = splitting.fixed_statistics(self.network, self.split.policy, self.split.base)
            self._stilled = [m for m in fixed if m.training]
        for module in self._stilled:
            module.eval()
        try:
            yield
        finally:
            for module in self._stilled:
                module.train()

    def whole(
        self, weights: Mapping[str, Tensor], outputs: Callable[[], Tensor] | None = None
    ) -> Tensors:
        """Returns a model as other programs read it: all tensors of the plain network by name.

        Tensors that are divided by entries are put together; those that never change are added,
        and other state that a state dict names. :data:`OTHER` remains only where there is more.
        Where `outputs` gives outputs of the network, what has no effect on them is left out, such
        as outputs of the last training pass that the network keeps.
        """
        named, more = self.other.by_name(weights.get(OTHER))
        self.load(weights)  # as passes may have changed tensors that never train
        if more is not None and outputs is not None:
            before = outputs()
            self.other.drop(more)
            more = None if torch.equal(outputs(), before) else more
        fixed = select(splitting.float_entries(self.network), self.split.base)
        entries = {n: ordinary(t) for n, t in fixed.items()} | dict(weights)
        entries.pop(OTHER, None)
        rest = {} if more is None else {OTHER: more}
        made = {**splitting.joined(self.network, entries), **named, **rest}
        self.other.restore(None)  # a user's loss stays as it was given
        return made

    def plan(self, update: splitting.Update) -> TrainableSet:
        """Returns the plan of training one part, or both."""
        entries = self.entries
        if (plan := self._plans.get(update)) is None:
            if not self.split.parameters(update):
                raise splitting.nothing_to_train(update)
            trained = select(entries, self.split.parameters(update))
            outside = self.split.buffers.union(trained)
            optimizer = self.make_optimizer(list(trained.values()))
            splitting.keep_groups(optimizer, trained, self.split.personal, self.network)
            fixed = [t for n, t in entries.items() if n not in outside]
            changing = [n for n in self.split.names(update) if n in entries]
            plan = TrainableSet(trained, fixed, changing, optimizer)
            # PyTorch's optimizers keep nothing but their state, which every call restores or
            # clears. A user's optimizer may keep more: each call of a client gets a new one.
            if type(plan.optimizer).__module__.startswith("torch.optim."):
                self._plans[update] = plan
        return plan


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
            form = _CHANNELS_LAST[kernels.ndim] if wanted else torch.contiguous_format
            # Not `contiguous`, which skips kernels of one channel: they have both layouts, but
            # their strides decide the layout of the outputs.
            kernels.data = kernels.data.clone(memory_format=form)


def _kernels(module: nn.Module) -> Tensor | None:
    if not isinstance(module, _ConvNd):
        return None
    kernels = module._parameters.get("weight")  # adapters compute it from others
    return kernels if kernels is not None and kernels.ndim in _CHANNELS_LAST else None
