"""Whether what ``medfed advise`` says holds on the patients whom it has not looked at.

For several seeds, each of which splits the patients anew: a pilot on those whom a run would not
test, then the method that it speaks for and training alone, trained as a user would, on the test
patients::

    python benchmarks/evidence/advice.py experiment=heart_pfednet data.path=HEART_FOLDER

What was computed is in ``--out`` and not computed again.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medfed.benchmark.advice import ALONE, Advice, Gain, advise, composed
from medfed.common.scores import smaller_is_better
from medfed.functional.statistics import difference, percentiles
from medfed.records.cells import Cell, cell_key, read_cell, write_cell
from medfed.run.cell import run_cell

METHODS = ("fedavg", "finetune", "ditto", "fedrep", "pfednet")  # as in configs/advise.yaml


def tested(overrides: Sequence[str], method: str, out: Path, split: int) -> dict[str, Any]:
    """The test metrics of a method, trained on all who are not tested."""
    config = composed(overrides, method)
    key, plain = cell_key(config, "final", False)
    cell = Cell("test", str(config.name), method, "final", 0, split, plain, key)
    if (found := read_cell(out, cell)) is None:
        found = run_cell(plain, "final")
        write_cell(out, cell, found)
    return found


def _held(says: str, low: float, high: float) -> str:
    """Whether an interval of the test patients agrees; open where it lies on both sides of 0."""
    if says == "cannot tell" or math.isnan(low):
        return "–"
    wrong = high < 0 if says == "better" else low > 0
    sure = low > 0 if says == "better" else high < 0
    return "no" if wrong else "yes" if sure else "open"


def compare(
    found: Advice, own: dict[str, Any], alone: dict[str, Any]
) -> dict[str, tuple[float, float, float]]:
    """Test gains of every hospital with intervals of patients drawn anew, if there are several."""
    metric, drawn = alone["metric"][0], (own.get("resampled", {}), alone.get("resampled", {}))
    sign = -1 if smaller_is_better(metric) else 1
    gains = {}
    for client in found.task.clients:
        value, other = (_number(r["clients"][client].get(metric)) for r in (own, alone))
        pairs = zip(*(d.get(client, []) for d in drawn), strict=True)
        again = np.array([sign * (_number(a) - _number(b)) for a, b in pairs], dtype=float)
        several = own["patients"][client]["test"] > 1
        ends = percentiles(again) if several else (math.nan, math.nan)
        gains[client] = (sign * (value - other), *ends)
    return gains


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def main() -> None:
    """Prints what was advised and what came of it, per seed and hospital."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="+", help="as medfed train takes them")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/advice"))
    given = parser.parse_args()
    columns = ("seed", "advice", "hospital", "pilot", "says", "test", "held")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    means: list[float] = []
    verdicts: Counter[tuple[str, str]] = Counter()
    inside, share = [], 0.0
    for seed in given.seeds:
        overrides = [*given.overrides, f"seed={seed}"]
        found, _ = advise(
            overrides,
            given.methods,
            folds=given.folds,
            repeats=given.repeats,
            out=given.out,
            workers=given.workers,
        )
        own, alone = (tested(overrides, m, given.out, seed) for m in (found.leader, ALONE))
        gains = compare(found, own, alone)
        means.append(float(np.nanmean([value for value, *_ in gains.values()])))
        share = found.pilot_data.kept_out / sum(map(len, found.pilot_data.patients.values()))
        overall = found.methods[found.leader].gain
        assert overall is not None
        what = found.use or f"cannot tell; best {found.best}"
        right = _held(overall.says, means[-1], means[-1])
        verdicts[f"all hospitals: {overall.says}", right] += 1
        print(_row(seed, what, "all", overall, f"{means[-1]:+.4f}", right), flush=True)
        for client, gain in found.methods[found.leader].hospitals.items():
            if client not in gains:
                continue  # too small for a verdict
            value, low, high = gains[client]
            right = _held(gain.says, low, high)
            verdicts[f"a hospital: {gain.says}", right] += 1
            if not math.isnan(value - gain.low):
                inside.append(gain.low <= value <= gain.high)
            test = f"{value:+.4f}" + ("" if math.isnan(low) else f" [{low:+.4f}, {high:+.4f}]")
            print(_row(seed, "", client, gain, test, right), flush=True)
    d = difference(means, share)
    interval = "" if math.isnan(d.low) else f" [{d.low:+.4f}, {d.high:+.4f}]"
    print(
        f"\nThe method shown against alone on the test patients, mean over hospitals and "
        f"{len(means)} seeds: {d.mean:+.4f}{interval}."
    )
    for (says, right), count in sorted(verdicts.items()):
        print(f"{says}, {count} times; held: {right}")
    print(f"Test gain of a hospital within the pilot's interval: {sum(inside)} of {len(inside)}.")


def _row(seed: int, what: str, client: str, gain: Gain, test: str, right: str) -> str:
    pilot = f"{gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"
    return f"| {seed} | {what} | {client} | {pilot} | {gain.says} | {test} | {right} |"


if __name__ == "__main__":
    main()
