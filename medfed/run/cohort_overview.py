"""What every client has before training: a short table in the terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medfed.common.console import say, wide_console
from medfed.common.names import cell
from medfed.common.scores import span
from medfed.datamodules.readers.base import few
from medfed.datamodules.splits import SPLITS
from medfed.run.cohort import FILE, CohortRecord, Had

_log = logging.getLogger(__name__)
_LINES = 12  # clients that have a line each
_COLUMNS = 6  # classes whose shares are printed each


def print_cohort(cohort: CohortRecord, console: Console | None = None) -> None:
    """Prints a line per client, or of many clients their range, and what a person should know.

    Args:
        cohort: What the clients have.
        console: Where to; None is the terminal.
    """
    console = console or wide_console()
    had = cohort.clients
    if len(had) <= _LINES:
        console.print(_table(cohort))
    else:
        say(console, *_ranges(cohort))
    if cohort.remarks:
        say(console, *cohort.remarks)
    if cohort.used < cohort.patients:
        left = cohort.patients - cohort.used
        say(
            console,
            f"No client has {left:,} of the {cohort.patients:,} patients: they are not used.",
        )
    if sentence := cohort.duplicates.sentence():
        _log.warning("%s %s names all.", sentence, FILE)


def _table(cohort: CohortRecord) -> Table:
    title, shown = _prevalence(cohort)
    rows = {
        name: {
            "client": cell(name),
            "patients": f"{h.patients:,} of {h.of:,}",
            "train / val / test": " / ".join(f"{n:,}" for n in h.splits.values()),
            "samples": _thinned(h),
            "channels removed": escape(", ".join(h.removed)),
            title: shown(h.before, h.after),
            "note": escape("; ".join([*_missing(h), *h.notes])),
        }
        for name, h in cohort.clients.items()
    }
    splits = [sum(h.splits[s] for h in cohort.clients.values()) for s in SPLITS]
    whole = {
        "client": "all",
        "patients": f"{cohort.used:,} of {cohort.patients:,}",
        "train / val / test": " / ".join(f"{n:,}" for n in splits),
        title: shown(cohort.whole, []),
    }
    # Columns that say nothing are left out.
    columns = [c for c in next(iter(rows.values())) if any(row[c] for row in rows.values())]
    table = Table(title="Before training")
    for column in columns:
        right = column in ("patients", "train / val / test", "samples")
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    for row in rows.values():
        table.add_row(*(row[c] for c in columns))
    table.add_section()
    table.add_row(*(whole.get(c, "") for c in columns))
    return table


def _prevalence(cohort: CohortRecord) -> tuple[str, Callable[[list[float], list[float]], str]]:
    """The title of the column, and what stands in it for shares before and after."""
    names, kind = cohort.names, cohort.kind
    if kind == "outcome":
        return f"mean {cell(names[0])}", lambda _, after: f"{after[0]:.4g}" if after else ""
    if kind == "classes" and len(names) > _COLUMNS:
        return (
            "classes",
            lambda before, after: f"{np.count_nonzero(after or before)} of {len(names)}",
        )
    chosen = slice(1, None) if kind == "classes" and len(names) == 2 else slice(None)

    def shown(before: list[float], after: list[float]) -> str:
        texts = [" / ".join(f"{100 * x:.1f}" for x in part[chosen]) for part in (before, after)]
        return " → ".join(dict.fromkeys(f"{text} %" for text in texts if text))

    title = "share of" if kind == "classes" else "share of patches' voxels:"
    return f"{title} {' / '.join(map(cell, names[chosen]))}", shown


def _thinned(had: Had) -> str:
    if had.samples is None or had.samples_of is None or had.samples == had.samples_of:
        return ""
    return f"{had.samples:,} of {had.samples_of:,}"


def _missing(had: Had) -> Iterator[str]:
    """What a client lacks in all splits, and in single ones."""
    empty = [split for split in SPLITS if not had.splits[split]]
    if empty:
        yield f"no patient in {', '.join(empty)}"
    found = list(had.missing.values())
    nowhere = [name for name in (found[0] if found else []) if all(name in m for m in found)]
    if nowhere:
        yield f"no {few(nowhere, 3)}"
    for split, names in had.missing.items():
        if here := [name for name in names if name not in nowhere]:
            yield f"{split}: no {few(here, 3)}"


def _ranges(cohort: CohortRecord) -> Iterator[str]:
    """The same in sentences, for many clients."""
    had = cohort.clients
    told = [f"{len(had)} clients have {cohort.used:,} of {cohort.patients:,} patients"]
    told += [f"{span(h.patients for h in had.values())} each"]
    told += [f"{span(h.splits[s] for h in had.values())} in {s}" for s in SPLITS]
    yield f"{', '.join(told)}."
    title, shown = _prevalence(cohort)
    if all(h.after for h in had.values()):
        order = sorted(had.values(), key=lambda h: h.after[-1])
        ends = [shown([], h.after) for h in (order[0], order[-1])]
        yield f"{title}: from {ends[0]} to {ends[1]}; before, of all: {shown(cohort.whole, [])}."
    lists = {
        "lack channels": [n for n, h in had.items() if h.removed],
        "have a scanner or labels of their own, or another note": [
            n for n, h in had.items() if h.notes
        ],
        "lack a class or all patients in some split": [
            n for n, h in had.items() if list(_missing(h))
        ],
    }
    for what, names in lists.items():
        if names:
            yield f"{len(names)} {what}: {few(names, 5)}."
    yield f"{FILE} has a line for each."
