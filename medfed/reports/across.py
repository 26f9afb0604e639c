"""Every hospital's model on every hospital's patients, and results by subgroup, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from medfed.common.console import say, wide_console
from medfed.common.figures import save_figures
from medfed.common.files import write_json
from medfed.common.scores import interval, label_of, number, smaller_is_better
from medfed.common.untrusted import read_json
from medfed.records.folder import RunFolder
from medfed.reports.charts import Picture
from medfed.reports.methods import Comparison, Finding
from medfed.reports.subsets import heat_map
from medfed.reports.tables import Table


def picture(values: Mapping[str, Any], metric: str, title: str) -> Figure:
    """Draws metrics by model (row) and hospital; a dot says whose patients."""
    table = np.array([[of.get(metric) for of in row.values()] for row in values.values()], float)
    rows = [f"model of {name}" for name in values]
    falls = smaller_is_better(metric)
    columns = [f"patients of {name}" for name in next(iter(values.values()))]
    return heat_map(table, rows, [[name] for name in columns], columns, title, falls=falls)


def show_across(values: Mapping[str, Any], folder: Path, split: str) -> None:
    """Writes ``across_<split>.json`` and its picture, and prints the table."""
    run, console = RunFolder(folder), wide_console()
    metric = run.summary["selection"][0]
    title = f"{split} {label_of(metric)}: of each model"
    write_json(folder / f"across_{split}.json", values)
    save_figures(run.pictures_folder, {f"across_{split}": picture(values, metric, title)})
    rows = [
        [m, *(number(of.get(metric, np.nan)) for of in row.values())] for m, row in values.items()
    ]
    columns = next(iter(values.values()))
    console.print(Table.of(["model of", *columns], rows, prose=(0,)).printed(title))
    say(console, f"Written: {folder}/across_{split}.json and pictures/across_{split}.png")


def show_subgroups(subgroups: Mapping[str, Any], folder: Path) -> None:
    """Writes ``subgroups_<split>.json``, prints the table, and names the worst subgroup."""
    split, groups = subgroups["split"], subgroups["groups"]
    metric, path = RunFolder(folder).summary["selection"][0], folder / f"subgroups_{split}.json"
    write_json(path, subgroups)
    enough = {name: one for name, one in groups.items() if "metrics" in one}
    known = {name: one["metrics"].get(metric, np.nan) for name, one in enough.items()}
    ends = {name: interval(one["intervals"].get(metric)) for name, one in enough.items()}
    rows = [[n, str(groups[n]["patients"]), number(v), ends[n]] for n, v in known.items()]
    table = Table.of([subgroups["column"], "patients", metric, "95 % interval"], rows, prose=(0,))
    title = f"{split} {label_of(metric)} by subgroup, all hospitals together"
    wide_console().print(table.printed(title))
    order = sorted((v * (1 - 2 * smaller_is_better(metric)), n) for n, v in known.items() if v == v)
    lines = [f"Worst by {metric}: {n}, {number(known[n])} {ends[n]}." for _, n in order[:1]]
    if few := [name for name in groups if name not in known]:
        lines.append(f"Too few patients to be shown: {', '.join(few)}.")
    say(wide_console(), *lines, f"Written: {path}, with all metrics")


def find(comparison: Comparison) -> Finding:
    """Draws each method's models on all hospitals' patients, if its first run was measured."""
    paths = {m.name: m.runs[0].folder / "across_test.json" for m in comparison.methods}
    kind, metric = dict[str, dict[str, dict[str, float | None]]], comparison.metric
    caption = "Each model (row) on the test patients of each hospital."
    pictures = {}
    for name, path in paths.items():
        if path.is_file():
            figure = picture(read_json(path, kind), metric, f"{name}, test {label_of(metric)}")
            pictures[f"across_{name}"] = Picture(figure, caption)
    return Finding(pictures=pictures)
