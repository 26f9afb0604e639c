"""Whether what ``medfed advise`` says holds on the patients whom it has not looked at.

For several splits of the patients: a pilot on those that are not tested, then the method that it
speaks for and training alone, both trained as a user would, on the test patients::

    python benchmarks/advice.py heart HEART_FOLDER
    python benchmarks/advice.py retina RETINA_FOLDER --repeats 1 --methods fedavg finetune ditto

What was computed is in ``--out`` and not computed again.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfed.common.scores import smaller_is_better
from medfed.functional.bootstrap import percentiles
from medfed.functional.paired import difference
from medfed.reports.advice.advice import advise
from medfed.reports.advice.choice import ALONE, Advice
from medfed.run.benchmark.cells import Cell, cell_key, read_cell, write_cell
from medfed.run.benchmark.suite import suites
from medfed.run.benchmark.work import run_cell
from medfed.run.pilot import composed

METHODS = ("fedavg", "finetune", "ditto", "fedrep", "pfednet")  # as in configs/advise.yaml
OUTER = 5  # parts of the patients, of which a split tests one


def asked(name: str, path: str | None, split: int) -> list[str]:
    """What a user would train with: a suite's experiment, one part of the patients to be tested."""
    suite = suites()[name]
    again, part = divmod(split, OUTER)
    where = [] if path is None else [f"data.path={Path(path).resolve()}"]
    own = suite.variants[suite.base].overrides
    dealt = [f"seed={split}", f"data.seed={again}", f"data.fold=[{part},{OUTER}]"]
    return [f"experiment={suite.experiment}", *suite.overrides, *own, *where, *dealt]


def tested(overrides: Sequence[str], method: str, out: Path, split: int) -> dict[str, Any]:
    """The test metrics of a method, trained on all who are not tested."""
    config = composed(overrides, method)
    key, plain = cell_key(config, "final", False)
    cell = Cell("test", str(config.name), method, "final", 0, split, plain, key)
    if (found := read_cell(out, cell)) is None:
        found = run_cell(plain, "final")
        write_cell(out, cell, found)
    return found


def held(says: str, low: float, high: float) -> str:
    """Whether a verdict and an interval of the test patients are of one mind."""
    if says == "cannot tell" or math.isnan(low):
        return "–"
    wrong = high < 0 if says == "better" else low > 0
    sure = low > 0 if says == "better" else high < 0
    return "no" if wrong else "yes" if sure else "open"


def compare(found: Advice, own: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Test gains of every hospital with intervals of patients drawn anew."""
    metric = alone["metric"][0]
    sign = -1 if smaller_is_better(metric) else 1
    gains = {}
    for client, metrics in own["clients"].items():
        value, other = metrics.get(metric), alone["clients"][client].get(metric)
        if value is None or other is None or math.isnan(value - other):
            gains[client] = (math.nan, math.nan, math.nan)
            continue
        drawn = [
            sign * (a - b)
            for a, b in zip(
                own.get("resampled", {}).get(client, []),
                alone.get("resampled", {}).get(client, []),
                strict=True,
            )
            if a is not None and b is not None
        ]
        import numpy as np

        gains[client] = (sign * (value - other), *percentiles(np.array(drawn, dtype=float)))
    return gains


def main() -> None:
    """Prints what was advised and what came of it, per split and hospital."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", help="whose experiment: heart, retina, breast_cancer, …")
    parser.add_argument("path", nargs="?", help="its data, where they are real")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--splits", type=int, default=OUTER)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/advice"))
    given = parser.parse_args()
    print(
        "| split | advice | hospital | pilot | says | test | held |\n|---|---|---|---:|---|---:|---|"
    )
    means: list[float] = []
    verdicts: Counter[tuple[str, str]] = Counter()
    inside, known = 0, 0
    for split in range(given.splits):
        overrides = [*asked(given.suite, given.path, split), *given.override]
        found, _ = advise(
            overrides, given.methods, folds=given.folds, repeats=given.repeats, out=given.out,
            workers=given.workers, quiet=True,
        )  # fmt: skip
        results = [tested(overrides, m, given.out, split) for m in (found.shown, ALONE)]
        gains = compare(found, *results)
        test = [g[0] for g in gains.values() if not math.isnan(g[0])]
        mean = sum(test) / len(test)
        means.append(mean)
        overall = found.methods[found.shown].gain
        assert overall is not None
        what = found.use or f"cannot tell (best {found.best})"
        right = (
            "–"
            if overall.says == "cannot tell"
            else "yes"
            if (mean > 0) == (overall.says == "better")
            else "no"
        )
        verdicts[f"all: {overall.says}", right] += 1
        print(row(split, what, "all", overall, f"{mean:+.4f}", right), flush=True)
        for client, gain in found.methods[found.shown].hospitals.items():
            value, low, high = gains[client]
            right = held(gain.says, low, high)
            verdicts[gain.says, right] += 1
            if not math.isnan(value) and not math.isnan(gain.low):
                known, inside = known + 1, inside + (gain.low <= value <= gain.high)
            shown = f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"
            print(row(split, "", client, gain, shown, right), flush=True)
    d = difference(means, 1 / (OUTER - 1))
    print(
        f"\nThe method shown against alone on the test patients, mean over hospitals and "
        f"{len(means)} splits: {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]."
    )
    for (says, right), count in sorted(verdicts.items()):
        print(f"{says}; held: {right}; {count} times")
    print(f"Test gain of a hospital within the pilot's interval: {inside} of {known}.")


def row(split: int, what: str, client: str, gain: Any, test: str, right: str) -> str:
    """A line of the table."""
    pilot = f"{gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"
    return f"| {split} | {what} | {client} | {pilot} | {gain.says} | {test} | {right} |"


if __name__ == "__main__":
    main()
