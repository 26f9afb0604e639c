"""Fine-tuning and measuring at export, where the run's data are at hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from medfed.config import build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData, Split
from medfed.delivery.codebook import Codebook
from medfed.delivery.quantization import finetune, quantise, with_codebooks
from medfed.delivery.run_models import RunRecord
from medfed.errors import ConfigError, DataError, NonFiniteError
from medfed.federation.budget import learning_rates
from medfed.federation.split import ParameterSplit
from medfed.federation.training import LocalTrainer
from medfed.models.task import TaskModule

_log = logging.getLogger(__name__)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Quantised:
    """A model on its way into a bundle.

    Attributes:
        weights: All float entries, dense.
        books: Codebooks of the quantised ones.
        validation: The selection metric on validation data of the model as ``trained``, after
            ``kmeans``, and ``finetuned``; ``None`` where it was not measured.
        test: Test metrics of these weights, or ``None``.
        steps: Steps of fine-tuning that these weights went through.
    """

    weights: Tensors
    books: dict[str, Codebook]
    validation: dict[str, float | None]
    test: dict[str, float] | None = None
    steps: int = 0


class Bench:
    """Trains and measures a client's model, on the run's own data.

    Args:
        run: The run.
        network: The model's network.
        data: The run's data, or ``None`` where they are not at hand.
    """

    def __init__(
        self, run: RunRecord, network: nn.Module, data: FederatedDataModule | None
    ) -> None:
        torch.set_num_threads(run.config.threads)
        self.data = data
        self.task: TaskModule = run.task()
        self.task.network = network
        self.metric, self.mode = self.task.selection
        split = ParameterSplit.of(self.task.network, (), run.config.buffers)
        optimizer, scheduler = build(run.config.optimizer), build(run.config.scheduler)
        self.last_rate = learning_rates(optimizer, scheduler, run.config.rounds)[-1]
        rounds, budget, seed = run.config.rounds, build(run.config.local), run.config.seed
        self.trainer = LocalTrainer(
            self.task.network, self.task.loss, split, optimizer, scheduler, rounds, budget, seed
        )

    def measure(self, weights: Mapping[str, Tensor], client: str, split: Split) -> dict[str, float]:
        """Returns the metrics of a model on one split of a client."""
        self.trainer.load(weights)
        return self.task.evaluate(self._client(client).eval_batches(split), test=split == "test")

    def compress(
        self,
        weights: Tensors,
        client: str,
        bits: Mapping[str, int],
        steps: int,
        rate: float | None,
    ) -> Quantised:
        """Quantises by k-means and fine-tunes; what made validation worse is not kept.

        Args:
            weights: All float entries of the trained model.
            client: The client.
            bits: Bits by parameter name.
            steps: Steps of fine-tuning.
            rate: Their step size, or ``None`` for the run's last one.
        """
        books = quantise(weights, bits)
        scores: dict[str, float | None] = dict.fromkeys(("trained", "kmeans", "finetuned"))
        plain = Quantised(with_codebooks(weights, books), books, scores)
        if self.data is None:
            return plain
        best = plain
        scores["trained"] = self._score(weights, client)
        scores["kmeans"] = self._score(plain.weights, client)
        if steps:
            tuned = self._finetuned(plain, client, steps, rate)
            if tuned is not None:
                scores["finetuned"] = self._score(tuned.weights, client)
                best = tuned if self._no_worse(scores) else plain
        return replace(best, test=self.measure(best.weights, client, "test"))

    def _finetuned(
        self, plain: Quantised, client: str, steps: int, rate: float | None
    ) -> Quantised | None:
        step_size = self.last_rate if rate is None else rate
        data = self._client(client)
        try:
            weights, books = finetune(
                self.trainer, data, plain.weights, plain.books, steps, step_size
            )
        except NonFiniteError:
            _log.warning("Fine-tuning of %s diverged; set a smaller finetune_lr.", client)
            return None
        return replace(plain, weights=weights, books=books, steps=steps)

    def _score(self, weights: Mapping[str, Tensor], client: str) -> float:
        return self.measure(weights, client, "val")[self.metric]

    def _no_worse(self, scores: Mapping[str, float | None]) -> bool:
        before, after = scores["kmeans"], scores["finetuned"]
        assert before is not None
        assert after is not None
        return not (after < before if self.mode == "max" else after > before)

    def _client(self, client: str) -> ClientData:
        assert self.data is not None
        return self.data.clients[client]


def open_data(run: RunRecord) -> FederatedDataModule | None:
    """Reads the run's data again, if they are there and are those of the run.

    Args:
        run: The run.

    Returns:
        The data, set up; ``None``, with one line that says why, where they cannot be used.
    """
    try:
        data: FederatedDataModule = build(run.config.data)
        data.keep_out = tuple(str(c) for c in run.config.get("newcomers") or ())
        data.setup()
        found: dict[str, Any] = data.splits()
    except (DataError, ConfigError, OSError) as error:
        _log.warning("No fine-tuning and no metrics, as the data are not at hand: %s", error)
        return None
    files = sorted(found["files"].values()) == sorted(run.splits["files"].values())
    if not files or found["clients"] != run.splits["clients"]:
        _log.warning("No fine-tuning and no metrics, as the data are not those of the run.")
        return None
    return data
