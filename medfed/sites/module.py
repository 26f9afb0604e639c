"""A run across sites under one Lightning Trainer: an epoch is a round, with one task in it.

So the coordinator's run has the loggers, checkpoints, selection and early stopping of any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from medfed.common.errors import CheckpointError
from medfed.common.scores import Record
from medfed.federation.budget import Passes
from medfed.federation.federation import Federation
from medfed.federation.lightning.callbacks import PersonalEvaluation
from medfed.federation.lightning.history import History
from medfed.federation.lightning.module import FederatedModule, TaskLike
from medfed.federation.lightning.schedule import EvaluationTasks, Task
from medfed.federation.training import LocalTrainer
from medfed.sites.coordinator import Coordinator, Metrics


class SitesEvaluation(PersonalEvaluation):
    """Selects a round although not every site could be measured after each.

    A mean over whoever was there would rise where a weak site is missing. So a site that was not
    measured counts with its metrics of the evaluation before, or where there is none, of its first
    one: two rounds then differ by nothing but what sites that were there in both have gained.
    The record, and so ``metrics.csv``, holds measured values alone.
    """

    def _mean(self, number: int, metric: str, mode: str) -> float:
        measured = self.history
        self.history = History(self.filled())
        try:
            return super()._mean(number, metric, mode)
        finally:
            self.history = measured

    def filled(self) -> list[Record]:
        """Returns the record with a row for each site after every evaluation."""
        known = {(r.round, r.client): r.metrics for r in self.history}
        latest: dict[str, dict[str, float]] = {}
        for record in self.history:
            latest.setdefault(record.client, record.metrics)
        filled = []
        for number in sorted({r.round for r in self.history}):
            latest |= {c: known[number, c] for c in latest if (number, c) in known}
            filled += [Record(number, c, metrics) for c, metrics in latest.items()]
        return filled


class SitesModule(FederatedModule):
    """Lets a coordinator carry out the rounds, each as one task.

    Args:
        task: The task; it says how a round is selected.
        federation: The server's half.
        local: Knows the network.
        coordinator: Reaches the sites.
    """

    def __init__(
        self,
        task: TaskLike,
        federation: Federation,
        local: LocalTrainer,
        coordinator: Coordinator,
    ) -> None:
        super().__init__(task, federation, local)
        self.coordinator = coordinator
        self.measured: Metrics = {}
        self.selected: int | None = None

    @property
    def owned(self) -> list[str]:
        """No client is here."""
        return []

    def tasks(self, round: int) -> list[Task]:
        """The round, as one task."""
        return [Task(round, "round", None, True)]

    def _evaluation_tasks(self, phase: str) -> EvaluationTasks:
        return EvaluationTasks(lambda: [Task(-1, phase, None, True)])

    def training_step(self, batch: Task, batch_idx: int) -> None:
        """Carries out the round, its evaluation and its commit."""
        every = self.trainer.check_val_every_n_epoch or 1
        evaluated = (self.trainer.current_epoch + 1) % every == 0
        self.measured = self.coordinator.round(self.next_round, evaluated)
        self.next_round += 1

    def validation_step(self, batch: Task, batch_idx: int) -> None:
        """Hands on what the sites have measured."""
        self.evaluations = dict(self.measured)

    def test_step(self, batch: Task, batch_idx: int) -> None:
        """Lets the sites measure the selected round on their test data."""
        self.evaluations = self.coordinator.test(self.next_round, self.selected)

    def gather_steps(self) -> dict[str, int]:
        """Returns the gradient steps of every client so far, as the sites say."""
        return {c: steps for c, (steps, _) in self.coordinator.standing.spent.items()}

    def gather_passes(self) -> dict[str, Passes]:
        """Returns the passes through the network of every client, as the sites say."""
        return {c: passes for c, (_, passes) in self.coordinator.standing.spent.items()}

    def _gather_states(self, own: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        return {c: {} for c in self.federation.ids}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the server, the ledger, and where the sites are; their states are with them."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["sites"] = self.coordinator.standing.state_dict()

    def restore(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Puts back the server.

        Raises:
            CheckpointError: If the checkpoint is of another run.
        """
        if "sites" not in checkpoint:
            raise CheckpointError("This checkpoint is of a simulation, not of a run across sites.")
        return super().restore(checkpoint)
