"""What PPFL recovers where the truth is known, and what a hospital gets that joins later.

    python benchmarks/evidence/memberships.py OUT         # runs what is missing
    python benchmarks/evidence/memberships.py OUT --take  # and takes the tables to docs/benchmark

The tables are those of docs/memberships.md, which ``python docs/tables.py`` writes from
``docs/benchmark/memberships.json``. All of it takes some minutes of one core; runs that are
finished in ``OUT`` are not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

from medfed import train
from medfed.common.console import size
from medfed.datamodules.partitions.by_centre import ByCentre
from medfed.datamodules.tables.mixture import MixtureDataModule
from medfed.run.memberships import half_l1
from medfed.run.onboarding import onboard, show_onboarding

DOCS = Path(__file__).parents[2] / "docs" / "benchmark"
LESS = ("data.samples=200", "rounds=20", "optimizer.lr=0.1")
GROUPS = ",".join(f"group_{group}_hospital_0" for group in range(4))
JOINS = {
    "digits": (
        "experiment=digits_ppfl",
        'canonical.parts=["*"]',
        "partition.num_clients=16",
        f"keep_out=[{GROUPS}]",
        "rounds=20",
        "evaluation.every=5",
    ),
    "clinical": ("experiment=clinical_pfednet", "keep_out=[hospital_0,hospital_4]"),
}
PATIENTS = {"digits": (1, 5, 20), "clinical": (1, 5, 20, 100)}
STEPS = {"digits": 50, "clinical": 100}
SEEDS = (0, 1, 2)
RULES = {"own": "own rule", "fine_tuning": "fine-tuning", "local": "local training"}
Table = dict[str, list[Any]]
Floats = NDArray[np.float64]


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    """Returns the summary of a run, which is trained where it is not there."""
    if not (folder / "summary.json").is_file():
        train(*overrides, folder=folder)
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def fit(likelihoods: Floats) -> Floats:
    """Returns the mixture (K,) of largest likelihood, of the rows' likelihoods (N, K)."""
    count = likelihoods.shape[1]
    fitted = minimize(
        lambda c: -np.log(likelihoods @ c + 1e-300).mean(),
        np.full(count, 1 / count),
        jac=lambda c: -(likelihoods / (likelihoods @ c + 1e-300)[:, None]).mean(0),
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda c: c.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-10, "maxiter": 200},
    )
    return np.asarray(fitted.x)


def floor(clients: int, samples: int, seed: int) -> float:
    """Returns how near to the true mixtures anybody could come on ``experiment=synthetic_ppfl``.

    The true models are given, and each client's mixture alone is fitted to its training rows, by
    maximum likelihood. What is left is the noise of the labels: half L1, mean over the clients.
    """
    data = MixtureDataModule(ByCentre(), seed=seed, clients=clients, samples=samples)
    data.setup()
    rows = []
    for client in data.clients.values():
        image, label = client.train["image"], client.train["label"]
        assert isinstance(image, Tensor)
        assert isinstance(label, Tensor)
        chance = expit(image.double().numpy() @ data.thetas.T)
        rows.append(fit(np.where(label.numpy()[:, None] == 1, chance, 1 - chance)))
    truth = np.array([data.mixtures[name] for name in data.clients])
    return float(half_l1(np.array(rows), truth).mean())


def recovery(out: Path, experiment: str, runs: Sequence[tuple[int, Sequence[str]]]) -> Table:
    """Half the L1 distance to true mixtures, run by run, beside what nobody could do better."""
    rows = []
    for number, (seed, overrides) in enumerate(runs):
        folder = out / f"{experiment}_{number}"
        summary = trained(folder, f"experiment={experiment}", f"seed={seed}", *overrides)
        data = OmegaConf.load(folder / "config.yaml").data
        told, linear = summary["memberships"], data.outcome == "continuous"
        ends = [told["half_l1_at_start"], told["half_l1"], told.get("last", told)["half_l1"]]
        error = summary["federation"]["rmse" if linear else "balanced_accuracy"]["mean"]
        ends.append(error if linear else floor(data.clients, data.samples, seed))
        rows.append([seed, summary["rounds"], data.samples, *(f"{v:.3f}" for v in ends)])
    last = "rmse (the noise alone: 1)" if experiment == "synthetic_linear" else "floor"
    head = ["seed", "rounds", "rows of a client", "start", "selected round", "last round", last]
    return {"head": head, "rows": rows}


def joining(out: Path, name: str, less: Sequence[str], seeds: Sequence[int]) -> Table:
    """What hospitals get that join, by their patients and by rule: means over seeds."""
    runs = []
    for seed in seeds:
        folder = out / f"join_{name}_{seed}"
        trained(folder, *JOINS[name], f"seed={seed}", *less)
        if not (folder / "onboarding.json").is_file():
            show_onboarding(onboard(folder, "all", PATIENTS[name], STEPS[name]), folder)
        runs.append(json.loads((folder / "onboarding.json").read_text(encoding="utf-8")))
    metric = runs[0]["selection"][0]
    rows = []
    for k in dict.fromkeys(row["k"] for row in runs[0]["rows"]):
        for rule, called in RULES.items():
            these = [[r for r in one["rows"] if (r["k"], r["rule"]) == (k, rule)] for one in runs]
            values = np.array([[row["metrics"][metric] for row in one] for one in these])
            means = values.mean(axis=1)
            told = f"{means.mean():.4f} ± {means.std(ddof=1):.4f}", f"{values.min():.4f}"
            cost = {
                n: np.mean([r[n] for one in these for r in one]) for n in ("seconds", "up", "down")
            }
            sent = [size(round(float(cost[way]))) for way in ("up", "down")]
            rows.append([k, called, *told, f"{cost['seconds']:.3f}", *sent])
    return {"head": ["patients", "rule", metric, "worst", "CPU s", "up", "down"], "rows": rows}


def main() -> None:
    """Prints the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a folder for the runs")
    parser.add_argument("--take", action="store_true", help="keep the tables for the docs")
    parser.add_argument("--rounds", type=int, help="of all runs, to see that they run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of what joins")
    parser.add_argument("--only", nargs="+", choices=["mixture", "linear", *JOINS])
    options = parser.parse_args()
    few = options.rounds
    less = [] if few is None else [f"rounds={few}", "evaluation.every=1", "pictures.format=none"]
    usual = [(seed, ["rounds=60", *less]) for seed in range(5)]
    last = [(0, [*LESS, *less])]
    out, linear = options.out, [(seed, less) for seed in options.seeds]
    makes: dict[str, Callable[[], Table]] = {
        "mixture": lambda: recovery(out, "synthetic_ppfl", [*usual, *last]),
        "linear": lambda: recovery(out, "synthetic_linear", linear),
        **{name: partial(joining, out, name, less, options.seeds) for name in JOINS},
    }
    tables = {name: make() for name, make in makes.items() if name in (options.only or makes)}
    for name, table in tables.items():
        print(f"\n{name}\n| {' | '.join(table['head'])} |")
        for row in table["rows"]:
            print(f"| {' | '.join(map(str, row))} |")
    if options.take and not options.only:
        (DOCS / "memberships.json").write_text(json.dumps(tables, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
