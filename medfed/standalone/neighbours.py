"""Cases that a hospital's model remembers: their nearest neighbours vote beside the network.

The store is three buffers of the network's head, so that all programs know it by name:
``neighbours_features`` (n, d), what entered the head for each case; ``neighbours_labels`` (n,); and
``neighbours_vote`` (3,), the number of neighbours that vote, the scale, and the weight of the vote.
An empty store changes nothing, and none votes in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from .mixture import mix_outputs
from .outputs import heads

FEATURES, LABELS, VOTE = "neighbours_features", "neighbours_labels", "neighbours_vote"


def nearest(z: Tensor, features: Tensor, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns mean squared distances ``(B, n)`` to a store, nearest first, and whose they are."""
    exact = "donot_use_mm_for_euclid_dist"  # as 0 for equal features
    distances = torch.cdist(z, features, compute_mode=exact).square() / features.shape[1]
    if left_out is not None:
        distances = distances.masked_fill(left_out, torch.inf)
    near, order = distances.sort(1)
    return near, order


def votes(near: Tensor, labels: Tensor, count: Tensor, scale: Tensor, classes: int) -> Tensor:
    """Returns the shares ``(B, K)`` of classes among the nearest, by exp(-distance / scale)."""
    beyond = torch.arange(near.shape[1], device=near.device) >= count
    weights = (-near / scale).masked_fill(beyond, -torch.inf).softmax(1)
    return (weights[:, None] @ one_hot(labels, classes).to(weights))[:, 0]


class Voting:
    """The two hooks of a network that remembers cases: on its head, and on its outputs."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.entering: Tensor | None = None

    def enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Sees what enters the head."""
        if not self.head.training:
            (self.entering,) = inputs

    def answer(self, network: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        """Mixes the network's probabilities with the neighbours' shares, as log-probabilities."""
        z, self.entering = self.entering, None
        features, labels, vote = (getattr(self.head, name) for name in (FEATURES, LABELS, VOTE))
        if network.training or z is None or not len(features):
            return None
        near, order = nearest(z.flatten(2).mean(2) if z.ndim > 2 else z, features)
        outputs = heads(output, inputs[0])[0]
        shares = votes(near, labels[order], vote[0], vote[1], outputs.shape[1])
        return mix_outputs([outputs, shares.log()], torch.stack([1 - vote[2], vote[2]]), "softmax")


def remembering(network: nn.Module, head: str, cases: int = 0, width: int = 0) -> nn.Module:
    """Gives a network a store of cases before its module `head`, in place, and returns it.

    Example:
        >>> network = nn.Sequential(nn.Identity(), nn.Linear(1, 2))
        >>> _ = nn.init.zeros_(network[1].weight), nn.init.zeros_(network[1].bias)
        >>> store = {FEATURES: [[0.0], [9.0]], LABELS: [0, 1], VOTE: [1.0, 1.0, 0.5]}
        >>> named = {f"1.{name}": torch.tensor(values) for name, values in store.items()}
        >>> _ = remembering(network, "1", cases=2, width=1).eval().load_state_dict(named, False)
        >>> network(torch.tensor([[8.0]])).softmax(1).detach()
        tensor([[0.2500, 0.7500]])
    """
    module = network.get_submodule(head)
    if FEATURES not in module._buffers:
        voting = Voting(module)
        module.register_forward_pre_hook(voting.enter)
        network.register_forward_hook(voting.answer)
    like = next(module.parameters())
    module.register_buffer(FEATURES, like.new_zeros(cases, width, requires_grad=False))
    module.register_buffer(LABELS, like.new_zeros(cases, dtype=torch.int64))
    module.register_buffer(VOTE, like.new_zeros(3, requires_grad=False))
    return network


def store_in(names: Iterable[str]) -> str | None:
    """Returns the module whose store stands among the names of a model's tensors, if any.

    Example:
        >>> store_in(["body.weight", "head.neighbours_features"]), store_in(["head.weight"])
        ('head', None)
    """
    stores = [name for name in names if name.endswith(f".{FEATURES}")]
    return stores[0].removesuffix(f".{FEATURES}") if stores else None


def with_store_of(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Gives a network as large a store as a model's tensors have, and returns it."""
    if (head := store_in(weights)) is not None:
        shape = weights[f"{head}.{FEATURES}"].shape
        if len(shape) != 2 or head not in (name for name, _ in network.named_modules()):
            raise RuntimeError(f"{head} has no place for a store of the shape {tuple(shape)}")
        remembering(network, head, *shape)
    return network


def without_store(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model's tensors but for those of patients in its store."""
    return {n: t for n, t in weights.items() if not n.endswith((FEATURES, LABELS, VOTE))}


def store_size(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns how many cases a model remembers, and their bytes.

    Example:
        >>> store_size({"1.neighbours_features": torch.zeros(5, 3), "1.weight": torch.zeros(2, 3)})
        {'cases': 5, 'bytes': 60}
    """
    cases = sum(len(t) for n, t in weights.items() if n.endswith(FEATURES))
    stored = sum(t.nbytes for n, t in weights.items() if n.endswith((FEATURES, LABELS, VOTE)))
    return {"cases": cases, "bytes": stored if cases else 0}
