"""The LightningModule of a federated run: an epoch is a round, a batch is a client's task."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, Protocol, runtime_checkable

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn

from medfed.common.errors import CheckpointError, CodecError, NonFiniteError
from medfed.common.tensors import to_device
from medfed.federation.budget import Passes
from medfed.federation.client import Batch
from medfed.federation.federation import Federation, Round, naming
from medfed.federation.lightning.collect import gather_named, rank, world_size
from medfed.federation.lightning.schedule import (
    EvaluationTasks,
    RoundTasks,
    Task,
    shard,
    tasks_of_round,
)
from medfed.federation.training import LocalTrainer
from medfed.federation.wire.packet import Packet

EvalSplit = Literal["train", "val", "test"]
# Lightning warns who returns no optimizer that nothing will train; here clients have their own.
_NO_OPTIMIZER = ".*returned `None`, this fit will run with no optimizer.*"


class TaskLike(Protocol):
    """What a federated run needs of a task module."""

    network: nn.Module

    def loss(self, batch: Batch) -> Tensor:
        """Returns the scalar loss of a batch."""

    def evaluate(self, batches: Iterable[Batch], *, test: bool = False) -> dict[str, float]:
        """Returns metrics over batches and changes no state."""


class MeterLike(Protocol):
    """What a task has measured."""

    def compute(self) -> dict[str, float]:
        """Returns the metrics."""

    def cases(self) -> list[dict[str, float | str]]:
        """Returns rows about the cases, if the task has any."""


@runtime_checkable
class Measures(Protocol):
    """A task that also knows what each case gave."""

    def measured(self, batches: Iterable[Batch], *, test: bool = False) -> MeterLike:
        """Returns the meter of ``evaluate``."""


class FederatedModule(pl.LightningModule):
    """Wraps a task module and a federation for one Lightning Trainer on one or many ranks.

    Args:
        task: The task module; its network is overwritten by whichever client works.
        federation: All clients; each rank trains those that are dealt to it.
        local: The training loop of the clients.
    """

    task: TaskLike

    def __init__(self, task: TaskLike, federation: Federation, local: LocalTrainer) -> None:
        super().__init__()
        self.task = task
        self.federation = federation
        self.local = local
        self.automatic_optimization = False
        self.strict_loading = False
        self.next_round = 0
        self.open_round: Round | None = None
        self.packets: dict[str, Packet] = {}
        self.failures: dict[str, str] = {}
        self.evaluations: dict[str, dict[str, float]] = {}
        self.cases: dict[str, list[dict[str, float | str]]] = {}  # of the split that is tested
        self.test_split: EvalSplit = "test"

    @property
    def owned(self) -> list[str]:
        """The clients that this rank trains and whose state it holds."""
        return shard(self.federation.ids, rank(), world_size())

    def tasks(self, round: int) -> list[Task]:
        """Returns this rank's tasks of a round."""
        federation = self.federation
        return tasks_of_round(
            round,
            federation.algorithm.phases(round),
            federation.members(round),
            federation.ids,
            rank(),
            world_size(),
        )

    def configure_optimizers(self) -> None:
        """There is none here: clients make their own."""
        warnings.filterwarnings("ignore", message=_NO_OPTIMIZER)

    def setup(self, stage: str) -> None:
        """Lets Lightning's precision plugin see every loss.

        Backward passes are the local loop's own: Lightning's hooks around them cost time in every
        step and have nobody to call.
        """
        training = stage == "fit"
        plugin = self.trainer.precision_plugin
        self.local.precision = plugin.forward_context if training else nullcontext
        # The plugin's own scaler would carry the scale of one client to the next.
        self.local.half = training and getattr(plugin, "scaler", None) is not None

    def on_fit_start(self) -> None:
        """Moves all states to where training runs."""
        self.federation.to(self.device)

    def on_test_start(self) -> None:
        """Moves all states to where evaluation runs."""
        self.federation.to(self.device)

    def transfer_batch_to_device(self, batch: Task, device: torch.device, _: int) -> Task:
        """Leaves tasks alone; clients move their own batches."""
        return batch

    def train_dataloader(self) -> RoundTasks:
        """The tasks of each round."""
        return RoundTasks(lambda: self.tasks(self.next_round))

    def val_dataloader(self) -> EvaluationTasks:
        """One evaluation task per client."""
        return self._evaluation_tasks("val")

    def test_dataloader(self) -> EvaluationTasks:
        """One evaluation task per client."""
        return self._evaluation_tasks("test")

    def _evaluation_tasks(self, phase: str) -> EvaluationTasks:
        ids = self.federation.ids
        return EvaluationTasks(tasks_of_round(-1, [phase], ids, ids, rank(), world_size()))

    def training_step(self, batch: Task, batch_idx: int) -> None:
        """Runs one client's task and keeps its encoded reply until the phase closes."""
        current = self.open_round
        if current is not None and batch.client is not None and batch.client in current.recipients:
            try:
                with self._full_precision():  # but for the losses
                    self.packets[batch.client] = current.fit(batch.client)
            except (NonFiniteError, CodecError) as error:
                if world_size() == 1:
                    raise
                # The other ranks wait for replies: they hear of it where the phase closes.
                self.failures[batch.client] = str(error)

    def validation_step(self, batch: Task, batch_idx: int) -> None:
        """Evaluates one client's personal model on its validation split."""
        self._evaluate(batch.client, "val")

    def test_step(self, batch: Task, batch_idx: int) -> None:
        """Evaluates one client's personal model on its test split, or on :attr:`test_split`."""
        self._evaluate(batch.client, self.test_split, keep=True)

    def _evaluate(self, client: str | None, split: EvalSplit, keep: bool = False) -> None:
        if client is not None:
            with naming(client, self.next_round - 1, "evaluation"), self._full_precision():
                self.evaluations[client] = self.evaluate_client(client, split, keep)

    def _full_precision(self) -> torch.autocast:
        """Ends what Lightning opens around a step: a model is measured as it is delivered."""
        return torch.autocast(self.device.type, enabled=False)

    def evaluate_client(
        self, client: str, split: EvalSplit, keep: bool = False
    ) -> dict[str, float]:
        """Returns the metrics of a client's personal model on one of its splits.

        Args:
            client: Its id.
            split: Which split.
            keep: Whether to keep what every case gave, in :attr:`cases`.
        """
        self.local.load(self.federation.personal_model(client))
        batches = self.federation.clients[client].data.eval_batches(split)
        on_device = (to_device(b, self.device) for b in batches)
        if not keep or not isinstance(self.task, Measures):
            return self.task.evaluate(on_device, test=split == "test")
        meter = self.task.measured(on_device, test=split == "test")
        self.cases[client] = meter.cases()
        return meter.compute()

    def exchange(self) -> bool:
        """Closes a phase: gathers the replies of all ranks and hands them to the server.

        Returns:
            Whether another phase of the round is open.

        Raises:
            NonFiniteError: On every rank, if a client of any rank failed.
            CodecError: If a reply cannot be read.
        """
        assert self.open_round is not None
        if world_size() > 1:
            raw = {f"reply/{c}": packet.to_bytes() for c, packet in self.packets.items()}
            raw |= {f"failure/{c}": text.encode() for c, text in self.failures.items()}
            gathered = gather_named(raw, self.device)
            for client in self.open_round.recipients:
                if failure := gathered.get(f"failure/{client}"):
                    raise NonFiniteError(failure.decode())
            most = self.federation.most_elements
            self.packets = {
                c: Packet.from_bytes(gathered[f"reply/{c}"], most)
                for c in self.open_round.recipients
            }
        is_open = self.open_round.exchange(self.packets)
        self.packets = {}
        return is_open

    def gather_steps(self) -> dict[str, int]:
        """Returns the gradient steps of every client so far; a collective call."""
        clients = self.federation.clients
        own = {c: str(clients[c].steps_done).encode() for c in self.owned}
        return {c: int(n) for c, n in gather_named(own, self.device).items()}

    def gather_passes(self) -> dict[str, Passes]:
        """Returns the passes through the network of every client so far; a collective call."""
        clients = self.federation.clients
        own = {c: json.dumps(clients[c].passes).encode() for c in self.owned}
        return {c: Passes(*json.loads(n)) for c, n in gather_named(own, self.device).items()}

    def _gather_states(self) -> dict[str, dict[str, Any]]:
        """Returns what every client keeps; a collective call.

        A rank's clients are saved together, so that what they share (the decoded shared part) is
        one tensor in the checkpoint and after resuming, too.
        """
        own = {c: self.federation.clients[c].state_dict() for c in self.owned}
        if world_size() == 1:
            return own
        buffer = io.BytesIO()
        torch.save(own, buffer)
        gathered = gather_named({str(rank()): buffer.getvalue()}, self.device)
        return {c: state for data in gathered.values() for c, state in _load(data).items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the server, every client of every rank and the ledger; a collective call."""
        states = self._gather_states()
        steps, passes = self.gather_steps(), self.gather_passes()
        # The network holds whichever client came last: scratch, and not part of the result.
        checkpoint["state_dict"] = {}
        checkpoint["federation"] = {
            "algorithm": type(self.federation.algorithm).__name__,
            "next_round": self.next_round,
            "steps": {c: int(steps[c]) for c in self.federation.ids},
            "passes": {c: tuple(passes[c]) for c in self.federation.ids},
            "server": self.federation.server,
            "memory": self.federation.memory,
            "clients": {c: states[c] for c in self.federation.ids},
            "ledger": self.federation.ledger.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores what :meth:`on_save_checkpoint` saved.

        Raises:
            CheckpointError: If the checkpoint is of another algorithm or other clients, or training
                is to go on from one of a version that counted no passes.
        """
        saved = self.restore(checkpoint)
        if self.trainer.state.fn == TrainerFn.FITTING:
            if "passes" not in saved:
                raise CheckpointError(
                    "This checkpoint is of an older version, which did not count gradient passes; "
                    "finish the run with that version, or repeat it."
                )
            # A test of the selected round must not forget what later rounds cost.
            self.federation.ledger.load_state_dict(saved["ledger"])
            self.next_round = saved["next_round"]
            for client, local in self.federation.clients.items():
                local.steps_done = saved["steps"][client]
                local.passes = Passes(*saved["passes"][client])

    def restore(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Puts back the states of a checkpoint, without what training on needs; returns its record.

        Raises:
            CheckpointError: If the checkpoint is of another algorithm or other clients.
        """
        saved: dict[str, Any] | None = checkpoint.get("federation")
        federation = self.federation
        if saved is None:
            raise CheckpointError(
                "This checkpoint holds no federation; choose one of a medfed run."
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
