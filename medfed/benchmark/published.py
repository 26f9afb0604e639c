"""Published tables beside ours: what a suite with ``published`` numbers prints.

A row holds if the difference of the means has an interval (Welch's, 95 %) that contains 0 and is
nowhere beyond :data:`MARGIN`; if the interval contains 0 and is wider, the runs cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from medfed.benchmark.runner import Progress
from medfed.benchmark.suite import Published
from medfed.common.console import wide_console
from medfed.common.tables import Table
from medfed.standalone.files import filled, write_text

MARGIN = 0.05
"""How far apart two means may be and still be called the same."""
_HEAD = ("method", "published", "ours", "difference", "holds")
_TEMPLATE = Path(__file__).parent / "templates" / "published.md"


def difference(ours: Sequence[float], known: Sequence[float]) -> tuple[str, str]:
    """Returns the difference of two means with its interval, and whether the row holds.

    Example:
        >>> difference([0.70, 0.71, 0.72], [0.71, 0.72, 0.73])
        ('-0.010 [-0.033, +0.013]', 'holds')
        >>> difference([0.9, 0.91, 0.92], [0.71, 0.72, 0.73])[1], difference([0.9], [0.8, 0.7])
        ('does not hold', ('+0.150', 'cannot tell'))
    """
    gap = float(np.mean(ours) - np.mean(known))
    if min(len(ours), len(known)) < 2:
        return f"{gap:+.3f}", "cannot tell"
    low = high = gap
    if np.ptp(ours) or np.ptp(known):
        low, high = stats.ttest_ind(ours, known, equal_var=False).confidence_interval()
    word = "holds" if max(-low, high) <= MARGIN else "cannot tell"
    return f"{gap:+.3f} [{low:+.3f}, {high:+.3f}]", word if low <= 0 <= high else "does not hold"


def mean_of(result: Mapping[str, Any], row: Published, metric: str = "") -> float:
    """Returns the mean of a run's test scores over hospitals, or over all their patients."""
    scores = {c: of[metric or result["metric"][0]] for c, of in result["clients"].items()}
    tested = [result["patients"][c]["test"] for c in scores]
    return float(np.average([*scores.values()], weights=tested if row.over == "patients" else None))


def tables(progress: Sequence[Progress]) -> Iterator[tuple[str, Table]]:
    """Yields the title and the rows of each suite."""
    for suite in {one.group.suite.name: one.group.suite for one in progress}.values():
        of_suite = (one for one in progress if one.group.suite.name == suite.name)
        by_method = {one.group.method.name: [*one.final.values()] for one in of_suite}
        rows = []
        for row in suite.published:
            whole = [result for result in by_method.get(row.method, ()) if "clients" in result]
            means = [mean_of(result, row, suite.metric) for result in whole]
            name = " ".join([row.method, *[f"({row.table})"] * bool(row.table)])
            compared = difference(means, row.means) if means else ("", "not computed")
            rows.append([name, _spread(row.means), _spread(means) if means else "", *compared])
        yield suite.title, Table.of(_HEAD, rows, prose=(0, 4))


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1) if len(values) > 1 else 0:.3f}"


def write(file: Path, progress: Sequence[Progress], quiet: bool) -> list[str]:
    """Writes and prints the tables; returns the sentences below them."""
    every = [*tables(progress)]
    hours = sum(r["cpu_seconds"] for one in progress for r in one.final.values()) / 3600
    sources = dict.fromkeys(one.group.suite.source for one in progress)
    words = {"tables": every, "sources": sources, "margin": MARGIN, "hours": hours}
    page, _, below = filled(_TEMPLATE, **words).partition("====\n")
    write_text(file, page + below)
    for title, table in every if not quiet else ():
        wide_console().print(table.printed(title))
    return [*below.splitlines(), f"Page: {file}"]
