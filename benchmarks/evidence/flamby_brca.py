"""FLamby's Fed-TCGA-BRCA: concordance per region, beside the results that FLamby publishes.

Patients, regions, the split into training and test patients, and five rounds of 100 steps in
batches of 8 are FLamby's. ``flamby`` is ``experiment=tcga_brca_flamby``, FLamby's own protocol:
features as they are, Cox's partial likelihood of batches. Its age, unscaled at a rate of 0.1,
decides in which direction the last batches push. In the others features are standardised region by
region: ``standardised`` changes nothing else, ``hazard`` is the discrete-time logistic hazard,
``cox`` the partial likelihood of whole regions. FLamby's five seeds change initial weights and the
order of batches.

Published: ``results_benchmark_fed_tcga_brca`` of github.com/owkin/FLamby, as files
``tcga_brca_seed42.csv`` and so on.

    python benchmarks/evidence/flamby_brca.py /path/to/tcga_brca [--published /path/to/published]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import multiprocessing
import tempfile
from pathlib import Path

import numpy as np

from medfed.config.compose import described
from medfed.run.train import train

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


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def prepare(folder: Path, table: Path) -> None:
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


def run_of(task: tuple[tuple[str, ...], int]) -> dict[str, float]:
    """Trains once, quietly; returns the concordance of each region and of all their pairs."""
    keys, seed = task
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        more = ("logger=none", "progress=false", f"seed={seed}", f"folder={place}/run")
        summary, _ = train(described(["experiment=tcga_brca_flamby", *keys, *more]))
    clients = {name: metrics["cindex"] for name, metrics in summary["clients"].items()}
    return {**clients, "pooled": summary["pooled"]["cindex"]}


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


def main() -> None:
    """Prints a row per protocol and method."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="FLamby's brca.csv, centers.csv and split")
    parser.add_argument("--published", type=Path, help="FLamby's tables of results")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="at most 5")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--table", type=Path, help="only write the table there")
    options = parser.parse_args()
    if options.table:
        prepare(options.folder, options.table)
        return
    seeds = SEEDS[: options.seeds]
    print(f"| method | whose | mean of regions ± SD | seeds {seeds} |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        table = Path(place) / "table.csv"
        prepare(options.folder, table)
        asked = {
            (m, p): (f"data.path={table}", f"algorithm={METHODS[m]}", *PROTOCOLS[p])
            for m in options.methods
            for p in options.protocols
        }
        tasks = [(keys, seed) for keys in asked.values() for seed in seeds]
        with multiprocessing.get_context("fork").Pool(options.workers) as pool:
            each = pool.imap(run_of, tasks)
            for n, (method, protocol) in enumerate(asked):
                if options.published and n % len(options.protocols) == 0:
                    print(f"| {method} | FLamby | {told(published(options.published, method))} |")
                runs = [next(each) for _ in seeds]
                pooled = float(np.mean([run.pop("pooled") for run in runs]))
                means = [float(np.mean([*run.values()])) for run in runs]
                within = f"(pairs within regions {pooled:.3f})"
                print(f"| {method} | medfed, {protocol} {within} | {told(means)} |", flush=True)


if __name__ == "__main__":
    main()
