"""The plain loop, which every other runtime equals bit for bit, and ``federate`` for your code.

Neither configurations nor Lightning are needed:

>>> from medfed.personalize.ditto import Ditto
>>> clients = [ArrayClient(c, torch.randn(20, 3), torch.randn(20, 1)) for c in ("a", "b")]
>>> def loss(network, batch):
...     return (network(batch["image"]) - batch["label"]).square().mean()
>>> done = federate(Ditto(strength=0.1), nn.Linear(3, 1), loss, clients, rounds=2)
>>> done.model("a")(torch.zeros(1, 3)).shape, done.ledger.total(direction="up")
(torch.Size([1, 1]), 112)

The module also onboards a client to a trained federation, and counts the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from medfed.common.errors import ConfigError
from medfed.common.seeding import torch_rng
from medfed.common.tensors import Tensors
from medfed.federation.algorithm import Algorithm, ClientInfo, Cohort
from medfed.federation.budget import LocalBudget, OptimizerFactory, SchedulerFactory
from medfed.federation.client import Batch, ClientData
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation, check_reply, count
from medfed.federation.local_client import LocalClient
from medfed.federation.missing_channels import entries_reading
from medfed.federation.onboarding import rules_of
from medfed.federation.other_state import copied, filled
from medfed.federation.split import BufferPolicy
from medfed.federation.wire.channel import Channel, Memory, Place
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.message import Message
from medfed.federation.wire.packet import Packet

Loss = Callable[[nn.Module, Batch], Tensor]


class _Batched:
    """What follows from the batches of a client's samples."""

    num_samples: int

    def eval_batches(self, split: Literal["train", "val", "test"]) -> Iterator[Batch]:
        """Yields a split in order."""
        raise NotImplementedError

    @cached_property
    def label_counts(self) -> Tensor:
        """Samples per class, ``(K,)``; one class if labels are not one whole number each."""
        labels: list[Any] = [batch.get("label") for batch in self.eval_batches("train")]
        if all(isinstance(t, Tensor) and t.ndim == 1 and not t.is_floating_point() for t in labels):
            return torch.bincount(torch.cat(labels).long())
        return torch.tensor([self.num_samples])

    @cached_property
    def channels(self) -> Tensor:
        """All channels, ``(C,)``."""
        first = self.train_inputs(1)
        return torch.ones(first.shape[1] if first.ndim > 1 else 1, dtype=torch.bool)

    def train_inputs(self, limit: int) -> Tensor:
        """Returns the first inputs."""
        images: list[Tensor] = []
        for batch in self.eval_batches("train"):
            images.append(batch["image"])
            if sum(map(len, images)) >= limit:
                break
        return torch.cat(images)[:limit]

    def patients_behind(self, limit: int) -> int:
        """Returns how many samples these inputs are of; each counts as a patient."""
        return min(limit, self.num_samples)


@dataclass(frozen=True)
class ArrayClient(_Batched):
    """A client whose data are two tensors.

    Attributes:
        id: Its name.
        inputs: ``(n, ...)``, in batches under ``image``.
        labels: ``(n, ...)``, in batches under ``label``.
        batch_size: Samples per training batch.
    """

    id: str
    inputs: Tensor
    labels: Tensor
    batch_size: int = 16

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # as a property it cannot be set
        """Number of training samples."""
        return len(self.inputs)

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch, in an order from the seed only."""
        order = torch.randperm(self.num_samples, generator=torch_rng(seed))
        yield from self._batches(order)

    def eval_batches(self, split: Literal["train", "val", "test"]) -> Iterator[Batch]:
        """Yields all samples in order, for every split."""
        yield from self._batches(torch.arange(self.num_samples))

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        for rows in order.split(self.batch_size):
            yield {"image": self.inputs[rows], "label": self.labels[rows]}


class Hospital(_Batched):
    """A client whose data are PyTorch's data sets or loaders, MONAI's among them.

    A sample is a pair of image and label, or a dictionary with both; or, as MONAI's random crops
    give it, a list of dictionaries. The order of an epoch comes from the run's seed alone, and so
    do random transforms of MONAI: a loader's sampler gets a new generator, and the data set's
    ``transform`` a new random state, in every epoch.

    Args:
        id: Its name.
        train: A ``Dataset`` with a length, a list of samples, or a ``DataLoader``.
        val: The same, of the validation split; only some methods need it.
        test: The same, of the test split.
        batch_size: Samples per batch; a loader keeps its batches.
        keys: The names of image and label in dictionaries.

    Raises:
        ConfigError: If a split has no length or no sample.

    Example:
        >>> samples = [{"ct": torch.zeros(1, 8), "mask": torch.tensor(k)} for k in (0, 1, 1)]
        >>> north = Hospital("north", samples, batch_size=2, keys=("ct", "mask"))
        >>> [batch["image"].shape for batch in north.train_batches(seed=0)]
        [torch.Size([2, 1, 8]), torch.Size([1, 1, 8])]
        >>> north.label_counts
        tensor([1, 2])
    """

    def __init__(
        self,
        id: str,
        train: Any,
        val: Any = None,
        test: Any = None,
        *,
        batch_size: int = 16,
        keys: tuple[str, str] = ("image", "label"),
    ) -> None:
        self.id, self.keys = id, keys
        splits = {"train": train, "val": val, "test": test}
        self._loaders = {
            name: self._loader(name, given, batch_size)
            for name, given in splits.items()
            if given is not None
        }
        self._train = self._loaders["train"]
        data: Any = self._train.dataset
        self.num_samples, self.batch_size = len(data), self._train.batch_size or batch_size
        self._loaders["train"] = DataLoader(
            data, self.batch_size, collate_fn=self._train.collate_fn
        )

    def _loader(self, split: str, given: Any, batch_size: int) -> DataLoader[Any]:
        data: Any = given.dataset if isinstance(given, DataLoader) else given
        try:
            empty = len(data) == 0
        except TypeError:
            empty = True
        if empty:
            raise ConfigError(
                f"Hospital {self.id}: {split} is of the type {type(data).__name__}, without a "
                "length or without a sample; give a Dataset with both, or a DataLoader of one."
            )
        if isinstance(given, DataLoader):
            return given
        return DataLoader(given, batch_size, shuffle=split == "train", collate_fn=_collated)

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields one epoch, in an order from the seed only."""
        sampler = getattr(self._train.batch_sampler, "sampler", self._train.sampler)
        for drawing in (self._train, sampler):
            if hasattr(drawing, "generator"):
                drawing.generator = torch_rng(seed)
        transform: Any = getattr(self._train.dataset, "transform", None)
        if hasattr(transform, "set_random_state"):
            transform.set_random_state(seed % 2**32)
        return map(self._named, self._train)

    def eval_batches(self, split: Literal["train", "val", "test"]) -> Iterator[Batch]:
        """Yields a split in order; nothing of a split that is not there."""
        return map(self._named, self._loaders.get(split, ()))

    def _named(self, given: Any) -> Batch:
        """Returns a batch with the names that federations use, the image first."""
        pair = isinstance(given, list | tuple) and len(given) == 2
        batch = dict(zip(self.keys, given, strict=True)) if pair else given
        image, label = self.keys
        if not isinstance(batch, Mapping) or not isinstance(batch.get(image), Tensor):
            held = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise ConfigError(
                f"Hospital {self.id}: a batch is a {type(given).__name__} {held}".rstrip()
                + f"; give pairs of image and label, or dictionaries with the tensor {image!r}, "
                "or name the keys, as in keys=('ct', 'mask')."
            )
        renamed = {"image": batch[image], **({"label": batch[label]} if label in batch else {})}
        batch = renamed | {k: v for k, v in batch.items() if k not in self.keys}
        return {k: v.as_tensor() if hasattr(v, "as_tensor") else v for k, v in batch.items()}


def _collated(samples: Sequence[Any]) -> Any:
    """Joins samples to a batch, as MONAI does: one sample may be a list of dictionaries."""
    crops = isinstance(samples[0], list) and isinstance(samples[0][0], Mapping)
    return default_collate([s for each in samples for s in each] if crops else list(samples))


@dataclass(frozen=True)
class Federated:
    """The result of a federation.

    Attributes:
        federation: All states, for a closer look.
        network: The initial network.
    """

    federation: Federation
    network: nn.Module

    @property
    def ledger(self) -> Ledger:
        """Every byte that travelled."""
        return self.federation.ledger

    def losses(self, split: Literal["train", "val", "test"] = "test") -> dict[str, float]:
        """Returns each client's mean loss on one of its splits, by its personal model.

        Raises:
            ConfigError: If a client has no sample there.
        """
        fed = self.federation
        assert fed.trainer is not None  # a federation of this module trains here
        at = {name: fed.personal_model(name) for name in fed.clients}
        return {n: fed.trainer.evaluated(fed.clients[n].data, at[n], split) for n in at}

    def weights(self, client: str) -> Tensors:
        """Returns a client's personal model: the tensors of its state dict, by name.

        Other state, which no state dict names, is in ``other state``, if there is any.

        Raises:
            ConfigError: If there is no such client.
        """
        if client not in self.federation.clients:
            known = ", ".join(self.federation.clients)
            raise ConfigError(f"There is no client {client!r}; the clients are {known}.")
        assert self.federation.trainer is not None
        return self.federation.trainer.model.whole(self.federation.personal_model(client))

    def model(self, client: str) -> nn.Module:
        """Returns a new network with a client's personal weights, in evaluation mode.

        Raises:
            ConfigError: If there is no such client.
        """
        return filled(copied(self.network), self.weights(client)).eval()


def assemble(
    algorithm: Algorithm,
    network: nn.Module,
    loss: Callable[[Batch], Tensor],
    clients: Sequence[ClientData],
    *,
    personal: str | Sequence[str] = (),
    buffers: BufferPolicy = "averaged",
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None = None,
    rounds: int = 1,
    budget: LocalBudget | None = None,
    channel: Callable[[Algorithm], Channel] | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    measure: Callable[[Iterable[Batch]], float] | None = None,
    everyone: Sequence[ClientInfo] | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Federation, LocalTrainer]:
    """Makes a federation: split, training loop, initial states, clients.

    Args:
        algorithm: The method.
        network: The model, at its initial weights.
        loss: Of a batch, under ``network``.
        clients: The data of the clients of this process, in order.
        personal: The task's personal part: patterns of parameter names.
        buffers: Policy of running statistics.
        optimizer: Makes an optimizer of a list of parameters.
        scheduler: Makes a schedule over rounds.
        rounds: Length of the schedule.
        budget: Local steps per round, clipping and optimizer state.
        channel: Makes the channel for the adapted algorithm.
        cohort: The clients that take part in a round.
        seed: Seed of the run.
        measure: Gives the loss of validation batches, for algorithms that ask for it.
        everyone: All clients of the federation, if not all are in this process.
        shape: The shape of one input, if no client is in this process.

    Raises:
        ConfigError: If the algorithm does not fit the network, or a name is unknown.
    """
    split = algorithm.split(network, personal, buffers)
    algorithm = algorithm.adapted(split, network)
    local = LocalTrainer(network, loss, split, optimizer, scheduler, rounds, budget, seed, measure)
    weights = local.model.initial()
    if everyone is None:
        everyone = [ClientInfo(c.id, c.num_samples) for c in clients]
    server, state = algorithm.init(weights, split, everyone)
    if algorithm.mask_aware:
        shape = shape or clients[0].train_inputs(1).shape[1:]
        server = {**server, "reads": entries_reading(network, shape)}
    local_clients = {c.id: LocalClient(c, local, weights, state) for c in clients}
    sent = None if channel is None else channel(algorithm)
    cohort = cohort or Cohort()
    cohort.of([c.id for c in everyone], seed, 0)  # an unknown client is named here
    return Federation(algorithm, server, local_clients, everyone, sent, cohort, seed, local), local


def federate(
    algorithm: Algorithm,
    network: nn.Module,
    loss: Loss,
    clients: Sequence[ClientData],
    *,
    rounds: int = 10,
    steps: int | None = None,
    lr: float = 0.1,
    optimizer: OptimizerFactory | None = None,
    personal: str | Sequence[str] = (),
    buffers: BufferPolicy = "averaged",
    channel: Channel | None = None,
    cohort: Cohort | None = None,
    seed: int = 0,
    after_round: Callable[[int, Federated], None] | None = None,
) -> Federated:
    """Federates an algorithm over your own clients and network, by the plain loop.

    The results equal those of a run under Lightning with the same weights, batches and seed.

    Args:
        algorithm: Any of :mod:`medfed.personalize`, or your own; ``medfed.federate`` takes a
            method's name, too, such as ``"fedavg"``, for the method with its default values.
        network: Your network; a copy of it is trained, from its present weights.
        loss: Of a batch under a network: ``loss(network, batch)``.
        clients: :class:`ArrayClient`, :class:`Hospital`, or any object with the interface
            :class:`medfed.federation.client.ClientData`.
        rounds: Federated rounds.
        steps: Gradient steps per client and round; ``None``: an epoch.
        lr: Step size of SGD, if no optimizer is given.
        optimizer: Makes an optimizer of a list of parameters.
        personal: The personal part for algorithms that ask for one: a pattern of parameter names,
            such as ``"class_layers.*"``, or several.
        buffers: BatchNorm statistics: ``averaged``, ``local`` or ``frozen``.
        channel: Codecs; dense fp32 by default.
        cohort: The clients that take part in a round; all by default.
        seed: Seed of all random choices.
        after_round: Called with each round's number and the federation so far.

    Raises:
        ConfigError: If the algorithm does not fit the network, or a name is unknown.
        NonFiniteError: If a loss becomes NaN or infinite; client, round and phase are named.
    """
    before, network = copied(network), copied(network)
    federation, _ = assemble(
        algorithm,
        network,
        partial(loss, network),
        clients,
        personal=(personal,) if isinstance(personal, str) else personal,
        buffers=buffers,
        optimizer=optimizer or partial(torch.optim.SGD, lr=lr),
        rounds=rounds,
        budget=LocalBudget(steps=steps),
        channel=None if channel is None else lambda _: channel,
        cohort=cohort,
        seed=seed,
    )
    done = Federated(federation, before)
    run_reference(federation, rounds, after_round and (lambda number: after_round(number, done)))
    return done


def run_reference(
    federation: Federation,
    rounds: int,
    after_round: Callable[[int], None] | None = None,
    start: int = 0,
) -> Federation:
    """Runs rounds client by client, in one process, without Lightning.

    Args:
        federation: The federation; it is advanced in place.
        rounds: The number of rounds of the whole run.
        after_round: Called with the round's number after the round.
        start: The first round to run.

    Returns:
        The same federation.
    """
    for number in range(start, rounds):
        current = federation.open(number)
        while current.exchange({c: current.fit(c) for c in current.recipients}):
            pass
        if after_round:
            after_round(number)
    return federation


OUTSIDE = -1  # the number of no round


def onboarded_client(federation: Federation, data: ClientData) -> LocalClient:
    """Returns a client in the initial state of all clients; it does not join the federation.

    Args:
        federation: A federation with at least one client in this process.
        data: The onboarded client's data.
    """
    like = next(iter(federation.clients.values()))
    return LocalClient(data, like.trainer, like.weights, federation.client_start)


class Newcomer:
    """The client's half of a method's onboarding.

    Args:
        federation: A federation whose channel and method it uses.
        client: The onboarded client, in the initial state of all; its end of the channel changes.

    Attributes:
        phase: How many questions it has answered.
        ledger: What it has received and sent.
    """

    def __init__(self, federation: Federation, client: LocalClient) -> None:
        self.federation, self.client = federation, client
        self.phase = 0
        self.ledger = Ledger()

    def answer(self, packet: Packet) -> Packet:
        """Answers a question of the server."""
        algorithm, client = self.federation.algorithm, self.client
        message = self._received(packet)
        client.begin(0, message.phase, self.phase)
        reply = algorithm.fit(client, message)
        check_reply(algorithm, reply)
        place, memory = Place(client.id, OUTSIDE, self.phase), client.memory
        encoded, memory["up"] = self.federation.channel.encode(reply, "up", place, memory["up"])
        count(self.ledger, encoded, OUTSIDE, encoded.phase, client.id, "up")
        self.phase += 1
        return encoded

    def begin(self, packet: Packet) -> Message:
        """Returns the last message, from which the client then starts."""
        message = self._received(packet)
        # This name is part of the seeds of published results.
        self.client.begin(0, "join", self.phase)
        return message

    def _received(self, packet: Packet) -> Message:
        memory = self.client.memory
        message, memory["down"] = self.federation.channel.decode(packet, "down", memory["down"])
        count(self.ledger, packet, OUTSIDE, packet.phase, self.client.id, "down")
        return message


def question(
    federation: Federation, info: ClientInfo, send: Callable[[Packet, bool], Packet], ledger: Ledger
) -> None:
    """Runs the server's half of a method's onboarding; the server's state does not change.

    Args:
        federation: The trained federation.
        info: The onboarded client.
        send: Sends a message to it, and returns its answer; the last message needs none.
        ledger: Counts the messages.
    """
    algorithm, channel, phase = federation.algorithm, federation.channel, 0
    memory: dict[Direction, Memory] = {"up": {}, "down": {}}  # its end of the client's channel

    def answered(message: Message, last: bool) -> Packet:
        place = Place(info.id, OUTSIDE, phase)
        packet, memory["down"] = channel.encode(message, "down", place, memory["down"])
        count(ledger, packet, OUTSIDE, packet.phase, info.id, "down")
        return send(packet, last)

    generator = rules_of(algorithm).onboarding(federation.server, info)
    try:
        message = next(generator)
        while True:
            packet = answered(message, last=False)
            answer, memory["up"] = channel.decode(packet, "up", memory["up"])
            check_reply(algorithm, answer)
            count(ledger, packet, OUTSIDE, packet.phase, info.id, "up")
            phase += 1
            message = generator.send(answer)
    except StopIteration as stop:
        answered(stop.value, last=True)


def exchange(federation: Federation, client: LocalClient) -> tuple[Message, Ledger]:
    """Runs both halves of a method's onboarding.

    Every message passes through the run's channel, as bytes and back. Neither the server's state
    nor its end of the channel changes.

    Args:
        federation: The trained federation.
        client: The onboarded client, from :func:`onboarded_client`; its end of the channel changes.

    Returns:
        The message from which the onboarded client starts, and the ledger.
    """
    newcomer, ledger = Newcomer(federation, client), Ledger()
    packets: list[Packet] = []

    def send(packet: Packet, last: bool) -> Packet:
        packets.append(packet)
        return packet if last else newcomer.answer(packet)

    question(federation, ClientInfo(client.id, client.num_samples), send, ledger)
    return newcomer.begin(packets[-1]), ledger
