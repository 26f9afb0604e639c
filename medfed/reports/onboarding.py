"""What hospitals that join a finished run get: a table, files and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from medfed.common.console import cell, say, shown, size, wide_console
from medfed.common.figures import save_figures
from medfed.common.files import csv_text, write_json, write_text
from medfed.common.scores import (
    federation_statistics,
    label_of,
    mean_of_known,
    number,
    smaller_is_better,
)
from medfed.records.evaluations import Onboarding, Row
from medfed.records.folder import RunFolder
from medfed.reports.charts import Point, curves, looks_in_order, panels
from medfed.reports.tables import Table


def by_rule(onboarding: Onboarding) -> dict[str, list[Row]]:
    """Returns the rows of each rule by the rule's name, as tables and pictures have it."""
    own = f"{onboarding.summary['algorithm']} (own rule)"
    names = {"own": own, "fine_tuning": "fine-tuning", "local": "local training"}
    rows = {name: [r for r in onboarding.rows if r.rule == rule] for rule, name in names.items()}
    return {name: of_rule for name, of_rule in rows.items() if of_rule}


def print_onboarding(onboarding: Onboarding, folder: Path, console: Console | None = None) -> None:
    """Prints metric, seconds and bytes against k, over the onboarded clients."""
    console = console or wide_console()
    metric = onboarding.summary["selection"][0]
    names = list(dict.fromkeys(row.client for row in onboarding.rows))
    title = (
        f"{cell(onboarding.summary['name'])}, {onboarding.summary['algorithm']}: "
        f"{len(names)} client"
        f"{'s' * (len(names) != 1)} onboarded, test {label_of(metric)}, up to {onboarding.steps} "
        "gradient steps"
    )
    lines = [
        [str(k), rule, *_texts(these, metric)]
        for k in dict.fromkeys(row.k for row in onboarding.rows)
        for rule, rows in by_rule(onboarding).items()
        if (these := [row for row in rows if row.k == k])
    ]
    head = ("k", "rule", "mean", "sd", "worst", "CPU seconds", "up", "down")
    console.print(Table.of(head, lines, prose=(1,)).printed(title))
    written = f"{folder}/onboarding.csv, onboarding.json and pictures/onboarding.png"
    say(
        console,
        *onboarding.notes,
        f"Onboarded clients: {', '.join(map(shown, names))}.",
        f"Written: {written}",
    )


def _texts(rows: Sequence[Row], metric: str) -> list[str]:
    over = federation_statistics([r.metrics[metric] for r in rows], smaller_is_better(metric))
    return [
        *(number(over[n]) for n in ("mean", "sd", "worst")),
        f"{np.mean([r.seconds for r in rows]):.3f}",
        *(size(round(float(np.mean([getattr(r, way) for r in rows])))) for way in ("up", "down")),
    ]


def to_csv(rows: Sequence[Any]) -> str:
    """Returns a line per row, of any dataclass with ``metrics``, with a column per metric."""
    records = [asdict(row) for row in rows]
    names = list(dict.fromkeys(n for row in rows for n in row.metrics))
    fixed = [name for name in records[0] if name != "metrics"]
    return csv_text(
        [*fixed, *names],
        ([*(r[f] for f in fixed), *(r["metrics"].get(n, "") for n in names)] for r in records),
    )


def write_onboarding(onboarding: Onboarding, folder: Path) -> None:
    """Writes ``onboarding.csv``, ``onboarding.json`` and ``pictures/onboarding.png``."""
    summary, run = onboarding.summary, RunFolder(folder)
    kept = ("name", "algorithm", "selection", "selected_round")
    record: dict[str, Any] = {name: summary[name] for name in kept}
    record |= {"steps": onboarding.steps, "notes": list(onboarding.notes)}
    write_text(run.onboarding_csv, to_csv(onboarding.rows))
    write_json(run.onboarding_json, record | {"rows": [asdict(row) for row in onboarding.rows]})
    metric = summary["selection"][0]
    others = summary["federation"][metric]["mean"]
    figure = onboarding_figure(by_rule(onboarding), metric, others)
    save_figures(run.pictures_folder, {"onboarding": figure})


def onboarding_figure(rules: Mapping[str, Sequence[Row]], metric: str, others: float) -> Figure:
    """Draws the metric and the CPU seconds of each rule, mean over the onboarded clients.

    Args:
        rules: The rows of each rule, by its name.
        metric: The metric's name.
        others: Mean of the hospitals of the run.
    """
    score, seconds = dict[str, list[Point]](), dict[str, list[Point]]()
    for name, rows in rules.items():
        for k in dict.fromkeys(row.k for row in rows):
            these = [row for row in rows if row.k == k]
            value = mean_of_known(np.array([row.metrics[metric] for row in these]), 0)
            score.setdefault(name, []).append((k, float(value)))
            seconds.setdefault(name, []).append((k, float(np.mean([r.seconds for r in these]))))
    counts = [k for k, _ in next(iter(score.values()))]
    score["hospitals of the run"] = [(k, others) for k in (min(counts), max(counts))]
    axis, looks = "training patients of the hospital that joins", looks_in_order(score)
    figure, (above, below) = panels(2)
    curves(score, axis, f"test {label_of(metric)}", looks, evenly=True, axes=above)
    curves(seconds, axis, "CPU seconds", looks, evenly=True, axes=below)
    return figure
