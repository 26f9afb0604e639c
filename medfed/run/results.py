"""Writes the results of a finished run: files, a table, pictures, and the logger's last entries."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.text import Text
from torch import Tensor

from medfed.common import scores
from medfed.common.console import (
    Table,
    evenly,
    grouped,
    only_news,
    say,
    short,
    size,
    swept,
    wide_console,
)
from medfed.common.figures import save_figures
from medfed.common.untrusted import read_tensors
from medfed.config.allowed import method_name
from medfed.config.description import Privacy, RunDescription
from medfed.federation.budget import Passes
from medfed.federation.client import ClientData
from medfed.federation.contributions import contributions
from medfed.federation.lightning.callbacks import PersonalEvaluation
from medfed.federation.lightning.collect import gather_named, rank
from medfed.federation.lightning.module import FederatedModule
from medfed.models.networks.adapters import merged
from medfed.models.segmentation_meter import slice_with_most
from medfed.models.task import TaskModule
from medfed.records.folder import RunFolder, save_prediction, save_tensors
from medfed.reports.coverage import COVERAGE, coverage_table
from medfed.run.experiment import Experiment
from medfed.run.intervals import case_statistics, doubts, over_clients
from medfed.run.loggers import end_logging
from medfed.run.memberships import Memberships
from medfed.run.privacy import protections, record
from medfed.standalone.errors import few
from medfed.standalone.files import csv_text, filled, write_json, write_text
from medfed.standalone.neighbours import store_in, store_size
from medfed.standalone.preparation import on_grid

_log = logging.getLogger(__name__)
MOST_CLIENTS = 24  # largest number of clients whose prediction is kept


def write_hashes(module: FederatedModule, folder: Path) -> None:
    """Writes the hashes of all states after the last round; a collective call."""
    digests, owned = module.federation.digests(), set(module.owned)
    here = {k: v for k, v in digests.items() if k.removeprefix("client/") in owned}
    everywhere = gather_named(here)
    hashes = {"server": digests["server"]}
    hashes |= {f"client/{c}": everywhere[f"client/{c}"] for c in module.federation.ids}
    if rank() == 0:
        write_json(RunFolder(folder).hashes_json, hashes)


def write(experiment: Experiment, memberships: Tensor | None = None) -> dict[str, Any]:
    """Writes models, metrics, ledger, summary and pictures; a collective call."""
    module, run = experiment.module, RunFolder(experiment.folder)
    federation = module.federation
    save_models(experiment)
    save_predictions(experiment)
    known = module.spent()
    experiment.trainer.strategy.barrier("results")
    best = experiment.evaluation.best_round()
    federation.count_delivery(module.next_round)
    spent = {c: known[c] for c in federation.ids}
    summary = summarise(experiment.config, module, experiment.evaluation, best, spent)
    if store_in(module.local.split.base) is not None:
        models = run.files("models", federation.ids)
        summary["remembered"] = {c: store_size(read_tensors(models[c])) for c in federation.ids}
    if rank() == 0:
        table = None
        if memberships is not None:
            data = experiment.data
            table = Memberships.of(list(data.clients), memberships, best, data.mixtures)
            summary["memberships"] = table.summary()
            write_text(run.memberships_csv, table.to_csv())
        write_tables(experiment, summary, best)
        end_logging(experiment.trainer.logger, draw(experiment, best, table), summary)
        print_summary(summary, run.folder)
    return summary


def draw(
    experiment: Experiment, best: int | None, memberships: Memberships | None = None
) -> dict[str, Path]:
    """Draws the pictures of a run unless ``pictures.format=none``; returns name to file."""
    if (kind := experiment.config.pictures) == "none":
        return {}
    from medfed.run.pictures import draw_run  # imported here, as nothing is drawn before the end

    folder = RunFolder(experiment.folder).pictures_folder
    return save_figures(folder, draw_run(experiment, best, memberships), kind)


def save_models(experiment: Experiment) -> None:
    """Writes the personal models of the clients of this process, and learned centres."""
    module, run = experiment.module, RunFolder(experiment.folder)
    federation = module.federation
    models, learned = run.files("models", federation.ids), run.files("centers", federation.ids)
    for client in module.owned:
        model, centers = federation.personal_model(client), federation.centers(client)
        # Adapters are merged, divided tensors whole: other programs know only the plain network.
        network = experiment.task.network
        outputs = partial(_first_outputs, experiment.task, federation.clients[client].data)
        plain = merged(network, module.local.model.whole(model, outputs))
        save_tensors(models[client], plain)
        if lost := centers.keys() - plain.keys():
            text = "%s: the centres of %d adapters are not kept, as the merged weights have none."
            _log.warning(text, client, len(lost))
        if centers := {n: c for n, c in centers.items() if n in plain}:  # of quantised parameters
            save_tensors(learned[client], centers)


def _first_outputs(task: TaskModule, data: ClientData) -> Tensor:
    return task.sample_outputs(next(iter(data.train_batches(0)))["image"])


def write_tables(experiment: Experiment, summary: dict[str, Any], best: int | None) -> None:
    """Writes metrics, ledger, cases, intervals and the summary, completed by the intervals."""
    run, evaluation = RunFolder(experiment.folder), experiment.evaluation
    test = [scores.Record(best or 0, c, m) for c, m in evaluation.test.items()]
    write_text(run.metrics_csv, scores.metrics_csv(evaluation.history, test, evaluation.losses))
    write_text(run.ledger_csv, experiment.module.federation.ledger.to_csv())
    if rows := cases_rows(experiment):
        write_text(run.cases_csv, csv_text(rows[0], (row.values() for row in rows)))
        if lesions := experiment.data.found_places(rows):
            write_text(run.detections_csv, csv_text(lesions[0], (row.values() for row in lesions)))
    summary |= case_statistics(experiment.tested_cases(), experiment.config.seed)
    config, federation = experiment.config, experiment.module.federation
    if config.privacy != Privacy():
        planned = protections(config, experiment.data.clients, federation)
        taken = summary["gradient_passes"]
        write_json(run.privacy_json, record(config, federation, planned, taken))
    write_json(run.summary_json, summary)


def summarise(
    config: RunDescription,
    module: FederatedModule,
    evaluation: PersonalEvaluation,
    best: int | None,
    spent: dict[str, tuple[int, Passes]],
) -> dict[str, Any]:
    """Returns the content of ``summary.json``, in types that JSON can hold."""
    test, val = evaluation.test, evaluation.history.undefined
    ledger, ways = module.federation.ledger, ("up", "down")
    parts, sent = ledger.totals("direction", "part"), ledger.totals("client", "direction")
    return {
        "name": config.name,
        "algorithm": method_name(config.algorithm.plain()),
        "selection": list(evaluation.selection),
        "selected_round": best,
        "rounds": module.next_round,
        "improving": scores.still_improving(
            [evaluation.score(n) for n in evaluation.history.rounds]
        ),
        "first_local": getattr(module.federation.algorithm, "first_local", None),
        "clients": dict(test),
        **({"points": evaluation.points} if evaluation.points else {}),
        "federation": over_clients(test),
        "bytes": {d: ledger.total(direction=d) for d in ways},
        "bytes_by_part": {f"{d}/{p}": count for (d, p), count in parts.items()},
        "savings": {d: ledger.savings(direction=d) for d in ways} | {"both": ledger.savings()},
        "savings_by_part": {f"{d}/{p}": ledger.savings(direction=d, part=p) for d, p in parts},
        "bytes_by_client": {c: {d: sent.get((c, d), 0) for d in ways} for c in test},
        **({"contributions": each} if (each := contributions(module.federation.server)) else {}),
        "steps": {c: steps for c, (steps, _) in spent.items()},
        "gradient_passes": {c: passes.gradient for c, (_, passes) in spent.items()},
        "forward_passes": {c: passes.forward for c, (_, passes) in spent.items()},
        # Metrics that the data leave undefined, and models whose outputs were not finite.
        "undefined": {"val": {c: names for c, names in val.items() if names}, **undefined(test)},
        "failed": {"val": evaluation.history.failures, "test": scores.failed(test)},
    }


def cases_rows(experiment: Experiment) -> list[dict[str, object]]:
    """Returns a row per test case: client, patient, and the columns of the task's meter."""
    return [
        {
            "client": client,
            "patient": experiment.data.plans[client].patients["test"][int(row["case"])],
            **{n: repr(v) if isinstance(v, float) else v for n, v in row.items() if n != "case"},
        }
        for client, rows in experiment.evaluation.cases.items()
        for row in rows
    ]


def undefined(
    clients: Mapping[str, Mapping[str, float]], split: str = "test"
) -> dict[str, dict[str, list[str]]]:
    """Returns, by split and client, the metrics that the data leave undefined, if any.

    Example:
        >>> undefined({"a": {"auroc": 0.5}, "b": {"auroc": float("nan")}})
        {'test': {'b': ['auroc']}}
    """
    return {split: {c: names for c, m in clients.items() if (names := scores.undefined_in(m))}}


def save_predictions(experiment: Experiment) -> None:
    """Writes one test slice per client with its prediction, for pictures that compare methods.

    Only segmentation tasks have such a slice; of very many clients only some are written.
    """
    module, task, clients = experiment.module, experiment.task, experiment.module.federation.ids
    files = RunFolder(experiment.folder).files("predictions", clients)
    chosen = set(evenly(clients, MOST_CLIENTS))
    for client in module.owned:
        if client not in chosen:
            continue
        module.local.model.load(module.federation.personal_model(client))
        batch = next(iter(module.federation.clients[client].data.eval_batches("test")), None)
        if batch is None:
            continue  # it has no test patient, as a warning said when the data were split
        if batch["label"].ndim < 4:
            return
        image, label = batch["image"], batch["label"]
        if "grid" in batch:  # the picture shows the scan on the grid of the mask
            pairs = zip(image, batch["grid"], strict=True)
            image = torch.stack([on_grid(one, grid, label.shape[2:]) for one, grid in pairs])
        if volumes := label.ndim == 5:  # their axial slices
            image, label = (t[0].permute(3, 0, 1, 2) for t in (image, label))
        index = slice_with_most(label)
        case = 0 if volumes else index
        (probability,) = task.predict({k: v[case : case + 1] for k, v in batch.items()})
        if volumes:
            probability = probability.permute(3, 0, 1, 2)[index]
        names = experiment.data.channel_names
        save_prediction(files[client], image[index], label[index], probability, names)


_STATISTICS = ("mean", "sd", "worst")
_SHORT: dict[str, Any] = {"sensitivity": "sens.", "specificity": "spec."}
_SHORT |= {"balanced_accuracy": Text("balanced\naccuracy"), "log_loss": Text("log\nloss")}
_LINES, _ENDS = 40, 10  # clients with a line each; of more clients, the best and the worst


def print_summary(summary: dict[str, Any], folder: Path, console: Console | None = None) -> None:
    """Prints the metrics per client and for the federation, and the bytes sent.

    A run of a sweep prints a line, and only remarks that no earlier run has printed.
    """
    console = console or wide_console()
    of_data, of_results = remarks(summary)
    if swept():
        say(console, result_line(summary, folder))
        with only_news():
            say(console, *of_data, *of_results)
        return
    console.print(metric_table(summary))
    covered = coverage_table({summary["algorithm"]: [summary]})
    if covered is not None:
        console.print(covered.printed("Sets and intervals"))
        say(console, COVERAGE)
    say(console, *of_data, *of_results, f"Results and pictures: {folder}")


def result_line(summary: Mapping[str, Any], folder: Path) -> str:
    """Returns a run in a line: the metric that selected its round, over hospitals."""
    metric = summary["selection"][0]
    over = summary["federation"].get(metric, dict.fromkeys(_STATISTICS, math.nan))
    ends = scores.interval(summary.get("intervals", {}).get("mean", {}).get(metric))
    mean, worst = scores.number(over["mean"]), scores.number(over["worst"])
    return (
        f"{summary['algorithm']}: test {metric} {' '.join(filter(None, (mean, ends)))}, worst "
        f"hospital {worst}; in {folder}"
    )


def remarks(summary: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Says how sure the numbers of a run's table are, and what they cost.

    The first sentences are about the data of the split, and hold for other methods, too.
    """
    points = summary.get("points", {})
    metric, of = summary["selection"][0], (summary["clients"], summary.get("split", "test"))
    absent: dict[tuple[str, ...], list[str]] = {}
    for client, names in summary.get("absent", {}).items():
        absent.setdefault(tuple(map(short, names)), []).append(short(client))
    sign = -1 if scores.smaller_is_better(metric) else 1
    every = (summary, *summary.get("constant", {}).values())
    means = [of["federation"].get(metric, {}).get("mean", math.nan) for of in every]
    known = [mean for mean in means[1:] if not math.isnan(mean)]
    best = max(known, key=lambda mean: sign * mean, default=math.nan)
    words = {
        **doubts(summary, metric),
        "summary": summary,
        "metric": metric,
        "split": of[1],
        "undefined_metrics": scores.undefined_sentences(*of),
        "failures": scores.failure_sentences(*of),
        "absent": absent,
        "mean": means[0],
        "constant": best,
        "small": grouped(summary.get("small", {}), 20),
        "lacking": [short(c) for c, p in points.items() if "pooled" in p or "threshold" not in p],
        "thresholds": {
            short(c): [f"{short(n[10:])} {v:g}" for n, v in p.items() if n.startswith("threshold/")]
            for c, p in points.items()
        },
        "as_trained": [short(c) for c, p in points.items() if "slope" not in p],
        "variance": max((p.get("variance", math.nan) for p in points.values()), default=math.nan),
        "useless": sign * means[0] < sign * best,  # not if one of them is undefined
        **{f.__name__: f for f in (few, scores.interval, scores.number, short, size, scores.span)},
    }
    text = filled(Path(__file__).parent / "templates" / "remarks.txt", **words)
    of_data, _, of_results = text.partition("====\n")
    return of_data.splitlines(), of_results.splitlines()


def metric_table(summary: Mapping[str, Any]) -> Table:
    """Returns the table of a run; 100 characters hold all metrics of a classification."""
    first = summary["selection"][0]
    names = [n for n in next(iter(summary["clients"].values())) if "/" not in n]
    names.sort(key=lambda name: name != first)
    each = [(of.get("loss"), of.get("log_loss")) for of in summary["clients"].values()]
    if first != "loss" and all(one and two and abs(one - two) < 1e-4 for one, two in each):
        names.remove("loss")  # a column of the same numbers
    intervals = summary.get("intervals", {"clients": {}, "mean": {}, "pooled": {}})
    shows = any(first in ends for ends in (intervals["mean"], *intervals["clients"].values()))
    table = Table(
        title=f"{short(summary['name'])}, {summary['algorithm']}: "
        f"{summary.get('split', 'test')} metrics of round {(summary['selected_round'] or 0) + 1} "
        f"of {summary['rounds']} (selected by validation {first})",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("client", overflow="fold")
    patients = intervals.get("patients", {})
    if patients:
        table.add_column("n", justify="right")
    for name in names:
        table.add_column(_SHORT.get(name, name.replace("_", " ")), justify="right")
        if name == first and shows:
            table.add_column(f"{intervals['level']:.0%} interval", justify="right")

    def add(name: str, values: Mapping[str, float], ends: Mapping[str, Any]) -> None:
        texts = [scores.number(values[n]) if n in values else "–" for n in names]
        texts[1:1] = [scores.interval(ends.get(first))] * shows
        table.add_row(short(name), *[str(patients.get(name, ""))] * bool(patients), *texts)

    best, worst = ends_of(summary["clients"], *summary["selection"])
    for client in best:
        add(client, summary["clients"][client], intervals["clients"].get(client, {}))
    if worst:
        left = len(summary["clients"]) - len(best) - len(worst)
        table.add_row(f"… {left:,} more, see metrics.csv", *["…"] * (1 + bool(patients)))
    for client in worst:
        add(client, summary["clients"][client], intervals["clients"].get(client, {}))
    table.add_section()
    over = summary["federation"]
    for row in _STATISTICS:
        values = {n: of[row] for n, of in over.items()}
        add(row, values, intervals["mean"] if row == "mean" else {})
        large = [m for c, m in summary["clients"].items() if c not in summary.get("small", {})]
        if row == "mean" and 1 < len(large) < len(summary["clients"]):
            means = {n: scores.federation_statistics([m[n] for m in large])["mean"] for n in names}
            add(scores.WITHOUT_SMALL, means, intervals.get(scores.WITHOUT_SMALL, {}))
    for row, ending in scores.CHOSEN.items():
        if again := {n: over[n + ending]["mean"] for n in names if n + ending in over}:
            add(row, again, {first: intervals["mean"].get(first + ending)})
    if summary.get("pooled"):
        add("pooled", summary["pooled"], intervals["pooled"])
    table.add_section()
    for name, constant in summary.get("constant", {}).items():
        add(name, {n: over["mean"] for n, over in constant["federation"].items()}, {})
    return table


def ends_of(
    clients: Mapping[str, Mapping[str, float]], metric: str, mode: str = "max"
) -> tuple[list[str], list[str]]:
    """Returns the clients that a table shows: all, or of very many the best and the worst ones.

    Clients without the metric are put in the middle; the worst one is last.

    Example:
        >>> best, worst = ends_of({f"c{i}": {"iou": i / 100} for i in range(100)}, "iou")
        >>> best[:2], worst[-2:], len(best + worst)
        (['c99', 'c98'], ['c1', 'c0'], 20)
    """
    if len(clients) <= _LINES:
        return [*clients], []
    sign = -1 if mode == "max" else 1
    known = [c for c, m in clients.items() if not math.isnan(m.get(metric, math.nan))]
    order = sorted(known or clients, key=lambda c: sign * clients[c].get(metric, 0.0))
    return order[:_ENDS], order[_ENDS:][-_ENDS:]
