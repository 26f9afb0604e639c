"""A bundle's network with its weights, and the mixture of several instances of a part of one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from .decode import decode, fill
from .mixture import Activation, Mixture, take
from .neighbours import with_store_of
from .outputs import only_logits


class CanonicalMixture(Mixture):
    """A network of which a part exists several times; the membership of a client is fixed."""

    def __init__(
        self, network: nn.Module, places: Sequence[str], count: int, activation: Activation
    ) -> None:
        taken = take(network, places)
        further = [copy.deepcopy(taken.layers) for _ in range(count - 1)]
        super().__init__(taken, [taken.layers, *further], activation)
        self.register_buffer("membership", torch.full((count,), 1 / count))


def load(network: nn.Module, bundle: str | Path) -> nn.Module:
    """Puts the weights of a bundle into a network and returns it."""
    packed, plain = (Path(bundle) / "models" / name for name in ("packed.pt", "model.pt"))
    weights = decode(packed if packed.is_file() else plain)
    return only_logits(fill(with_store_of(network, weights), weights))
