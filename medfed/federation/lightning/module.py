"""The LightningModule of a federated run: an epoch is a round, and a round is one batch.

It moves clients between ranks, and gathers the replies of all ranks.
"""

# Callbacks of rounds go with a FederatedModule alone.
# mypy: disable-error-code="override"

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn

from medfed.common.streams import globals_kept
from medfed.federation.budget import Passes
from medfed.federation.contributions import COSINES
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.lightning.collect import Gathering, gather_named, gathered, world_size
from medfed.federation.lightning.evaluating import EvaluatingModule, TaskLike
from medfed.federation.lightning.strategy import assign, check_trainer
from medfed.federation.round import Round
from medfed.federation.wire.packet import Packet
from medfed.standalone.errors import CheckpointError, CodecError, ConfigError, NonFiniteError


class Once:
    """One batch for Lightning: a whole round, or an evaluation, of this rank's clients.

    Lightning takes longer over a batch than a small network over a step, waits for the first rank
    at every batch, and may stop after any.
    """

    def __iter__(self) -> Iterator[str]:
        """Yields the batch."""
        yield "all clients"


class FederatedModule(EvaluatingModule):
    """Wraps a task module and a federation for one Lightning Trainer on one or many ranks.

    The working client overwrites the task's network.
    """

    needs_rounds: ClassVar[bool] = True  # the callback that counts them

    def __init__(self, task: TaskLike, federation: Federation, local: LocalTrainer) -> None:
        super().__init__(task, federation, local)
        self._taken: dict[str, float] | None = None  # in this round; None in the first one
        self.automatic_optimization = False
        self.strict_loading = False
        # At the start and the end of a client's work.
        self.listeners: list[Callable[[str, str, bool], None]] = []
        self._group: dist.ProcessGroup | None = None

    def configure_callbacks(self) -> list[pl.Callback]:
        """Returns none; Lightning calls it first, so that it refuses what rounds cannot follow."""
        trainer: Any = self.trainer
        check_trainer(trainer, self.task.network)
        closing = any(getattr(each, "closes_rounds", False) for each in trainer.callbacks)
        if self.needs_rounds and trainer.state.fn == TrainerFn.FITTING and not closing:
            raise ConfigError(
                "The Trainer has no callback that closes rounds; add FederatedRounds() of "
                "medfed.federation.lightning.callbacks."
            )
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns one that no weight follows: it shows the round's step size to callbacks."""
        return self.local.model.make_optimizer([nn.Parameter(torch.zeros(1))])

    def setup(self, stage: str) -> None:
        """Passes every loss through the precision plugin; clients' loops do the backward pass."""
        training = stage == "fit"
        plugin = self.trainer.precision_plugin
        self.local.gradients.precision = plugin.forward_context if training else nullcontext
        # The plugin's scaler would carry the scale of one client to the next.
        self.local.gradients.half = training and getattr(plugin, "scaler", None) is not None

    def on_fit_start(self) -> None:
        """Moves all states to the device."""
        self.federation.to(self.device)

    on_test_start = on_fit_start

    def on_fit_end(self) -> None:
        """Gives the device's memory of training samples back."""
        self.local.residents.release()

    def train_dataloader(self) -> Once:
        """Each round, as one batch."""
        return Once()

    def val_dataloader(self) -> list[str]:
        """One batch, for all clients; evaluations need its length."""
        return [*Once()]

    test_dataloader = val_dataloader

    def training_step(self, batch: str, batch_idx: int) -> None:
        """Runs a whole round: this rank's clients in every phase, with the exchanges between.

        Clients may first move to ranks with less work. No result depends on the ranks: a client's
        random numbers depend only on the client.
        """
        current, self.losses = Round(self.federation, self.next_round), {}
        self._reassign(current.cohort)
        with self._full_precision():  # losses alone are computed in the run's precision
            is_open = True
            while is_open:
                self._train(current)
                is_open = current.close_phase()
        if self._taken is not None:  # in the first round libraries warm up
            self.seconds |= self._taken
        self._taken = {}

    def _train(self, current: Round) -> None:
        """Trains this rank's clients; hands the round the replies of the clients of all ranks.

        A client that fails on one rank is an error on every rank.
        """
        clients = self._on_this_rank(current.recipients)
        if world_size() == 1:
            with globals_kept(self.device):
                for client in clients:
                    current.receive(client, self._fit(current, client))
            known = {c: self.federation.clients[c].training_loss for c in clients}
            self.losses |= {c: loss for c, loss in known.items() if loss is not None}
            return
        gathering = self._start_gathering(current.recipients)
        with globals_kept(self.device):
            for client in clients:
                began = time.perf_counter()
                try:
                    reply = self._fit(current, client).to_bytes()
                except (NonFiniteError, CodecError) as error:
                    # The other ranks wait for replies: they get the error at the end of the phase.
                    gathering.put({f"failure/{client}": str(error)})
                    continue
                cost = time.perf_counter() - began, self.federation.clients[client].training_loss
                gathering.put({f"reply/{client}": reply, f"costs/{client}": cost})
        replies, most = gathering.finish(), self.federation.most_elements
        for client in current.recipients:
            if failure := replies.get(f"failure/{client}"):
                raise NonFiniteError(failure)
        for client in current.recipients:
            current.receive(client, Packet.from_bytes(replies.pop(f"reply/{client}"), most))
            taken, loss = replies[f"costs/{client}"]
            if self._taken is not None:
                self._taken[client] = self._taken.get(client, 0.0) + taken
            if loss is not None:
                self.losses[client] = loss

    def _fit(self, current: Round, client: str) -> Packet:
        """Trains a client, and returns its encoded reply."""
        for tell in self.listeners:
            tell(current.phase, client, False)
        packet = current.fit(client)
        for tell in self.listeners:
            tell(current.phase, client, True)
        return packet

    def _start_gathering(self, recipients: Sequence[str]) -> Gathering:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        counts = Counter(self.owners[c] for c in recipients)
        return Gathering(max(counts.values(), default=0), self._group)

    def _reassign(self, cohort: Sequence[str]) -> None:
        """Moves clients of a cohort to ranks with less work; a collective call."""
        if world_size() == 1 or not self.seconds:
            return
        better = assign(self._work(cohort), world_size(), self.owners)
        moved = [c for c in cohort if better[c] != self.owners[c]]
        if moved:
            states = self._gather_states(c for c in self._on_this_rank(cohort) if c in moved)
            spent = self.spent()
            for client in moved:
                local = self.federation.clients[client]
                local.load_state_dict(states[client])
                local.steps_done, local.passes = spent[client]
            self.owners |= better

    def spent(self) -> dict[str, tuple[int, Passes]]:
        """Returns every client's gradient steps and passes so far; a collective call."""
        here = {c: self.federation.clients[c] for c in self.owned}
        return gather_named({c: (k.steps_done, k.passes) for c, k in here.items()})

    def _gather_states(self, clients: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Returns clients' states, by default of all clients of all ranks; a collective call.

        A rank's clients are saved together, so that common tensors stay one tensor after resuming.
        """
        here = self.owned if clients is None else clients
        states = {c: self.federation.clients[c].state_dict() for c in here}
        if world_size() == 1:
            return states
        buffer = io.BytesIO()
        torch.save(states, buffer)
        everywhere = [_load(data) for data in gathered(buffer.getvalue())]
        return {c: state for states in everywhere for c, state in states.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the server, every client of every rank and the ledger; a collective call."""
        states, spent = self._gather_states(), self.spent()
        # The network holds the last client's weights, which are not part of the result.
        checkpoint["state_dict"] = {}
        checkpoint["federation"] = {
            "algorithm": type(self.federation.algorithm).__name__,
            "next_round": self.next_round,
            "steps": {c: spent[c][0] for c in self.federation.ids},
            "passes": {c: tuple(spent[c][1]) for c in self.federation.ids},
            "server": self.federation.server,
            "memory": self.federation.memory,
            "clients": {c: states[c] for c in self.federation.ids},
            "ledger": self.federation.ledger.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores what :meth:`on_save_checkpoint` saved."""
        cosines = self.federation.server.get(COSINES)
        saved = self.restore(checkpoint)
        if self.trainer.state.fn == TrainerFn.FITTING:
            # A test of the selected round must keep the costs of later rounds.
            self.federation.ledger.load_state_dict(saved["ledger"])
            self.next_round = saved["next_round"]
            for client, local in self.federation.clients.items():
                local.steps_done = saved["steps"][client]
                local.passes = Passes(*saved["passes"][client])
        elif cosines is not None:  # those of all rounds
            self.federation.server[COSINES] = cosines

    def restore(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Restores a checkpoint's states, except those for training; returns its record."""
        saved: dict[str, Any] | None = checkpoint.get("federation")
        federation = self.federation
        if saved is None:
            raise CheckpointError(
                "This checkpoint holds no federation; choose a checkpoint of a medfed run."
            )
        name = type(federation.algorithm).__name__
        if saved["algorithm"] != name or list(saved["clients"]) != federation.ids:
            raise CheckpointError(
                f"This checkpoint is of {saved['algorithm']} with the clients "
                f"{', '.join(saved['clients'])}, the run is of {name} with "
                f"{', '.join(federation.ids)}."
            )
        federation.server, federation.memory = saved["server"], saved["memory"]
        for client, local in federation.clients.items():
            local.load_state_dict(saved["clients"][client])
        federation.to(self.device)
        return saved


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
