"""What ``scripts/export.py`` does: a bundle for each client, a table and a picture."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from medfed.datamodules.base import FederatedDataModule
from medfed.delivery.bundle import read_bundle
from medfed.delivery.codebook import Codebook
from medfed.delivery.export_report import ExportRow, draw_export, print_export
from medfed.delivery.metadata import collect_facts, finite
from medfed.delivery.onnx_export import import_onnx
from medfed.delivery.quantization import FULL, choose_bits
from medfed.delivery.run_models import RunRecord
from medfed.delivery.tuning import Bench, Quantised, open_data
from medfed.delivery.writing import write_bundle
from medfed.errors import ConfigError
from medfed.reports.pictures import save_figures

_log = logging.getLogger(__name__)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ExportOptions:
    """How models are exported.

    Attributes:
        bits: 1 to 8: k-means; 32: as trained; ``None``: the centres that the run has learned, if
            it has.
        layers: Bits by patterns of weight names.
        finetune_steps: Steps after k-means.
        finetune_lr: Their step size; ``None``: the run's last one.
        onnx: Whether bundles hold an ONNX file, too.

    Raises:
        ConfigError: If a value cannot be used.
    """

    bits: int | None = None
    layers: Mapping[str, int] | None = None
    finetune_steps: int = 20
    finetune_lr: float | None = None
    onnx: bool = False

    def __post_init__(self) -> None:
        steps, rate = self.finetune_steps, self.finetune_lr
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ConfigError(f"finetune_steps must be a whole number of at least 0, not {steps}.")
        if rate is not None and not (isinstance(rate, int | float) and rate > 0):
            raise ConfigError(f"finetune_lr must be a positive number or null, not {rate}.")
        if not isinstance(self.onnx, bool):
            raise ConfigError(f"onnx must be true or false, not {self.onnx}.")
        if self.onnx:
            import_onnx()  # before anything is computed
        if self.layers is not None and not isinstance(self.layers, Mapping):
            raise ConfigError("layers must map patterns to bits, such as layers={upcat_1.*:4}.")


def export_run(config: DictConfig) -> list[Path]:
    """Exports the models of a run.

    Args:
        config: The composed ``configs/export.yaml``.

    Returns:
        The bundles' folders.

    Raises:
        MedfedError: If the run, a client or an option cannot be used.
    """
    chosen: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    names = ("bits", "layers", "finetune_steps", "finetune_lr", "onnx")
    options = ExportOptions(**{n: chosen[n] for n in names})
    run = RunRecord.read(Path(str(config.run)))
    folder = run.folder / "bundles" if config.out is None else Path(str(config.out))
    clients = run.clients(chosen["client"])
    bits = _bits(run, options)
    data = open_data(run) if bits else None
    rows = []
    for client in clients:
        row = export_client(run, client, folder / client, bits, options, data)
        rows.append(row)
        _log.info("Wrote %s.", row.folder)
    print_export(rows, run.config.model.selection[0])
    pictures = save_figures(run.folder / "pictures", {"export": draw_export(rows)})
    _log.info("Picture: %s", pictures["export"])
    return [row.folder for row in rows]


def export_client(
    run: RunRecord,
    client: str,
    folder: Path,
    bits: Mapping[str, int],
    options: ExportOptions,
    data: FederatedDataModule | None,
) -> ExportRow:
    """Writes one client's bundle and reads it again.

    Args:
        run: The run.
        client: The client.
        folder: The bundle's folder.
        bits: Bits by parameter name of the ordinary network for k-means; empty: no k-means.
        options: How to export.
        data: What quantised models are fine-tuned and measured on, if at hand.
    """
    model = run.model(client)
    weights = model.weights
    facts = _facts(run, client, model.plain)
    books: dict[str, Codebook] = {}
    done = Quantised(weights, books, dict.fromkeys(("trained", "kmeans", "finetuned")))
    method = None
    if bits:
        steps, rate = options.finetune_steps, options.finetune_lr
        own = {entry: b for name, b in bits.items() for entry in model.entries(name)}
        bench = Bench(run, model.network(), data)
        done, method = bench.compress(weights, client, own, steps, rate), "kmeans"
        facts["test_metrics"] = None if done.test is None else finite(done.test)
    elif options.bits is None and (books := run.learned(client, weights)):
        done, method = Quantised(weights, books, done.validation), "learned"
    metric = run.config.model.selection[0]
    facts["quantization"] = {
        "method": method,
        "finetune_steps": done.steps,
        "validation_metric": metric,
        "validation": done.validation,
    }
    dense = {n: t for n, t in done.weights.items() if n not in done.books}
    written = write_bundle(folder, facts, dense, done.books, options.onnx)
    read_bundle(folder)
    return ExportRow(client, folder, written, weights, done.books)


def _facts(run: RunRecord, client: str, network: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = OmegaConf.to_container(run.config)  # type: ignore[assignment]
    preprocessing = run.preprocessing[client]
    records = (run.splits, run.summary, run.versions)
    return collect_facts(client, config, network, preprocessing, *records)


def _bits(run: RunRecord, options: ExportOptions) -> dict[str, int]:
    """Bits by name for k-means; empty where the models stay as they are, or have centres."""
    if options.bits is None and not options.layers:
        return {}
    if options.bits is None and (run.folder / "centers").is_dir():
        raise ConfigError(
            "The run has learned centres, which layers cannot change; set bits for k-means instead."
        )
    bits = FULL if options.bits is None else options.bits
    chosen = choose_bits(run.task().network, bits, options.layers)
    if bits != FULL and not chosen:
        _log.warning("All layers of this network are first or last; nothing is quantised.")
    return chosen
