"""What ``medfed export`` does: a bundle for each client, and a table."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from medfed.common.console import file_names, say, short, size, wide_console
from medfed.common.scores import mean_of_known
from medfed.common.tables import Table
from medfed.common.untrusted import read_tensors
from medfed.config.compose import build
from medfed.config.sections import Section
from medfed.datamodules.base import FederatedDataModule
from medfed.delivery.bundle.bundle import read_bundle, write_bundle
from medfed.delivery.bundle.onnx_file import ONNX, import_extra
from medfed.delivery.export import finetuning
from medfed.delivery.export.client_model import FULL, choose_bits
from medfed.delivery.export.run_record import RunRecord, finite
from medfed.standalone.checks import check_fields, check_known, check_not_negative, check_positive
from medfed.standalone.csv_files import csv_rows
from medfed.standalone.errors import ConfigError
from medfed.standalone.files import csv_text, write_text
from medfed.standalone.neighbours import store_size

_log = logging.getLogger(__name__)
_TEST = ("trained", "bundle")
_SAMPLES = 32  # training inputs that show the ranges of int8
Facts = Mapping[str, Any]
"""The part ``medfed`` of the metadata of one exported bundle."""


@dataclass(frozen=True)
class ExportOptions:
    """The keys of ``configs/export.yaml``, described there."""

    run: str
    client: str | Sequence[str] = "all"
    bits: int | Sequence[int] | None = None
    layers: Mapping[str, int] | None = None
    finetune_steps: Annotated[int, check_not_negative] = 20
    finetune_lr: Annotated[float, check_positive] = 1e-3
    tolerance: Annotated[float, check_not_negative] = 0.02
    onnx: bool | Literal["int8"] = False
    largest_part: str | Sequence[str] | None = None
    out: str | None = None
    patients_features: bool = False
    plugins: Sequence[str] | None = None  # named, so that the run's own code may be used

    @property
    def widths(self) -> list[int | None]:
        """The bits per weight that bundles are made with."""
        choices = self.bits if isinstance(self.bits, list) else [self.bits]
        return list(dict.fromkeys(choices))

    def __post_init__(self) -> None:
        check_fields("", self)
        if not self.widths:
            raise ConfigError("bits=[] names no width; leave it out, or name some: bits=[32,4,2].")
        if self.onnx:
            import_extra("onnx")  # before anything is computed


def export_run(config: Section) -> list[Path]:
    """Exports the models of a run."""
    options: ExportOptions = build(config)
    run = RunRecord.read(Path(options.run))
    folder = run.bundles if options.out is None else Path(options.out)
    clients, files = run.chosen(options.client), file_names(run.clients)
    remembered = _check_remembered(run, clients, options)
    plans = {width: _bits(run, width, options.layers) for width in options.widths}
    data = finetuning.open_data(run) if any(plans.values()) or options.onnx == "int8" else None
    if options.onnx == "int8" and data is None:
        raise ConfigError(
            f"onnx=int8 needs the data of {run.folder} to see the range of each layer's outputs; "
            "make them available, or choose onnx=true."
        )
    rows = dict[Path, dict[str, Any]]()
    for client in clients:
        for width, bits in plans.items():
            place = folder if len(plans) == 1 else folder / f"{width}_bits"
            place /= files[client]
            rows[place] = _export_client(run, client, place, width, bits, options, data)
            _log.info("Wrote %s.", place)
    metric, mode = run.summary["selection"]
    _print_export([*rows.values()], metric, mode, options.tolerance)
    table = run.export_csv if options.out is None else folder / run.export_csv.name
    _save_table(table, folder, rows, metric)
    _log.info("Table: %s", table)
    if remembered:
        _log.warning("%s, and whoever gets a bundle gets them.", remembered)
    return [*rows]


def _check_remembered(run: RunRecord, clients: Sequence[str], options: ExportOptions) -> str:
    """Says which models hold features of patients, once the hospitals agree; else empty."""
    files = run.files("models", clients)
    sizes = {c: store_size(read_tensors(files[c])) for c in clients}
    remembered = [
        f"{short(client)} ({size['cases']} training samples, {size['bytes']:,} bytes)"
        for client, size in sizes.items()
        if size["cases"]
    ]
    if not remembered:
        return ""
    which = f"Features and labels of patients are in the models of {', '.join(remembered)}"
    ways = []
    if not options.patients_features:
        ways.append("set patients_features=true if the hospitals agree")
    if options.layers or {*options.widths} - {None, FULL}:
        ways.append("leave out bits and layers, as features are of weights in full precision")
    if ways:
        ending = f"and whoever gets a bundle gets them; {', and '.join(ways)}"
        raise ConfigError(f"{which}, {ending}.")
    return which


def _export_client(
    run: RunRecord,
    client: str,
    folder: Path,
    width: int | None,
    bits: Mapping[str, int],
    options: ExportOptions,
    data: FederatedDataModule | None,
) -> dict[str, Any]:
    """Writes one client's bundle and reads it again."""
    model = run.client_model(client)
    facts = run.facts(client, model.plain)
    if (remembered := store_size(model.weights))["cases"]:
        facts["card"]["remembered"] = remembered
    facts["largest_part"] = _regions(options.largest_part, facts)
    if facts["largest_part"]:  # the intervals of volumes are of whole masks
        facts["coverage"] = None
    start = finetuning.Quantised(model.weights, {}, "trained", dict.fromkeys(finetuning.STAGES))
    done, method = start, None
    if bits:
        tuning = (options.finetune_steps, options.finetune_lr, options.tolerance)
        done = finetuning.quantise_and_tune(run, client, model, bits, data, *tuning)
        method, facts["coverage"] = "kmeans", None  # validation has seen other weights
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
    local = data.clients[client] if options.onnx == "int8" and data is not None else None
    samples = None if local is None else local.train_inputs(_SAMPLES)
    written = write_bundle(folder, facts, dense, done.books, bool(options.onnx), samples)
    read_bundle(folder)
    if local is not None and (folder / ONNX).is_file():
        finetuning.say_int8(run, model, local, folder / ONNX, done.weights)
    return written


def _regions(wanted: str | Sequence[str] | None, facts: Mapping[str, Any]) -> list[str] | None:
    """The regions of which the largest part is kept."""
    if not wanted:
        return None
    known = list(facts["labels"])
    if facts["input"]["kind"] != "volumes":
        raise ConfigError("largest_part is for segmentation of volumes; leave it out.")
    names = known if wanted == "all" else wanted
    names = [names] if isinstance(names, str) else [*map(str, names)]
    for name in names:
        check_known("largest_part", name, known)
    return list(dict.fromkeys(names))


def _bits(run: RunRecord, width: int | None, layers: Mapping[str, int] | None) -> dict[str, int]:
    """Bits by name for k-means; empty where the models stay as they are, or have centres."""
    if width is None and not layers:
        return {}
    if width is None and run.centers.is_dir():
        raise ConfigError("The run has learned centres, which layers cannot change; set bits.")
    bits = FULL if width is None else width
    chosen = choose_bits(run.task().network, bits, layers)
    if bits != FULL and not chosen:
        _log.warning("All layers of this network are first or last; nothing is quantised.")
    return chosen


def _print_export(rows: Sequence[Facts], metric: str, mode: str, tolerance: float) -> None:
    """Prints a line per bundle: bits, sizes, and the metric before and after."""
    console = wide_console()
    stages = [s for s in finetuning.STAGES if any(_scores(row)[s] is not None for row in rows)]
    head = ["client", "bits", "weights", "fp32", "ratio"]
    head += [f"val {metric} {name.replace('kmeans', 'k-means')}" for name in stages]
    head += [f"test {metric} {name}" for name in _TEST]
    lines = []
    for row in rows:
        packed, whole = (row["sizes"][n] for n in ("packed", "fp32"))
        line = [row["client"], _bits_of(row), size(packed), size(whole), f"{whole / packed:.2f}"]
        lines.append([*line, *(number(_scores(row)[n]) for n in stages), *_tests(row, metric)])
    lines += _means(rows, metric, mode, len(stages))
    console.print(Table.of(head, lines, prose=(0,)).printed("Exported bundles, sizes of files"))
    say(console, *_remarks(rows, metric, mode, tolerance))


def _save_table(path: Path, folder: Path, rows: Mapping[Path, Facts], metric: str) -> None:
    """Writes a CSV line per bundle in a folder: bits, bytes, and the metric at every stage."""
    head = ["client", "bits", "bytes", "kept", "metric"]
    head += [*(f"val_{n}" for n in finetuning.STAGES), *(f"test_{n}" for n in _TEST), "bundle"]
    earlier = [*csv_rows(path)] if path.is_file() else []
    others = earlier[1:] if earlier[:1] == [head] else []
    lines = {line[-1]: line for line in others if (folder / line[-1]).is_dir()}
    for place, row in rows.items():
        line = [row["client"], _bits_of(row), row["sizes"]["packed"], row["quantization"]["kept"]]
        line += [metric, *_scores(row).values(), *tested(row, metric)]
        bundle = place.relative_to(folder).as_posix()
        lines[bundle] = [*line, bundle]
    write_text(path, csv_text(head, lines.values()))


def tested(facts: Mapping[str, Any], metric: str) -> tuple[float | None, float | None]:
    """Returns the test metric of the model as trained, and of the bundle's weights.

    Example:
        >>> tested({"run_test_metrics": {"iou": 0.8}, "test_metrics": None}, "iou")
        (0.8, None)
    """
    return (facts["run_test_metrics"] or {}).get(metric), (facts["test_metrics"] or {}).get(metric)


def _bits_of(row: Facts) -> str:
    """Writes the widths of a bundle's parameters.

    Example:
        >>> _bits_of({"bits": {"a": 2, "b": 4, "c": 2}}), _bits_of({"bits": {}})
        ('2, 4', '32')
    """
    return ", ".join(map(str, sorted(set(row["bits"].values())))) or "32"


def _scores(row: Facts) -> dict[str, float | None]:
    return {stage: row["quantization"]["validation"][stage] for stage in finetuning.STAGES}


def _tests(row: Facts, metric: str) -> list[str]:
    return [*map(number, tested(row, metric))]


def number(value: float | None) -> str:
    """Writes a metric; what was not measured, or is undefined, is a dash."""
    return "-" if value is None else f"{value:.4f}"


def _means(rows: Sequence[Facts], metric: str, mode: str, stages: int) -> Iterator[list[str]]:
    """The mean and the worst client, for each width of several clients."""
    for width in dict.fromkeys(map(_bits_of, rows)):
        same = [r for r in rows if _bits_of(r) == width]
        if len(same) < 2:
            continue
        pairs = np.array([tested(r, metric) for r in same], dtype=float)  # NaN where None
        worst = np.fmin.reduce(pairs) if mode == "max" else np.fmax.reduce(pairs)
        between = [""] * (3 + stages)
        for name, values in (("mean", mean_of_known(pairs, axis=0)), ("worst", worst)):
            known = [None if math.isnan(v) else float(v) for v in values]
            yield [f"({name})", width, *between, *map(number, known)]


def _remarks(rows: Sequence[Facts], metric: str, mode: str, tolerance: float) -> Iterator[str]:
    """Says where fine-tuning was not kept, and where the test metric fell."""

    def named(row: Facts) -> str:
        return f"{short(row['client'])} ({_bits_of(row)} bits)"

    tuned = [r for r in rows if _scores(r)["finetuned"] is not None]
    if undone := [named(r) for r in tuned if r["quantization"]["kept"] != "finetuned"]:
        text = "Fine-tuning was undone, as validation is worse than by k-means and than as trained"
        yield f"{text}: {', '.join(undone)}."
    fallen = [r for r in rows if finetuning.falls(*tested(r, metric), mode, tolerance)]
    if lost := [f"{named(r)} {' to '.join(_tests(r, metric))}" for r in fallen]:
        unit = f"{tolerance:g}" if mode == "max" else f"{tolerance:.0%}"
        yield (
            f"warning: test {metric} is worse than as trained by more than tolerance={unit}: "
            f"{', '.join(lost)}; use more bits, or layers= for the layers that need them."
        )
