"""Callbacks that run the rounds, evaluate and select them, stop early, and log bytes."""

# Callbacks of rounds go with a FederatedModule alone.
# mypy: disable-error-code="override"

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ProgressBar
from pytorch_lightning.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from medfed.common import scores
from medfed.common.console import Terminal, bar, only_news, short, swept, visible
from medfed.common.schemas import packed, unpacked
from medfed.common.scores import Record
from medfed.federation.aggregation import Outlier
from medfed.federation.lightning.collect import gather_named, rank, warn, world_size
from medfed.federation.wire.ledger import DIRECTIONS
from medfed.functional.conformal import common
from medfed.functional.points import Point
from medfed.standalone.checks import check_known
from medfed.standalone.errors import NonFiniteError
from medfed.standalone.files import write_json

if TYPE_CHECKING:
    from medfed.federation.lightning.module import FederatedModule

HALF = 150
"""Training samples with which a client weighs half in the mean that selects; with the usual parts
50 validation samples, see benchmarks/evidence/selection.py."""


class History(list[Record]):
    """Records in the order of rounds and clients, with derived facts of each round.

    Example:
        >>> history = History([Record(0, "a", {"iou": 0.5}), Record(0, "b", {"iou": 1.0})])
        >>> history.mean(0, "iou"), history.rounds
        (0.75, [0])
    """

    def __init__(
        self, records: Iterable[Record] = (), samples: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.samples = samples or {}  # training samples of the clients
        self.by_round: dict[int, list[Record]] = {}
        self.failures: dict[str, list[int]] = {}  # of clients whose models have failed
        self.has_losses = False  # whether any loss is known: without a validation patient none is
        # Of clients the metrics that their data leave undefined, known after one evaluation.
        self.undefined: dict[str, list[str]] = {}
        self._means: dict[tuple[int, str, str], float] = {}
        self.extend(records)

    def extend(self, records: Iterable[Record]) -> None:
        """Appends the records of rounds that are new."""
        for record in records:
            self.append(record)
            self.by_round.setdefault(record.round, []).append(record)
            if scores.failed({record.client: record.metrics}):
                self.failures.setdefault(record.client, []).append(record.round)
            self.has_losses |= not math.isnan(record.metrics.get("loss", math.nan))
            self.undefined.setdefault(record.client, scores.undefined_in(record.metrics))

    @property
    def rounds(self) -> list[int]:
        """The evaluated rounds, in order."""
        return sorted(self.by_round)

    def mean(self, number: int, metric: str, mode: str = "max") -> float:
        """Returns the mean of a metric over the clients for which it is defined; larger is better.

        A client of n training samples weighs n / (n + :data:`HALF`), as few validation samples can
        tell little. Each value is rounded, as across hospitals, so that both select the same round.
        """
        if (key := (number, metric, mode)) not in self._means:
            self._means[key] = self._mean(*key)
        return self._means[key]

    def _mean(self, number: int, metric: str, mode: str) -> float:
        sign, values = 1 if mode == "max" else -1, dict[str, float]()
        for record in self.by_round.get(number, ()):
            if metric in self.undefined.get(record.client, ()):
                continue
            value = record.metrics.get(metric, math.nan)
            value = scores.rounded(value) if math.isfinite(value) else scores.worst_value(metric)
            # Where the metric is unknown here, the direction of selection defines the worst value.
            values[record.client] = sign * value if math.isfinite(value) else -math.inf
        samples = [self.samples.get(client, 1) for client in values]
        if len(set(samples)) < 2:
            return sum(values.values()) / len(values) if values else math.nan
        weights = [n / (n + HALF) for n in samples]
        pairs = zip(weights, values.values(), strict=True)
        return math.fsum(w * v for w, v in pairs) / math.fsum(weights)


FALLBACK = ("loss", "min")  # selects if the data leave the configured metric undefined everywhere
LOGGED = 100  # the most clients with separate curves in a logger
SCORE = "val/score"  # the selection score, larger is better, for callbacks that watch it
Value = TypeVar("Value")


class FederatedRounds(pl.Callback):
    """Counts the rounds for Lightning: each is a step of the Trainer."""

    closes_rounds: ClassVar[bool] = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Shows the first round's step size, and says where a schedule ends before the rounds."""
        rates = pl_module.local.rates
        if len({*rates}) > 1 and not 0 <= (trainer.max_epochs or 0) <= len(rates):
            warn(
                f"Trainer(max_epochs={trainer.max_epochs}) goes on after the {len(rates)} rounds "
                f"of assemble's schedule, with its last step size, {rates[-1]:g}; give both the "
                "same number."
            )
        self._count(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: FederatedModule, *_: Any, **__: Any
    ) -> None:
        """Counts the round that has ended."""
        pl_module.next_round += 1
        self._count(trainer, pl_module)

    def _count(self, trainer: pl.Trainer, module: FederatedModule) -> None:
        # Lightning counts the steps of its optimizers, and clients have others.
        steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        steps.ready = steps.completed = module.next_round
        rates = module.local.rates
        for optimizer in trainer.optimizers:
            for options in optimizer.param_groups:
                options["lr"] = rates[min(module.next_round, len(rates) - 1)]


class PersonalEvaluation(pl.Callback):
    """Gathers validation metrics per client and logs mean and worst client.

    What a client's data leave undefined in its first evaluation is omitted from then on. A model
    that has failed counts with the worst possible value. If the data of all clients leave the
    metric undefined, the loss selects the round.
    """

    def __init__(self, metric: str, mode: str = "max") -> None:
        check_known("mode", mode, ("max", "min"))
        self.wanted = metric, mode
        self.history = History()  # the metrics of every evaluated round
        # The mean training loss of each client in each round in which it took steps.
        self.losses: list[Record] = []
        # The clients at which a loss was not finite or far above its start, by round.
        self.diverged: dict[int, list[str]] = {}
        self.test: dict[str, dict[str, float]] = {}
        self.cases: dict[str, list[dict[str, float | str]]] = {}
        self.points: dict[str, Point] = {}
        self.shows_all = True  # through Lightning, which takes its time; a run folder has all
        self._fitting = True

    @property
    def compared(self) -> History:
        """The metrics by which rounds are compared."""
        return self.history

    @property
    def selection(self) -> tuple[str, str]:
        """Metric and mode that select the round: the configured ones, or else the loss."""
        undefined, metric = self.history.undefined.values(), self.wanted[0]
        nowhere = all(metric in names for names in undefined)
        # Without any validation patient the loss is undefined, too, and nothing selects.
        return FALLBACK if nowhere and self.history.has_losses else self.wanted

    @property
    def metric(self) -> str:
        """The metric that selects the round."""
        return self.selection[0]

    def setup(self, trainer: pl.Trainer, pl_module: FederatedModule, stage: str) -> None:
        """Notes what each client's validation can tell."""
        self.history.samples = pl_module.federation.samples

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Appends the record of this round."""
        if trainer.sanity_checking:
            pl_module.evaluations.clear()
            return
        metrics = _gather(pl_module, pl_module.evaluations)
        number = pl_module.next_round - 1
        if trainer.state.fn != TrainerFn.FITTING:  # a look at what the record holds
            self._log(pl_module, self._values(metrics), logger=None)
            return
        if names := {name: None for known in metrics.values() for name in known}:
            check_known("The metric of PersonalEvaluation", self.wanted[0], names)
        undefined = dict(self.history.undefined)
        metrics = {c: scores.failures_count(m, undefined.get(c)) for c, m in metrics.items()}
        sentences = self._news(metrics, number)
        if diverged := pl_module.diverged(metrics):
            unsaid = [c for c in diverged if c not in scores.failed(metrics)]
            if unsaid and not any(self.diverged.values()):
                sentences.append(_divergence(unsaid, number))
            self.diverged[number] = diverged
        self.history.extend(Record(number, client, m) for client, m in metrics.items())
        for sentence in [*sentences, *([] if undefined else self._on_selection())]:
            warn(sentence)
        values = self._values(metrics)
        score = {} if math.isnan(s := self.score(number)) else {SCORE: s}
        watched = (f"val/{self.metric}", f"val/{self.metric}_worst")
        logged = {n: v for n, v in values.items() if self.shows_all or n in watched}
        self._log(pl_module, logged | score)
        if trainer.logger:
            trainer.logger.log_metrics(values | _curves("val", metrics), step=number)

    def _values(
        self, metrics: Mapping[str, Mapping[str, float]], split: str = "val"
    ) -> dict[str, float]:
        """Returns the mean and the worst client of every metric that some client defines."""
        (chosen, mode), values = self.selection, dict[str, float]()
        for name in next(iter(metrics.values())):
            falls = mode == "min" if name == chosen else scores.smaller_is_better(name)
            over = scores.federation_statistics([m[name] for m in metrics.values()], falls)
            if not math.isnan(over["mean"]):
                values[f"{split}/{name}"] = over["mean"]
                values[f"{split}/{name}_worst"] = over["worst"]
        return values

    @staticmethod
    def _log(
        pl_module: pl.LightningModule, values: Mapping[str, float], logger: bool | None = False
    ) -> None:
        """Shows values to callbacks that watch them; all ranks have the same."""
        if pl_module.trainer.barebones:  # which has no place for them
            return
        for name, value in values.items():
            pl_module.log(name, value, logger=logger, sync_dist=True, batch_size=1, on_epoch=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Appends the training losses of the round that has closed, and logs them."""
        number, ids = pl_module.next_round - 1, pl_module.federation.ids
        losses = {c: pl_module.losses[c] for c in ids if c in pl_module.losses}
        self.losses += [Record(number, client, {"loss": loss}) for client, loss in losses.items()]
        if not losses:
            return
        mean = {"train/loss": sum(losses.values()) / len(losses)}
        if self.shows_all:
            self._log(pl_module, mean)
        if trainer.logger:
            known = {client: {"loss": loss} for client, loss in losses.items()}
            trainer.logger.log_metrics(mean | _curves("train", known), step=number)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Keeps the test metrics, and the results of every case."""
        here, decided = [*pl_module.points], dict[str, dict[str, float]]()
        self.points = _gather(pl_module, pl_module.points)
        if pl_module.chooser is not None:  # not at a coordinator, whose sites have decided
            others = common(self.points)
            decided = {client: pl_module.decide(client, others) for client in here}
            self.points = _gather(pl_module, pl_module.points)
        metrics, decided = (_gather(pl_module, m) for m in (pl_module.evaluations, decided))
        self.test = {c: scores.failures_count(m) | decided.get(c, {}) for c, m in metrics.items()}
        self.cases = _gather(pl_module, pl_module.cases)
        if self.shows_all:
            self._log(pl_module, self._values(self.test, "test"), logger=None)

    def _news(self, metrics: dict[str, dict[str, float]], number: int) -> list[str]:
        """Logs once for each client which metrics are omitted and whether its model has failed."""
        first, before = not self.history, self.history.failures
        news = {c: m for c, m in metrics.items() if c not in before}
        with only_news():
            for sentence in scores.undefined_sentences(metrics, "validation") if first else ():
                warn(sentence)
        return scores.failure_sentences(news, "validation", f"Round {number + 1}: ")

    def _on_selection(self) -> list[str]:
        """Logs what selects the round if the configured metric cannot."""
        wanted = self.wanted[0]
        if not all(wanted in names for names in self.history.undefined.values()):
            return []
        instead = "the last one will be" if self.metric == wanted else "the smallest loss selects"
        return [
            f"The validation data leave {wanted} undefined at every client, so no round can be "
            f"selected by it: {instead}; set model.selection to another metric."
        ]

    def best_round(self) -> int | None:
        """Returns the round with the best mean over clients.

        Ties go to the smallest mean loss, then to the earliest round: with few patients an AUROC of
        1 comes early and ignores the quality of the probabilities. A round in which training
        diverged at some clients is selected only if all others did, too; one where it did at all is
        never selected.
        """
        chosen, diverged = self.selection, self.diverged
        by_round = self.history.by_round
        rounds = [n for n in self.history.rounds if len(diverged.get(n, ())) < len(by_round[n])]
        rounds = [n for n in rounds if n not in diverged] or rounds
        mean = self.compared.mean
        usable = {n: score for n in rounds if not math.isnan(score := mean(n, *chosen))}
        if not usable:
            return rounds[-1] if rounds else None
        return max(usable, key=lambda n: (usable[n], mean(n, *FALLBACK), -n))

    def check_selected(self) -> None:
        """Refuses to test a run without a round that can be selected."""
        if self.history and self.best_round() is None:
            raise NonFiniteError(
                "In every evaluated round the loss is not finite or far above its start at all "
                "clients, so no round can be selected; lower optimizer.lr or set local.clip."
            )

    def score(self, number: int) -> float:
        """Returns the selection score of a round, larger is better; NaN where undefined."""
        return self.compared.mean(number, *self.selection)

    def state_dict(self) -> dict[str, Any]:
        """Returns the record, so that a resumed run selects like an uninterrupted one."""
        rows = {"history": packed(self.history), "losses": packed(self.losses)}
        return {**rows, "diverged": dict(self.diverged)}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Notes whether training continues; a test of an earlier round keeps the later ones."""
        self._fitting = trainer.state.fn == TrainerFn.FITTING

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the record, unless it holds more than that of a tested round."""
        if not self._fitting and (self.history or self.losses):
            return
        self.history = History(unpacked(state_dict["history"], Record), self.history.samples)
        self.losses = unpacked(state_dict["losses"], Record)
        self.diverged = dict(state_dict["diverged"])


def _curves(split: str, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The curves of single clients; of more than a logger can show, metrics.csv has all."""
    few = metrics if len(metrics) <= LOGGED else {}
    every = {f"{split}/{visible(c)}/{name}": v for c, m in few.items() for name, v in m.items()}
    return {name: value for name, value in every.items() if not math.isnan(value)}


def _divergence(clients: Sequence[str], number: int) -> str:
    names = ", ".join(map(short, clients[:3])) + (" and others" if len(clients) > 3 else "")
    return (
        f"Round {number + 1}: training diverges: a loss of {names} is far above that of the "
        "untrained model. Such a round is not selected; lower optimizer.lr or set local.clip."
    )


class UnusualRounds(pl.Callback):
    """Says and records what is unusual in a round: far longer messages, diverging losses."""

    def __init__(self, path: Path, evaluation: PersonalEvaluation) -> None:
        self.path = path
        self.evaluation = evaluation
        self.far: list[Outlier] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Logs the first unusual part of each client, and records all."""
        new, pl_module.federation.far = pl_module.federation.far, []
        known = {(far.client, far.part) for far in self.far}
        self.far += new
        if rank() > 0 or not (self.far or self.evaluation.diverged):
            return
        for far in new:
            if (far.client, far.part) not in known:
                known.add((far.client, far.part))
                warn(str(far))
        diverged = {str(n): clients for n, clients in self.evaluation.diverged.items()}
        write_json(self.path, {"far": [far._asdict() for far in self.far], "diverged": diverged})

    def state_dict(self) -> dict[str, Any]:
        """Returns the record, so that a resumed run continues it."""
        return {"far": [tuple(far) for far in self.far]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.far = [Outlier(*row) for row in state_dict["far"]]


class Patience(EarlyStopping):
    """Lightning's early stopping, whose state survives resuming."""

    def __init__(self, patience: int) -> None:
        super().__init__(
            SCORE,
            patience=patience,
            mode="max",
            strict=False,  # the metric may be undefined at all clients
            check_finite=False,  # a failed model counts as the worst round and does not end the run
            check_on_train_epoch_end=False,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops at once if the resumed run had already stopped."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True


class CommunicationLogger(pl.Callback):
    """Logs, by direction, the bytes of each round and so far, and the savings over fp32."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Logs the round that has closed."""
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


def _gather(module: FederatedModule, local: dict[str, Value]) -> dict[str, Value]:
    """Returns all ranks' records, in the order of clients; clears the local ones."""
    # NumPy's numbers become plain ones, as in the files.
    everywhere = gather_named(json.loads(json.dumps(local)))
    local.clear()
    return {c: everywhere[c] for c in module.federation.ids if c in everywhere}


class RoundProgress(ProgressBar):
    """A rich bar on a terminal; elsewhere one line per evaluated round, but none in a sweep."""

    def __init__(self, evaluation: PersonalEvaluation, console: Console | None = None) -> None:
        super().__init__()
        self.evaluation = evaluation
        self.console = console or Terminal(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._began, self._first = time.monotonic(), 0

    def disable(self) -> None:
        """Shows nothing: called by Lightning on all ranks but the first."""
        self.console.quiet = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Starts the bar at the run's first or resumed round."""
        self._began, self._first = time.monotonic(), pl_module.next_round
        if not self.console.is_terminal or self.console.quiet:
            return
        work = "{task.fields[phase]:<9} {task.fields[client]:<14} {task.fields[loss]:<13}"
        columns = TextColumn(work, markup=False), TextColumn("{task.fields[score]}")
        rounds = "round {task.fields[round]}/{task.fields[rounds]}"
        self._bar = bar(self.console, rounds, 24, *columns)
        pl_module.listeners.append(lambda *news: self._tell(pl_module, *news))
        fields: dict[str, Any] = dict.fromkeys(("phase", "client", "loss", "score"), "")
        fields |= {"round": self._first + 1, "rounds": (last := trainer.max_epochs or 0)}
        federation, first = pl_module.federation, self._first
        # How often a client trains in a round.
        self._visits = len(federation.algorithm.phases(first)) * len(federation.members(first))
        total = self._visits * (last - first)
        self._task = self._bar.add_task("", total=total, **fields)
        self._bar.start()

    def _tell(self, module: FederatedModule, phase: str, client: str, done: bool) -> None:
        """Shows the client that starts to train, and the loss of one that has finished."""
        if not self._bar:
            return
        if not done:
            number = module.next_round + 1
            self._bar.update(self._task, round=number, phase=phase, client=short(client))
            return
        loss = module.federation.clients[client].loss
        # The other ranks have probably made the same progress.
        text = "" if loss is None else f"loss {loss:.4f}"
        self._bar.update(self._task, advance=world_size(), loss=text)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Shows the progress over all ranks."""
        if self._bar:
            done = pl_module.next_round - self._first
            self._bar.update(self._task, completed=self._visits * done)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:
        """Shows the validation score, or writes the round's line."""
        if trainer.sanity_checking:
            return
        value = trainer.callback_metrics.get(f"val/{self.evaluation.metric}")
        score = "" if value is None else f"val {self.evaluation.metric} {float(value):.4f}"
        if self._bar:
            self._bar.update(self._task, score=score)
        elif self.console.quiet is False and not swept():
            done, rounds = pl_module.next_round, trainer.max_epochs or 0
            spent = time.monotonic() - self._began
            left = spent / max(1, done - self._first) * (rounds - done)
            known_losses = [pl_module.federation.clients[c].loss for c in pl_module.owned]
            losses = [loss for loss in known_losses if loss is not None]
            # Across sites the losses stay at the sites.
            loss = f"loss {sum(losses) / len(losses):.4f}  " if losses else ""
            self.console.print(
                f"round {done}/{rounds}  {loss}{score}  {spent:.0f} s, about {left:.0f} s left"
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Removes the progress bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    on_exception = on_train_end  # so that the error is readable
