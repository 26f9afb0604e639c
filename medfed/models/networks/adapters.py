"""Low-rank adapters: a frozen network plus products of two thin matrices on its weights.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-rank adaptation of large language
models, ICLR 2022, Section 4.1: h = W_0 x + (alpha / r) B A x.

| symbol | here |
|---|---|
| W_0 (d, k) | a layer's weight as rows: (out, in), of a convolution (out, in / groups * kernel) |
| A (r, k), B (d, r) | ``NAME.parametrizations.weight.0.lora_A`` and ``lora_B`` |
| r, alpha | ``rank``, ``alpha`` |

A starts like a linear layer (uniform; Gaussian in the paper), B at zero: the network initially
computes the same, bit for bit. The rows of a transposed convolution are its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from medfed.common.seeding import torch_rng
from medfed.common.tensors import Tensors
from medfed.federation.split import float_entries, match
from medfed.models.networks.canonical import Canonical
from medfed.standalone.checks import check_count, check_fields, within
from medfed.standalone.errors import ConfigError

PLACE = "parametrizations.weight."
PATTERN = f"*{PLACE}0.lora_?"
_LISTED = 6


class LowRank(nn.Module):
    """Adds (alpha / r) B A to a weight.

    Example:
        >>> low = LowRank(torch.zeros(4, 3, 2), 1, 1.0, torch_rng(0))
        >>> low.lora_A.shape, low.lora_B.shape, low(torch.ones(4, 3, 2)).shape
        (torch.Size([1, 6]), torch.Size([4, 1]), torch.Size([4, 3, 2]))
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape[0], weight[0].numel()
        bound = math.sqrt(3 / columns)
        uniform = 2 * torch.rand(rank, columns, generator=generator) - 1
        self.lora_A = nn.Parameter((bound * uniform).to(weight))
        self.lora_B = nn.Parameter(weight.new_zeros(rows, rank))
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        """Returns the weight with the product."""
        return merge(weight, self.lora_A, self.lora_B, self.scale)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns weight + scale B A, in the weight's shape.

    Example:
        >>> merge(torch.zeros(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [3.0]]), 2.0)
        tensor([[ 2.,  4.],
                [ 6., 12.]])
    """
    return weight + (scale * (b @ a)).view_as(weight)


@dataclass(frozen=True)
class Adapters:
    """Which layers of a network are adapted, and which other entries train."""

    rank: Annotated[int, check_count] = 4  # r
    # The product counts alpha / r; ``None``: as much as r.
    alpha: Annotated[float | None, within("(0, inf)")] = None
    # Name patterns of linear and convolutional layers; only those that become smaller are adapted.
    layers: Sequence[str] = ("*",)
    # Name patterns of entries that train whole, such as an output layer; ``None``: the layers next
    # to the outputs, or without data the last added layer.
    train: Sequence[str] | None = None
    # ``shared``, or ``personal`` for a method that keeps what the model calls personal.
    part: Literal["shared", "personal"] = "shared"
    # ``sent``: a run that starts from weights sends the frozen ones once; ``known``: every hospital
    # has them.
    base: Literal["sent", "known"] = "sent"

    def __post_init__(self) -> None:
        check_fields("adapters", self)
        for key in ("layers", "train"):
            if isinstance(getattr(self, key), str):
                raise ConfigError(f"adapters.{key} must be a list of name patterns.")


@dataclass(frozen=True)
class Adapted:
    """The result of adapting a network."""

    layers: tuple[str, ...]  # layers with an adapter
    small: tuple[str, ...]  # layers that an adapter would not make smaller; they are frozen
    train: tuple[str, ...]  # entries that train whole
    trained: int  # elements that train
    frozen: int  # elements that do not

    def __str__(self) -> str:
        share = self.trained / (self.trained + self.frozen)
        whole = ", ".join(self.train[:_LISTED]) + (" ..." if len(self.train) > _LISTED else "")
        small = f"; {len(self.small)} are too small for one" if self.small else ""
        return (
            f"{self.trained:,} elements train, {self.frozen:,} are frozen ({share:.2%} train): "
            f"adapters on {len(self.layers)} layers{small}; whole: {whole or 'nothing'}."
        )


def attach(network: nn.Module, adapters: Adapters, seed: int = 0) -> Adapted:
    """Adds adapters to a network, in place, and freezes all other entries."""
    entries = float_entries(network)
    known = {id(t): n for n, t in entries.items()}
    free = ((n, m) for n, m in network.named_modules() if not is_parametrized(m))
    layers = {n: m for n, m in free if isinstance(m, nn.Linear | _ConvNd)}
    # A tensor shared by two layers cannot have an adapter in only one of them.
    uses = [id(t) for m in network.modules() for t in m._parameters.values() if t is not None]
    layers = {n: m for n, m in layers.items() if uses.count(id(m.weight)) == 1}
    if not layers:
        what = "adapters=lora finds no linear or convolutional layer in this network"
        raise ConfigError(f"{what}; choose adapters=none.")
    whole = [_last(network, list(layers))] if adapters.train is None else list(adapters.train)
    train = set(match(whole, entries, "adapters.train: {!r} matches no parameter"))
    chosen = match(adapters.layers, layers, "adapters.layers: {!r} matches no layer")
    chosen = [n for n in chosen if known[id(layers[n].weight)] not in train]
    small = []
    for name in chosen:
        weight = layers[name].weight
        if adapters.rank * (len(weight) + weight[0].numel()) >= weight.numel():
            small.append(name)
            continue
        alpha = adapters.rank if adapters.alpha is None else adapters.alpha
        rng = torch_rng(seed, "adapters", name)
        register_parametrization(layers[name], "weight", LowRank(weight, adapters.rank, alpha, rng))
    adapted = tuple(n for n in chosen if n not in small)
    if not adapted:
        raise ConfigError(
            f"adapters.rank={adapters.rank} saves nothing in any layer that adapters.layers names; "
            "lower it, or choose adapters=none."
        )
    # A membership is a client's mixture of canonical models, not a weight of a model.
    more = {"membership"} if isinstance(network, Canonical) else set()
    entries = float_entries(network)
    trained = {n for n in entries if n in train | more or fnmatchcase(n, PATTERN)}
    frozen = {n: t for n, t in entries.items() if n not in trained}
    for tensor in frozen.values():
        tensor.requires_grad_(False)
    network.frozen_entries = frozenset(frozen)  # type: ignore[assignment]
    numbers = sum(entries[n].numel() for n in trained), sum(t.numel() for t in frozen.values())
    return Adapted(adapted, tuple(small), tuple(n for n in entries if n in train), *numbers)


def _last(network: nn.Module, layers: Sequence[str]) -> str:
    """A pattern of the entries of the last layer, in every canonical instance."""
    last = layers[-1]
    if isinstance(network, Canonical) and last.startswith("canonical."):
        last = f"canonical.*.{last.split('.', 2)[2]}"
    return f"{last}.*"


def merged(network: nn.Module, weights: Mapping[str, Tensor]) -> Tensors:
    """Returns the entries of the plain network equal to an adapted one."""
    if not getattr(network, "frozen_entries", None):
        return dict(weights)
    whole, merged_weights = {**float_entries(network), **weights}, Tensors()
    with torch.no_grad():
        for name, tensor in whole.items():
            layer, adapted, which = name.partition(PLACE)
            if not adapted:
                merged_weights[name] = tensor.detach()
            elif which == "original":
                low = network.get_submodule(f"{layer}{PLACE}0")
                assert isinstance(low, LowRank)
                a, b = (whole[f"{layer}{PLACE}0.lora_{matrix}"] for matrix in "AB")
                merged_weights[f"{layer}weight"] = merge(tensor.to(a), a, b, low.scale)
    return merged_weights
