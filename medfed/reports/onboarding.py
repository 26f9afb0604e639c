"""What hospitals that join a finished run get: a table, files and a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from medfed.federation.callbacks.evaluation import smaller_is_better
from medfed.onboarding import RULES, Onboarding, Row, Rule
from medfed.reports.comparison_pictures import label_of
from medfed.reports.onboarding_pictures import onboarding_figure
from medfed.reports.pictures import save_figures
from medfed.reports.results import size, wide_console
from medfed.run_folder import federation_statistics, write_json, write_text


def rule_name(rule: Rule, algorithm: str) -> str:
    """Returns a rule's name as tables and pictures have it.

    Example:
        >>> rule_name("own", "ppfl"), rule_name("local", "ppfl")
        ('ppfl (own rule)', 'local training')
    """
    return {
        "own": f"{algorithm} (own rule)",
        "fine_tuning": "fine-tuning",
        "local": "local training",
    }[rule]


def cells(found: Onboarding) -> dict[tuple[int, Rule], list[Row]]:
    """Groups the rows: all newcomers of one k and rule, k ascending as asked for."""
    counts = list(dict.fromkeys(row.k for row in found.rows))
    grouped = {
        (k, rule): [row for row in found.rows if (row.k, row.rule) == (k, rule)]
        for k in counts
        for rule in RULES
    }
    return {key: rows for key, rows in grouped.items() if rows}


def print_onboarding(found: Onboarding, folder: Path, console: Console | None = None) -> None:
    """Prints metric, seconds and bytes against k, over the newcomers."""
    console = console or wide_console()
    metric = found.summary["selection"][0]
    names = list(dict.fromkeys(row.client for row in found.rows))
    table = Table(
        title=f"{found.summary['name']}, {found.summary['algorithm']}: {len(names)} newcomer"
        f"{'s' * (len(names) != 1)}, test {label_of(metric)}, up to {found.steps} gradient steps"
    )
    titles = ("k", "rule", "mean", "sd", "worst", "CPU seconds", "up", "down")
    for name in titles:
        table.add_column(name, justify="left" if name == "rule" else "right")
    previous = None
    for (k, rule), rows in cells(found).items():
        if previous not in (None, k):
            table.add_section()
        table.add_row("" if k == previous else str(k), *_texts(found, rule, rows))
        previous = k
    console.print(table)
    for note in found.notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"Newcomers: {', '.join(names)}.", highlight=False, soft_wrap=True)
    console.print(
        f"Written: {folder}/onboarding.csv, onboarding.json and pictures/onboarding.png",
        soft_wrap=True,
        highlight=False,
    )


def _texts(found: Onboarding, rule: Rule, rows: Sequence[Row]) -> list[str]:
    metric = found.summary["selection"][0]
    over = federation_statistics([r.metrics[metric] for r in rows], smaller_is_better(metric))
    return [
        rule_name(rule, found.summary["algorithm"]),
        *(f"{over[n]:.4f}" for n in ("mean", "sd", "worst")),
        f"{np.mean([r.seconds for r in rows]):.3f}",
        size(round(float(np.mean([r.up for r in rows])))),
        size(round(float(np.mean([r.down for r in rows])))),
    ]


def to_csv(rows: Sequence[Row]) -> str:
    """Returns a line per newcomer, k and rule, with a column per metric."""
    text = io.StringIO()
    fixed = [name for name in Row.__dataclass_fields__ if name != "metrics"]
    names = list(dict.fromkeys(n for row in rows for n in row.metrics))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*fixed, *names])
    for row in rows:
        values = [repr(row.metrics[n]) if n in row.metrics else "" for n in names]
        writer.writerow([*(getattr(row, name) for name in fixed), *values])
    return text.getvalue()


def write_onboarding(found: Onboarding, folder: Path) -> None:
    """Writes ``onboarding.csv``, ``onboarding.json`` and ``pictures/onboarding.png``."""
    summary = found.summary
    kept = ("name", "algorithm", "selection", "selected_round")
    record: dict[str, Any] = {name: summary[name] for name in kept}
    record |= {"steps": found.steps, "notes": list(found.notes)}
    write_text(folder / "onboarding.csv", to_csv(found.rows))
    write_json(folder / "onboarding.json", record | {"rows": [asdict(row) for row in found.rows]})
    metric = summary["selection"][0]
    named = {
        rule_name(rule, summary["algorithm"]): [row for row in found.rows if row.rule == rule]
        for rule in RULES
    }
    others = summary["federation"][metric]["mean"]
    figure = onboarding_figure({name: rows for name, rows in named.items() if rows}, metric, others)
    save_figures(folder / "pictures", {"onboarding": figure})
