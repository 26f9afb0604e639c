"""A client's model in the form that a bundle holds: a network as plain data, and its weights.

An ordinary model stays as it is. Canonical models (:mod:`medfed.models.networks.canonical`) that
mix parameters become the one network that they are. Those that mix outputs become the instances
that the client uses, with its membership; where it uses one alone, that one network.

Quantising a trained model: which layers with how many bits, and k-means per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors
from medfed.delivery.bundle.networks import build_network, check_state, describe_mixture
from medfed.delivery.bundle.weights import Codebook, check_bits, kmeans
from medfed.federation.other_state import OTHER
from medfed.federation.split import aliases, match
from medfed.models.networks.canonical import Canonical
from medfed.personalize.quantized_base import layer_weights
from medfed.standalone.decode import fill
from medfed.standalone.errors import CheckpointError, ConfigError
from medfed.standalone.neighbours import with_store_of

NEGLIGIBLE = 1e-7  # single precision does not resolve so small a share of a probability


@dataclass(frozen=True)
class ClientModel:
    """A network and its weights."""

    plain: dict[str, Any]  # the network, see :mod:`medfed.delivery.bundle.networks`
    # All float entries, in single precision, and other tensors of the state dict that training has
    # changed.
    weights: Tensors

    def network(self) -> nn.Module:
        """Builds the network, without its weights."""
        return with_store_of(build_network(self.plain), self.weights)

    def entries(self, name: str) -> list[str]:
        """Names the entries that an entry of the ordinary network has become here.

        Example:
            >>> mixture = {"places": ["up.0"], "count": 2}
            >>> ClientModel(mixture, {}).entries("up.0.weight")
            ['canonical.0.up_0.weight', 'canonical.1.up_0.weight']
            >>> ClientModel(mixture, {}).entries("up.1.weight"), ClientModel({}, {}).entries("a")
            (['common.up.1.weight'], ['a'])
        """
        places = self.plain.get("places")
        if places is None:
            return [name]
        return list(dict.fromkeys(_entry(name, places, k) for k in range(self.plain["count"])))


def checked(plain: dict[str, Any], weights: Tensors, source: str) -> ClientModel:
    """Puts a model together."""
    network = with_store_of(build_network(plain), weights)
    _check_entries(network, weights, source)
    ordered = {n: weights[n] for n in network.state_dict() if n in weights}
    floats = {n: t.float() for n, t in ordered.items() if t.is_floating_point()}
    return ClientModel(plain, ordered | floats)


def from_canonical(
    network: Canonical, plain: dict[str, Any], places: list[str], loaded: Tensors, source: str
) -> ClientModel:
    """Puts a canonical model into the form that a bundle holds; keeps the instances in use."""
    _check_entries(network, loaded, source)
    fill(network.to(next(iter(loaded.values())).dtype), loaded)
    used = (network.membership >= NEGLIGIBLE).nonzero().flatten().tolist()
    if network.mix == "parameters" or len(used) == 1:
        return checked(dict(plain), collapse(network, used[0]), source)
    network.canonical = nn.ModuleList(network.canonical[k] for k in used)
    network.membership = nn.Parameter(network.membership[used].detach())
    mixture = describe_mixture(plain, places, len(used), network.activation)
    return checked(mixture, _distinct(network), source)


def _distinct(network: nn.Module) -> Tensors:
    """The state dict, each tensor under the first of its names."""
    first = aliases(network)
    return {n: t.clone() for n, t in network.state_dict().items() if first.get(n, n) == n}


def collapse(network: Canonical, instance: int = 0) -> Tensors:
    """Returns the entries of one network: with one instance, or with the mixed parameters.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2)]
        >>> both = torch.stack([n[1].weight.detach() for n in nets])
        >>> state = collapse(Canonical(nets, ["1.*"], mix="parameters"))
        >>> list(state), torch.allclose(state["1.weight"], both.mean(0))
        (['0.weight', '0.bias', '1.weight', '1.bias'], True)
    """
    with torch.no_grad(), network._instance(instance):
        state = _distinct(network.common)
        if network.mix == "parameters":
            state |= network.mixed()
    boxed = all(name.startswith("network.") for name in state)
    return {n.removeprefix("network.") if boxed else n: t for n, t in state.items()}


def _entry(name: str, places: list[str], k: int) -> str:
    if places == [""]:
        return f"canonical.{k}.network.{name}"
    for place in places:
        if name.startswith(f"{place}."):
            return f"canonical.{k}.{place.replace('.', '_')}.{name.removeprefix(f'{place}.')}"
    return f"common.{name}"


def _check_entries(network: nn.Module, weights: Tensors, source: str) -> None:
    if OTHER in weights:
        raise ConfigError(
            f"The network of {source} keeps state in attributes, which no weight file holds; keep "
            "it in buffers (register_buffer), and train it again."
        )
    try:
        check_state(network, weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"The model of {source} has other entries than its configuration says; the run folder "
            "is mixed up."
        ) from error


FULL = 32
Bits = Mapping[str, int]


def choose_bits(network: nn.Module, bits: int, layers: Bits | None = None) -> dict[str, int]:
    """Decides which tensors are quantised, and with how many bits.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        >>> choose_bits(net, 2), choose_bits(net, 2, {"1.*": 4, "2.*": 32, "3.*": 8})
        ({'1.weight': 2, '2.weight': 2}, {'1.weight': 4, '3.weight': 8})
    """
    weights = layer_weights(network)
    settings = {"bits": bits, **{f"layers.{p}": b for p, b in (layers or {}).items()}}
    for name, value in settings.items():
        if value != FULL:
            check_bits(value, name, ", or 32 for none")
    chosen = dict.fromkeys(weights[1:-1], bits)
    for pattern, value in (layers or {}).items():
        missing = "The pattern {!r} of layers matches no weight of a convolution or linear layer"
        chosen.update(dict.fromkeys(match([pattern], weights, missing), value))
    return {n: chosen[n] for n in weights if chosen.get(n, FULL) != FULL}


def quantise(weights: Mapping[str, Tensor], bits: Mapping[str, int]) -> dict[str, Codebook]:
    """Fits a codebook to each chosen tensor, see :func:`medfed.delivery.bundle.weights.kmeans`."""
    return {name: kmeans(weights[name], count) for name, count in bits.items()}
