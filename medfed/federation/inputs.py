"""Checks what a user's code hands to a federation, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import ceil
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.arguments import kind
from medfed.common.seeding import derive_seed, torch_rng
from medfed.federation import optimizers
from medfed.federation.aggregation import Aggregation
from medfed.federation.algorithm import Algorithm
from medfed.federation.budget import batches_of
from medfed.federation.client import AmongOthers, Batch, ClientData
from medfed.federation.hospital import Batched, padded
from medfed.federation.split import float_entries
from medfed.federation.wire.channel import Channel
from medfed.standalone.errors import ConfigError, MedfedError, few, first_line


def check_network(network: object) -> None:
    """Refuses what is no network, or one without parameters."""
    if not isinstance(network, nn.Module):
        raise ConfigError(f"The network must be an nn.Module, not {kind(network)}.")
    if isinstance(network, torch.jit.ScriptModule):
        raise ConfigError(
            "The network is a TorchScript module, whose weights cannot be exchanged; give the "
            "nn.Module that it was made from."
        )
    if next(network.parameters(), None) is None:
        raise ConfigError(
            f"The network {type(network).__name__} has no parameters, so nothing can train; give "
            "one that registers its layers as attributes or in an nn.ModuleList."
        )
    if name := next((n for n, t in network.named_parameters() if t.is_complex()), None):
        raise ConfigError(
            f"The parameter {name} is complex, which no method averages; keep its real and its "
            "imaginary part, as by torch.view_as_real."
        )
    for name, t in float_entries(network).items():
        if t.is_meta or any(n > 1 and not way for n, way in zip(t.shape, t.stride(), strict=True)):
            raise ConfigError(
                f"The tensor {name} of the network has no memory for each of its numbers (device "
                "meta, or expand); give it some, as by network.to_empty or tensor.clone()."
            )


def check_loss(loss: object) -> None:
    """Refuses what is no function of a network and a batch."""
    of_outputs = getattr(loss, "__module__", "") == nn.functional.__name__
    if not callable(loss) or of_outputs or isinstance(loss, type | nn.modules.loss._Loss):
        raise ConfigError(
            f"The loss must be a function of a network and a batch, not {kind(loss)}; write "
            "def loss(network, batch): return criterion(network(batch['image']), batch['label'])."
        )


def check_optimizer(
    optimizer: optimizers.OptimizerFactory,
    scheduler: optimizers.SchedulerFactory | None,
    rounds: int,
    network: nn.Module,
) -> None:
    """Refuses an optimizer or a schedule that cannot take the steps of all rounds."""
    try:
        if optimizers.takes_network(optimizer):
            trained = [p for p in network.parameters() if p.requires_grad]
            optimizer = optimizers.of_kind(optimizer(trained, network))
        optimizers.learning_rates(optimizer, scheduler, rounds)
    except Exception as error:
        raise ConfigError(
            f"The optimizer or its schedule cannot be used: {first_line(error)}; give functions "
            "that make them, such as partial(torch.optim.SGD, lr=0.1), with steps that need no "
            "closure and no metric."
        ) from error


def check_clients(clients: Iterable[ClientData]) -> list[ClientData]:
    """Returns the clients, each under another name, that count labels over the same classes."""
    if isinstance(clients, str | Mapping) or not isinstance(clients, Iterable):
        raise ConfigError(f"clients must be a list of Hospital objects, not {kind(clients)}.")
    every = list(clients)
    for one in every:
        if not hasattr(one, "train_batches"):
            raise ConfigError(
                f"One of the clients is {kind(one)}; give medfed.Hospital(NAME, DATA) for each."
            )
        if not isinstance(one.id, str) or not one.id:
            raise ConfigError(f"The name of a client must be a text, not {one.id!r}.")
    if twice := [name for name, count in Counter(c.id for c in every).items() if count > 1]:
        raise ConfigError(f"Two clients have the name {twice[0]}; give each its own.")
    agreed = [(c.id, c.classes) for c in every if isinstance(c, Batched) and c.classes is not None]
    for name, classes in agreed[1:]:
        if classes != agreed[0][1]:
            raise ConfigError(
                f"{agreed[0][0]} has the classes {agreed[0][1]}, and {name} has {classes}; give "
                "all hospitals the same list."
            )
    return [Beside(c, every) if isinstance(c, Batched) else c for c in every]


def check_labels(algorithm: Algorithm, clients: Iterable[ClientData]) -> None:
    """Refuses a method that compares classes where patients have no class, or several."""
    for client in clients if algorithm.by_class else ():
        label = next(iter(client.eval_batches("train")), {}).get("label")
        one = isinstance(label, Tensor) and label.ndim == 1 and not label.is_floating_point()
        if not one or len(client.label_counts) < 2:
            raise ConfigError(
                f"{algorithm.title} is for patients of one class each, and the labels of "
                f"{client.id} are not that, of two or more classes; choose another algorithm "
                "for outcomes, times, regions, boxes and findings, such as algorithm=fedper."
            )


def check_averages(algorithm: Algorithm, channel: Channel) -> None:
    """Refuses what protects means, of a model that is wholly personal."""
    robust = type(algorithm.aggregation)
    masks = channel.sums is not None
    key = "channel.secure=masks" if masks else f"aggregation={robust.__name__.lower()}"
    if algorithm.parts_averaged and (masks or robust is not Aggregation):
        raise ConfigError(
            f"{key} protects what is averaged, and the model is wholly personal, so "
            f"{algorithm.title} averages nothing; make less of it personal "
            f"(model.personal), or leave {key} out."
        )


def check_averages_moments(algorithm: Algorithm, channel: Channel) -> None:
    """Checks that a server can average the optimizers' state."""
    links = channel.links.items()
    changed = [way for way, link in links if not (link.direct and link.codec.lossless)]
    # Its own declaration: a method that inherits from another may train in another way.
    if not vars(type(algorithm)).get("averages_moments") or algorithm.mask_aware:
        mask = " with algorithm.mask_aware=true" if algorithm.mask_aware else ""
        why = f"{algorithm.title}{mask} does not send the plain mean of one training"
    elif type(algorithm.aggregation) is not Aggregation:
        why = f"aggregation={type(algorithm.aggregation).__name__.lower()} compares weights"
    elif channel.sums is not None:
        why = "channel.secure=masks clips their numbers of steps"
    elif changed:
        why = f"codec.{changed[0]} and channel.{changed[0]} change what is sent"
    else:
        return
    raise cannot_average(why)


def cannot_average(why: str) -> ConfigError:
    """Returns the error of a run whose server cannot average the optimizers' state."""
    return ConfigError(
        f"local.optimizer_state=averaged does not go with this: {why}; choose "
        "local.optimizer_state=kept or fresh."
    )


class Beside(AmongOthers):
    """A hospital's data, with labels counted over the classes of all hospitals."""

    # Looked up in the class, so not passed on by `__getattr__`.
    resident_bytes = property(attrgetter("_data.resident_bytes"))
    resident_on = property(attrgetter("_data.resident_on"))

    @property
    def label_counts(self) -> Tensor:
        """Samples per class of the federation, ``(K,)``; 0 for classes that others have."""
        size = max(len(c.label_counts) for c in self._everyone)
        counts = self._data.label_counts
        if len(counts) > size:
            raise ConfigError(
                f"Hospital {self._data.id} has the label {len(counts) - 1}, and the federation has "
                f"{size} classes; leave those samples out."
            )
        return padded(counts, size)


class Pool(AmongOthers):
    """A client's data, with training batches from all clients.

    An epoch has every training sample of every client once. It joins as many batches as there are
    clients, in a random order over all clients, shuffles their samples and cuts them again, so each
    batch is a mixture. All other data are the client's.
    """

    @property
    def num_samples(self) -> int:
        """Training samples per client, so that budgets in epochs equal those of all clients."""
        return ceil(sum(c.num_samples for c in self._everyone) / len(self._everyone))

    @property
    def num_batches(self) -> int:
        """Batches of the client's size of so many samples."""
        return ceil(self.num_samples / self._data.batch_size)

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch over the samples of all clients, in an order from the seed only."""
        streams = [c.train_batches(derive_seed(seed, c.id)) for c in self._everyone]
        counts = [batches_of(c) for c in self._everyone]
        turns = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        random = torch_rng(seed, "pool")
        turns = turns[torch.randperm(len(turns), generator=random)]
        waiting = iter(turns.tolist())
        while group := list(islice(waiting, len(counts))):
            batches = [next(streams[n]) for n in group]
            joined = {
                k: torch.cat([b[k] for b in batches])
                for k, v in batches[0].items()
                if isinstance(v, Tensor)
            }
            order = torch.randperm(len(next(iter(joined.values()))), generator=random)
            for index in order.split(self._data.batch_size):
                yield {k: v[index.to(v.device)] for k, v in joined.items()}


@dataclass
class CheckedLoss:
    """A user's loss, which must be one number that depends on the network and on no other."""

    loss: Callable[[Batch], Tensor]  # the loss of a batch
    network: nn.Module
    reaches: bool = False  # whether two losses were seen to depend on nothing else
    # The tensors with gradients outside of the network that the first loss depends on.
    others: dict[int, Tensor] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Returns the loss of a batch, without dimensions."""
        try:
            value = self.loss(batch)
        except Exception as error:
            if not isinstance(error, MedfedError):
                error.add_note(f"(in the loss of a batch of {_contents(batch)})")
            raise
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise ConfigError(
                f"The loss must return one number as a tensor, such as loss.mean(), not "
                f"{kind(value)}."
            )
        if torch.is_grad_enabled() and not value.requires_grad and not _in_a_transform():
            raise ConfigError(
                "The loss does not depend on the trained parameters; compute it from the network's "
                "outputs, without detach(), item(), argmax or torch.no_grad()."
            )
        if not (torch.compiler.is_compiling() or self.reaches or not value.requires_grad):
            self._check_reach(value)
        return value.reshape(()) if value.ndim else value

    def _check_reach(self, value: Tensor) -> None:
        """Refuses a loss with parameters that are not the network's, which no step would move."""
        if _in_a_transform():
            return
        network, others, inside = {*map(id, self.network.parameters())}, dict[int, Tensor](), False
        waiting, visited = [value.grad_fn], set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            waiting += [before for before, _ in node.next_functions]
            if type(node).__name__ == "AccumulateGrad":
                leaf: Tensor = node.variable  # type: ignore[attr-defined]
                if id(leaf) in network:
                    inside = True
                else:
                    others[id(leaf)] = leaf
        if not inside:
            raise ConfigError(
                "The loss does not depend on the network that it is given; compute it from the "
                "outputs of its first argument, as in loss(network, batch)."
            )
        # What is there in a second loss is no image of a batch, whose gradient a loss may use.
        before = self.others or {}
        outside = [t for n, t in others.items() if n in before or isinstance(t, nn.Parameter)]
        if outside:
            shapes = few([str(list(t.shape)) for t in outside], 3)
            raise ConfigError(
                f"The loss has weights outside of the network, of shape {shapes}, which no step "
                "would train; make them parameters of the network, or set requires_grad_(False) on "
                "them."
            )
        self.reaches, self.others = self.others is not None, others
        if self.reaches:
            self.others = {}


def _contents(batch: Batch) -> str:
    """Names the tensors of a batch.

    Example:
        >>> _contents({"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])})
        'image [2, 3] float32, label [2] int64'
    """
    tensors = [(name, t) for name, t in batch.items() if isinstance(t, Tensor)]
    return ", ".join(
        f"{n} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in tensors
    )


def _in_a_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None
