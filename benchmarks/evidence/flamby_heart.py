"""FLamby's Fed-Heart-Disease by its own protocol, beside the results that FLamby publishes.

The patients, inputs and split are FLamby's: UCI's four files without the columns slope, ca and
thal, then the 740 patients of whom nothing is missing; chest pain and ECG as indicators, the first
of each dropped, 13 inputs; 66 % of each centre to train on, by scikit-learn's stratified
``train_test_split`` with random state 43, so that the test patients are the same ones. So are
model (logistic regression of 14 coefficients, the distribution of its initial weights), batches of
4, rounds (15 of 100 steps; of local and pooled training 50 epochs of Adam at 0.001), learning rates
and the methods' settings; standardised centre by centre, of ``pooled`` all together.

Published: accuracy by seed and centre in ``flamby/results/results_benchmark_fed_heart_disease`` of
github.com/owkin/FLamby (the revision of the files that is named below), settings in
``flamby/config_heart_disease.json``; J. Ogier du Terrail et al., "FLamby: Datasets and Benchmarks
for Cross-Silo Federated Learning in Realistic Healthcare Settings", NeurIPS 2022.

What cannot be followed: initial weights and the order of batches come from other generators;
values more than 3 interquartile ranges beyond the quartiles count as that limit; the deviation is
divided by N, not N - 1. FLamby's cyclic training has no counterpart here.

    python benchmarks/evidence/flamby_heart.py /path/to/heart [--table heart.csv]
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from sklearn.model_selection import train_test_split

import medfed

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
TESTED = (104, 89, 16, 45)
SOURCE = "github.com/owkin/FLamby, seeds 42, 45, 46 at a422b61, seeds 43, 44 at f553c7a"
_AVERAGED = ((79, 62, 11, 28), (75, 66, 12, 30), (77, 67, 8, 26), (76, 60, 12, 28), (73, 65, 9, 32))
_ADAPTIVE = (
    *((79, 68, 12, 28), (76, 65, 12, 30), (80, 67, 12, 33)),
    *((79, 66, 12, 31), (81, 69, 11, 30)),
)
# Test patients of each centre that were told right, seed by seed; of Pooled of all centres.
PUBLISHED: dict[str, tuple[tuple[int, ...], ...]] = {
    "local": (
        (76, 67, 13, 34),
        (78, 66, 13, 31),
        (76, 67, 10, 30),
        (78, 66, 13, 29),
        (80, 66, 9, 34),
    ),
    "fedavg": _AVERAGED,
    "fedprox": _AVERAGED,
    "scaffold": ((78, 62, 11, 28), *_AVERAGED[1:3], (75, 60, 12, 28), _AVERAGED[4]),
    "fedadam": (
        *((79, 67, 12, 28), (75, 65, 12, 29), (79, 66, 12, 33)),
        *((79, 65, 12, 31), (79, 69, 11, 29)),
    ),
    "fedadagrad": _ADAPTIVE,
    "fedyogi": _ADAPTIVE,
    "pooled": ((201,), (202,), (202,), (203,), (202,)),
}


def prepare(source: Path, table: Path) -> list[int]:
    """Writes the table of all centres with the split; returns the test patients of each centre."""
    kept = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
    indicators = [("cp", 2), ("cp", 3), ("cp", 4), ("restecg", 1), ("restecg", 2)]
    names = (*kept[:2], "cp", *kept[2:5], "restecg", *kept[5:])  # the first ten columns
    counts = []
    with table.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(
            ["patient", "centre", "split", *kept, *(f"{n}_{v}" for n, v in indicators), "num"]
        )
        for centre in CENTRES:
            lines = (source / f"processed.{centre}.data").read_text().split()
            rows = [[cells[i] for i in (*range(10), 13)] for cells in (x.split(",") for x in lines)]
            numbers = [[float(cell.replace("?", "nan")) for cell in row] for row in rows]
            known = [row for row in numbers if not any(map(math.isnan, row))]
            ill = [int(row[-1] > 0) for row in known]
            patients = [f"{centre}_{n}" for n in range(len(known))]
            few = min(ill.count(0), ill.count(1)) <= 2
            _, tested = train_test_split(
                patients, train_size=0.66, test_size=1.0 - 0.66, random_state=43,
                stratify=None if few else ill,
            )  # fmt: skip
            counts.append(len(tested))
            for patient, row, label in zip(patients, known, ill, strict=True):
                of = dict(zip(names, row, strict=False))
                cells = [int(of[name] == value) for name, value in indicators]
                split = "test" if patient in tested else "train"
                out.writerow([patient, centre, split, *(of[n] for n in kept), *cells, label])
    return counts


def accuracies(table: Path, method: str, seed: int, folder: Path) -> list[float]:
    """Trains by a method; returns the accuracy on each centre's test patients."""
    keys = ("experiment=heart_flamby", f"data.path={table}", f"algorithm={method}")
    quiet = ("logger=none", "progress=false", "pictures.format=none")
    with redirect_stdout(io.StringIO()):
        run = medfed.train(*keys, *quiet, seed=seed, folder=folder)
    return [float(run.summary["clients"][centre]["accuracy"]) for centre in CENTRES]


def row(values: np.ndarray, tested: np.ndarray) -> list[str]:
    """The cells of a method: each centre, their mean, all patients; over (seeds, centres)."""
    columns = [*values.T, values.mean(1), values @ tested / tested.sum()]
    return [f"{c.mean():.3f} ± {c.std(ddof=1) if len(c) > 1 else 0:.3f}" for c in columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of processed.cleveland.data and so on")
    parser.add_argument("--methods", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--table", type=Path, help="only write the table there")
    args = parser.parse_args()
    if args.table:
        prepare(args.folder, args.table)
        return
    head = ("method", "whose", "Cleveland", "Hungary", "Switzerland", "Long Beach", "mean", "all")
    print(f"Published: {SOURCE}")
    print(f"| {' | '.join(head)} |\n|---|---|{'---:|' * 6}")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "heart.csv"
        tested = np.array(prepare(args.folder, table))
        for method in args.methods:
            known = np.array(PUBLISHED[method], dtype=float)
            if known.shape[1] == 1:
                known = known[:, 0] / sum(TESTED)
                told = ["", "", "", "", "", f"{known.mean():.3f} ± {known.std(ddof=1):.3f}"]
            else:
                told = row(known / TESTED, np.array(TESTED))
            print(f"| `{method}` | FLamby | {' | '.join(told)} |", flush=True)
            ours = [
                accuracies(table, method, seed, Path(folder) / f"{method}_{seed}")
                for seed in range(args.seeds)
            ]
            print(f"| | medfed | {' | '.join(row(np.array(ours), tested))} |", flush=True)
    print(f"test patients: {' '.join(map(str, tested))}; FLamby's: {' '.join(map(str, TESTED))}")


if __name__ == "__main__":
    main()
