"""What methods reach of a continuous outcome with their defaults, as it is and in standard units.

    python benchmarks/evidence/outcome_units.py OUT            # runs what is missing, prints the table
    python benchmarks/evidence/outcome_units.py OUT --take     # and takes it to docs/benchmark

Scikit-learn's diabetes in five hospitals, each patient tested once in one of five folds. The table
is that of docs/results/diabetes.md, which ``python docs/tables.py`` writes. It takes some minutes
of one core; runs that are finished in ``OUT`` are not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from medfed import train

DOCS = Path(__file__).parents[2] / "docs" / "benchmark"
METHODS = (
    *("local", "fedavg", "scaffold", "ditto", "pfedme", "pfednet"),
    *("fedadam", "fedyogi", "fedadagrad", "fedmgda"),
)
UNITS = {"as it is": "[0,1]", "in standard units": "null"}
FOLDS = 5


def reached(out: Path, method: str, unit: str, fold: int, less: list[str]) -> tuple[float, float]:
    """Mean RMSE over hospitals of a run, and of a constant; it is run where it is not there."""
    folder = out / f"{method}_{list(UNITS.values()).index(unit)}_{fold}"
    if not (folder / "summary.json").is_file():
        keys = [f"algorithm={method}", f"data.outcome_scale={unit}", f"data.fold=[{fold},{FOLDS}]"]
        train("experiment=diabetes_pfednet", *keys, *less, "pictures.format=none", folder=folder)
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    constant = found["constant"]["constant"]["federation"]["rmse"]["mean"]
    return found["federation"]["rmse"]["mean"], constant


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a folder for the runs")
    parser.add_argument("--take", action="store_true", help="keep the table for the docs")
    parser.add_argument("--rounds", type=int, help="of all runs, to see that they run")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    options = parser.parse_args()
    less = [] if options.rounds is None else [f"rounds={options.rounds}"]
    rows, constants = [], list[float]()
    for method in options.methods:
        row = [f"`{method}`"]
        for unit in UNITS.values():
            found = np.array([reached(options.out, method, unit, f, less) for f in range(FOLDS)])
            row.append(f"{found[:, 0].mean():.2f} ± {found[:, 0].std(ddof=1):.2f}")
            constants = list(found[:, 1])
        rows.append(row)
    rows.append(
        ["a constant", *[f"{np.mean(constants):.2f} ± {np.std(constants, ddof=1):.2f}"] * 2]
    )
    head = ["method", *(f"rmse, outcome {name}" for name in UNITS)]
    for row in [head, *rows]:
        print(f"| {' | '.join(row)} |")
    if options.take and options.methods == METHODS and options.rounds is None:
        (DOCS / "outcome_units.json").write_text(
            json.dumps({"outcome_units": {"head": head, "rows": rows}}, indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
