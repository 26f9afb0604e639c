"""Utility, bytes, epsilon and what an attack on membership finds, by method: what a board weighs.

    python benchmarks/frontier.py /path/to/heart --figure docs/frontier.png
    python benchmarks/frontier.py --cohort digits --methods fedavg ditto --seeds 2
    python benchmarks/frontier.py /path/to/heart --cohort heart_flamby --published dp_heart.csv

All methods get the same rounds, steps and batches, and `privacy.example` at several epsilons at
delta 0.001 (none: no noise). The first table has, by epsilon, the mean accuracy of the hospitals on
test patients and that of the worst hospital (mean ± standard deviation over seeds), what all
hospitals send, and the largest epsilon of a hospital in `privacy.json` at each epsilon. The second
attacks runs of the first seed by `medfed audit`: shadow federations on halves of the patients
attack each other; 95 % intervals by patients. Then follows what cannot be protected, in the words
of the refusal.

The last command sets FLamby's published table of differential privacy (columns perf, e, d, seed;
`flamby/dp_example/results_fed_heart_disease.csv` of github.com/owkin/FLamby) against FedAvg here,
and accounts for its steps again: per hospital, its script plans noise for 15 passes over the
batches of 4, but takes 15 rounds of 100 steps. Its seed also gives all hospitals the same noise,
which no epsilon here includes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from medfed.common.errors import ConfigError
from medfed.config.compose import described
from medfed.functional.privacy import epsilon, noise_for
from medfed.records.evaluations import Guess
from medfed.run.audit import audit
from medfed.run.train import train

METHODS = {
    **{name: (f"algorithm={name}",) for name in ("fedavg", "ditto", "fedper", "qupel")},
    "qupel-quantised": ("algorithm=qupel", "algorithm.full_precision=[]"),
    "pfednet": ("algorithm=pfednet", "algorithm.graph.kind=ring"),
    "ppfl": ("algorithm=ppfl", "algorithm.strength=0"),
}
REFUSED = {
    "pfednet, a graph of sketches": ("algorithm=pfednet",),
    "ppfl, similar clients": ("algorithm=ppfl",),
    **{name: (f"algorithm={name}",) for name in ("ifca", "fedrod", "marina", "pooled")},
}
COHORTS = {
    "heart": ("experiment=heart_pfednet", "data.scaling=client"),
    "heart_flamby": ("experiment=heart_flamby",),
    "digits": ("experiment=digits_conflict", "model.network.norm=group"),
}
EPSILONS = (None, 10.0, 3.0, 1.0)
ATTACKED, ATTACKED_AT = ("fedavg", "ditto", "qupel"), (None, 3.0)
DELTA = 1e-3
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Point:
    """One run: test accuracy, kB sent by all hospitals, and the largest epsilon of one."""

    mean: float
    worst: float
    sent: float
    spent: float | None


def words_of(options: argparse.Namespace, bound: float | None, delta: float = DELTA) -> list[str]:
    """The keys that all runs share, and the noise."""
    words = [
        *COHORTS[options.cohort],
        *("logger=none", "progress=false", "pictures.format=none", f"rounds={options.rounds}"),
        *(f"evaluation.every={options.rounds}", f"local.steps={options.steps}"),
    ]
    if options.data is not None:
        words.append(f"data.path={options.data}")
    if bound is not None:
        words.append(f"privacy.example={{epsilon:{bound},delta:{delta},clip:1.0}}")
    return words


def trained(words: Sequence[str], folder: Path) -> Point:
    """Trains once, quietly."""
    with contextlib.redirect_stdout(io.StringIO()):
        summary, _ = train(described([*words, f"folder={folder}"]))
    kept, accuracy = folder / "privacy.json", summary["federation"]["accuracy"]
    spent = None
    if kept.is_file():
        clients = json.loads(kept.read_text("utf-8"))["example"]["clients"].values()
        spent = max(client["epsilon"] for client in clients)
    return Point(accuracy["mean"], accuracy["worst"], summary["bytes"]["up"] / 1e3, spent)


def attacked(folder: Path, shadows: int) -> list[Guess]:
    """The attack of shadow federations on each other, all hospitals together, by model."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = audit(folder, shadows=shadows, rounds=1)
    return [
        g for g in found.guesses if g.client == "all" and not g.of_run and "bits" not in g.model
    ]


def spread(values: Sequence[float]) -> str:
    """The mean and the standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def name_of(bound: float | None) -> str:
    """An epsilon in words."""
    return "none" if bound is None else f"{bound:g}"


def frontier(options: argparse.Namespace) -> dict[str, list[Sequence[float]]]:
    """Prints the tables; returns the mean accuracies over seeds by method and epsilon."""
    asked = [name_of(bound) for bound in EPSILONS]
    print(f"| method | epsilon {' | '.join(asked)} | kB up | epsilon spent |")
    print("|---" * (len(asked) + 3) + "|")
    curves: dict[str, list[Sequence[float]]] = {name: [] for name in options.methods}
    guesses: list[tuple[str, float | None, Guess]] = []
    for name in options.methods:
        cells, spent = [], []
        for bound in EPSILONS:
            points = []
            for seed in range(options.seeds):
                words = [*words_of(options, bound), *METHODS[name]]
                with tempfile.TemporaryDirectory() as place:
                    folder = Path(place) / "run"
                    points.append(trained([*words, f"seed={seed}"], folder))
                    chosen = name in ATTACKED and bound in ATTACKED_AT and options.shadows
                    if chosen and seed == 0:
                        guesses += [(name, bound, g) for g in attacked(folder, options.shadows)]
            curves[name].append([point.mean for point in points])
            worst = spread([point.worst for point in points])
            cells.append(f"{spread(curves[name][-1])}; {worst}")
            if bound is not None:
                spent.append(f"{max(point.spent or math.inf for point in points):.2f}")
        print(
            f"| {name} | {' | '.join(cells)} | {points[0].sent:.1f} | {', '.join(spent)} |",
            flush=True,
        )
    if guesses:
        print("\n| method | epsilon | model | patients | AUC | recognised at 1 % |")
        print("|---|---:|---|---:|---:|---:|")
    for name, bound, guess in guesses:
        area, hits = guess.auc, guess.hits
        print(
            f"| {name} | {name_of(bound)} | {guess.model} | {guess.patients} "
            f"| {area[0]:.2f} [{area[1]:.2f}, {area[2]:.2f}] "
            f"| {hits[0]:.3f} [{hits[1]:.3f}, {hits[2]:.3f}] |"
        )
    return curves


def refused(options: argparse.Namespace) -> None:
    """Prints why methods cannot be protected."""
    print()
    for name, words in REFUSED.items():
        with tempfile.TemporaryDirectory() as place:
            try:
                trained([*words_of(options, 3.0), *words], Path(place) / "run")
            except ConfigError as error:
                print(f"- {name}: {str(error).partition(': ')[2]}")
            else:
                raise AssertionError(f"{name} is not refused.")


def drawn(curves: dict[str, list[Sequence[float]]], path: Path) -> None:
    """Draws accuracy by epsilon; bars are a standard deviation over seeds."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (name, runs) in enumerate(curves.items()):
        shift = 0.06 * (place - (len(curves) - 1) / 2)
        bars = [statistics.stdev(run) if len(run) > 1 else 0.0 for run in runs]
        axes.errorbar(
            [at + shift for at in range(len(runs))],
            [statistics.mean(run) for run in runs],
            yerr=bars,
            marker=MARKERS[place % len(MARKERS)],
            capsize=2,
            label=name,
        )
    axes.set_xticks(range(len(EPSILONS)), [name_of(bound) for bound in EPSILONS])
    axes.set_xlabel("epsilon (less is more private)")
    axes.set_ylabel("test accuracy, mean of hospitals")
    axes.legend(ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


PASSES, TAKEN, BATCH = 15, 1500, 4
ROWS = {"Cleveland": 199, "Hungarian": 172, "Switzerland": 30, "VA": 85}  # FLamby trains with
FLAMBY_DELTA = 1e-4


def published(options: argparse.Namespace) -> None:
    """Prints FLamby's table against FedAvg here, and its epsilon with all steps counted."""
    found: dict[str, list[float]] = {}
    with options.published.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["d"] or float(row["d"]) == FLAMBY_DELTA:
                found.setdefault(row["e"], []).append(float(row["perf"]))
    print("| epsilon claimed | FLamby | its epsilon: " + ", ".join(ROWS) + " | FedAvg here |")
    print("|---:|---:|---|---:|")
    for claimed in (None, 10.0, 1.0, 0.1):
        true = "unbounded"
        if claimed is not None:
            batches = [-(-rows // BATCH) for rows in ROWS.values()]
            noises = [noise_for(1 / n, PASSES * n, claimed, FLAMBY_DELTA) for n in batches]
            spent = (
                epsilon(1 / n, noise, TAKEN, FLAMBY_DELTA)
                for n, noise in zip(batches, noises, strict=True)
            )
            true = ", ".join(f"{value:.2g}" for value in spent)
        ours = []
        for seed in range(options.seeds):
            words = words_of(options, claimed, FLAMBY_DELTA)
            with tempfile.TemporaryDirectory() as place:
                run = [*words, "algorithm=fedavg", f"seed={seed}"]
                ours.append(trained(run, Path(place) / "run").mean)
        theirs = found["" if claimed is None else str(claimed)]
        print(
            f"| {name_of(claimed)} | {spread(theirs)} | {true} | {spread(ours)} |",
            flush=True,
        )


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="the folder of the UCI heart data")
    parser.add_argument("--cohort", choices=COHORTS, default="heart")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shadows", type=int, default=8, help="of each attack; 0: no attack")
    parser.add_argument("--figure", type=Path, help="where to draw accuracy by epsilon")
    parser.add_argument("--published", type=Path, help="FLamby's dp_heart.csv")
    options = parser.parse_args()
    if options.cohort != "digits" and options.data is None:
        parser.error("heart needs the folder of its data")
    if options.published is not None:
        published(options)
        return
    curves = frontier(options)
    if options.cohort == "heart":
        refused(options)
    if options.figure is not None:
        drawn(curves, options.figure)


if __name__ == "__main__":
    main()
