"""Canonical models: K instances of a part of any network, mixed by a membership vector.

PPFL (one of the project's source papers), its two architectures, with r the network, theta_k the
instances of the canonical part, c the membership vector in the simplex:

=============  ==============================  ==============================================
``outputs``    sum_k c_k r(theta_k)            probabilities are mixed: of classes by softmax,
                                               of regions by sigmoid, outputs as they are else
``parameters`` r(sum_k c_k theta_k)            one network, whose part is the mixture
=============  ==============================  ==============================================

A mixture of probabilities is returned as log-probabilities or logits, so that losses and metrics
stay as they are. They normalise what they get: off the simplex the loss is that of c / sum c, and
its gradient differs from that of the plain mixture by a multiple of the all-ones vector, which no
step on the simplex notices.

The instances are built independently. Copies of one part would have equal gradients for ever.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError
from medfed.models.networks.outputs import heads
from medfed.models.networks.personal_part import part_roots, place, positions, remainder, take

Mix = Literal["outputs", "parameters"]
Activation = Literal["identity", "softmax", "sigmoid"]


class Canonical(nn.Module):
    """A network of which a part exists K times.

    Common parts are computed once per batch for all instances, if they get the same input: the
    features of a classifier, the contracting path of a U-Net.

    Args:
        networks: K networks of one architecture, built independently. The first one gives the
            common part, each gives its instance of the canonical part; the networks are dismantled.
        parts: Patterns of the canonical part's names, such as ``class_layers.*``; whole layers.
        mix: What to mix: ``outputs`` or ``parameters``.
        activation: For ``outputs``: turns the network's outputs into probabilities.

    Shapes:
        As the network's. Parameters: ``membership (K,)``, ``common.*``, ``canonical.k.*``.

    Raises:
        ConfigError: If the patterns match nothing or half a layer, a value is unknown, or two
            instances are equal.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2)]
        >>> net = Canonical(nets, ["2.*"])
        >>> [name for name, _ in net.named_parameters()][:3]
        ['membership', 'common.0.weight', 'common.0.bias']
        >>> torch.allclose(net(torch.ones(4, 2)).exp().sum(1), torch.ones(4))  # log-probabilities
        True
    """

    personal: ClassVar[tuple[str, ...]] = ("membership",)
    membership: nn.Parameter

    def __init__(
        self,
        networks: Sequence[nn.Module],
        parts: Sequence[str],
        mix: Mix = "outputs",
        activation: Activation = "softmax",
    ) -> None:
        super().__init__()
        check_known("canonical.mix", mix, get_args(Mix))
        check_known("activation", activation, get_args(Activation))
        if not networks:
            raise ConfigError("canonical.count must be 1 or more.")
        self.mix = mix
        self.activation = activation
        count = len(networks)
        like = next(networks[0].parameters())
        self.membership = nn.Parameter(torch.full((count,), 1 / count).to(like))
        places = part_roots(networks[0], parts)
        self._boxed = places == [""]
        if self._boxed:  # the whole network: wrapped, so that it has a place in a parent, too
            networks, places = (
                [nn.Sequential(OrderedDict(network=n)) for n in networks],
                ["network"],
            )
        self.common = networks[0]
        # Before they are taken out: a network may hold a layer in several places.
        self._places = [place(self.common, p) for p in places]
        at = positions(self.common)
        everywhere = [n for p in places for n in at[id(self.common.get_submodule(p))]]
        self.canonical = nn.ModuleList(_Part(take(n, places)) for n in networks)
        self._names = places
        fixed = {id(layer): layer for layer in remainder(self.common, everywhere)}
        self._fixed = list(fixed.values())
        _check_distinct(self.canonical, parts)
        if mix == "parameters":
            for other in self.canonical[1:]:
                _forget_buffers(other)

    def forward(self, x: Tensor) -> Any:
        """Returns the mixture for a batch: log-probabilities, logits or plain outputs.

        If the network has several heads, each is mixed separately, and the result is a list.
        """
        if self.mix == "parameters":
            with self._instance(0):
                return functional_call(self.common, self.mixed(), (x,))
        used = self._used()
        with _computed_once(self._fixed):
            outputs = [self._output(k, x) for k in used]
        whole = len(used) == len(self.canonical)
        membership = self.membership if whole else self.membership[used]
        mixtures = [
            mix_outputs(head, membership, self.activation) for head in zip(*outputs, strict=True)
        ]
        return mixtures[0] if len(mixtures) == 1 else mixtures

    def mixed(self) -> dict[str, Tensor]:
        """Returns sum_k c_k theta_k under the names that it has within the network."""
        weights: dict[str, Tensor] = {}
        done: set[int] = set()  # for tied weights the first name is enough
        for i, name in enumerate(self._names):
            parts = [dict(_layers(k)[i].named_parameters()) for k in self.canonical]
            for inner in parts[0]:
                if id(parts[0][inner]) in done:
                    continue
                done.add(id(parts[0][inner]))
                stacked = torch.stack([p[inner] for p in parts])
                full = f"{name}.{inner}" if inner else name
                weights[full] = torch.tensordot(self.membership, stacked, dims=1)
        return weights

    def ordinary(self, name: str) -> str | None:
        """Returns an entry's name in the ordinary network; ``None`` for the membership.

        Example:
            >>> nets = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(2)]
            >>> net = Canonical(nets, ["1.*"])
            >>> net.ordinary("common.0.bias"), net.ordinary("canonical.1.1.bias")
            ('0.bias', '1.bias')
        """
        kind, _, rest = name.partition(".")
        if kind == "canonical":
            _, layer, inner = rest.split(".", 2)
            rest = next(f"{n}.{inner}" for n in self._names if n.replace(".", "_") == layer)
        elif kind != "common":
            return None
        return rest.removeprefix("network.") if self._boxed else rest

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
        layers = _layers(self.canonical[k])
        for slots, layer in zip(self._places, layers, strict=True):
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
    """Mixes K outputs, as probabilities unless the activation is the identity.

    Args:
        outputs: K tensors ``(B, ...)``; for ``softmax`` classes are axis 1.
        membership: ``(K,)`` weights c, 0 or more.
        activation: ``softmax``, ``sigmoid`` or ``identity``.

    Returns:
        A tensor like one output: the logarithm of the mixed class probabilities, the logit of the
        mixed region probabilities, or the mixed outputs.

    Example:
        >>> outputs = [torch.tensor([[0.0, 0.0]]), torch.tensor([[9.0, 0.0]])]
        >>> mix_outputs(outputs, torch.tensor([0.5, 0.5]), "softmax").exp()
        tensor([[0.7499, 0.2501]])
        >>> mix_outputs(outputs, torch.tensor([0.5, 0.5]), "identity")
        tensor([[4.5000, 0.0000]])
    """
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
    positive = (logsigmoid(stacked) + logs).logsumexp(0)
    return positive - (logsigmoid(-stacked) + logs).logsumexp(0)


def _layers(part: nn.Module) -> list[nn.Module]:
    return list(part.children())


@contextmanager
def _computed_once(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets layers reuse their output for the same input.

    This saves time; dropout is then the same for all instances, and BatchNorm counts a batch once.
    """
    # An instance's own forward is found before that of its class.
    kept = [(layer.__dict__, layer.__dict__.get("forward")) for layer in layers]
    for layer in layers:
        layer.__dict__["forward"] = _once(layer.forward)
    try:
        yield
    finally:
        for held, forward in kept:
            if forward is None:
                del held["forward"]
            else:
                held["forward"] = forward


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    seen: list[tuple[tuple[Any, ...], Any]] = []

    def remembering(*inputs: Any) -> Any:
        for known, output in seen:
            if len(known) == len(inputs) and all(map(_is, known, inputs)):
                return output
        seen.append((inputs, function(*inputs)))
        return seen[-1][1]

    return remembering


def _is(a: Any, b: Any) -> bool:
    return a is b


def _forget_buffers(part: nn.Module) -> None:
    """Keeps the statistics of the first instance only: one network with a mixed part runs."""
    for module in part.modules():
        for name in module._buffers:
            module._buffers[name] = None


def _check_distinct(instances: nn.ModuleList, parts: Sequence[str]) -> None:
    flat = [torch.cat([p.detach().flatten() for p in i.parameters()]) for i in instances]
    for k, one in enumerate(flat):
        if any(torch.equal(one, other) for other in flat[:k]):
            raise ConfigError(
                f"The canonical instances of {', '.join(parts)} start as equals and would stay so; "
                "choose a model that starts at random (a logistic regression does with "
                "model.network.spread=0.1)."
            )
