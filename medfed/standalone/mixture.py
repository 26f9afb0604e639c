"""A network of which a part exists several times, mixed by a membership vector.

What training adds is in :mod:`medfed.models.networks.canonical`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from .outputs import heads

Activation = Literal["identity", "softmax", "sigmoid"]
Slot = tuple[dict[str, nn.Module | None], str]
"""Where a layer is kept: its parent's children, and its name among them."""


class Taken(NamedTuple):
    """A network without some of its layers."""

    network: nn.Module
    layers: dict[str, nn.Module]  # the layers by name
    slots: list[list[Slot]]  # where each of them belongs


class Mixture(nn.Module):
    """Mixes the outputs of instances of some layers; a subclass sets the ``membership`` (K,).

    Common parts are computed once per batch for all instances, if they get the same input.
    """

    membership: Tensor

    def __init__(
        self, taken: Taken, instances: Sequence[dict[str, nn.Module]], activation: Activation
    ) -> None:
        super().__init__()
        self.activation = activation
        self.common, self._places = taken.network, taken.slots
        self.canonical = nn.ModuleList(_Part(layers) for layers in instances)
        holders = {id(children) for children, _ in itertools.chain.from_iterable(taken.slots)}
        self._fixed = list(dict.fromkeys(remainder(self.common, holders)))

    def forward(self, x: Tensor) -> Any:
        """Returns a batch's mixture, head by head: log-probabilities, logits or outputs."""
        used = self._used()
        with _computed_once(self._fixed):
            outputs = [self._output(k, x) for k in used]
        whole = len(used) == len(self.canonical)
        membership = self.membership if whole else self.membership[used]
        mixtures = [mix_outputs(h, membership, self.activation) for h in zip(*outputs, strict=True)]
        return mixtures[0] if len(mixtures) == 1 else mixtures

    def _used(self) -> list[int]:
        """The instances that count: where c_k is zero and stays so, instance k is not computed."""
        learns = self.membership.requires_grad and torch.is_grad_enabled()
        # A recorded graph must be valid for other memberships, too.
        recorded = torch.jit.is_tracing() or torch.compiler.is_compiling()  # type: ignore[attr-defined]
        if learns or recorded:
            return list(range(len(self.canonical)))
        used: list[int] = self.membership.detach().nonzero().flatten().tolist()
        return used or [0]

    def _output(self, k: int, x: Tensor) -> list[Tensor]:
        with self._instance(k):
            return heads(self.common(x), x)

    @contextmanager
    def _instance(self, k: int) -> Iterator[None]:
        """Puts an instance where the canonical part belongs, for one pass."""
        for slots, layer in zip(self._places, self.canonical[k].children(), strict=True):
            for children, leaf in slots:
                children[leaf] = layer
        try:
            yield
        finally:
            for children, leaf in itertools.chain.from_iterable(self._places):
                children[leaf] = None


class _Part(nn.Module):
    """The layers of one instance; a dot is no part of a module's name."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name.replace(".", "_"), layer)
            # The layers before are computed once, and all instances read their outputs.
            for module in layer.modules():
                if getattr(module, "inplace", False) is True:
                    module.inplace = False  # type: ignore[assignment]


def mix_outputs(outputs: Sequence[Tensor], membership: Tensor, activation: Activation) -> Tensor:
    """Mixes K outputs by a membership (K,), as probabilities but with the identity."""
    stacked = torch.stack(list(outputs))
    if activation == "identity":
        mixture: Tensor = torch.tensordot(membership.to(stacked), stacked, dims=1)
        return mixture
    # The smallest number keeps the gradient of a membership finite that has underflowed to 0.
    logs = (membership + torch.finfo(membership.dtype).tiny).log()
    logs = logs.reshape(-1, *[1] * (stacked.ndim - 1))
    if len(outputs) == 1:
        return outputs[0] + logs[0]
    if activation == "softmax":
        return (stacked.log_softmax(2) + logs).logsumexp(0)
    # ONNX Runtime computes the logarithm of a sigmoid that has underflowed to 0.
    log = (lambda z: -softplus(-z)) if torch.jit.is_tracing() else logsigmoid  # type: ignore[attr-defined]
    return (log(stacked) + logs).logsumexp(0) - (log(-stacked) + logs).logsumexp(0)


@contextmanager
def _computed_once(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets layers reuse their output for the same input; dropout is then the same for all."""
    # An instance's own forward is found before that of its class.
    shared = [
        (attributes, {n: attributes[n] for n in attributes if n == "forward"})
        for attributes in map(vars, layers)
    ]
    for layer in layers:
        layer.__dict__["forward"] = _once(layer.forward)
    try:
        yield
    finally:
        for attributes, before in shared:
            attributes.pop("forward")
            attributes.update(before)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    results: list[tuple[tuple[Any, ...], Any]] = []

    def remembering(*inputs: Any) -> Any:
        for known, output in results:
            if [*map(id, known)] == [*map(id, inputs)]:
                return output
        results.append((inputs, function(*inputs)))
        return results[-1][1]

    return remembering


def positions(network: nn.Module) -> dict[int, list[str]]:
    """Returns all names of every layer, by its id; DynUNet has some of its layers twice."""
    paths: dict[int, list[str]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    return paths


def take(network: nn.Module, places: Sequence[str]) -> Taken:
    """Removes layers from a network; the whole network is taken out of a module around it."""
    if list(places) == [""]:
        network, places = nn.Sequential(OrderedDict(network=network)), ["network"]
    layers = {name: network.get_submodule(name) for name in places}
    at = positions(network)  # a network may hold a layer in several places
    slots = [[_slot(network, path) for path in at[id(layer)]] for layer in layers.values()]
    for children, leaf in itertools.chain.from_iterable(slots):
        children[leaf] = None
    return Taken(network, layers, slots)


def _slot(network: nn.Module, path: str) -> Slot:
    parent, _, leaf = path.rpartition(".")
    return network.get_submodule(parent)._modules, leaf


def remainder(network: nn.Module, holders: set[int]) -> Iterator[nn.Module]:
    """Yields the largest layers from which nothing was taken.

    Example:
        >>> net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
        >>> ((slot,),) = take(net, ["1.1"]).slots
        >>> list(remainder(net, {id(slot[0])}))
        [ReLU(), Tanh()]
    """
    for layer in network.children():
        if holders.isdisjoint(id(inner._modules) for inner in layer.modules()):
            yield layer
        else:
            yield from remainder(layer, holders)
