"""A client's model in the form that a bundle holds: a network as plain data, and its weights.

An ordinary model stays as it is. Canonical models (:mod:`medfed.models.networks.canonical`) that
mix parameters become the one network that they are. Those that mix outputs become the instances
that the client uses, with its membership; where it uses one alone, that one network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medfed.delivery.networks import build_network, describe_mixture
from medfed.errors import CheckpointError
from medfed.federation.split import float_entries
from medfed.models.networks import Canonical

NEGLIGIBLE = 1e-7  # single precision does not resolve so small a share of a probability
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ClientModel:
    """A network and its weights.

    Attributes:
        plain: The network, see :mod:`medfed.delivery.networks`.
        weights: All float entries, in single precision.
    """

    plain: dict[str, Any]
    weights: Tensors

    def network(self) -> nn.Module:
        """Builds the network, without its weights."""
        return build_network(self.plain)

    def entries(self, name: str) -> list[str]:
        """Names the entries that an entry of the ordinary network has become here.

        Args:
            name: An entry of the ordinary network.

        Returns:
            One name, or one per instance if it belongs to the canonical part.

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
    """Puts a model together.

    Args:
        plain: The network.
        weights: Its float entries, of any precision, in any order.
        source: Whose they are, for the error.

    Raises:
        CheckpointError: If the weights are those of another network.
    """
    expected = float_entries(build_network(plain))
    if set(weights) != set(expected):
        raise CheckpointError(
            f"The model of {source} has other entries than its configuration says; the run folder "
            "is mixed up."
        )
    return ClientModel(plain, {n: weights[n].float() for n in expected})


def used_instances(
    plain: Mapping[str, Any], places: list[str], activation: str, loaded: Tensors
) -> tuple[dict[str, Any], Tensors]:
    """Keeps of mixed outputs what the client uses.

    Args:
        plain: The ordinary network.
        places: Layers of the canonical part, from `part_roots`.
        activation: Of the mixture.
        loaded: The float entries of the client's canonical model.

    Returns:
        A network and its weights. Instances with a membership below :data:`NEGLIGIBLE` are left
        out: no probability changes by more.
    """
    membership = loaded["membership"]
    kept = (membership >= NEGLIGIBLE).nonzero().flatten().tolist()
    instances = {n: t for n, t in loaded.items() if n.startswith("canonical.")}
    common = {n: t for n, t in loaded.items() if n.startswith("common.")}
    if len(kept) == 1:
        return dict(plain), _one(common, instances, places, kept[0])
    own = {
        f"canonical.{i}.{n.split('.', 2)[2]}": t
        for i, k in enumerate(kept)
        for n, t in instances.items()
        if n.startswith(f"canonical.{k}.")
    }
    network = describe_mixture(plain, places, len(kept), activation)
    return network, {"membership": membership[kept], **common, **own}


def collapse(network: Canonical) -> Tensors:
    """Returns the float entries of the one network that mixed parameters amount to.

    Args:
        network: A canonical model with ``mix="parameters"``.

    Returns:
        Entries under the names of the ordinary network.

    Example:
        >>> nets = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2)]
        >>> both = torch.stack([n[1].weight.detach() for n in nets])
        >>> state = collapse(Canonical(nets, ["1.*"], mix="parameters"))
        >>> list(state), torch.allclose(state["1.weight"], both.mean(0))
        (['0.weight', '0.bias', '1.weight', '1.bias'], True)
    """
    with torch.no_grad(), network._instance(0):
        state = {n: t.detach().clone() for n, t in float_entries(network.common).items()}
        state |= network.mixed()
    boxed = all(name.startswith("network.") for name in state)
    return {n.removeprefix("network.") if boxed else n: t for n, t in state.items()}


def _one(common: Tensors, instances: Tensors, places: list[str], k: int) -> Tensors:
    """The ordinary network with one instance in its places."""
    found = {n.removeprefix("common."): t for n, t in common.items()}
    for place in places:
        inside = f"{place}." if place else ""
        prefix = _entry(inside, [place], k)
        own = {n: t for n, t in instances.items() if n.startswith(prefix)}
        found |= {inside + n.removeprefix(prefix): t for n, t in own.items()}
    return found


def _entry(name: str, places: list[str], k: int) -> str:
    if places == [""]:
        return f"canonical.{k}.network.{name}"
    for place in places:
        if name.startswith(f"{place}."):
            return f"canonical.{k}.{place.replace('.', '_')}.{name.removeprefix(f'{place}.')}"
    return f"common.{name}"
