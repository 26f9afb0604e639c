"""FLamby's own protocols on two of its data sets, beside the results that FLamby publishes.

    python benchmarks/evidence/flamby.py heart /path/to/heart [--table heart.csv]
    python benchmarks/evidence/flamby.py brca /path/to/tcga_brca [--published /path/to/published]

Published: ``flamby/results`` of github.com/owkin/FLamby; J. Ogier du Terrail et al., "FLamby:
Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings", NeurIPS
2022. FLamby's five seeds change initial weights and the order of batches, which come from other
generators here.

*heart* (Fed-Heart-Disease, ``experiment=heart_flamby``): accuracy by centre. Patients, inputs and
split are FLamby's: UCI's four files without the columns slope, ca and thal, then the 740 patients
of whom nothing is missing; chest pain and ECG as indicators, the first of each dropped; 66 % of
each centre to train on, by scikit-learn's ``train_test_split`` with random state 43. So are model,
batches of 4, rounds, learning rates and settings (``flamby/config_heart_disease.json``). Values
more than 3 interquartile ranges beyond the quartiles count as that limit; FLamby's cyclic training
has no counterpart. The line below each pair has the difference of the means over centres, and
``holds`` where it is at most two standard errors of both sets of seeds. ``finetune`` is FLamby's
FedAvg and then 100 local steps, of which its table of fine-tuning has means over centres alone; so
has it of the FedAvg beside it, which is another run than the others.

*brca* (Fed-TCGA-BRCA, ``experiment=tcga_brca_flamby``): concordance by region. ``flamby`` is
FLamby's protocol: features as they are, Cox's partial likelihood of batches. Its age, unscaled at a
rate of 0.1, decides in which direction the last batches push. In the others features are
standardised region by region: ``standardised`` changes nothing else, ``hazard`` is the
discrete-time logistic hazard, ``cox`` the partial likelihood of whole regions. Published are files
``tcga_brca_seed42.csv`` and so on.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split

import medfed

Task = tuple[tuple[str, ...], int]
SEEDS = (42, 43, 44, 45, 46)
METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "Scaffold": "scaffold",
    "FedAdam": "fedadam",
    "FedAdagrad": "fedadagrad",
    "FedYogi": "fedyogi",
    "Local": "local",
    "Pooled Training": "pooled",
}
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "flamby": (),
    "standardised": ("data.normalization=standard",),
    "hazard": ("data.normalization=standard", "model.loss=hazard"),
    "cox": ("data.normalization=standard", "model.loss=cox", "data.batch_size=1000"),
}


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
# Means over centres, seed by seed, of FLamby's table of fine-tuning.
FINETUNING = {
    "fedavg": (0.71104, 0.69862, 0.71047, 0.73680, 0.73193),
    "finetune": (0.74785, 0.72431, 0.73165, 0.73680, 0.73474),
}


HEART = (*PUBLISHED, "finetune")


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def prepare_brca(folder: Path, table: Path) -> None:
    """Writes the table, with columns of regions and of FLamby's split."""
    regions = {row["TSS Code"]: row["Region"] for row in rows_of(folder / "centers.csv")}
    folds = {row["pid"]: row["fold"] for row in rows_of(folder / "train_test_split.csv")}
    rows = [
        {"region": regions[row["pid"].split("-")[1]], "fold": folds[row["pid"]], **row}
        for row in rows_of(folder / "brca.csv")
        if row["pid"] in folds
    ]
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def prepare_heart(source: Path, table: Path) -> list[int]:
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


def run_of(task: Task) -> dict[str, Any]:
    """Trains once, quietly; returns the summary."""
    keys, seed = task
    quiet = ("logger=none", "progress=false", "pictures.format=none")
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        return dict(medfed.train(*keys, *quiet, seed=seed, folder=f"{place}/run").summary)


def runs_of(tasks: list[Task], workers: int) -> Iterator[dict[str, Any]]:
    """Trains each task, several at a time."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(run_of, tasks)


def published(folder: Path, method: str) -> list[float]:
    """The mean concordance over regions that FLamby publishes, by seed."""
    means = []
    for seed in SEEDS:
        found = [
            float(row["Metric"])
            for row in rows_of(folder / f"tcga_brca_seed{seed}.csv")
            if (row["Method"] in (method, f"{method}100") and row["Test"].startswith("client_test"))
            or (
                method == "Local" and row["Method"] == row["Test"].replace("client_test_", "Local ")
            )
        ]
        means.append(float(np.mean(found)))
    return means


def told(values: list[float]) -> str:
    """Mean and deviation over seeds, and each seed.

    Example:
        >>> told([0.5, 0.7])
        '0.600 ± 0.141 | 0.500 0.700'
    """
    spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
    return f"{np.mean(values):.3f} ± {spread:.3f} | {' '.join(f'{v:.3f}' for v in values)}"


def row(values: np.ndarray, tested: np.ndarray) -> list[str]:
    """The cells of a method: each centre, their mean, all patients; over (seeds, centres)."""
    columns = [*values.T, values.mean(1), values @ tested / tested.sum()]
    return [f"{c.mean():.3f} ± {c.std(ddof=1) if len(c) > 1 else 0:.3f}" for c in columns]


def judged(ours: np.ndarray, known: np.ndarray) -> str:
    """The difference of two means over seeds, and whether it is within two standard errors.

    Example:
        >>> judged(np.array([0.7, 0.72]), np.array([0.71, 0.73]))
        '-0.010, holds (two standard errors: 0.028)'
    """
    gap = ours.mean() - known.mean()
    if min(len(ours), len(known)) < 2:
        return f"{gap:+.3f}; one seed cannot tell"
    band = 2 * math.sqrt(sum(v.var(ddof=1) / len(v) for v in (ours, known)))
    word = "holds" if abs(gap) <= band else "does not hold"
    return f"{gap:+.3f}, {word} (two standard errors: {band:.3f})"


def heart(args: argparse.Namespace, table: Path) -> None:
    """Prints ours, FLamby's and their difference for each method."""
    tested = np.array(prepare_heart(args.folder, table))
    head = ("method", "whose", "Cleveland", "Hungary", "Switzerland", "Long Beach", "mean", "all")
    print(f"Published: {SOURCE}")
    print(f"| {' | '.join(head)} |\n|---|---|{'---:|' * 6}")
    names = [name for name in HEART if name in (args.methods or HEART)]
    keys = ("experiment=heart_flamby", f"data.path={table}")
    tasks: list[Task] = [
        ((*keys, f"algorithm={m}"), seed) for m in names for seed in range(args.seeds)
    ]
    each = runs_of(tasks, args.workers)
    for method in names:
        clients = [next(each)["clients"] for _ in range(args.seeds)]
        ours = np.array([[float(of[c]["accuracy"]) for c in CENTRES] for of in clients])
        told = {}  # FLamby's cells, and by what ours are judged
        if method in PUBLISHED:
            known = np.array(PUBLISHED[method], dtype=float)
            if known.shape[1] == 1:
                known = known[:, 0] / sum(TESTED)
                cells = ["", "", "", "", "", f"{known.mean():.3f} ± {known.std(ddof=1):.3f}"]
                told["FLamby"] = cells, judged(ours @ tested / tested.sum(), known)
            else:
                known = known / TESTED
                told["FLamby"] = row(known, np.array(TESTED)), judged(ours.mean(1), known.mean(1))
        if method in FINETUNING:
            known = np.array(FINETUNING[method])
            cells = ["", "", "", "", f"{known.mean():.3f} ± {known.std(ddof=1):.3f}", ""]
            told["FLamby, fine-tuning"] = cells, judged(ours.mean(1), known)
        print(f"| `{method}` | medfed | {' | '.join(row(ours, tested))} |", flush=True)
        for whose, (cells, word) in told.items():
            print(f"| | {whose} | {' | '.join(cells)} |\n| | difference | {word} |", flush=True)
    print(f"test patients: {' '.join(map(str, tested))}; FLamby's: {' '.join(map(str, TESTED))}")


def brca(args: argparse.Namespace, table: Path) -> None:
    """Prints a row per protocol and method."""
    prepare_brca(args.folder, table)
    seeds = SEEDS[: args.seeds]
    print(f"| method | whose | mean of regions ± SD | seeds {seeds} |\n|---|---|---|---|")
    keys = ("experiment=tcga_brca_flamby", f"data.path={table}")
    names = [name for name, ours in METHODS.items() if ours in (args.methods or PUBLISHED)]
    asked = [(m, p) for m in names for p in args.protocols]
    each = runs_of(
        [((*keys, f"algorithm={METHODS[m]}", *PROTOCOLS[p]), s) for m, p in asked for s in seeds],
        args.workers,
    )
    for n, (method, protocol) in enumerate(asked):
        if args.published and n % len(args.protocols) == 0:
            print(f"| {method} | FLamby | {told(published(args.published, method))} |")
        runs = [next(each) for _ in seeds]
        pooled = np.mean([run["pooled"]["cindex"] for run in runs])
        means = [float(np.mean([c["cindex"] for c in run["clients"].values()])) for run in runs]
        within = f"(pairs within regions {pooled:.3f})"
        print(f"| {method} | medfed, {protocol} {within} | {told(means)} |", flush=True)
        if args.published and protocol == "flamby":
            known = np.array(published(args.published, method)[: len(means)])
            print(f"| | difference | {judged(np.array(means), known)} |", flush=True)


def main() -> None:
    """Compares, or only writes a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=["heart", "brca"])
    parser.add_argument("folder", type=Path, help="processed.cleveland.data …; or brca.csv …")
    parser.add_argument("--table", type=Path, help="only write the table there")
    parser.add_argument("--methods", nargs="+", choices=HEART)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="at most 5")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--published", type=Path, help="FLamby's results of brca")
    args = parser.parse_args()
    if args.table:
        (prepare_heart if args.set == "heart" else prepare_brca)(args.folder, args.table)
        return
    with tempfile.TemporaryDirectory() as place:
        (heart if args.set == "heart" else brca)(args, Path(place) / "table.csv")


if __name__ == "__main__":
    main()
