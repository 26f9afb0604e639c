"""What the methods over canonical models share: memberships, their record, steps beside them.

A network with canonical parts (:class:`medfed.models.networks.Canonical`) has one more parameter,
the membership vector c in the simplex. It is the client's own; all else is shared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medfed.errors import ConfigError
from medfed.federation.algorithm import ClientInfo
from medfed.federation.client import Client, GradientAt, share_of, with_statistics
from medfed.federation.collect import rank
from medfed.federation.message import Message
from medfed.federation.split import BufferPolicy, ParameterSplit
from medfed.federation.tensors import State, Tensors
from medfed.personalize.fedavg import FedAvg

MEMBERSHIP = "membership"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixing(FedAvg):
    """FedAvg over a canonical model whose membership vector stays personal.

    ``server["membership"]`` holds a row per client, ``server["history"]`` all rows of the start
    and of every round so far.

    Raises:
        ConfigError: If another part is declared personal.
    """

    personal: str | tuple[str, ...] = MEMBERSHIP
    mixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal != (MEMBERSHIP,):
            raise ConfigError(
                f"algorithm.personal is {MEMBERSHIP} in {type(self).__name__}; what exists K times "
                "is chosen by canonical.parts."
            )

    def split(
        self, network: nn.Module, task_patterns: Sequence[str], buffers: BufferPolicy
    ) -> ParameterSplit:
        """The membership vector is personal, all else is shared.

        Raises:
            ConfigError: If the model has no canonical part.
        """
        if MEMBERSHIP not in dict(network.named_parameters()):
            raise ConfigError(
                f"algorithm={type(self).__name__.lower()} needs a model with a canonical part, and "
                "this one has none; choose canonical=outputs or canonical=parameters."
            )
        return super().split(network, task_patterns, buffers)

    def init(
        self, weights: Tensors, split: ParameterSplit, clients: Sequence[ClientInfo]
    ) -> tuple[State, State]:
        """All memberships start at 1/K."""
        start = torch.full_like(weights[MEMBERSHIP], 1 / weights[MEMBERSHIP].numel())
        server, client = super().init({**weights, MEMBERSHIP: start}, split, clients)
        if start.numel() > len(clients) and rank() == 0:
            _log.warning(
                "There are %d canonical models for %d clients, more than they can tell apart.",
                start.numel(),
                len(clients),
            )
        server["membership"] = {c.id: start for c in clients}
        server["history"] = {MEMBERSHIP: start.expand(1, len(clients), -1).clone()}
        return server, client

    def record(self, server: State) -> None:
        """Appends the present memberships to the history."""
        rows = torch.stack([server["membership"][c] for c in server["num_samples"]])
        server["history"] = {MEMBERSHIP: torch.cat([server["history"][MEMBERSHIP], rows[None]])}

    def shared_steps(self, client: Client, start: Tensors, steps: int | None = None) -> Tensors:
        """Steps on all but the membership, by default the round's whole budget."""
        if not client.split.buffers.intersection(client.split.personal):
            return client.train(start, update="shared", steps=steps)

        # Statistics that stay with the client follow the steps as well, so all entries are free
        # and the membership is put back.
        def put_back(weights: Mapping[str, Tensor], _: GradientAt) -> None:
            weights[MEMBERSHIP].copy_(start[MEMBERSHIP])

        return client.train(start, update="all", steps=steps, after_step=put_back)

    def fit_membership(self, client: Client, start: Tensors, steps: int) -> Tensor:
        """Returns the membership (K,) of a newcomer in the canonical models as they are.

        Args:
            client: The newcomer.
            start: All entries, the membership at 1/K.
            steps: Gradient steps, for methods that take some.
        """
        return start[MEMBERSHIP]

    def arrival(self, client: Client, message: Message) -> Tensors:
        """All canonical models alike."""
        start = super().arrival(client, message)
        return {**start, MEMBERSHIP: torch.full_like(start[MEMBERSHIP], 1 / len(start[MEMBERSHIP]))}

    def join(self, client: Client, message: Message) -> Tensors:
        """A newcomer fits its membership and nothing else."""
        start = self.arrival(client, message)
        found = self.fit_membership(client, start, client.steps)
        return with_statistics(client, {**start, MEMBERSHIP: found})

    def fine_tune(self, client: Client, message: Message) -> Tensors:
        """Half of the steps fit the membership as in :meth:`join`, half train all else."""
        start = self.arrival(client, message)
        found = self.fit_membership(client, start, share_of(client.steps, 0, 2))
        return self.shared_steps(client, {**start, MEMBERSHIP: found}, share_of(client.steps, 1, 2))

    def alone(self, client: Client) -> Tensors:
        """Instance 0 alone: the network that a method without canonical parts starts from."""
        first = torch.zeros_like(client.weights[MEMBERSHIP])
        first[0] = 1
        return self.shared_steps(client, {**client.weights, MEMBERSHIP: first})

    def memberships(self, server: State) -> Tensor:
        """Of every round; a client that was absent has those that it had."""
        return server["history"][MEMBERSHIP]
