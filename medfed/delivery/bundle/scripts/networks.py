"""What a bundle needs to mix several instances of a part of a network."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from medfed.models.networks.mixture import Activation, Mixture, take


class CanonicalMixture(Mixture):
    """A network of which a part exists several times; the membership of a client is fixed.

    Args:
        network: The ordinary network.
        places: The layers of that part, [""] the whole network.
        count: Instances.
        activation: Turns the network's outputs into probabilities.
    """

    def __init__(
        self, network: nn.Module, places: Sequence[str], count: int, activation: Activation
    ) -> None:
        taken = take(network, places)
        further = [copy.deepcopy(taken.layers) for _ in range(count - 1)]
        super().__init__(taken, [taken.layers, *further], activation)
        self.register_buffer("membership", torch.full((count,), 1 / count))
