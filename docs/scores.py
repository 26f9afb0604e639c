"""Writes ``docs/numbers.json``: the scores of README's first example and of the demo.

    python docs/scores.py outputs/first outputs/demo

after the two commands of README's first example and after ``make demo``. The tests compare README
and docs/results/brats.md with this file, and one of its scores with a fresh run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def scores(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns, per method and in the order of seeds, what the pages show of each run."""
    runs: dict[str, list[dict[str, Any]]] = {}
    paths = folder.glob("*/summary.json")
    for path in sorted(paths, key=lambda p: int(p.parent.name.split("_")[0])):
        summary = json.loads(path.read_text())
        metric = next(m for m in ("iou", "balanced_accuracy") if m in summary["federation"])
        method = path.parent.name.partition("algorithm=")[2].partition(",")[0]
        runs.setdefault(method, []).append(
            {
                "mean": summary["federation"][metric]["mean"],
                "hospitals": [client[metric] for client in summary["clients"].values()],
                "up": summary["bytes"]["up"],
            }
        )
    return runs


if __name__ == "__main__":
    first, demo = (scores(Path(folder)) for folder in sys.argv[1:])
    text = json.dumps({"first": first, "demo": demo}, indent=1)
    Path(__file__).with_suffix(".json").write_text(text + "\n")
