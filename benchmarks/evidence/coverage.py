"""How often sets of classes hold the class at each hospital, on real strokes.

    python benchmarks/evidence/coverage.py IST_CSV
    python benchmarks/evidence/coverage.py IST_CSV --least 50 --splits 5

FedAvg trains a logistic regression once per split; 30 % of a hospital's patients choose quantiles,
30 % test them. A row per quantile: of the hospital alone, of all patients together, and that which
medfed chooses: of a hospital of 100 validation patients, else the mean over hospitals. A hospital's
numbers are means over splits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from medfed.common.tensors import to_device
from medfed.config.compose import described
from medfed.federation.lightning.strategy import ranks_end_together
from medfed.functional.conformal import Covering, common, quantile
from medfed.functional.points import Chooser, Point, Rows
from medfed.run.experiment import build_experiment
from medfed.run.finished import test_selected

OVERRIDES = (
    *("experiment=stroke", "model=logistic", "algorithm=fedavg", "logger=none", "progress=false"),
    *("pictures.format=none", "data.val_fraction=0.3", "data.test_fraction=0.3"),
)
Cases = Mapping[str, dict[str, Rows]]


def cases_of(overrides: list[str]) -> Cases:
    """Trains once; returns the cases of each hospital by split."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_experiment(described([*OVERRIDES, *overrides, f"folder={folder}"]))
        with ranks_end_together(experiment.trainer):
            experiment.trainer.fit(experiment.module)
            test_selected(experiment)
    module, task = experiment.module, experiment.task
    cases: dict[str, dict[str, Rows]] = {}
    with torch.no_grad():
        for name, client in module.federation.clients.items():
            module.local.model.load(module.federation.personal_model(name))
            cases[name] = {
                split: task.measured(
                    to_device(batch, module.device) for batch in client.data.eval_batches(split)
                ).cases()
                for split in ("val", "train", "test")
            }
    return cases


def points_of(cases: Cases, covering: Covering) -> dict[str, Point]:
    """Chooses as a run does: alone, then with what all say."""
    fitted = {c: (of["val"], of["train"] if covering.linear else ()) for c, of in cases.items()}
    others = common({c: covering.choose(*rows) for c, rows in fitted.items()})
    return {c: covering.choose(*rows, others) for c, rows in fitted.items()}


def bounds_of(cases: Cases, covering: Covering) -> dict[str, dict[str, float]]:
    """Returns each hospital's quantile: of itself alone, of all patients, and as medfed chooses."""
    points, misfits = points_of(cases, covering), {}
    for c, of in cases.items():
        rows = [dict(row) for row in of["val"]]
        if covering.chooser is not None:
            covering.chooser.apply(rows, points[c])
        kind = "calibrated" if covering.chooser is not None else "probability"
        true = np.array([row[f"{kind}/{row['label']}"] for row in rows])
        misfits[c] = np.where(true < 0.5, 1 - true, 0.0)  # of two classes
    every = np.concatenate([*misfits.values()])
    together = quantile(every, np.arange(len(every)), covering.level)
    alone = {c: quantile(m, np.arange(len(m)), covering.level) for c, m in misfits.items()}
    ours = {c: point["quantile"] for c, point in points.items()}
    return {"own": alone, "all patients'": dict.fromkeys(cases, together), "medfed's": ours}


def measured(cases: Cases, level: float) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns coverage and set size at each hospital, by quantile."""
    found = {}
    for name, chooser in (("", None), (", recalibrated", Chooser(2, None, "shift", linear=True))):
        covering = Covering(level, "classes", chooser=chooser)
        points = points_of(cases, covering)
        for of, bounds in bounds_of(cases, covering).items():
            metrics = {
                c: covering.apply(cases[c]["test"], {**points[c], "quantile": bound})
                for c, bound in bounds.items()
            }
            values = {c: (m["coverage/point"], m["set_size/point"]) for c, m in metrics.items()}
            found[f"{of}{name}"] = values
    return found


def main() -> None:
    """Reads the arguments, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the table of the International Stroke Trial")
    parser.add_argument("overrides", nargs="*", help="of the run, such as rounds=2")
    parser.add_argument("--least", type=int, default=100, help="patients of a hospital")
    parser.add_argument("--level", type=float, default=0.9)
    parser.add_argument("--splits", type=int, default=5)
    given = parser.parse_intermixed_args()
    who = [f"data.path={given.path}", f"partition.patients=[{given.least},100000]"]
    values = defaultdict(list)
    for seed in range(given.splits):
        cases = cases_of([*who, f"seed={seed}", *given.overrides])
        for name, each in measured(cases, given.level).items():
            values[name].append([*each.values()])
    print(f"{len(cases)} hospitals, {given.splits} splits, rate {given.level:g}")
    print("| quantile | coverage | hospitals, 5 to 95 % | lowest | classes in a set |")
    print("|---|---|---|---|---|")
    for name, splits in values.items():
        coverage, sizes = np.moveaxis(np.mean(splits, axis=0), 1, 0)
        low, high = np.quantile(coverage, [0.05, 0.95])
        row = f"{coverage.mean():.3f} | {low:.3f}–{high:.3f} | {coverage.min():.3f}"
        print(f"| {name} | {row} | {sizes.mean():.2f} |")


if __name__ == "__main__":
    main()
