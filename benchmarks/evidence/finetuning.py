"""Test Dice of patients before and after quantising, and after its repair, on six real scans.

Two hospitals of three patients of BraTS 2018 (one to train on, one to validate, one to test; FLAIR
and T1) train the small U-Net by pFedNet, once per seed, which also draws who is tested. Every model
is quantised to 4, 3 and 2 bits as ``medfed export`` does, by k-means alone and with fine-tuning::

    python benchmarks/evidence/finetuning.py CASES_FOLDER

Runs are kept in ``--out``; those that are there are not repeated. ``CASES_FOLDER`` holds a folder
per case with FLAIR.nii.gz, T1.nii.gz and GT_W.nii.gz. ``--runs A B`` takes finished runs of any
kind instead, ``--metric`` another metric.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from medfed.config.compose import described
from medfed.delivery.export.client_model import choose_bits
from medfed.delivery.export.finetuning import open_data, quantise_and_tune
from medfed.delivery.export.run_record import RunRecord
from medfed.run.train import train

BITS = (4, 3, 2)
STEPS = {"k-means": 0, "fine-tuned": 20}
RATE, TOLERANCE = 1e-3, 0.02  # as in configs/export.yaml
SEEDS = (0, 1, 2)
OVERRIDES = (
    "experiment=brats_pfednet",
    "data=brats_folder",
    "data.reader.hospitals=2",
    "partition=centre",
    "model.surface=false",
    "rounds=20",
    "evaluation.every=20",
    "logger=none",
    "progress=false",
)
Scores = dict[tuple[str, int], list[float]]
"""By what was done and bits: the metric of every client's test patients, in order."""


def runs(cases: str, out: Path) -> list[Path]:
    """Trains what is not there yet."""
    folders = [out / f"seed_{seed}" for seed in SEEDS]
    for seed, folder in zip(SEEDS, folders, strict=True):
        if not (folder / "summary.json").is_file():
            paths = (f"data.path={cases}", f"data.root={out / 'cache'}", f"folder={folder}")
            train(described([*OVERRIDES, *paths, f"seed={seed}"]))
    return folders


def measure(folder: Path, metric: str, scores: Scores, kept: dict[int, list[str]]) -> list[str]:
    """Adds the test metric of every client's model, by bits; names the clients and patients."""
    run = RunRecord.read(folder)
    data, rows = open_data(run), []
    for client in run.clients:
        model = run.client_model(client)
        scores["trained", 32].append(run.summary["clients"][client][metric])
        for bits in BITS:
            chosen = choose_bits(run.task().network, bits)
            for name, steps in STEPS.items():
                found = quantise_and_tune(run, client, model, chosen, data, steps, RATE, TOLERANCE)
                assert found.test is not None, "the run's data are not at hand"
                scores[name, bits].append(found.test[metric])
            kept[bits].append(found.stage)
        rows.append(f"{folder.name}, {client}: {patients(run, client)}")
        print(rows[-1], {k: round(v[-1], 4) for k, v in scores.items()}, flush=True)
    return rows


def patients(run: RunRecord, client: str) -> str:
    """Names the test patient of a client, or counts them."""
    names = run.splits["clients"][client]["test"]
    return str(names[0]) if len(names) == 1 else f"{len(names)} patients"


def report(rows: Sequence[str], scores: Scores, kept: dict[int, list[str]], metric: str) -> None:
    """Prints a line per client and the mean of all, by bits."""
    columns = [("trained", 32), *((how, bits) for bits in BITS for how in STEPS)]
    heads = ["32 bits", *(f"{bits} bits, {how}" for how, bits in columns[1:])]
    print(f"| test {metric} | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for i, row in enumerate(rows):
        print(line(row, (scores[column][i] for column in columns)))
    print(line("mean", (statistics.fmean(scores[column]) for column in columns)))
    plain = scores[columns[0]]
    lowest = (min(b - a for a, b in zip(plain, scores[c], strict=True)) for c in columns)
    print(line("largest fall", lowest))
    for bits in BITS:
        pairs = zip(scores["k-means", bits], scores["fine-tuned", bits], strict=True)
        better = sum(after > before for before, after in pairs)
        stages = {s: kept[bits].count(s) for s in ("kmeans", "statistics", "finetuned")}
        print(f"{bits} bits: better than k-means {better} of {len(rows)}; kept: {stages}")


def line(name: str, values: Iterable[float]) -> str:
    """A row of the table."""
    return f"| {name} | {' | '.join(f'{v:.4f}' for v in values)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="?", help="folder of the six cases")
    parser.add_argument("--out", type=Path, default=Path("outputs/finetuning"))
    parser.add_argument("--runs", type=Path, nargs="+", help="finished runs instead")
    parser.add_argument("--metric", default="dice")
    given = parser.parse_args()
    if bool(given.cases) == bool(given.runs):
        parser.error("name the folder of the cases, or runs by --runs")
    scores: Scores = defaultdict(list)
    kept: dict[int, list[str]] = defaultdict(list)
    rows = []
    for run in given.runs or runs(given.cases, given.out):
        rows += measure(run, given.metric, scores, kept)
    report(rows, scores, kept, given.metric)


if __name__ == "__main__":
    main()
