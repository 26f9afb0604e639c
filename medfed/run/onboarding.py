"""Lets hospitals join a finished run: by the method's rule, by fine-tuning, or alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import torch

from medfed.common import scores
from medfed.common.console import grouped, say, short, size, wide_console
from medfed.common.figures import save_figures
from medfed.common.tables import Table
from medfed.common.tensors import Tensors
from medfed.common.untrusted import read_json
from medfed.config.compose import build
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.partitions.base import RoundRobin
from medfed.datamodules.plans import first_patients
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.local_client import LocalClient
from medfed.federation.onboarding import rules_of
from medfed.federation.reference import onboarded_client, run_onboarding
from medfed.federation.wire.ledger import Ledger
from medfed.functional.conformal import for_newcomer
from medfed.records.folder import RunFolder, with_nan
from medfed.reports.charts import Point, curves, looks_in_order, panels
from medfed.run.experiment import Experiment
from medfed.run.finished import reopen_selected
from medfed.standalone.errors import ConfigError, DataError, did_you_mean
from medfed.standalone.files import csv_text, write_json, write_text

Rule = Literal["own", "fine_tuning", "local"]
RULES: tuple[Rule, ...] = ("own", "fine_tuning", "local")


@dataclass(frozen=True)
class Row:
    """One onboarded client under one rule with its first patients."""

    client: str
    k: int  # how many training patients it should use
    patients: int  # how many it used
    samples: int  # their training samples
    steps: int  # gradient steps that the rule was allowed
    rule: Rule  # ``own``, the method's; ``fine_tuning`` of all received entries; ``local`` training
    metrics: Mapping[str, Any]  # numbers, on its test patients
    seconds: float  # CPU time of this process for both halves, without the evaluation
    up: int  # bytes to the server
    down: int  # bytes to the client


@dataclass(frozen=True)
class Onboarding:
    """How a run's model serves clients that join later, by rule and number of patients."""

    summary: dict[str, Any]  # of the run, as ``summary.json`` holds it
    steps: int  # gradient steps that each rule may take
    rows: tuple[Row, ...]  # in the order of clients, k and rules
    notes: tuple[str, ...] = ()  # sentences about deviations from the request
    earlier: tuple[Row, ...] = ()  # those that the run folder has


def onboard(
    folder: Path, who: str, counts: Sequence[int] = (1, 5, 20), steps: int = 100
) -> Onboarding:
    """Lets clients join the selected round of a finished run, by each rule; the run stays as it is.

    `who` is a client that the run kept out, ``all`` of them, or a path to another hospital's data.
    Each uses its first k training patients, in an order drawn from the run's seed, and the learning
    rate of the first round. Its validation patients choose its threshold and its level, which is
    drawn towards 0 as the run's are.
    """
    run = RunFolder(folder)
    summary, earlier = run.summary, earlier_rows(run, Row)
    experiment = reopen_selected(folder)
    clients = find_clients(experiment, who)
    module = experiment.module
    module.local.budget = replace(module.local.budget, steps=steps)
    others, rows, notes = for_newcomer(summary.get("points", {})), list[Row](), []
    federation, rules = module.federation, rules_of(module.federation.algorithm)

    def measured(data: ClientData, k: int, rule: Rule) -> None:
        client, ledger = onboarded_client(federation, data), Ledger()
        started = time.process_time()
        if rule == "local":
            client.begin(0, "join", 0)
            model = rules.alone(client)
        else:
            message, ledger = run_onboarding(federation, client)
            if rule == "fine_tuning" and not message.parts:
                return  # the client receives nothing that it could fine-tune
            model = (rules.onboard if rule == "own" else rules.fine_tune)(client, message)
        seconds = time.process_time() - started
        _, metrics = tested(module, client, model, others)
        patients, up = len(data.patients["train"]), ledger.total(direction="up")
        used = data.id, k, patients, data.num_samples, steps, rule, metrics, seconds, up
        rows.append(Row(*used, ledger.total(direction="down")))

    for client in clients:
        there = first_patients(client, len(client.patients["train"]), experiment.config.seed)
        if more := [k for k in counts if k > len(there.patients["train"])]:
            notes.append(
                f"{client.id} has only {len(there.patients['train'])} training patients; "
                f"k={','.join(map(str, more))} uses all of them."
            )
        for k in counts:
            some = first_patients(client, k, experiment.config.seed)
            for rule in RULES:
                measured(some, k, rule)
    tested_on = {client.id: len(client.patients["test"]) for client in clients}
    sizes = {c: (n, "test patients") for c, n in tested_on.items()}
    sizes |= {c: scores.fewest_cases(cases) for c in sizes if (cases := module.cases.get(c))}
    if small := {c: f"{n} {of}" for c, (n, of) in sizes.items() if n < scores.LEAST_CASES}:
        notes.append(f"With so few patients, rules may differ by chance: {grouped(small)}.")
    notes += scores.undefined_sentences({row.client: row.metrics for row in rows}, "test")
    return Onboarding(summary, steps, tuple(rows), tuple(notes), tuple(earlier))


def find_clients(experiment: Experiment, who: str) -> list[ClientData]:
    """Finds the clients that the user names; see :func:`onboard`."""
    known = experiment.data.kept_out
    if who in known:
        hospitals = [known[who]]
    elif who == "all" and known:
        hospitals = list(known.values())
    elif "/" in who or Path(who).exists():
        hospitals = [hospital_at(experiment, Path(who).expanduser())]
    else:
        trained = who in experiment.data.clients
        what = "took part in training" if trained else f"was not kept out{did_you_mean(who, known)}"
        there = f"name one of {', '.join(known)}"
        if not known:
            there = (
                f"the run in {experiment.folder} kept no client out of training; train one with "
                "keep_out=[CLIENT]"
            )
        raise ConfigError(
            f"onboard={who} {what}; {there}, or name a folder of data such as "
            "onboard=/path/to/hospital."
        )
    for client in hospitals:
        if not client.patients["test"]:
            raise DataError(
                f"Hospital {client.id} has no test patient to evaluate its model on; give it at "
                "least 2 patients."
            )
    return hospitals


def hospital_at(experiment: Experiment, path: Path) -> ClientData:
    """Reads the data of a hospital that the run has never seen, as one client."""
    config = experiment.config
    if "path" not in config.data:
        raise ConfigError(
            f"onboard={path}: the data of this run are generated, so medfed cannot read another "
            "hospital's data; train a run with keep_out=[CLIENT]."
        )
    if not path.exists():
        raise DataError(f"onboard={path} does not exist; name a file or folder of patients.")
    one = {"_target_": f"{RoundRobin.__module__}.RoundRobin", "num_clients": 1}
    config = config.replacing({"data.path": str(path), "data.partition": one})
    data: FederatedDataModule = build(config.data)
    data.join(experiment.data)
    data.balanced = experiment.data.balanced
    data.setup()
    for name in ("channel_names", "class_names"):
        names, needed = getattr(data, name), getattr(experiment.data, name)
        if names != needed:
            raise DataError(
                f"{path} has the {name.split('_')[0]} names {', '.join(names)}, the run has "
                f"{', '.join(needed)}; a hospital that joins needs the same, in the same order."
            )
    return replace(next(iter(data.clients.values())), id=path.stem)


def tested(
    module: FederatedModule, client: LocalClient, model: Tensors, others: Mapping[str, float] | None
) -> tuple[Tensors, dict[str, float]]:
    """Returns a model as it is delivered, and its metrics on the hospital's test patients."""
    model = module.federation.as_evaluated(client, model)
    module.local.model.load(model)
    with torch.no_grad():
        metrics = module.evaluate_data(client.id, client.data, "test", keep=True)
    return model, metrics | module.decide(client.id, others)


RowT = TypeVar("RowT")


class _Record(msgspec.Struct, Generic[RowT]):
    """The part of ``onboarding.json`` that is read again."""

    rows: list[RowT]


def earlier_rows(run: RunFolder, kind: Any) -> list[Any]:
    """Returns what ``onboarding.json`` holds; read before training, as the file may be damaged."""
    if not run.onboarding_json.is_file():
        return []
    content = read_json(run.onboarding_json, _Record[kind])
    return [replace(row, metrics=with_nan(row.metrics)) for row in content.rows]


def add_rows(
    run: RunFolder, earlier: Sequence[Any], rows: Sequence[Any], notes: Sequence[str] = ()
) -> None:
    """Writes ``onboarding.csv`` and ``onboarding.json``; a hospital's new rows replace its earlier.

    The rows are dataclasses of one kind, with ``client`` and ``metrics``.
    """
    new = {row.client for row in rows}
    rows = [*(row for row in earlier if row.client not in new), *rows]
    records = [asdict(row) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record["metrics"]))
    fixed = [name for name in records[0] if name != "metrics"]
    lines = ([*(r[f] for f in fixed), *(r["metrics"].get(n, "") for n in names)] for r in records)
    write_text(run.onboarding_csv, csv_text([*fixed, *names], lines))
    write_json(run.onboarding_json, run.about() | {"notes": list(notes), "rows": records})


def show_onboarding(onboarding: Onboarding, folder: Path) -> None:
    """Adds the rows to the run folder, draws ``pictures/onboarding.png``, and prints a table.

    Both show means over the onboarded clients against k: the metric, seconds and bytes.
    """
    summary, rows, run = onboarding.summary, onboarding.rows, RunFolder(folder)
    add_rows(run, onboarding.earlier, rows, onboarding.notes)
    metric, method = summary["selection"][0], summary["algorithm"]
    names = {"own": f"{method} (own rule)", "fine_tuning": "fine-tuning", "local": "local training"}
    lines, score, seconds = list[list[str]](), dict[str, list[Point]](), dict[str, list[Point]]()
    counts = list(dict.fromkeys(row.k for row in rows))
    for k, (rule, name) in product(counts, names.items()):
        if not (these := [row for row in rows if (row.k, row.rule) == (k, rule)]):
            continue
        values = [row.metrics[metric] for row in these]
        over = scores.federation_statistics(values, scores.smaller_is_better(metric))
        used, *sent = (
            float(np.mean([getattr(row, what) for row in these]))
            for what in ("seconds", "up", "down")
        )
        texts = (scores.number(over[n]) for n in ("mean", "sd", "worst"))
        lines.append([str(k), name, *texts, f"{used:.3f}", *(size(round(n)) for n in sent)])
        score.setdefault(name, []).append((k, over["mean"]))
        seconds.setdefault(name, []).append((k, used))
    others = summary["federation"][metric]["mean"]
    score["hospitals of the run"] = [(k, others) for k in (min(counts), max(counts))]
    axis, looks = "training patients of the hospital that joins", looks_in_order(score)
    figure, (above, below) = panels(2)
    label = f"test {scores.label_of(metric)}"
    curves(score, axis, label, looks, evenly=True, axes=above)
    curves(seconds, axis, "CPU seconds", looks, evenly=True, axes=below)
    save_figures(run.pictures_folder, {"onboarding": figure})
    clients, console = list(dict.fromkeys(row.client for row in rows)), wide_console()
    title = (
        f"{short(summary['name'])}, {method}: {len(clients)} client{'s' * (len(clients) != 1)} "
        f"onboarded, {label}, up to {onboarding.steps} gradient steps"
    )
    head = ("k", "rule", "mean", "sd", "worst", "CPU seconds", "up", "down")
    console.print(Table.of(head, lines, prose=(1,)).printed(title))
    written = f"{folder}/onboarding.csv, onboarding.json and pictures/onboarding.png"
    listed = f"Onboarded clients: {', '.join(map(short, clients))}."
    say(console, *onboarding.notes, listed, f"Written: {written}")
