"""Carries out the rounds, evaluates and selects them, stops in time, and logs what travelled."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping

from medfed.common.scores import (
    Record,
    failure_sentences,
    failures_count,
    federation_statistics,
    smaller_is_better,
    undefined_sentences,
)
from medfed.federation.lightning.collect import gather_named, rank
from medfed.federation.lightning.history import History
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.lightning.schedule import Task
from medfed.federation.wire.ledger import DIRECTIONS

_log = logging.getLogger(__name__)
FALLBACK = ("loss", "min")  # selects where the data leave the wanted metric undefined everywhere
LOGGED = 100  # clients, at most, of which each has a curve of its own in a logger
SCORE = "val/score"  # the selection score, larger is better, for what watches it
Found = TypeVar("Found")


class FederatedRounds(pl.Callback):
    """Carries out the rounds; the round is closed before Lightning validates."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the round."""
        assert isinstance(pl_module, FederatedModule)
        pl_module.begin_round()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Task,
        batch_idx: int,
    ) -> None:
        """Exchanges replies at the end of a phase."""
        assert isinstance(pl_module, FederatedModule)
        if batch.closes and not pl_module.exchange():
            pl_module.open_round = None
            pl_module.next_round += 1


class PersonalEvaluation(pl.Callback):
    """Gathers validation metrics per client and logs mean and worst client.

    What a client's data leave undefined is known after its first evaluation, and left out in every
    round alike; a model that has failed counts with the worst possible value, see
    :mod:`medfed.common.scores`. Both are said once, where they are first seen. A metric that the
    data of all clients leave undefined selects nothing, so that the loss does.

    Args:
        metric: The metric by which a round is selected, e.g. ``iou``.
        mode: ``max`` or ``min``.
    """

    def __init__(self, metric: str, mode: str = "max") -> None:
        self.wanted = metric, mode
        self._history = History()
        self.test: dict[str, dict[str, float]] = {}
        self.cases: dict[str, list[dict[str, float | str]]] = {}

    @property
    def history(self) -> History:
        """The metrics of every evaluated round."""
        return self._history

    @history.setter
    def history(self, records: Iterable[Record]) -> None:
        self._history = records if isinstance(records, History) else History(records)

    @property
    def selection(self) -> tuple[str, str]:
        """Metric and mode that select the round: those that are wanted, or else the loss."""
        undefined, metric = self.undefined().values(), self.wanted[0]
        nowhere = all(metric in names for names in undefined)
        # Without any validation patient the loss is undefined, too, and nothing selects.
        return FALLBACK if nowhere and self.history.measured else self.wanted

    @property
    def metric(self) -> str:
        """The metric that selects the round."""
        return self.selection[0]

    @property
    def mode(self) -> str:
        """``max`` or ``min`` of it."""
        return self.selection[1]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Appends the record of this round."""
        assert isinstance(pl_module, FederatedModule)
        metrics = _gather(pl_module, pl_module.evaluations)
        number = pl_module.next_round - 1
        undefined = self.undefined()
        metrics = {c: failures_count(m, undefined.get(c)) for c, m in metrics.items()}
        told = self._news(metrics, number)
        self.history += [Record(number, client, m) for client, m in metrics.items()]
        if rank() == 0:
            for sentence in [*told, *([] if undefined else self._on_selection())]:
                _log.warning(sentence)
        values: dict[str, float] = {}
        for name in next(iter(metrics.values())):
            over = federation_statistics([m[name] for m in metrics.values()], self._falls(name))
            if not math.isnan(over["mean"]):
                values[f"val/{name}"] = over["mean"]
                values[f"val/{name}_worst"] = over["worst"]
        shown = values
        if not math.isnan(score := self.score(number)):
            shown = {**values, SCORE: score}
        for name, value in shown.items():
            # All ranks know the same; what others watch is the score and its metric.
            if name in (SCORE, f"val/{self.metric}", f"val/{self.metric}_worst"):
                pl_module.log(name, value, logger=False, sync_dist=True, batch_size=1)
        if trainer.logger:
            # Of more clients a logger has no use: metrics.csv has them all.
            chosen, few = self.metric, metrics if len(metrics) <= LOGGED else {}
            values_of = {c: m[chosen] for c, m in few.items() if not math.isnan(m[chosen])}
            per_client = {f"val/{c}/{chosen}": value for c, value in values_of.items()}
            trainer.logger.log_metrics({**values, **per_client}, step=number)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the test metrics, and what every case gave."""
        assert isinstance(pl_module, FederatedModule)
        metrics = _gather(pl_module, pl_module.evaluations)
        self.test = {c: failures_count(m) for c, m in metrics.items()}
        self.cases = _gather(pl_module, pl_module.cases)

    def undefined(self) -> dict[str, list[str]]:
        """Returns for each client the metrics that its validation data leave undefined."""
        return self.history.undefined()

    def failures(self) -> dict[str, list[int]]:
        """Returns the clients whose models have failed on validation data, and in which rounds."""
        return self.history.failures

    def _falls(self, metric: str) -> bool:
        return self.mode == "min" if metric == self.metric else smaller_is_better(metric)

    def _news(self, metrics: dict[str, dict[str, float]], number: int) -> list[str]:
        """Says, once for each client, what is left out and whose model has failed."""
        first, before = not self.history, self.failures()
        news = {c: m for c, m in metrics.items() if c not in before}
        told = undefined_sentences(metrics, "validation") if first else []
        return told + failure_sentences(news, "validation", f"Round {number + 1}: ")

    def _on_selection(self) -> list[str]:
        """Says what selects the round where the wanted metric cannot."""
        wanted = self.wanted[0]
        if not all(wanted in names for names in self.undefined().values()):
            return []
        instead = "the last one will be" if self.metric == wanted else "the smallest loss selects"
        return [
            f"The validation data leave {wanted} undefined at every client, so no round can be "
            f"selected by it: {instead}; set model.selection to another metric."
        ]

    def best_round(self) -> int | None:
        """Returns the round with the best mean over clients.

        Of rounds that are equal in it, that of the smallest mean loss: with few patients an AUROC
        of 1 comes early, and says nothing of the probabilities. Then the earliest.
        """
        rounds, chosen = self.history.rounds, self.selection
        scores = {n: self._mean(n, *chosen) for n in rounds}
        usable = {n: s for n, s in scores.items() if not math.isnan(s)}
        if not usable:
            return rounds[-1] if rounds else None
        best = max(usable.values())
        return max(
            (n for n, score in usable.items() if score == best),
            key=lambda n: (self._mean(n, *FALLBACK), -n),
        )

    def score(self, number: int) -> float:
        """Returns the selection score of a round, larger is better; NaN where undefined."""
        return self._mean(number, *self.selection)

    def _mean(self, number: int, metric: str, mode: str) -> float:
        return self.history.mean(number, metric, mode)

    def state_dict(self) -> dict[str, Any]:
        """Returns the record, so that a resumed run selects as a straight one."""
        return {"history": self.history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts the record back."""
        self.history = History(Record(*row) for row in state_dict["history"])


class Patience(EarlyStopping):
    """Lightning's early stopping, which a resumed run remembers.

    Args:
        patience: Evaluations without improvement after which the run stops.
    """

    def __init__(self, patience: int) -> None:
        super().__init__(
            SCORE,
            patience=patience,
            mode="max",
            strict=False,  # the metric may be undefined at all clients
            check_finite=False,  # a model that has failed is the worst of rounds, not the last
            check_on_train_epoch_end=False,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Trains no further where the run to be continued had stopped."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True


class CommunicationLogger(pl.Callback):
    """Logs, by direction, the bytes of each round and of the run so far, and what is saved.

    ``bytes/up_savings`` is how many times fewer bytes the run has sent than fp32 would have.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the round that has closed."""
        assert isinstance(pl_module, FederatedModule)
        if not trainer.logger:
            return
        ledger, number = pl_module.federation.ledger, pl_module.next_round - 1
        metrics: dict[str, float] = {}
        for direction in DIRECTIONS:
            so_far = ledger.traffic(direction)
            metrics[f"bytes/{direction}_total"] = so_far.bytes
            metrics[f"bytes/{direction}_savings"] = so_far.savings
            metrics[f"bytes/{direction}"] = ledger.traffic(direction, number).bytes
        for name, value in pl_module.federation.server.get("diagnostics", {}).items():
            metrics[f"server/{name}"] = float(value)
        trainer.logger.log_metrics(metrics, step=number)


def _gather(module: FederatedModule, found: dict[str, Found]) -> dict[str, Found]:
    """Returns what was found of all clients of all ranks, in the order of clients; forgets it."""
    own = {c: json.dumps(m).encode() for c, m in found.items()}
    gathered = gather_named(own, module.device)
    found.clear()
    return {c: json.loads(gathered[c]) for c in module.federation.ids if c in gathered}
