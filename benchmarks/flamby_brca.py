"""FLamby's Fed-TCGA-BRCA: concordance per region, beside the results that FLamby publishes.

Patients, regions, the split into training and test patients, and five rounds of 100 steps in
batches of 8 are FLamby's. Features are standardised region by region, which FLamby does not do: its
age, unscaled at a rate of 0.1, decides in which direction the last batches push. ``hazard`` is the
discrete-time logistic hazard, ``cox`` the partial likelihood of whole regions; FLamby's is Cox's of
batches. FLamby's five seeds change initial weights and the order of batches.

Published: ``results_benchmark_fed_tcga_brca`` of github.com/owkin/FLamby, as files
``tcga_brca_seed42.csv`` and so on.

    python benchmarks/flamby_brca.py /path/to/tcga_brca [--published /path/to/published]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import tempfile
from pathlib import Path

import numpy as np

from medfed.config.compose import described
from medfed.run.train import train

SEEDS = (42, 43, 44, 45, 46)
METHODS = {
    "FedAvg": ("algorithm=fedavg",),
    "FedProx": ("algorithm=fedprox", "algorithm.mu=0.1"),
    "Scaffold": ("algorithm=scaffold", "optimizer.lr=0.01"),
    "FedAdam": ("algorithm=fedadam", "optimizer.lr=0.01"),
    "Local": ("algorithm=local",),
}
LOSSES = {
    "hazard": (),
    "cox": ("model.loss=cox", "data.batch_size=1000"),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def prepare(folder: Path, place: Path) -> tuple[str, ...]:
    """Writes the table with a column of regions, and FLamby's split; returns the keys."""
    regions = {row["TSS Code"]: row["Region"] for row in rows_of(folder / "centers.csv")}
    folds = {row["pid"]: row["fold"] for row in rows_of(folder / "train_test_split.csv")}
    rows = [
        {"region": regions[row["pid"].split("-")[1]], **row}
        for row in rows_of(folder / "brca.csv")
        if row["pid"] in folds
    ]
    clients: dict[str, dict[str, list[str]]] = {}
    for row in sorted(rows, key=lambda row: row["region"]):
        split = clients.setdefault(row["region"], {"train": [], "val": [], "test": []})
        split[folds[row["pid"]]].append(row["pid"])
    with (place / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (place / "splits.json").write_text(json.dumps({"clients": clients}))
    keys = (f"data.path={place / 'table.csv'}", "partition=saved")
    return *keys, f"partition.file={place / 'splits.json'}"


def run_of(keys: tuple[str, ...], seed: int) -> dict[str, float]:
    """Trains once, quietly; returns the concordance of each region and of all their pairs."""
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        more = ("logger=none", "progress=false", f"seed={seed}", f"folder={place}/run")
        summary, _ = train(described(["experiment=tcga_brca_survival", *keys, *more]))
    clients = {name: metrics["cindex"] for name, metrics in summary["clients"].items()}
    return {**clients, "pooled": summary["pooled"]["cindex"]}


def published(folder: Path, method: str) -> list[float]:
    """The mean concordance over regions that FLamby publishes, by seed."""
    means = []
    for seed in SEEDS:
        found = [
            float(row["Metric"])
            for row in rows_of(folder / f"tcga_brca_seed{seed}.csv")
            if (row["Method"] == f"{method}100" and row["Test"].startswith("client_test"))
            or (
                method == "Local" and row["Method"] == row["Test"].replace("client_test_", "Local ")
            )
        ]
        means.append(float(np.mean(found)))
    return means


def main() -> None:
    """Prints a row per loss and method."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="FLamby's brca.csv, centers.csv and split")
    parser.add_argument("--published", type=Path, help="FLamby's tables of results")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="at least 2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        keys = prepare(options.folder, Path(place))
        for loss, choice in LOSSES.items():
            for method, words in METHODS.items():
                runs = [run_of((*keys, *choice, *words), seed) for seed in SEEDS[: options.seeds]]
                pooled = [run.pop("pooled") for run in runs]
                means = [float(np.mean([*run.values()])) for run in runs]
                line = f"{loss:7} {method:9} mean of regions {np.mean(means):.3f} ± "
                line += f"{np.std(means, ddof=1):.3f}, pairs within regions {np.mean(pooled):.3f}"
                if options.published:
                    theirs = published(options.published, method)
                    line += f"; published {np.mean(theirs):.3f} ± {np.std(theirs, ddof=1):.3f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
