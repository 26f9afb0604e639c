"""How often the rule of verdicts detects a difference, and how often it is wrong, by simulation.

    python benchmarks/evidence/verdict_rule.py [--repeats 1000]

Methods are compared with one reference on splits, as :func:`medfed.reports.verdicts.against` does.
One method has a true difference of the size that a task calls detectable (80 % power, at a level
divided by the number of methods), the others have none. ``detected`` is how often the rule shows
the difference, and should be about 80 %; ``any difference among equals`` is how often it shows one
where all methods are equal, and should be about 5 % at most. ``detected before`` is what was
detected while the observed mean had to reach the detectable difference, too.

Splits of the same patients (``overlap`` above 0) have a common error, of the size that Nadeau and
Bengio's variance assumes.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np

from medfed.functional.statistics import LEVEL, POWER, noncentrality
from medfed.reports.tasks import Scores, Task
from medfed.reports.verdicts import UNDECIDED, against

CASES = ((5, 0.0, 6), (5, 0.0, 24), (10, 0.0, 48), (10, 0.25, 24), (10, 0.25, 48))


class Rates(NamedTuple):
    """Shares of the repetitions."""

    detected: float
    twice: float
    wrong: float


def rates(splits: int, overlap: float, methods: int, repeats: int) -> Rates:
    """Simulates comparisons of methods with a reference."""
    rng = np.random.default_rng((splits, methods, repeats))
    error = math.sqrt(1 / splits + overlap)
    size = error * noncentrality(splits - 1, (1 - LEVEL) / methods, POWER)
    counts = np.zeros(3)
    for _ in range(repeats):
        common = math.sqrt(overlap) * rng.normal(size=(methods, 1))
        noise = rng.normal(size=(methods, splits)) + common
        for k, gain in enumerate((size, 0.0)):
            values = noise + gain * (np.arange(methods) == 0)[:, None]
            found = against(_task(values, overlap), "local", [f"m{n}" for n in range(methods)])
            first = found["m0"]
            if k == 0:
                shown = first.verdict == "better"
                reached = first.difference.mean >= first.difference.detectable
                counts[:2] += shown, shown and reached
            else:
                counts[2] += any(one.verdict != UNDECIDED for one in found.values())
    return Rates(*(float(share) for share in counts / repeats))


def _task(values: np.ndarray, overlap: float) -> Task:
    none = np.zeros((values.shape[1], 0, 1))
    task = Task("simulated", "", clients=("hospital",), overlap=overlap)
    for name, row in (("local", 0 * values[0]), *((f"m{n}", v) for n, v in enumerate(values))):
        task.scores[name] = Scores(name, row[:, None], none, (0.0, 0.0), 1.0, 0, {})
    return task


def main() -> None:
    """Prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=len(CASES))
    asked = parser.parse_args()
    print(
        "| splits | overlap | methods | detected | detected before | any difference among equals |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    for splits, overlap, methods in CASES[: asked.cases]:
        cells = " | ".join(f"{rate:.1%}" for rate in rates(splits, overlap, methods, asked.repeats))
        print(f"| {splits} | {overlap:g} | {methods} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
