"""Evaluates a finished run again: the selected round on any split, and in three more ways.

They are every hospital's model on every hospital's patients, all models by subgroup of patients,
and each client's model on subsets of its channels.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfed.common import scores
from medfed.common.console import file_names, grouped, say, short, wide_console
from medfed.common.figures import save_figures
from medfed.common.floors import divided
from medfed.common.tables import Table
from medfed.common.tensors import to_device
from medfed.datamodules.augmentation import ChannelDropout
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.patient_columns import patient_columns
from medfed.datamodules.readers.base import check_names
from medfed.datamodules.readers.table import in_order
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.federation.client import Batch
from medfed.federation.lightning.collect import warn
from medfed.federation.lightning.evaluating import EvalSplit
from medfed.federation.lightning.strategy import ranks_end_together
from medfed.records.folder import RunFolder
from medfed.reports.subsets import heat_map
from medfed.run.experiment import Experiment
from medfed.run.finished import reopen, reopen_selected, test_selected
from medfed.run.intervals import case_statistics, over_clients
from medfed.run.results import undefined
from medfed.standalone.csv_files import MISSING, Sheet, as_number, missing_words
from medfed.standalone.errors import ConfigError, did_you_mean, few
from medfed.standalone.files import csv_text, write_json, write_text
from medfed.standalone.names import code_among, fold, same


def evaluate_run(folder: Path, split: str = "test") -> dict[str, Any]:
    """Evaluates every client's selected personal model and writes ``evaluation_<split>.json``.

    Returns the run's summary with the new scores in ``clients`` and ``federation``.
    """
    run = RunFolder(folder)
    summary = run.summary
    experiment = _tested(folder, split)
    clients = experiment.evaluation.test
    measured: dict[str, Any] = {"split": split, "clients": clients}
    measured |= {"federation": over_clients(clients), "undefined": undefined(clients, split)}
    measured |= {"failed": {split: scores.failed(clients)}}
    measured |= case_statistics(experiment.tested_cases(), experiment.config.seed)
    write_json(run.evaluation_json(split), run.about() | measured)
    return summary | measured


def _warn_of_split(folder: Path, split: str) -> None:
    """Says where a model has learned or was chosen by the cases that it is to predict."""
    if split != "test":
        did = "trained the models" if split == "train" else "chose the round, and any thresholds"
        warn(f"The {split} patients {did}: metrics are better than on patients that did not.")
    known = RunFolder(folder).summary.get("remembered", {}) if split == "train" else {}
    if clients := [short(client) for client, of in known.items() if of["cases"]]:
        warn(
            f"The models of {few(clients)} remember these training cases, so metrics of them mean "
            "nothing; choose split=val or split=test."
        )


def _tested(folder: Path, split: str) -> Experiment:
    """Evaluates each selected model on its client's patients."""
    _warn_of_split(folder, split)
    experiment = reopen(folder)
    experiment.module.test_split = split  # type: ignore[assignment]
    with ranks_end_together(experiment.trainer):
        test_selected(experiment)
    return experiment


def measure_across(folder: Path, split: str = "test") -> dict[str, dict[str, dict[str, float]]]:
    """Returns the metrics of every client's model on every client's patients, by model and client.

    A client's data are prepared as for its own model. Surface distances, which take long, are left
    out.
    """
    experiment = _tested(folder, split)
    module, clients = experiment.module, experiment.module.federation.clients
    values: dict[str, dict[str, dict[str, float]]] = {}
    for model in clients:
        module.local.model.load(module.federation.personal_model(model))
        for client, of in clients.items():
            batches = (to_device(b, module.device) for b in of.data.eval_batches(split))  # type: ignore[arg-type]
            values.setdefault(model, {})[client] = experiment.task.evaluate(batches)
    return values


def measure_subgroups(
    folder: Path,
    split: str,
    column: str,
    source: Path | None = None,
    edges: Sequence[float] = (),
    least: int = 20,
) -> dict[str, Any]:
    """Evaluates the clients' models on the patients of all clients, by subgroup.

    The values of a column, which may be in a CSV file, divide the patients; numbers are divided
    into bands. Of few patients, and of a group from which the only one of few would follow,
    ``patients`` is None.
    """
    experiment = _tested(folder, split)
    tested, data = experiment.tested_cases(), experiment.data
    if not tested.pooled():
        raise ConfigError("by is for tasks with a table of cases, and models that have not failed.")
    texts = values_of(data, column, source)
    named = banded(texts, edges, _words_missing(data))
    of_group: dict[str, dict[str, Any]] = defaultdict(dict)
    for client, cases in tested.cases.items():
        names = [named.get(p) or "unknown" for p in data.plans[client].patients[tested.split]]
        each = np.array(names, dtype=object)[cases["case"].astype(int)]
        for name in {*each}:
            of_group[name][client] = {n: values[each == name] for n, values in cases.items()}
    order = [*dict.fromkeys(named[p] for p in sorted(named, key=lambda p: in_order(texts[p])))]
    patients = {
        name: sum(len({*of["case"].tolist()}) for of in of_group[name].values())
        for name in (*order, "unknown")
        if name in of_group
    }
    groups: dict[str, dict[str, Any]] = {}
    for name, count in divided(patients, least).items():
        groups[name] = {"patients": count}
        if count is not None:
            stats = case_statistics(replace(tested, cases=of_group[name]), experiment.config.seed)
            groups[name] |= {"metrics": stats["pooled"], "intervals": stats["intervals"]["pooled"]}
    return {"column": column, "split": split, "groups": groups}


def values_of(data: FederatedDataModule, column: str, source: Path | None) -> dict[str, str]:
    """Returns a column's text of each patient; empty where a cell is missing."""
    if source is not None:
        return _values_in(source, column, data)
    known: Sequence[str]
    if not isinstance(data, TabularDataModule):
        listed = patient_columns(data)
        if column in listed:
            return dict.fromkeys(data.patients, "") | listed[column]
        known = [*listed]
    elif column in (known := (table := data.table).names):
        texts = dict(enumerate(table.categories.get(column, ())))
        numbers = table.features[:, table.names.index(column)]
        values = ["" if np.isnan(v) else texts.get(int(v), f"{v:g}") for v in numbers]
        return _by_patient(column, table.patients, values)
    elif data.path is not None and data.reader is None:
        # The columns of the CSV file of a table may be no features.
        sheet = Sheet.read(Path(data.path).expanduser(), data.header, _words_missing(data))
        if sheet.has(column):
            patients = [f"row_{n}" for n in range(len(sheet))]
            if data.patient is not None:
                patients = [*map(fold, sheet[data.patient])]
            return _by_patient(column, patients, [text or "" for text in sheet.texts(column)])
        known = sheet.columns
    raise ConfigError(
        f"by={column} is no column of the data{did_you_mean(column, known)}; name a CSV file "
        "with the columns patient and this one by patients=FILE.csv."
    )


def _by_patient(column: str, patients: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    """The last known value of each patient; a line says which have several."""
    every: dict[str, dict[str, None]] = {}
    for patient, value in zip(patients, values, strict=True):
        known = every.setdefault(patient, {})
        if value:
            known.pop(value, None)
            known[value] = None
    several = [f"{p} ({', '.join(of)})" for p, of in every.items() if len(of) > 1]
    if several:
        _log.warning(
            "%d patients have several values of %s, of which the last counts: %s.",
            *(len(several), column, few(several, 3)),
        )
    return {patient: [*of][-1] if of else "" for patient, of in every.items()}


def _words_missing(data: FederatedDataModule) -> Collection[str]:
    return missing_words(data.missing if isinstance(data, TabularDataModule) else ())


def _values_in(source: Path, column: str, data: FederatedDataModule) -> dict[str, str]:
    """The same from a CSV file."""
    if not source.is_file():
        raise ConfigError(f"patients={source} is no file; name a CSV with the column patient.")
    sheet = Sheet.read(source, missing=_words_missing(data))
    for name in ("patient", column):
        if not sheet.has(name):
            raise ConfigError(
                f"patients={source} has no column {name}{did_you_mean(name, sheet.columns)}; it "
                f"needs the columns patient and {column}."
            )
    patients, ids = sheet.names("patient"), list(data.patients)
    places = [*(f"data row {n + 1}" for n in range(len(patients))), *["the run"] * len(ids)]
    same([*patients, *ids], f"{source} and the run", places.__getitem__)
    values = _by_patient(column, patients, [text or "" for text in sheet.texts(column)])
    values |= {one: values[fold(one)] for one in ids if fold(one) in values}
    if not {*values} & {*data.patients}:
        raise ConfigError(
            f"patients={source} names no patient of the run; its column patient has "
            f"{next(iter(values))}, the run has {next(iter(data.patients))}: write the same ids."
        )
    return values


def banded(
    values: Mapping[str, str], edges: Sequence[float] = (), missing: Collection[str] = MISSING
) -> dict[str, str]:
    """Puts numbers into bands; texts, codes, and numbers of at most six values, stay.

    Bands begin at `edges`, by default the quartiles. A few texts among numbers, and numbers that
    begin with a zero, are groups beside the bands. If less than half are numbers, and no edges are
    given, all stay.

    Example:
        >>> banded({"a": "39", "b": "40", "c": "71"}, [40, 60])
        {'a': 'below 40', 'b': '40 to below 60', 'c': '60 and more'}
        >>> banded({"a": "f", "b": "m"})
        {'a': 'f', 'b': 'm'}
    """
    texts = {patient: text for patient, text in values.items() if text.lower() not in missing}
    finite = {p: as_number(text) for p, text in texts.items() if abs(as_number(text)) < np.inf}
    numbers = {p: value for p, value in finite.items() if not code_among([texts[p]])}
    known, codes = [*numbers.values()], len(finite) - len(numbers)
    mostly = 2 * len(known) >= len(texts) and len({*known}) > 6 and codes <= len(texts) / 50
    if not known or not (edges or mostly):
        return texts
    ends = sorted(edges or {float(f"{q:.3g}") for q in np.quantile(known, (0.25, 0.5, 0.75))})
    bands = [f"{low:g} to below {high:g}" for low, high in pairwise(ends)]
    bands = [f"below {ends[0]:g}", *bands, f"{ends[-1]:g} and more"]
    others = {patient: text for patient, text in texts.items() if patient not in numbers}
    if others:
        listed = few(list(dict.fromkeys(others.values())), 8)
        _log.warning(
            "%d values are no plain numbers, and stay beside the bands: %s.", len(others), listed
        )
    return others | {p: bands[bisect_right(ends, value)] for p, value in numbers.items()}


def show_across(values: Mapping[str, Any], folder: Path, split: str) -> None:
    """Writes ``across_<split>.json`` and its picture, and prints the table."""
    run, console = RunFolder(folder), wide_console()
    metric = run.summary["selection"][0]
    title = f"{split} {scores.label_of(metric)}: of each model at hospitals (patients)"
    write_json(folder / f"across_{split}.json", values)
    known = {m: [of.get(metric, np.nan) for of in row.values()] for m, row in values.items()}
    hospitals, falls = next(iter(values.values())), scores.smaller_is_better(metric)
    models, patients = [f"model of {n}" for n in values], [f"patients of {n}" for n in hospitals]
    each = np.array([*known.values()], float), models, [[n] for n in patients], patients
    save_figures(run.pictures_folder, {f"across_{split}": heat_map(*each, title, falls=falls)})
    rows = [[model, *map(scores.number, row)] for model, row in known.items()]
    counts = {c: len(of[split]) for c, of in run.splits["clients"].items() if split in of}
    if counts:  # a coordinator of sites knows none
        rows.append(["patients", *(str(counts[c]) for c in hospitals)])
    console.print(Table.of(["model of", *hospitals], rows, prose=(0,)).printed(title))
    small = {c: f"{n} patients" for c, n in counts.items() if n < scores.LEAST_CASES}
    small |= run.summary.get("small", {}) if split == "test" else {}
    if listed := {c: small[c] for c in hospitals if c in small}:
        say(console, f"With so few patients, models may differ by chance: {grouped(listed)}.")
    say(console, f"Written: {folder}/across_{split}.json and pictures/across_{split}.png")


def show_subgroups(subgroups: Mapping[str, Any], folder: Path) -> None:
    """Writes ``subgroups_<split>_<column>.json``, prints the table, and names the worst one."""
    split, groups, column = (subgroups[key] for key in ("split", "groups", "column"))
    path = folder / f"subgroups_{split}_{file_names([column])[column]}.json"
    write_json(path, subgroups)
    enough = {name: one for name, one in groups.items() if "metrics" in one}
    # A loss that selects the round, as of survival, is not that of patients together.
    metric, of_one = RunFolder(folder).summary["selection"][0], next(iter(enough.values()), None)
    if of_one is not None and metric not in of_one["metrics"]:
        metric = next(iter(of_one["metrics"]))
    known = {name: one["metrics"].get(metric, np.nan) for name, one in enough.items()}
    ends = {name: scores.interval(one["intervals"].get(metric)) for name, one in enough.items()}
    rows = [[n, str(groups[n]["patients"]), scores.number(v), ends[n]] for n, v in known.items()]
    table = Table.of([column, "patients", metric, "95 % interval"], rows, prose=(0,))
    title = f"{split} {scores.label_of(metric)} by subgroup, all hospitals together"
    if rows:
        wide_console().print(table.printed(title))
    lines, defined = [], [name for name, value in known.items() if value == value]
    if len(defined) > 1:  # nothing is the worst of one
        falls = scores.smaller_is_better(metric)
        worst, *_, best = sorted(defined, key=known.__getitem__, reverse=falls)
        (low, high), (least, most) = (enough[n]["intervals"][metric] for n in (worst, best))
        chance = f"; its interval is not apart from that of {best}, the best, so it may be chance"
        lines = [
            f"Worst by {metric}: {worst}, {scores.number(known[worst])} {ends[worst]}"
            f"{'' if high < least or most < low else chance}."
        ]
    if any(ends[name] == "–" for name in defined):
        lines.append("–: a hospital has a single test patient there, or few resamples define it.")
    if hidden := [name for name in groups if name not in known]:
        what = "Not shown, of too few patients or as these would follow"
        lines.append(f"{what}: {few(hidden, 12)}; a lower least= shows more.")
    say(wide_console(), *lines, f"Written: {path}, with all metrics")


Subset = tuple[str, ...]


@dataclass(frozen=True)
class Subsets:
    """The metrics of every client's model on subsets of its channels."""

    split: str
    channels: tuple[str, ...]
    subsets: tuple[Subset, ...]  # in the order of tables
    present: dict[str, Subset]  # the channels of each client
    # By client and subset, without subsets with a channel that the client lacks.
    metrics: dict[str, dict[Subset, dict[str, float]]]


MOST = 6
"""Largest number of channels of which all subsets are evaluated: 63 subsets."""
_log = logging.getLogger(__name__)


def measure_subsets(folder: Path, wanted: str | Sequence[str], split: str = "test") -> Subsets:
    """Evaluates every client's selected personal model on subsets of its channels.

    The other channels are zero after normalisation, as for a hospital that lacks them. Surface
    distances are left out, because they take long.
    """
    _warn_of_split(folder, split)
    experiment = reopen_selected(folder)
    module, names = experiment.module, tuple(experiment.data.channel_names)
    subsets = find_subsets(wanted, names)
    summary = RunFolder(folder).summary
    clients = {c: experiment.data.clients[c] for c in summary["clients"]}
    planes = {c: len(d.channels) // len(names) for c, d in clients.items()}  # slices of a contrast
    present = {
        c: tuple(n for n, there in zip(names, d.channels[:: planes[c]], strict=True) if there)
        for c, d in clients.items()
    }
    fits = {c: [s for s in subsets if set(s) <= set(channels)] for c, channels in present.items()}
    count = sum(map(len, fits.values()))
    if not count:
        raise ConfigError(
            f"subsets={'+'.join(subsets[0])}: no client has all of these channels; name others."
        )
    _log.info("Evaluating %d subsets of %d channels, %d times.", len(subsets), len(names), count)
    metrics: dict[str, dict[Subset, dict[str, float]]] = {}
    for client, data in clients.items():
        module.local.model.load(module.federation.personal_model(client))
        metrics[client] = {}
        for subset in fits[client]:
            keep = torch.tensor([n in subset for n in names]).repeat_interleave(planes[client])
            batches = (to_device(b, module.device) for b in without(data, split, keep))  # type: ignore[arg-type]
            first = next(batches, None)  # a split may have no case with all of these channels
            if first is not None:
                every = itertools.chain([first], batches)
                metrics[client][subset] = module.task.evaluate(every)
    return Subsets(split, names, subsets, present, metrics)  # type: ignore[arg-type]


def find_subsets(wanted: str | Sequence[str], names: Subset) -> tuple[Subset, ...]:
    """Reads the key ``subsets``; the channels of each are in their usual order.

    Example:
        >>> find_subsets("all", ("FLAIR", "T1w"))
        (('FLAIR',), ('T1w',), ('FLAIR', 'T1w'))
        >>> find_subsets(["t1w+FLAIR"], ("FLAIR", "T1w"))
        (('FLAIR', 'T1w'),)
    """
    if wanted == "all":
        if len(names) > MOST:
            raise ConfigError(
                f"subsets=all: {len(names)} channels have {2 ** len(names) - 1} subsets, too many "
                f"to evaluate; name some, such as subsets=[{names[0]},{names[0]}+{names[1]}]."
            )
        sizes = range(1, len(names) + 1)
        return tuple(s for size in sizes for s in itertools.combinations(names, size))
    listed = [wanted] if isinstance(wanted, str) else [str(w) for w in wanted]
    chosen = (check_names("channel", text.split("+"), names) for text in listed)
    return tuple(dict.fromkeys(tuple(n for n in names if n in c) for c in chosen))


def without(client: ClientData, split: EvalSplit, keep: Tensor) -> Iterator[Batch]:
    """Yields a split's batches with all but some channels zero, rescaled as in training.

    Samples that lack one of these channels are left out.
    """
    alter = client.channel_dropout or ChannelDropout()
    for batch in client.eval_batches(split):
        whole = batch["channels"][:, keep].all(1)
        if not whole.any():
            continue
        batch = {name: values[whole] for name, values in batch.items()}
        channels = batch["channels"] & keep
        image = alter.only(batch["image"], channels, batch["channels"])
        yield {**batch, "image": image, "channels": channels}


def table_of(subsets: Subsets, metric: str) -> NDArray[np.float64]:
    """Returns a metric, a row per client and a last one of means, a column per subset."""
    known = [{s: m.get(metric) for s, m in of.items()} for of in subsets.metrics.values()]
    values = np.array([[of.get(s) for s in subsets.subsets] for of in known], float)
    return np.vstack([values, scores.mean_of_known(values, 0)])


def show_subsets(subsets: Subsets, folder: Path) -> None:
    """Writes ``subsets_<split>.csv`` and its picture, and prints tables.

    The file has a line per client and subset: how many of its channels are missing, and metrics.
    Tables are of Dice, where the task has it, and of the metric that selected the round.
    """
    run, split, console = RunFolder(folder), subsets.split, wide_console()
    summary, clients = run.summary, list(subsets.metrics)
    rows = [(c, s, m) for c, by_subset in subsets.metrics.items() for s, m in by_subset.items()]
    names = list(rows[0][2])
    counts = {c: len(channels) for c, channels in subsets.present.items()}
    lines = ([c, "+".join(s), counts[c] - len(s), *(m[n] for n in names)] for c, s, m in rows)
    write_text(run.subsets_csv(split), csv_text(["client", "channels", "missing", *names], lines))
    chosen = [n for n in dict.fromkeys(("dice", summary["selection"][0])) if n in names]
    tables, apart = [table_of(subsets, metric) for metric in chosen], len(clients) <= 8
    title, of = f"{split} {scores.label_of(chosen[0])} with some channels", [*clients, "mean"]
    kinds = {"falls": scores.smaller_is_better(chosen[0]), "mean": True}
    figure = heat_map(tables[0], of, subsets.subsets, subsets.channels, title, **kinds)
    save_figures(run.pictures_folder, {f"subsets_{split}": figure})
    for metric, values in zip(chosen, tables, strict=True):
        cells = []
        for subset, (*each, mean) in zip(subsets.subsets, values.T, strict=True):
            texts = ["" if np.isnan(v) else scores.number(v) for v in each] if apart else []
            counted = f"{(~np.isnan(each)).sum()} of {len(clients)}"
            cells.append(["+".join(subset), *texts, scores.number(mean), counted])
        table = Table.of(["channels", *clients * apart, "mean", "of"], cells, prose=(0,))
        title = f"{split} {scores.label_of(metric)} on subsets of the channels"
        name = f"{short(summary['name'])}, {summary['algorithm']}"
        console.print(table.printed(f"{name}: {title}"))
    say(
        console,
        "A client is measured on what it has; means are over the clients of the last column.",
        f"Written: {folder}/subsets_{split}.csv and pictures/subsets_{split}.png",
    )
