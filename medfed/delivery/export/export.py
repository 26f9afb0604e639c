"""What ``medfed export`` does: a bundle for each client, and a table."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medfed.common.console import file_names
from medfed.common.errors import ConfigError, did_you_mean
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.datamodules.base import FederatedDataModule
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.networks import code_of
from medfed.delivery.bundle.onnx_file import import_extra
from medfed.delivery.export.client_model import FULL, choose_bits
from medfed.delivery.export.finetuning import STAGES, Quantised, open_data, quantise_and_tune
from medfed.delivery.export.report import print_export, save_table
from medfed.delivery.export.run_record import RunRecord, finite

_log = logging.getLogger(__name__)


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
    finetune_steps: int = 20
    finetune_lr: float = 1e-3
    tolerance: float = 0.02
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
        steps, rate = self.finetune_steps, self.finetune_lr
        if steps < 0:
            raise ConfigError(f"finetune_steps must be a whole number of at least 0, not {steps}.")
        if rate is None or not rate > 0:
            raise ConfigError(f"finetune_lr must be a positive number, not {rate}.")
        if not self.tolerance >= 0:
            raise ConfigError(f"tolerance must be 0 or more, not {self.tolerance}.")
        if not self.widths:
            raise ConfigError("bits=[] names no width; leave it out, or name some: bits=[32,4,2].")
        if self.onnx:
            import_extra("onnx")  # before anything is computed
        if self.layers is not None and not isinstance(self.layers, Mapping):
            raise ConfigError("layers must map patterns to bits, such as layers={upcat_1.*:4}.")


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
    folder = run.files.bundles if options.out is None else Path(options.out)
    clients, files = run.clients(options.client), file_names(run.clients("all"))
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
    table = run.files.export_csv
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
        data: What quantised models are fine-tuned and measured on, if at hand.

    Returns:
        The part ``medfed`` of the bundle's metadata.
    """
    model = run.model(client)
    facts = run.facts(client, model.plain)
    facts["largest_part"] = _regions(options.largest_part, facts)
    done, method = Quantised(model.weights, {}, "trained", dict.fromkeys(STAGES)), None
    if bits:
        tuning = (options.finetune_steps, options.finetune_lr, options.tolerance)
        done, method = quantise_and_tune(run, client, model, bits, data, *tuning), "kmeans"
        facts["test_metrics"] = None if done.test is None else finite(done.test)
    elif width is None and (books := run.learned(client, model.weights)):
        done, method = replace(done, books=books), "learned"
    facts["quantization"] = {
        "method": method,
        "kept": done.stage,
        "finetune_steps": options.finetune_steps if done.stage == "finetuned" else 0,
        "validation_metric": run.summary["selection"][0],
        "validation": finite(done.validation),
    }
    dense = {n: t for n, t in done.weights.items() if n not in done.books}
    sources = code_of(model.plain)[1]
    written = write_bundle(folder, facts, dense, done.books, options.onnx, sources)
    read_bundle(folder)
    return written


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
        if name not in known:
            raise ConfigError(
                f"largest_part names {name}{did_you_mean(name, known)}; the regions are "
                f"{', '.join(known)}."
            )
    return list(dict.fromkeys(names))


def _bits(run: RunRecord, width: int | None, layers: Mapping[str, int] | None) -> dict[str, int]:
    """Bits by name for k-means; empty where the models stay as they are, or have centres."""
    if width is None and not layers:
        return {}
    if width is None and run.files.centers.is_dir():
        raise ConfigError(
            "The run has learned centres, which layers cannot change; set bits for k-means instead."
        )
    bits = FULL if width is None else width
    chosen = choose_bits(run.task().network, bits, layers)
    if bits != FULL and not chosen:
        _log.warning("All layers of this network are first or last; nothing is quantised.")
    return chosen
