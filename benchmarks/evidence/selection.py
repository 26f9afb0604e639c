"""How to weigh hospitals when validation selects a round: a simulation, and real patients.

    python benchmarks/evidence/selection.py [--repeats 2000] [--table FILE --least 20 50 100]

Equal weights let a hospital of two validation patients select by chance; weights by the number of
patients let the largest hospital select for all. Printed is what the selected round loses on the
mean over hospitals, times 10,000, by rule: in a simulation against the best round, whose curves
rise and fall with a peak of each hospital's own; with ``--table``, the table of the International
Stroke Trial, as the test AUROC of the selected round less that of equal weights (mean and standard
error over splits), for FedAvg at the hospitals of at least so many patients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

Floats = NDArray[np.float64]
ROUNDS = 20
RULES: dict[str, Callable[[Floats], Floats]] = {
    "equal": np.ones_like,
    "n / (n + 10)": lambda n: n / (n + 10),
    "n / (n + 50)": lambda n: n / (n + 50),
    "root of n": np.sqrt,
    "n": lambda n: n,
    "10 or more": lambda n: np.where(n >= min(10, n.max()), 1.0, 0.0),
}
HOSPITALS = {
    "40 36 24 18 2": (40, 36, 24, 18, 2),
    "100 100 4 4": (100, 100, 4, 4),
    "200 20 20 20": (200, 20, 20, 20),
    "8 8 8 8 60": (8, 8, 8, 8, 60),
}


def selected(scores: Floats, sizes: Floats, rule: str) -> int:
    """Returns the round that validation selects; scores are (hospitals, rounds)."""
    weights = np.where(np.isnan(scores), 0.0, RULES[rule](sizes)[:, None])
    means = (weights * np.nan_to_num(scores)).sum(0) / np.maximum(weights.sum(0), 1e-12)
    return int(means.argmax())


def simulated(sizes: Floats, apart: float, repeats: int) -> dict[str, float]:
    """Returns what each rule loses; peaks of hospitals are ``apart`` rounds from the common one."""
    rng, rounds = np.random.default_rng(0), np.arange(ROUNDS)
    lost = dict.fromkeys(RULES, 0.0)
    for _ in range(repeats):
        peaks = rng.uniform(4, 16) + rng.normal(0, apart, len(sizes))
        true = 0.8 - 0.0006 * (rounds - peaks[:, None]) ** 2
        # The same patients are met in every round.
        common, own = rng.normal(size=(len(sizes), 1)), rng.normal(size=true.shape)
        noise = (np.sqrt(0.8) * common + np.sqrt(0.2) * own) * 0.5 / np.sqrt(sizes)[:, None]
        means = true.mean(0)
        for rule in RULES:
            lost[rule] += means.max() - means[selected(true + noise, sizes, rule)]
    return {rule: 1e4 * total / repeats for rule, total in lost.items()}


def measured(table: str, least: int, splits: int) -> dict[str, tuple[float, float]]:
    """Returns what each rule gains over equal weights on real patients, and its standard error."""
    from medfed.config.compose import described
    from medfed.run.assembly import read_data

    gains: dict[str, list[float]] = {rule: [] for rule in RULES}
    for seed in range(splits):
        keys = [f"data.path={table}", f"partition.patients=[{least},500]", f"seed={seed}"]
        data = read_data(described(["experiment=stroke", *keys, "logger=none", "progress=false"]))
        clients = list(data.clients.values())
        parts = [
            [part([c.train]), part(c.evaluation["val"]), part(c.evaluation["test"])]
            for c in clients
        ]
        sizes = np.array([len(val[1]) for _, val, _ in parts], dtype=float)
        val, test = fedavg(parts)
        at = {rule: selected(val, sizes, rule) for rule in RULES}
        means = np.nanmean(test, axis=0)
        for rule in RULES:
            gains[rule].append(means[at[rule]] - means[at["equal"]])
    return {
        rule: (1e4 * float(np.mean(g)), 1e4 * float(np.std(g, ddof=1) / np.sqrt(len(g))))
        for rule, g in gains.items()
    }


def part(batches: Iterable[Mapping[str, Any]]) -> tuple[Floats, Floats]:
    """Returns inputs and labels of a split, with a column of ones."""
    x, y = (torch.cat([b[key] for b in batches]).double().numpy() for key in ("image", "label"))
    return np.column_stack([x.reshape(len(y), -1), np.ones(len(y))]), y


def fedavg(parts: Sequence[Any], rate: float = 0.3, steps: int = 5) -> tuple[Floats, Floats]:
    """Logistic regression by FedAvg; (hospitals, rounds) AUROC of validation and of test."""
    weights = np.zeros(parts[0][0][0].shape[1])
    sizes = np.array([len(train[1]) for train, *_ in parts])
    found: list[list[list[float]]] = [[], []]
    for _ in range(ROUNDS):
        ends = []
        for (x, y), *_ in parts:
            own = weights.copy()
            for _ in range(steps):
                own -= rate * x.T @ (1 / (1 + np.exp(-x @ own)) - y) / max(1, len(y))
            ends.append(own)
        weights = np.average(ends, axis=0, weights=sizes)
        for split in (0, 1):
            found[split].append([auroc(p[1 + split], weights) for p in parts])
    return np.array(found[0]).T, np.array(found[1]).T


def auroc(split: tuple[Floats, Floats], weights: Floats) -> float:
    """Returns the AUROC; NaN for one class."""
    x, y = split
    return float(roc_auc_score(y, x @ weights)) if 0 < y.sum() < len(y) else np.nan


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--table")
    parser.add_argument("--least", type=int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--splits", type=int, default=20)
    options = parser.parse_args()
    print(f"| validation patients | {' | '.join(RULES)} |\n|---|{'---:|' * len(RULES)}")
    for name, sizes in HOSPITALS.items():
        for apart in (1, 4):
            lost = simulated(np.array(sizes, dtype=float), apart, options.repeats)
            print(
                f"| {name}, peaks {apart} apart | {' | '.join(f'{v:.1f}' for v in lost.values())} |"
            )
    for least in options.least if options.table else ():
        gains = measured(options.table, least, options.splits)
        cells = " | ".join(f"{mean:+.1f} ± {error:.1f}" for mean, error in gains.values())
        print(f"| strokes, hospitals of {least} or more | {cells} |", flush=True)


if __name__ == "__main__":
    main()
