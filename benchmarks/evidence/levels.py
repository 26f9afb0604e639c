"""What a level per hospital is worth on real strokes, by splits stratified by label and at random.

    python benchmarks/evidence/levels.py IST_CSV
    python benchmarks/evidence/levels.py IST_CSV --splits 10 model=logistic

Each method trains once per split; each calibration is then fitted to the same models' validation
patients (of linear models to the training patients, too) and measured on their test patients.
Differences are means over hospitals, with the interval of Nadeau and Bengio over splits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from medfed.common.tensors import to_device
from medfed.config.compose import described
from medfed.federation.lightning.strategy import ranks_end_together
from medfed.functional.points import Chooser, common
from medfed.functional.statistics import difference
from medfed.run.experiment import build_experiment
from medfed.run.finished import test_selected

METHODS = ("fedavg", "pfednet")
CALIBRATIONS = (None, "shift", "temperature", "platt")
OVERRIDES = (
    *("experiment=stroke", "partition.patients=[120,500]", "evaluation.calibration=null"),
    *("logger=none", "progress=false", "pictures.format=none"),
)
OVERLAP = 0.25  # test patients per training patient, of shares of .2, .2 and .6 about .33
SCORES = ("brier", "log_loss")
Values = dict[str, float]


def scores_of(overrides: list[str], linear: bool) -> dict[str, Values]:
    """Trains once; returns the mean scores over hospitals by calibration."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_experiment(described([*overrides, f"folder={folder}"]))
        with ranks_end_together(experiment.trainer):
            experiment.trainer.fit(experiment.module)
            test_selected(experiment)
    module, task, cases = experiment.module, experiment.task, {}
    with torch.no_grad():
        for name, client in module.federation.clients.items():
            module.local.model.load(module.federation.personal_model(name))
            cases[name] = {
                split: task.measured(
                    to_device(batch, module.device) for batch in client.data.eval_batches(split)
                ).cases()
                for split in ("val", "train", "test")
            }
    found = {}
    for method in CALIBRATIONS:
        chooser = Chooser(2, None, method or "shift")
        fitted = {c: (of["val"], of["train"] if linear else ()) for c, of in cases.items()}
        others = common({c: chooser.choose(*rows) for c, rows in fitted.items()})
        points = {c: chooser.choose(*rows, others) for c, rows in fitted.items()}
        each = [chooser.apply(of["test"], points[c] if method else {}) for c, of in cases.items()]
        found[str(method)] = {
            s: float(np.mean([m[f"{s}/calibrated"] for m in each])) for s in SCORES
        }
    return found


def table(results: dict[str, dict[str, list[Values]]]) -> list[list[str]]:
    """Returns a row per method and calibration: differences from FedAvg as trained."""
    rows = []
    for method, calibration in itertools.product(METHODS, CALIBRATIONS):
        row = [method, calibration or "as trained"]
        for splits, score in itertools.product(("stratified", "random"), SCORES):
            mine, base = (
                results[splits][f"{m}/{c}"] for m, c in ((method, calibration), ("fedavg", None))
            )
            gaps = [a[score] - b[score] for a, b in zip(mine, base, strict=True)]
            gap = difference(gaps, OVERLAP)
            mean = np.mean([b[score] for b in base])
            first = (method, calibration) == ("fedavg", None)
            text = f"{mean:.4f}" if first else f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"
            row.append(text)
        rows.append(row)
    return rows


def main() -> None:
    """Reads the arguments, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="the table of the International Stroke Trial")
    parser.add_argument("overrides", nargs="*", help="of the run, such as model=logistic")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--out", type=Path, help="keeps the numbers as JSON")
    given = parser.parse_intermixed_args()
    results: dict[str, dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
    for seed, method, stratify in itertools.product(range(given.splits), METHODS, (True, False)):
        more = [f"data.path={given.path}", f"algorithm={method}", f"seed={seed}"]
        more += [f"data.stratify={str(stratify).lower()}", *given.overrides]
        found = scores_of([*OVERRIDES, *more], "model=logistic" in given.overrides)
        for calibration, values in found.items():
            splits = "stratified" if stratify else "random"
            results[splits][f"{method}/{calibration}"].append(values)
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))
    print("| method | probabilities | Brier, stratified | log loss | Brier, at random | log loss |")
    print("|" + "---|" * 6)
    for row in table(results):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
