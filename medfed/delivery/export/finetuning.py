"""Repairs quantised models at export and measures them, if the data of the run are available.

There are three candidates: the model after k-means, with recomputed statistics, and distilled from
the trained model. The bundle gets the last one whose validation metric is no worse than that after
k-means, or within the tolerance of the trained model's. Taking the best one would follow chance: a
few validation patients rank near-equal models at random (docs/export.md has the measurement).

The two repairs use the training data of the hospital:

1. *Statistics.* Running means and variances of BatchNorm belong to the activations of the
   unquantised weights. They are recomputed with the quantised ones.
2. *Distillation.* Centres, and what is not quantised, learn to give the logits that the trained
   model gives, by Adam, whose step does not grow with the number of weights that share a centre
   (Polino, Pascanu and Alistarh, "Model compression via distillation and quantization", ICLR
   2018). Which weight has which centre stays, and so do the statistics.

Labels play no part: a model that was trained on a few patients only learns them by heart further.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from medfed.common.console import short
from medfed.common.processes import set_threads
from medfed.common.tensors import Tensors
from medfed.config.compose import build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.splits import Split
from medfed.delivery.bundle.onnx_file import OnnxNetwork
from medfed.delivery.bundle.weights import Codebook, with_codebooks
from medfed.delivery.export.client_model import ClientModel, quantise
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.split import ParameterSplit
from medfed.models.meters import Batch
from medfed.standalone.decode import fill
from medfed.standalone.errors import MedfedError, NonFiniteError
from medfed.standalone.outputs import only_logits

if TYPE_CHECKING:
    from medfed.delivery.export.run_record import RunRecord


def measured_statistics(
    network: nn.Module, weights: Mapping[str, Tensor], data: ClientData, seed: int
) -> Tensors | None:
    """Estimates the running statistics of normalisation again, under given weights."""
    network = fill(copy.deepcopy(network), weights)
    first = next(network.parameters())

    def passed(batch: Batch) -> Tensor:
        return network(batch["image"].to(first))  # type: ignore[no-any-return]

    split = ParameterSplit.of(network)
    trainer = LocalTrainer(network, passed, split, torch.optim.Adam, seed=seed)
    start = trainer.model.initial()
    end = trainer.reestimated(data, start)
    return None if end is start else {**weights, **end}


def distil(
    network: nn.Module,
    trained: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    books: Mapping[str, Codebook],
    data: ClientData,
    steps: int,
    rate: float,
    seed: int,
) -> tuple[Tensors, dict[str, Codebook]]:
    """Moves centres, and what is not quantised, towards the answers of the trained model."""
    start = with_codebooks(weights, books)
    if not steps:
        return start, dict(books)
    teacher, student = (only_logits(copy.deepcopy(network)) for _ in range(2))
    fill(teacher, trained)
    coded = _Coded(fill(student, start), books)

    def loss(batch: Batch) -> Tensor:
        coded.eval()  # as it will compute at the hospital
        image = batch["image"].to(next(coded.parameters()))
        with torch.no_grad():
            wanted = teacher(image)
        return mse_loss(coded(image), wanted)

    split = ParameterSplit.of(coded, (), "frozen")
    trainer = LocalTrainer(coded, loss, split, torch.optim.Adam, seed=seed)
    nothing: dict[str, Any] = dict.fromkeys(("penalty", "after_step", "memory"))
    place = data, trainer.model.initial(), ("export", data.id), rate
    end, _ = trainer.run(*place, update="all", steps=steps, **nothing)
    centers = (end[f"centers.{number}"] for number in range(len(books)))
    tuned = {n: _sorted(b, c) for (n, b), c in zip(books.items(), centers, strict=True)}
    return with_codebooks({n: end.get(f"network.{n}", t) for n, t in start.items()}, tuned), tuned


class _Coded(nn.Module):
    """A network whose quantised weights are the centres that their elements have."""

    def __init__(self, network: nn.Module, books: Mapping[str, Codebook]) -> None:
        super().__init__()
        self.network, self.books = network, books
        self.centers = nn.ParameterList(book.centers.clone() for book in books.values())
        for name in books:  # its elements are read from the centres instead
            network.get_parameter(name).requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        pairs = zip(self.books.items(), self.centers, strict=True)
        dense = {name: replace(book, centers=c).dense() for (name, book), c in pairs}
        return functional_call(self.network, dense, (image,))  # type: ignore[no-any-return]


def _sorted(book: Codebook, centers: Tensor) -> Codebook:
    """The codebook with moved centres, in order again."""
    ordered, order = centers.to(book.centers.dtype).cpu().sort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    return Codebook(rank[book.indices], ordered.clone(), book.shape)


STAGES = ("trained", "kmeans", "statistics", "finetuned")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantised:
    """A model on its way into a bundle."""

    weights: Tensors  # all float entries, dense
    books: dict[str, Codebook]  # codebooks of the quantised ones
    stage: str  # which of :data:`STAGES` it is
    # The selection metric on validation data after each stage; ``None`` where it was not measured.
    validation: dict[str, float | None]
    test: dict[str, float] | None = None  # test metrics of these weights, or ``None``


def quantise_and_tune(
    run: RunRecord,
    client: str,
    model: ClientModel,
    bits: Mapping[str, int],
    data: FederatedDataModule | None,
    steps: int,
    rate: float,
    tolerance: float,
) -> Quantised:
    """Quantises by k-means, and repairs as far as validation allows it."""
    set_threads(run.config.threads)
    widths = {entry: count for name, count in bits.items() for entry in model.entries(name)}
    books = quantise(model.weights, widths)
    scores: dict[str, float | None] = dict.fromkeys(STAGES)
    plain = Quantised(with_codebooks(model.weights, books), books, "kmeans", scores)
    if data is None:
        return plain
    bench = _Bench(run, model, data.clients[client])
    scores["trained"] = bench.score(model.weights)
    scores["kmeans"] = bench.score(plain.weights)
    best = plain
    repaired = _repaired(bench, model.weights, plain, steps, rate, run.config.seed) if steps else []
    for candidate in repaired:
        scores[candidate.stage] = score = bench.score(candidate.weights)
        near = not falls(scores["trained"], score, bench.mode, tolerance)
        if not math.isnan(score) and (near or not falls(scores["kmeans"], score, bench.mode, 0)):
            best = candidate
    return replace(best, test=bench.measure(best.weights, "test"))


def falls(before: float | None, after: float | None, mode: str, tolerance: float) -> bool:
    """Says whether a metric is worse than before by more than a tolerance.

    Example:
        >>> falls(0.80, 0.79, "max", 0.02), falls(0.80, 0.77, "max", 0.02)
        (False, True)
        >>> falls(50.0, 50.9, "min", 0.02), falls(50.0, 51.1, "min", 0.02)
        (False, True)
    """
    if before is None or after is None or math.isnan(before):
        return False
    return before - after > tolerance if mode == "max" else after > before + tolerance * abs(before)


def _repaired(
    bench: _Bench, trained: Tensors, plain: Quantised, steps: int, rate: float, seed: int
) -> list[Quantised]:
    """The model with statistics measured anew, if it has some, and distilled."""
    repaired, now = [], plain
    statistics = measured_statistics(bench.network, plain.weights, bench.data, seed)
    if statistics is not None:
        now = replace(plain, weights=statistics, stage="statistics")
        repaired.append(now)
    try:
        tuning = bench.data, steps, rate, seed
        weights, books = distil(bench.network, trained, now.weights, plain.books, *tuning)
    except NonFiniteError:
        _log.warning("Fine-tuning of %s diverged; set a smaller finetune_lr.", short(bench.data.id))
    else:
        repaired.append(replace(plain, weights=weights, books=books, stage="finetuned"))
    return repaired


class _Bench:
    """Measures a model as the run did, on a client's data."""

    def __init__(self, run: RunRecord, model: ClientModel, data: ClientData) -> None:
        self.data = data
        self.task = run.task()
        self.network = self.task.network = only_logits(model.network())
        self.metric, self.mode = self.task.selection

    def measure(self, weights: Mapping[str, Tensor], split: Split) -> dict[str, float]:
        fill(self.network, weights)
        return self.task.evaluate(self.data.eval_batches(split), test=split == "test")

    def score(self, weights: Mapping[str, Tensor]) -> float:
        return self.measure(weights, "val")[self.metric]


def say_int8(
    run: RunRecord, model: ClientModel, data: ClientData, path: Path, weights: Mapping[str, Tensor]
) -> None:
    """Says in one line what 8-bit integers change of the selection metric on validation data."""
    bench = _Bench(run, model, data)
    before = bench.score(weights)
    bench.task.network = OnnxNetwork(path)
    after = bench.task.evaluate(data.eval_batches("val"))[bench.metric]
    text = "%s: models/model.onnx computes with 8-bit integers; validation %s %.4f, %.4f without."
    _log.info(text, short(data.id), bench.metric, after, before)


def open_data(run: RunRecord) -> FederatedDataModule | None:
    """Reads the run's data again, if they are there and are those of the run."""
    try:
        data: FederatedDataModule = build(run.config.data)
        data.keep_out = tuple(str(c) for c in run.config.get("keep_out") or ())
        data.balanced = run.config.model.get("class_weights") == "balanced"
        data.setup()
        run.check_data(data.splits())
    except (MedfedError, OSError) as error:
        _log.warning("No fine-tuning and no metrics, as the data are not at hand: %s", error)
        return None
    return data
