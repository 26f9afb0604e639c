"""Utility, bytes, epsilon and what an attack on membership finds, by method: what a board weighs.

    python benchmarks/trust/frontier.py heart /path/to/heart --store docs/frontier.json
    python benchmarks/trust/frontier.py digits --methods fedavg ditto --seeds 2
    python benchmarks/trust/frontier.py heart_flamby /path/to/heart --published dp_heart.csv
    python benchmarks/trust/frontier.py --store docs/frontier.json --figure docs/frontier.png

All methods get the same rounds, steps and batches, and `privacy.example` at several epsilons (none:
no noise). The first table has, by epsilon, the score of the hospitals on test patients, and that of
the worst hospital (mean ± standard deviation over seeds), what all hospitals send, and the largest
epsilon of a hospital in `privacy.json`. The second attacks the runs by `medfed audit`: shadow
federations on halves of the patients attack each other. Brackets reach from the lowest to the
highest end of the seeds' 95 % intervals by patients. Then follows what cannot be protected, in the
words of the refusal.

`--store` keeps each run as soon as it is finished; a second call goes on where the first stopped,
and without a cohort, the tables and the figure are those of what is stored.

`tcga_brca` is the folder of FLamby's table and regions (`brca.csv`, `centers.csv`): who has died
five years after the diagnosis, at four regions; patients who were followed for less, and regions
with fewer than 15 patients, are left out.

`--published` sets FLamby's published table of differential privacy (columns perf, e, d, seed;
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
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from medfed.config.compose import described
from medfed.functional.privacy import epsilon, noise_for
from medfed.run.audit import audit
from medfed.run.train import train
from medfed.standalone.errors import ConfigError

METHODS = {
    **{name: (f"algorithm={name}",) for name in ("fedavg", "ditto", "fedper")},
    "pfednet": ("algorithm=pfednet", "algorithm.graph.kind=ring"),
    "ppfl": ("algorithm=ppfl", "algorithm.strength=0"),
    "qupel": ("algorithm=qupel",),
    "qupel-quantised": ("algorithm=qupel", "algorithm.full_precision=[]"),
}
REFUSED = {
    "pfednet, a graph of sketches": ("algorithm=pfednet",),
    "ppfl, similar clients": ("algorithm=ppfl",),
    **{name: (f"algorithm={name}",) for name in ("ifca", "fedrod", "marina", "pooled")},
}


@dataclass(frozen=True)
class Cohort:
    """Hospitals: their keys, what is scored, and what all methods get."""

    title: str
    metric: str
    rounds: int
    words: tuple[str, ...]
    delta: float = 1e-3
    steps: int = 5


COHORTS = {
    "heart": Cohort(
        "heart: logistic regression",
        "accuracy",
        30,
        ("experiment=heart_pfednet", "data.scaling=client"),
    ),
    "tcga_brca": Cohort(
        "TCGA-BRCA: logistic regression",
        "auroc",
        20,
        (
            *("experiment=clinical_pfednet", "data=csv", "partition=centre", "data.label=died"),
            *("data.centre=region", "data.patient=pid", "data.val_fraction=0"),
            *("data.test_fraction=0.34", "data.scaling=client"),
        ),
    ),
    "digits": Cohort(
        "digits: one hidden layer",
        "accuracy",
        20,
        (
            *("experiment=digits_conflict", "tuned.num_clients=4", "tuned.groups=2", "model=mlp"),
            *("model.network.in_channels=64", "optimizer.lr=0.2"),
        ),
    ),
    "retina": Cohort(
        "retina: small U-Net",
        "dice",
        20,
        (
            *("experiment=retina_pfednet", "partition=centre", "model.network.norm=instance"),
            *("model.surface=false", "data.reader.scale=0.5", "data.patch_size=[32,32]"),
            *("data.patches_per_patient=8", "tuned.unet.channels=[8,16]"),
            *("tuned.unet.strides=[2]", "tuned.unet.num_res_units=1"),
        ),
        steps=20,
    ),
    "heart_flamby": Cohort("", "accuracy", 30, ("experiment=heart_complete",), delta=1e-4),
}
EPSILONS = (None, 10.0, 3.0, 1.0)
ATTACKED = ("fedavg", "ditto", "fedper", "pfednet", "ppfl", "qupel")
ATTACKED_AT = (None, 3.0)
COLUMNS, YEARS, FEWEST = ("pid", "E", "T"), 5, 15
MARKERS = "osD^vPX"
Cells = dict[str, Any]
"""By cohort: its rounds and steps, and its runs by method, epsilon and seed."""


def name_of(bound: float | None) -> str:
    """An epsilon in words."""
    return "none" if bound is None else f"{bound:g}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean and the standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def five_years(folder: Path, path: Path) -> None:
    """Writes the table of TCGA-BRCA's patients whose state after five years is known."""
    with (folder / "centers.csv").open(encoding="utf-8", newline="") as file:
        regions = {row["TSS Code"]: row["Region"] for row in csv.DictReader(file)}
    with (folder / "brca.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kept = []
    for row in rows:
        early = float(row["T"]) < 365 * YEARS
        dead = bool(float(row["E"]))
        if dead or not early:
            features = {name: value for name, value in row.items() if name not in COLUMNS}
            region = regions[row["pid"].split("-")[1]]
            kept.append(
                {"pid": row["pid"], "region": region, "died": int(dead and early), **features}
            )
    sizes = Counter(row["region"] for row in kept)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(kept[0]))
        writer.writeheader()
        writer.writerows(row for row in kept if sizes[row["region"]] >= FEWEST)


def words_of(options: argparse.Namespace, bound: float | None, place: Path) -> list[str]:
    """The keys that all runs of a cohort share, and the noise."""
    cohort = COHORTS[options.cohort]
    words = [
        *cohort.words,
        *("logger=none", "progress=false", "pictures.format=none", f"rounds={options.rounds}"),
        *(f"evaluation.every={options.rounds}", f"local.steps={options.steps}"),
    ]
    data = options.data
    if options.cohort == "tcga_brca":
        five_years(options.data, data := place / "brca.csv")
    if options.cohort == "retina":
        words.append(f"data.cache={options.cache or place}")
    if data is not None:
        words.append(f"data.path={data}")
    if bound is not None:
        words.append(f"privacy.example={{epsilon:{bound},delta:{cohort.delta},clip:1.0}}")
    return words


def run_of(options: argparse.Namespace, method: str, bound: float | None, seed: int) -> Cells:
    """Trains once, quietly: test scores, kB of all hospitals, and the largest epsilon of one."""
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place) / "run"
        words = [*words_of(options, bound, Path(place)), *METHODS[method]]
        summary, _ = train(described([*words, f"seed={seed}", f"folder={folder}"]))
        score = summary["federation"][COHORTS[options.cohort].metric]
        cell = {"mean": score["mean"], "worst": score["worst"], "kB": summary["bytes"]["up"] / 1e3}
        if bound is not None:
            kept = json.loads((folder / "privacy.json").read_text("utf-8"))
            clients = kept["example"]["clients"].values()
            cell["epsilon"] = max(client["epsilon"] for client in clients)
        if options.shadows and method in ATTACKED and bound in ATTACKED_AT:
            found = audit(folder, shadows=options.shadows, rounds=1)
            cell["attack"] = {
                g.model: {"patients": g.patients, "auc": g.auc, "hits": g.hits}
                for g in found.guesses
                if g.client == "all" and not g.of_run and "bits" not in g.model
            }
    return cell


def fill(options: argparse.Namespace, stored: Cells, bounds: Sequence[float | None]) -> None:
    """Trains what is not stored yet."""
    settings = {name: getattr(options, name) for name in ("rounds", "steps")}
    kept = stored.setdefault(options.cohort, {})
    if any(kept.setdefault(name, value) != value for name, value in settings.items()):
        raise SystemExit(f"{options.store} has runs at other settings; choose another --store.")
    for method in options.methods:
        for bound in bounds:
            for seed in range(options.seeds):
                of_method = kept.setdefault("runs", {}).setdefault(method, {})
                runs = of_method.setdefault(name_of(bound), {})
                attacked = options.shadows and method in ATTACKED and bound in ATTACKED_AT
                known = runs.get(str(seed))
                if known is None or (attacked and "attack" not in known):
                    runs[str(seed)] = run_of(options, method, bound, seed)
                    if options.store is not None:
                        text = json.dumps(stored, indent=1)
                        options.store.with_suffix(".new").write_text(text + "\n", "utf-8")
                        options.store.with_suffix(".new").replace(options.store)


def table(stored: Cells, cohort: str) -> Iterator[str]:
    """The lines of a cohort's two tables."""
    runs = stored[cohort]["runs"]
    asked = [name_of(bound) for bound in EPSILONS]
    yield f"| method | epsilon {' | '.join(asked)} | kB up | epsilon spent |"
    yield "|---" * (len(asked) + 3) + "|"
    for method in METHODS:
        if not all(runs.get(method, {}).get(name) for name in asked):
            continue  # not finished
        cells = {name: list(runs[method][name].values()) for name in asked}
        shown = " | ".join(
            "; ".join(spread([cell[of] for cell in cells[name]]) for of in ("mean", "worst"))
            for name in asked
        )
        spent = ", ".join(f"{max(c['epsilon'] for c in cells[n]):.2f}" for n in asked[1:])
        yield f"| {method} | {shown} | {cells['none'][0]['kB']:.1f} | {spent} |"
    if not any("attack" in c for m in runs.values() for by in m.values() for c in by.values()):
        return
    yield ""
    yield "| method | epsilon | model | patients | AUC | recognised at 1 % |"
    yield "|---|---:|---|---:|---:|---:|"
    for method, by_bound in runs.items():
        for name, by_seed in by_bound.items():
            attacks = [cell["attack"] for cell in by_seed.values() if "attack" in cell]
            for model in attacks[0] if attacks else ():
                found = [attack[model] for attack in attacks]
                patients = min(one["patients"] for one in found)
                shown = " | ".join(
                    f"{spread([one[of][0] for one in found], digits)} "
                    f"[{min(one[of][1] for one in found):.{digits}f}, "
                    f"{max(one[of][2] for one in found):.{digits}f}]"
                    for of, digits in (("auc", 2), ("hits", 3))
                )
                yield f"| {method} | {name} | {model} | {patients} | {shown} |"


def refused(options: argparse.Namespace) -> None:
    """Prints why methods cannot be protected."""
    print()
    for name, words in REFUSED.items():
        with tempfile.TemporaryDirectory() as place:
            shared = words_of(options, 3.0, Path(place))
            try:
                train(described([*shared, *words, f"folder={place}/run"]))
            except ConfigError as error:
                print(f"- {name}: {str(error).partition(': ')[2]}")
            else:
                raise AssertionError(f"{name} is not refused.")


def drawn(stored: Cells, path: Path) -> None:
    """Draws the scores by epsilon, a panel per cohort; bars are a standard deviation over seeds."""
    cohorts = [name for name in stored if COHORTS[name].title]
    figure = Figure(figsize=(3.8 * len(cohorts), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(cohorts), squeeze=False)[0]
    for axes, cohort in zip(panels, cohorts, strict=True):
        runs = stored[cohort]["runs"]
        for place, method in enumerate(METHODS):
            if not all(runs.get(method, {}).get(name_of(bound)) for bound in EPSILONS):
                continue
            scores = [
                [cell["mean"] for cell in runs[method][name_of(bound)].values()]
                for bound in EPSILONS
            ]
            axes.errorbar(
                [at + 0.06 * (place - (len(METHODS) - 1) / 2) for at in range(len(EPSILONS))],
                [statistics.mean(run) for run in scores],
                yerr=[statistics.stdev(run) if len(run) > 1 else 0.0 for run in scores],
                marker=MARKERS[place],
                color=f"C{place}",
                capsize=2,
                label=method,
            )
        axes.set_title(COHORTS[cohort].title, fontsize="medium")
        axes.set_xlim(-0.4, len(EPSILONS) - 0.6)
        axes.set_xticks(range(len(EPSILONS)), [name_of(bound) for bound in EPSILONS])
        axes.set_xlabel("epsilon (less is more private)")
        axes.set_ylabel(f"test {COHORTS[cohort].metric}, mean of hospitals")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


PASSES, TAKEN, BATCH = 15, 1500, 4
ROWS = {"Cleveland": 199, "Hungarian": 172, "Switzerland": 30, "VA": 85}  # FLamby trains with
CLAIMED = (None, 10.0, 1.0, 0.1)
FLAMBY = "published"


def theirs(path: Path, delta: float) -> dict[str, list[float]]:
    """FLamby's accuracies by epsilon, without noise and at one delta."""
    found: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["d"] or float(row["d"]) == delta:
                claimed = name_of(float(row["e"]) if row["e"] else None)
                found.setdefault(claimed, []).append(float(row["perf"]))
    return found


def counted(claimed: float, delta: float) -> list[float]:
    """The epsilon of each hospital in FLamby's script, with all steps counted.

    Example:
        >>> [round(spent, 1) for spent in counted(1.0, 1e-4)]
        [1.5, 1.6, 4.1, 2.3]
    """
    batches = [-(-rows // BATCH) for rows in ROWS.values()]
    noises = [noise_for(1 / n, PASSES * n, claimed, delta) for n in batches]
    pairs = zip(batches, noises, strict=True)
    return [epsilon(1 / n, noise, TAKEN, delta) for n, noise in pairs]


def published(stored: Cells) -> Iterator[str]:
    """The lines of FLamby's table against FedAvg here, and of its epsilon."""
    kept, delta = stored["heart_flamby"], COHORTS["heart_flamby"].delta
    yield "| epsilon claimed | FLamby | its epsilon: " + ", ".join(ROWS) + " | FedAvg here |"
    yield "|---:|---:|---|---:|"
    for claimed in CLAIMED:
        name, true = name_of(claimed), "unbounded"
        if claimed is not None:
            true = ", ".join(f"{value:.2g}" for value in counted(claimed, delta))
        ours = [cell["mean"] for cell in kept["runs"]["fedavg"][name].values()]
        yield f"| {name} | {spread(kept[FLAMBY][name])} | {true} | {spread(ours)} |"


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cohort", choices=COHORTS, nargs="?", help="none: what --store has")
    parser.add_argument("data", type=Path, nargs="?", help="the folder of the cohort's data")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="by default those of the cohort")
    parser.add_argument("--steps", type=int, help="per round, by default those of the cohort")
    parser.add_argument("--shadows", type=int, default=8, help="of each attack; 0: no attack")
    parser.add_argument("--store", type=Path, help="a JSON file that keeps the runs")
    parser.add_argument("--cache", type=Path, help="the folder of retina's decoded pictures")
    parser.add_argument("--figure", type=Path, help="where to draw the scores by epsilon")
    parser.add_argument("--published", type=Path, help="FLamby's dp_heart.csv")
    options = parser.parse_args()
    stored = {}
    if options.store is not None and options.store.is_file():
        stored = json.loads(options.store.read_text("utf-8"))
    if options.cohort is not None:
        if options.cohort != "digits" and options.data is None:
            parser.error(f"{options.cohort} needs the folder of its data")
        options.rounds = options.rounds or COHORTS[options.cohort].rounds
        options.steps = options.steps or COHORTS[options.cohort].steps
        if options.cohort == "heart_flamby":
            if options.published is None:
                parser.error("heart_flamby needs --published")
            options.methods, options.shadows = ["fedavg"], 0
            kept = {FLAMBY: theirs(options.published, COHORTS[options.cohort].delta)}
            stored["heart_flamby"] = {**stored.get("heart_flamby", {}), **kept}
            fill(options, stored, CLAIMED)
        else:
            fill(options, stored, EPSILONS)
    for cohort in stored:
        lines = published(stored) if cohort == "heart_flamby" else table(stored, cohort)
        print(f"\n{cohort}\n", *lines, sep="\n")
    if options.cohort == "heart":
        refused(options)
    if options.figure is not None:
        drawn(stored, options.figure)


if __name__ == "__main__":
    main()
