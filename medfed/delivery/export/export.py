"""What ``medfed export`` does: a bundle for each client, and a table.

A quantised model is measured on the run's test data, if they are at hand. Running means and
variances of BatchNorm belong to the activations of the unquantised weights, so they are recomputed
with the quantised ones, on the training data of the hospital.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfed.common.checks import check_fields, check_known, check_not_negative
from medfed.common.console import file_names, say, shown, size, wide_console
from medfed.common.errors import ConfigError, DataError
from medfed.common.files import csv_text, write_text
from medfed.common.scores import mean_of_known
from medfed.common.seeding import derive_seed
from medfed.common.tensors import Tensors
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.onnx_file import import_extra
from medfed.delivery.bundle.scripts.decode import fill
from medfed.delivery.bundle.weights import Codebook, with_codebooks
from medfed.delivery.export.client_model import FULL, ClientModel, choose_bits, quantise
from medfed.delivery.export.run_record import RunRecord, finite
from medfed.models.meters import Batch
from medfed.models.networks.outputs import only_logits
from medfed.reports.tables import Table

_log = logging.getLogger(__name__)
_TEST = ("trained", "bundle")
Facts = Mapping[str, Any]
"""The part ``medfed`` of the metadata of one exported bundle."""


@dataclass(frozen=True)
class ExportOptions:
    """The keys of ``configs/export.yaml``, described there.

    Raises:
        ConfigError: If a value cannot be used, or a package is not there.
    """

    run: str
    client: str | Sequence[str] = "all"
    bits: int | Sequence[int] | None = None
    layers: Mapping[str, int] | None = None
    tolerance: Annotated[float, check_not_negative] = 0.02
    onnx: bool = False
    largest_part: str | Sequence[str] | None = None
    out: str | None = None
    plugins: Sequence[str] | None = None  # named, so that the run's own code may be used

    @property
    def widths(self) -> list[int | None]:
        """The bits per weight that bundles are made with."""
        given = self.bits if isinstance(self.bits, list) else [self.bits]
        return list(dict.fromkeys(given))

    def __post_init__(self) -> None:
        check_fields("", self)
        if not self.widths:
            raise ConfigError("bits=[] names no width; leave it out, or name some: bits=[32,4,2].")
        if self.onnx:
            import_extra("onnx")  # before anything is computed


def export_run(config: Section) -> list[Path]:
    """Exports the models of a run.

    Args:
        config: The composed ``configs/export.yaml``.

    Returns:
        The bundles' folders.

    Raises:
        MedfedError: If the run, a client or an option cannot be used.
    """
    options: ExportOptions = build(config)
    run = RunRecord.read(Path(options.run))
    folder = run.bundles if options.out is None else Path(options.out)
    clients, files = run.chosen(options.client), file_names(run.clients)
    plans = {width: _bits(run, width, options.layers) for width in options.widths}
    data = open_data(run) if any(plans.values()) else None
    rows: list[dict[str, Any]] = []
    made = []
    for client in clients:
        for width, bits in plans.items():
            place = folder if len(plans) == 1 else folder / f"{width}_bits"
            place /= files[client]
            rows.append(export_client(run, client, place, width, bits, options, data))
            made.append(place)
            _log.info("Wrote %s.", place)
    metric, mode = run.summary["selection"]
    print_export(rows, metric, mode, options.tolerance)
    table = run.export_csv
    save_table(table, rows, metric)
    _log.info("Table: %s", table)
    return made


def export_client(
    run: RunRecord,
    client: str,
    folder: Path,
    width: int | None,
    bits: Mapping[str, int],
    options: ExportOptions,
    data: FederatedDataModule | None,
) -> dict[str, Any]:
    """Writes one client's bundle and reads it again.

    Args:
        run: The run.
        client: The client.
        folder: The bundle's folder.
        width: Bits as the options have them; ``None``: the centres of the run.
        bits: Bits by parameter name of the ordinary network for k-means; empty: no k-means.
        options: How to export.
        data: What quantised models are measured on, if at hand.

    Returns:
        The part ``medfed`` of the bundle's metadata.
    """
    model = run.exported(client)
    facts = run.facts(client, model.plain)
    facts["largest_part"] = _regions(options.largest_part, facts)
    weights, books, method = model.weights, dict[str, Codebook](), None
    if bits:
        widths = {entry: width for name, width in bits.items() for entry in model.entries(name)}
        books, method = quantise(model.weights, widths), "kmeans"
        weights, facts["test_metrics"] = with_codebooks(model.weights, books), None
        if data is not None:
            weights, metrics = measured(run, model, weights, data.clients[client])
            facts["test_metrics"] = finite(metrics)
    elif width is None and (books := run.learned(client, model.weights)):
        method = "learned"
    facts["quantization"] = {"method": method}
    dense = {n: t for n, t in weights.items() if n not in books}
    written = write_bundle(folder, facts, dense, books, options.onnx)
    read_bundle(folder)
    return written


def measured(
    run: RunRecord, model: ClientModel, weights: Tensors, data: ClientData
) -> tuple[Tensors, dict[str, float]]:
    """Fits the statistics of BatchNorm to quantised weights, and measures these as the run did.

    Args:
        run: The run.
        model: A client's.
        weights: All its float entries, quantised.
        data: The client's data.

    Returns:
        All entries with new statistics, and the metrics on the test data.
    """
    torch.set_num_threads(run.config.threads)
    task = run.task()
    network = task.network = only_logits(model.network())
    found = measured_statistics(network, weights, data, run.config.seed)
    weights = weights if found is None else found
    fill(network, weights)
    return weights, task.evaluate(data.eval_batches("test"), test=True)


BATCHES = 20  # that statistics are measured on


def measured_statistics(
    network: nn.Module, weights: Mapping[str, Tensor], data: ClientData, seed: int
) -> Tensors | None:
    """Measures the running statistics of BatchNorm under given weights.

    Args:
        network: The network, which is left as it is.
        weights: All float entries.
        data: The client's data.
        seed: Of the order of its batches.

    Returns:
        All entries with the mean statistics of :data:`BATCHES` training batches; None where the
        network keeps no statistics.
    """
    network = fill(copy.deepcopy(network), weights)
    layers = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return None
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
        layer.train()
    with torch.no_grad():
        for batch in islice(_batches(data, seed), BATCHES):
            network(batch["image"].to(next(network.parameters())))
    state = network.state_dict()
    return {name: state[name] for name in weights}


def _batches(data: ClientData, seed: int) -> Iterator[Batch]:
    """Training batches without end, but rests of a single sample, which have no statistics."""
    epochs = (data.train_batches(derive_seed(seed, "statistics", data.id, n)) for n in count())
    rests = data.num_samples > data.batch_size > 1
    for batch in chain.from_iterable(epochs):
        if not (rests and len(batch["image"]) == 1):
            yield batch


def open_data(run: RunRecord) -> FederatedDataModule | None:
    """Reads the run's data again, if they are there and are those of the run.

    Args:
        run: The run.

    Returns:
        The data, set up; ``None``, with one line that says why, where they cannot be used.
    """
    try:
        data: FederatedDataModule = build(run.config.data)
        data.keep_out = tuple(str(c) for c in run.config.get("keep_out") or ())
        data.balanced = run.config.model.get("class_weights") == "balanced"
        data.setup()
        splits: dict[str, Any] = data.splits()
    except (DataError, ConfigError, OSError) as error:
        _log.warning("No metrics of quantised models, as the data are not at hand: %s", error)
        return None
    files = sorted(splits["files"].values()) == sorted(run.splits["files"].values())
    if not files or splits["clients"] != run.splits["clients"]:
        _log.warning("No metrics of quantised models, as the data are not those of the run.")
        return None
    return data


def _regions(wanted: str | Sequence[str] | None, facts: Mapping[str, Any]) -> list[str] | None:
    """The regions of which the largest part is kept.

    Raises:
        ConfigError: If the model segments no volumes, or not this region.
    """
    if not wanted:
        return None
    known = list(facts["labels"])
    if facts["input"]["kind"] != "volumes":
        raise ConfigError("largest_part is for segmentation of volumes; leave it out.")
    names = (
        known if wanted == "all" else [wanted] if isinstance(wanted, str) else [*map(str, wanted)]
    )
    for name in names:
        check_known("largest_part", name, known)
    return list(dict.fromkeys(names))


def _bits(run: RunRecord, width: int | None, layers: Mapping[str, int] | None) -> dict[str, int]:
    """Bits by name for k-means; empty where the models stay as they are, or have centres."""
    if width is None and not layers:
        return {}
    if width is None and run.centers.is_dir():
        raise ConfigError(
            "The run has learned centres, which layers cannot change; set bits for k-means instead."
        )
    bits = FULL if width is None else width
    chosen = choose_bits(run.task().network, bits, layers)
    if bits != FULL and not chosen:
        _log.warning("All layers of this network are first or last; nothing is quantised.")
    return chosen


def print_export(rows: Sequence[Facts], metric: str, mode: str, tolerance: float) -> None:
    """Prints a line per bundle: bits, sizes, and the metric before and after.

    Args:
        rows: The bundles.
        metric: The run's selection metric.
        mode: ``max`` or ``min``.
        tolerance: See :func:`falls`.
    """
    console = wide_console()
    head = ["client", "bits", "model.pt", "fp32", "ratio"]
    head += [f"test {metric}\n{name}" for name in _TEST]
    lines = []
    for row in rows:
        packed, whole = (row["sizes"][n] for n in ("packed", "fp32"))
        line = [row["client"], _bits_of(row), size(packed), size(whole)]
        lines.append([*line, f"{whole / packed:.2f}", *map(number, tested(row, metric))])
    lines += _means(rows, metric, mode)
    console.print(Table.of(head, lines, prose=(0,)).printed("Exported bundles"))
    lost = [
        f"{shown(row['client'])} ({_bits_of(row)} bits) "
        f"{' to '.join(map(number, tested(row, metric)))}"
        for row in rows
        if falls(*tested(row, metric), mode, tolerance)
    ]
    if lost:
        unit = f"{tolerance:g}" if mode == "max" else f"{tolerance:.0%}"
        say(
            console,
            f"warning: test {metric} is worse than as trained by more than tolerance={unit}: "
            f"{', '.join(lost)}; use more bits, or layers= for the layers that need them.",
        )


def save_table(path: Path, rows: Sequence[Facts], metric: str) -> None:
    """Writes a CSV line per bundle: bits, bytes, and the metric before and after.

    Args:
        path: The file.
        rows: The bundles.
        metric: The run's selection metric.
    """
    lines: list[list[Any]] = []
    for row in rows:
        scores = ("" if v is None else v for v in tested(row, metric))
        lines.append([row["client"], _bits_of(row), row["sizes"]["packed"], metric, *scores])
    head = ("client", "bits", "bytes", "metric", *(f"test_{n}" for n in _TEST))
    write_text(path, csv_text(head, lines))


def falls(before: float | None, after: float | None, mode: str, tolerance: float) -> bool:
    """Says whether a metric is worse than before by more than a tolerance.

    Args:
        before: As trained.
        after: Of the bundle.
        mode: ``max``: the tolerance is a difference, as of Dice or accuracy; ``min``: a share of
            the value before, as of errors in the outcome's unit.
        tolerance: 0 or more.

    Example:
        >>> falls(0.80, 0.79, "max", 0.02), falls(0.80, 0.77, "max", 0.02)
        (False, True)
        >>> falls(50.0, 50.9, "min", 0.02), falls(50.0, 51.1, "min", 0.02)
        (False, True)
    """
    if before is None or after is None or math.isnan(before):
        return False
    return before - after > tolerance if mode == "max" else after > before + tolerance * abs(before)


def tested(facts: Mapping[str, Any], metric: str) -> tuple[float | None, float | None]:
    """Returns the test metric of the model as trained, and of the bundle's weights.

    Example:
        >>> tested({"run_test_metrics": {"iou": 0.8}, "test_metrics": None}, "iou")
        (0.8, None)
    """
    return (facts["run_test_metrics"] or {}).get(metric), (facts["test_metrics"] or {}).get(metric)


def _bits_of(row: Facts) -> str:
    return bits_text(row["bits"].values())


def number(value: float | None) -> str:
    """Writes a metric; what was not measured, or is undefined, is a dash."""
    return "-" if value is None else f"{value:.4f}"


def _means(rows: Sequence[Facts], metric: str, mode: str) -> Iterator[list[str]]:
    """The mean and the worst client, for each width of several clients."""
    for width in dict.fromkeys(map(_bits_of, rows)):
        same = [r for r in rows if _bits_of(r) == width]
        if len(same) < 2:
            continue
        pairs = np.array([tested(r, metric) for r in same], dtype=float)  # NaN where None
        worst = np.fmin.reduce(pairs) if mode == "max" else np.fmax.reduce(pairs)
        between = [""] * 3
        for name, values in (("mean", mean_of_known(pairs, axis=0)), ("worst", worst)):
            known = [None if math.isnan(v) else float(v) for v in values]
            yield [f"({name})", width, *between, *map(number, known)]


def bits_text(bits: Any) -> str:
    """Names the bits per weight of the quantised tensors.

    Example:
        >>> bits_text([2, 2, 4]), bits_text([])
        ('2, 4', '32')
    """
    return ", ".join(map(str, sorted(set(bits)))) or "32"
