"""The federation: the states of server and clients, and the model that each client gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfed.common.tensors import State, Tensors, digest, states_on
from medfed.federation.aggregation import Outlier
from medfed.federation.algorithm import Algorithm, ClientInfo, Cohort
from medfed.federation.duties import check_message, check_model, unchanged
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.engine.private import ClientPrivacy
from medfed.federation.local_client import LocalClient
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.codecs.base import MAX_UNCHECKED
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import KINDS, Message, Packet


class Federation:
    """The server's state, the clients of this process, and the channel between them.

    `clients`: those that this process trains. `everyone`: all clients of the federation on all
    ranks, in order. `trainer`: the training loop; a server without clients has its network, too.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        server: State,
        clients: Mapping[str, LocalClient],
        everyone: Sequence[ClientInfo],
        trainer: LocalTrainer,
        channel: Channel | None = None,
        cohort: Cohort | None = None,
        seed: int = 0,
    ) -> None:
        self.cohort = cohort or Cohort()
        algorithm.check_cohort(self.cohort)
        self.algorithm = algorithm
        self.server = server
        self.clients = dict(clients)
        self.ids = [c.id for c in everyone]
        self.samples: Mapping[str, int] = {c.id: c.num_samples for c in everyone}
        self._all_samples = sum(self.samples.values())
        self.channel = channel or Channel()
        self.ledger = Ledger()
        self.seed = seed
        # The state of the server's end of the channel, by direction and client.
        self.memory: dict[Direction, State] = {"up": {}, "down": {}}
        # What this process's clients lack of the result, sent by a server elsewhere.
        self.arrived: dict[str, Packet] = {}
        self.far: list[Outlier] = []  # parts of replies far longer than those of the others
        self.compares = False  # whether each client's update is compared with the others'
        self.client_start: State = next((dict(c.state) for c in self.clients.values()), {})
        self.absent_folder: Path | None = None  # for the state of absent clients; None: in memory
        self.noise: ClientPrivacy | None = None  # what clients add to their replies, if protected
        self.channel.seed = seed
        self.trainer = trainer
        # Whether the server averages the optimizers' state.
        self.averages_moments = trainer.budget.optimizer_state == "averaged"
        # No lossy codec may change buffers; every client has the same model.
        self.channel.buffers = trainer.split.buffers.union(algorithm.exact)

    def to(self, device: torch.device) -> None:
        """Moves all states to a device, but for those that clients keep between their turns."""
        self.channel.device = device
        weights = {name: client.weights for name, client in self.clients.items()}
        states = {"server": self.server, "start": self.client_start, "weights": weights}
        moved = states_on({**states, **self.memory}, device)
        self.server, self.client_start = moved["server"], moved["start"]
        self.memory = {d: moved[d] for d in self.memory}
        for name, client in self.clients.items():
            client.weights = moved["weights"][name]

    def bytes_between_rounds(self) -> int:
        """The approximate size of one client's state between rounds, with optimizer and channel."""
        if not self.clients:
            return 0
        modes = [link.mode(kind) for link in self.channel.links.values() for kind in KINDS]
        lossy = min(2, len(modes) - modes.count("plain"))
        return next(iter(self.clients.values())).bytes_between_rounds(lossy)

    def members(self, round: int) -> tuple[str, ...]:
        """Returns the cohort of a round."""
        return self.cohort.of(self.ids, self.seed, round)

    def share(self, client: str) -> float:
        """Returns a client's weight among all clients, whether they take part or not."""
        if self.algorithm.weighting == "uniform":
            return 1 / len(self.ids)
        return self.samples[client] / self._all_samples

    @property
    def most_elements(self) -> int:
        """A bound above any reply: many models, or the minimum that a receiver always accepts."""
        size = sum(map(Tensor.numel, self.trainer.model.entries.values()))
        return max(MAX_UNCHECKED, 64 * size)

    def delivery(self, client: str) -> Packet:
        """Returns the part of the current result that a client lacks; changes neither end."""
        with unchanged(self.algorithm, self.server, "group {} of the server's state"):
            message = self.algorithm.broadcast(self.server, client)
        check_message(self.algorithm, "broadcast returns", message)
        last = self.memory["down"].get(client)
        return self.channel.encode(message, "down", MessageContext(client), last)[0]

    def delivered(self, client: str) -> Message:
        """Returns the part that a client of this process lacks, as it would decode it."""
        last = self.clients[client].memory["down"]
        # At a hospital's site the server's state is elsewhere, and its packet has arrived.
        packet = self.arrived.get(client) or self.delivery(client)
        return self.channel.decode(packet, "down", last)[0]

    def personal_model(self, client: str, split: str = "test") -> Tensors:
        """Returns the model that a client of this process evaluates on a split; changes no state.

        It is the client's model after decoding, including the losses of a lossy codec.
        """
        with self.clients[client].loaded() as local:
            passes = local.passes
            delivered = self.delivered(client)
            with unchanged(self.algorithm, local.state, "group {} of the client's state"):
                model = self.algorithm.personal_model(local, delivered)
            local.passes = passes  # of an evaluation, which are not the training's
            entries, other = local.trainer.model.entries, local.moved_other_state
            check_model(self.algorithm, client, entries, other, model)
            return self.as_evaluated(local, model, split)

    def as_evaluated(self, local: LocalClient, model: Tensors, split: str = "test") -> Tensors:
        """Returns a client's model as it is evaluated on a split.

        Its statistics of normalisation are those that the run wants; what the method fits on
        validation cases is in it, unless the split is that of validation.
        """
        if self.noise is not None:
            return model
        if (self.algorithm.normalization or local.trainer.normalization) == "reestimated":
            model = local.trainer.reestimated(local.data, model)
        return model if split == "val" else self.algorithm.completed(local, model)

    def centers(self, client: str) -> Tensors:
        """Returns the centres of a client's quantised parameters, by name; changes no state."""
        with self.clients[client].loaded() as local:
            return self.algorithm.centers(local, self.delivered(client))

    def memberships(self) -> Tensor | None:
        """Returns the clients' memberships in canonical models over rounds, if there are any."""
        return self.algorithm.memberships(self.server)

    def pictures(self) -> Mapping[str, Any]:
        """Returns figures of the server's state, by name, if there are any."""
        return self.algorithm.pictures(self.server, self.ids)

    def count_delivery(self, round: int, clients: Sequence[str] | None = None) -> None:
        """Adds the delivery of the final result to every client, or to some, to the ledger."""
        for client in self.ids if clients is None else clients:
            self.ledger.count(self.delivery(client).sizes(), round, "deliver", client, "down")

    def digests(self) -> dict[str, str]:
        """Returns a hash of the states of the server and of each client of this process.

        The states of both ends of the channel are included.
        """
        ends = {f"{d}/{c}": named for d, state in self.memory.items() for c, named in state.items()}
        hashes = {"server": _digest(self.server, ends)}
        return hashes | {
            f"client/{c}": _digest(local.state, local.memory) for c, local in self.clients.items()
        }


def _digest(state: State, memory: State) -> str:
    whole = state | {f"memory/{group}": named for group, named in memory.items()}
    return digest({f"{g}/{n}": t for g, named in whole.items() for n, t in named.items()})
