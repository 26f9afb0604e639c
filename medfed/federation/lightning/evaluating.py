"""Evaluates the clients' models under Lightning, each on the rank that holds the client."""

# Callbacks of rounds go with a FederatedModule alone.
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from medfed.common.arguments import kind
from medfed.common.tensors import to_device
from medfed.federation.client import Batch, ClientData
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.lightning.collect import rank, world_size
from medfed.federation.lightning.strategy import assign, costs
from medfed.federation.wire.channel import naming
from medfed.functional.conformal import Covering
from medfed.functional.points import Chooser, Point, RegionChooser, Rows
from medfed.standalone.errors import ConfigError

EvalSplit = Literal["train", "val", "test"]


class TaskLike(Protocol):
    """The interface of a task module for a federated run."""

    network: nn.Module

    def loss(self, batch: Batch) -> Tensor:
        """Returns the scalar loss of a batch."""

    def evaluate(self, batches: Iterable[Batch], *, test: bool = False) -> dict[str, float]:
        """Returns metrics over batches and changes no state."""


class EvaluatingModule(pl.LightningModule):
    """Holds a task, a federation and the training loop, and evaluates the clients of this rank."""

    task: TaskLike

    def __init__(self, task: TaskLike, federation: Federation, local: LocalTrainer) -> None:
        super().__init__()
        if getattr(task, "network", None) is not local.network:
            raise ConfigError(
                "The task's network is not the one that trains, so that its metrics would be of "
                "other weights; give assemble task.network and task.loss, and FederatedModule an "
                "object with network, loss(batch) and evaluate(batches, test)."
            )
        self.task = task
        self.federation = federation
        self.local = local
        self.next_round = 0
        self.owners: dict[str, int] = {}  # the rank of each client
        self.seconds: dict[str, float] = {}  # of each client's last round, on several ranks
        self.losses: dict[str, float] = {}  # of this round's training steps, by client
        self.evaluations: dict[str, dict[str, float]] = {}
        self.cases: dict[str, list[dict[str, float | str]]] = {}  # of the split that is tested
        # Chooses thresholds and calibration on validation cases, if the run wants any.
        self.chooser: Chooser | RegionChooser | Covering | None = None
        self.points: dict[str, Point] = {}  # of tested clients
        self._chosen_on: dict[str, tuple[Rows, Rows]] = {}  # validation and training cases
        self.test_split: EvalSplit = "test"
        # A loss above it means that training diverges.
        self.highest_loss: float = getattr(task, "highest_loss", math.inf)

    def validation_step(self, batch: str, batch_idx: int) -> None:
        """Evaluates clients' personal models on their validation splits."""
        self._evaluate("val")

    def test_step(self, batch: str, batch_idx: int) -> None:
        """Evaluates clients' personal models on their test splits, or on :attr:`test_split`."""
        self._evaluate(self.test_split, keep=True)

    def _evaluate(self, split: EvalSplit, keep: bool = False) -> None:
        clients = self._on_this_rank(self.federation.ids)
        # Lightning tries the validation before training, on some data.
        for client in clients[:1] if self.trainer.sanity_checking else clients:
            with naming(client, self.next_round - 1, "evaluation"), self._full_precision():
                self.evaluations[client] = self.evaluate_client(client, split, keep)

    def _full_precision(self) -> torch.autocast:
        """Leaves Lightning's precision context: models are evaluated as they are delivered."""
        return torch.autocast(self.device.type, enabled=False)

    def evaluate_client(
        self, client: str, split: EvalSplit, keep: bool = False
    ) -> dict[str, float]:
        """Returns the metrics of a client's personal model on one of its splits.

        `keep`: whether to keep the results of every case, and what validation chooses.
        """
        self.local.model.load(self.federation.personal_model(client, split))
        return self.evaluate_data(client, self.federation.clients[client].data, split, keep)

    def evaluate_data(
        self, client: str, data: ClientData, split: EvalSplit, keep: bool = False
    ) -> dict[str, float]:
        """Returns the metrics of the loaded model on a split of some data, see above."""

        def batches(split: EvalSplit) -> Iterator[Batch]:
            return (to_device(b, self.device) for b in data.eval_batches(split))

        # A task may also have results of each case.
        measured: Callable[..., Any] | None = getattr(self.task, "measured", None)
        if not keep or measured is None:
            return _numbers(self.task.evaluate(batches(split), test=split == "test"))
        levels = () if self.chooser is None else self.chooser.levels
        more: dict[str, Any] = {"levels": levels} if levels else {}
        meter = measured(batches(split), test=split == "test", **more)
        self.cases[client] = meter.cases()
        if self.chooser is not None:
            training = measured(batches("train")).cases() if self.chooser.linear else []
            self._chosen_on[client] = measured(batches("val"), **more).cases(), training
            self.points[client] = self.chooser.choose(*self._chosen_on[client])
        return dict(meter.compute())

    def decide(self, client: str, others: Mapping[str, float] | None = None) -> dict[str, float]:
        """Chooses the point of a client that has been tested, and decides its test cases there.

        `others`: see :func:`medfed.functional.points.common`. Returns the metrics of these
        decisions.
        """
        if self.chooser is None:
            return {}
        self.points[client] = self.chooser.choose(*self._chosen_on[client], others=others)
        return self.chooser.apply(self.cases[client], self.points[client])

    def diverged(self, metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Returns the clients whose training or validation loss is far above its start."""
        nothing = math.nan
        return [
            client
            for client, known in metrics.items()
            if known.get("loss", nothing) > self.highest_loss
            or self.losses.get(client, nothing) > self.highest_loss
        ]

    @property
    def owned(self) -> list[str]:
        """The clients that this rank trains and whose state it holds."""
        return self._on_this_rank(self.federation.ids)

    def _on_this_rank(self, clients: Iterable[str]) -> list[str]:
        if world_size() == 1:
            return [*clients]
        if not self.owners:
            self.owners = assign(self._work(self.federation.ids), world_size())
        return [c for c in clients if self.owners[c] == rank()]

    def _work(self, clients: Iterable[str]) -> dict[str, float]:
        """The estimated cost of each client's round; the same on every rank."""
        expected = {c: self.federation.clients[c].expected_work for c in {*clients, *self.seconds}}
        seconds = costs(expected, self.seconds)
        return {c: seconds[c] for c in clients}


def _numbers(metrics: object) -> dict[str, float]:
    """Returns a task's metrics as plain numbers, which its tensors with one entry become, too."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"evaluate must return metrics by name, not {kind(metrics)}.")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"The metric {name} of evaluate must be one number, not {kind(value)}."
            ) from error
    return numbers
