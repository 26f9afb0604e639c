"""The tables of two of FLamby's data sets, as ``medfed benchmark suite=published`` reads them.

    python benchmarks/evidence/flamby.py heart FOLDER TABLE.csv
    python benchmarks/evidence/flamby.py brca FOLDER TABLE.csv

FLamby: J. Ogier du Terrail et al., "FLamby: Datasets and Benchmarks for Cross-Silo Federated
Learning in Realistic Healthcare Settings", NeurIPS 2022.

*heart* (Fed-Heart-Disease, ``experiment=heart_flamby``): patients, inputs and split are FLamby's:
UCI's four files without the columns slope, ca and thal, then the 740 patients of whom nothing is
missing; chest pain and ECG as indicators, the first of each dropped; 66 % of each centre to train
on, by scikit-learn's ``train_test_split`` with random state 43. So are model, batches of 4, rounds,
learning rates and settings. Values more than 3 interquartile ranges beyond the quartiles count as
that limit.

*brca* (Fed-TCGA-BRCA, ``experiment=tcga_brca_flamby``): features as they are, Cox's partial
likelihood of batches. Its age, unscaled at a rate of 0.1, decides in which direction the last
batches push; ``data.normalization=standard`` changes nothing else, ``model.loss=hazard`` is the
discrete-time logistic hazard, ``model.loss=cox`` the partial likelihood of whole regions.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

from sklearn.model_selection import train_test_split

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
TESTED = [104, 89, 16, 45]  # FLamby's test patients


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


def main() -> None:
    """Writes a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=["heart", "brca"])
    parser.add_argument("folder", type=Path, help="processed.cleveland.data …; or brca.csv …")
    parser.add_argument("table", type=Path, help="the file to write")
    args = parser.parse_args()
    if args.set == "brca":
        prepare_brca(args.folder, args.table)
    else:
        print("test patients:", *prepare_heart(args.folder, args.table), "FLamby's:", *TESTED)


if __name__ == "__main__":
    main()
