"""The LightningModule of a federated run: an epoch is a round, a batch is a client's task."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from medfed.common.errors import CodecError, NonFiniteError
from medfed.common.tensors import to_device
from medfed.federation.client import Batch
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation, Round, naming
from medfed.federation.lightning.collect import Gathering, world_size
from medfed.federation.lightning.ranks import (
    ClientsOfRanks,
    EvaluationTasks,
    Task,
    Tasks,
    tasks_of_round,
)
from medfed.federation.wire.packet import Packet

if TYPE_CHECKING:
    from medfed.federation.engine.gpu.slots import Slots

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


class FederatedModule(ClientsOfRanks):
    """Wraps a task module and a federation for one Lightning Trainer on one or many ranks.

    Args:
        task: The task module; its network is overwritten by whichever client works.
        federation: All clients; each rank trains those that are assigned to it.
        local: The training loop of the clients.
    """

    task: TaskLike

    def __init__(self, task: TaskLike, federation: Federation, local: LocalTrainer) -> None:
        super().__init__(federation)
        self.task = task
        self.local = local
        self.slots: Slots[LocalTrainer] | None = None
        if local.budget.slots > 1:
            # Experimental, so imported by whoever asks for it. Before Lightning hangs on the task,
            # which is copied.
            from medfed.federation.engine.gpu.slots import slots_of

            self.slots = slots_of(local, local.budget.slots)
        self.automatic_optimization = False
        self.strict_loading = False
        self.open_round: Round | None = None
        self.packets: dict[str, Packet] = {}
        self.listeners: list[
            Callable[[str, str, bool], None]
        ] = []  # when a client begins and is done
        self._gathering: Gathering | None = None
        self._group: dist.ProcessGroup | None = None
        self.evaluations: dict[str, dict[str, float]] = {}
        self.cases: dict[str, list[dict[str, float | str]]] = {}  # of the split that is tested
        self.test_split: EvalSplit = "test"

    def begin_round(self) -> None:
        """Opens the next round; a collective call, in which clients move to ranks with less to do.

        No result depends on who works where: what a client draws depends on itself alone.
        """
        self._reassign(self.federation.members(self.next_round))
        self.open_round, self.packets = self.federation.open(self.next_round), {}

    def tasks(self, round: int) -> list[Task]:
        """Returns this rank's tasks of a round."""
        phases = self.federation.algorithm.phases(round)
        members = self.federation.members(round)
        together = 1 if self.slots is None else len(members)
        return tasks_of_round(round, phases, self._listed(members), together)

    def _listed(self, clients: Sequence[str]) -> Sequence[str] | None:
        """Of several ranks only the beginning of a round says which clients work on which."""
        return clients if world_size() == 1 else None

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
        for local in [self.local] if self.slots is None else self.slots.trainers:
            local.gradients.precision = plugin.forward_context if training else nullcontext
            # The plugin's own scaler would carry the scale of one client to the next.
            local.gradients.half = training and getattr(plugin, "scaler", None) is not None

    def on_fit_start(self) -> None:
        """Moves all states, and the networks of all slots, to where training runs."""
        self.federation.to(self.device)
        if self.slots is not None:
            self.slots.move(self.device)

    def on_test_start(self) -> None:
        """Moves all states to where evaluation runs."""
        self.federation.to(self.device)

    def transfer_batch_to_device(self, batch: Task, device: torch.device, _: int) -> Task:
        """Leaves tasks alone; clients move their own batches."""
        return batch

    def train_dataloader(self) -> Tasks:
        """The tasks of each round."""
        return Tasks(lambda: self.tasks(self.next_round))

    def val_dataloader(self) -> EvaluationTasks:
        """One evaluation task per client."""
        return self._evaluation_tasks("val")

    def test_dataloader(self) -> EvaluationTasks:
        """One evaluation task per client."""
        return self._evaluation_tasks("test")

    def _evaluation_tasks(self, phase: str) -> EvaluationTasks:
        return EvaluationTasks(
            lambda: tasks_of_round(-1, [phase], self._listed(self.federation.ids))
        )

    def training_step(self, batch: Task, batch_idx: int) -> None:
        """Runs the clients of a task; their encoded replies travel or wait for the phase's end."""
        current = self.open_round
        if current is None:
            return
        clients = self._share(current.recipients if batch.clients is None else batch.clients)
        if world_size() > 1:
            self._gathering = self._gathering or self._start_gathering(current.recipients)
        working = [c for c in clients if c in current.recipients]
        if self.slots is None:
            for client in working:
                self._fit(current, client, self.local)
        else:
            self.slots.run([partial(self._fit, current, client) for client in working])

    def _tell(self, phase: str, client: str, done: bool) -> None:
        for tell in self.listeners:
            tell(phase, client, done)

    def _fit(self, current: Round, client: str, trainer: LocalTrainer) -> None:
        """Has a client train by a trainer, and keeps its reply or sends it on its way."""
        self._tell(current.phase, client, False)
        began = time.perf_counter()
        self.federation.clients[client].trainer = trainer
        try:
            with self._full_precision():  # but for the losses
                packet = current.fit(client)
        except (NonFiniteError, CodecError) as error:
            if self._gathering is None:
                raise
            # The other ranks wait for replies: they hear of it where the phase closes.
            self._gathering.put({f"failure/{client}": str(error).encode()})
            return
        finally:
            self.federation.clients[client].trainer = self.local
        self._tell(current.phase, client, True)
        if self._gathering is None:
            self.packets[client] = packet
            return
        taken = repr(time.perf_counter() - began).encode()
        self._gathering.put({f"reply/{client}": packet.to_bytes(), f"seconds/{client}": taken})

    def _start_gathering(self, recipients: Sequence[str]) -> Gathering:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        counts = Counter(self.owners[c] for c in recipients)
        return Gathering(max(counts.values(), default=0), self._group)

    def validation_step(self, batch: Task, batch_idx: int) -> None:
        """Evaluates clients' personal models on their validation splits."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Task, batch_idx: int) -> None:
        """Evaluates clients' personal models on their test splits, or on :attr:`test_split`."""
        self._evaluate(batch, self.test_split, keep=True)

    def _evaluate(self, task: Task, split: EvalSplit, keep: bool = False) -> None:
        for client in self._share(self.federation.ids if task.clients is None else task.clients):
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
        if self._gathering is not None:
            gathered, self._gathering = self._gathering.finish(), None
            for client in self.open_round.recipients:
                if failure := gathered.get(f"failure/{client}"):
                    raise NonFiniteError(failure.decode())
            most = self.federation.most_elements
            for client in self.open_round.recipients:
                self.packets[client] = Packet.from_bytes(gathered[f"reply/{client}"], most)
                taken = float(gathered[f"seconds/{client}"])
                self._taken[client] = self._taken.get(client, 0.0) + taken
        is_open = self.open_round.exchange(self.packets)
        self.packets = {}
        if not is_open:
            self._count_time()
        return is_open
