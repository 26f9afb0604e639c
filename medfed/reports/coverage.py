"""How often sets and intervals of finished runs hold the truth, hospital by hospital."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from medfed.common.scores import mean_of_known, number
from medfed.common.tables import Table
from medfed.functional.conformal import range_of_coverage

Summaries = Sequence[Mapping[str, Any]]
_SIZES = {"set_size": "classes in a set", "width": "width", "factor": "volume within a factor of"}
_HEAD = ("method", "hospital", "quantile of", "coverage", "range")
COVERAGE = (
    "Coverage is the share of test patients whose set or interval holds the truth. Range: of a "
    "hospital's own quantile where it covers in 5 to 95 % of draws of its validation patients, "
    "if later patients are like them; of the mean, the lowest and the highest hospital. A quantile "
    "of all hospitals promises nothing to a single hospital."
)


def coverage_table(methods: Mapping[str, Summaries]) -> Table | None:
    """Returns the coverage of each hospital, mean over runs; None without chosen quantiles."""
    rows = [row for method, of in methods.items() for row in _rows(method, of)]
    if not rows:
        return None
    first = next(iter(next(iter(methods.values()))[0]["clients"].values()))
    size = next(title for name, title in _SIZES.items() if any(name in n for n in first))
    return Table.of((*_HEAD, size), rows, prose=(0, 1, 2))


def _rows(method: str, summaries: Summaries) -> Iterator[list[str]]:
    tested = {client: metrics for s in summaries for client, metrics in s["clients"].items()}
    # A user's own metric may be called coverage, too.
    known_parts = [re.fullmatch(r"coverage(/.+)?/point", n) for n in next(iter(tested.values()))]
    for name, part in [(m[0], m[1] or "") for m in known_parts if m]:
        region, values = part.replace("/", ", "), []
        for client, metrics in tested.items():
            size = next(n for n in metrics if n.removesuffix(f"{part}/point") in _SIZES)
            runs = [s for s in summaries if client in s["clients"]]
            known = np.array([[s["clients"][client][n] for n in (name, size)] for s in runs])
            values.append(mean_of_known(known, 0))
            points = [s.get("points", {}).get(client, {}) for s in runs]
            texts = _basis(points, part)
            coverage, sized = map(number, values[-1])
            yield [method, client + region, texts[0], coverage, texts[1], sized]
        if len(values) > 1:
            coverage, sized = mean_of_known(np.array(values), 0)
            every = [v for v, _ in values if not math.isnan(v)]
            ends = f"{min(every):.3f} to {max(every):.3f}" if every else "–"
            yield [method, "mean" + region, "", number(coverage), ends, number(sized)]


def _basis(points: Sequence[Mapping[str, float]], part: str) -> tuple[str, str]:
    """Whose patients a quantile is of, and the range of its coverage where they are the own."""
    known = [p for p in points if f"patients{part}" in p]
    if not known:
        return "too few patients", "–"
    fewest = min(known, key=lambda p: p[f"patients{part}"])
    count = fewest[f"patients{part}"]
    if not count:
        return "all hospitals", "–"
    low, high = range_of_coverage(count, fewest["level"])
    return f"{count:.0f} patients", f"{low:.3f} to {high:.3f}"
