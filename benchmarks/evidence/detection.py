"""Sensitivity to nodules at one false alarm per scan, by method, on the generated LUNA16 cohort.

    python benchmarks/evidence/detection.py FOLDER --store docs/detection.json

Each method of each seed trains ``experiment=luna16_detection`` once; finished runs stay in the
store. With ``--rounds 0`` nothing is trained, and the table is printed from the store alone. Two
floors stand beside the methods: the untrained detector, and 50 boxes at random places of each scan.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

METHODS = ("local", "fedavg", "ditto", "fedper", "pfednet")
METRICS = ("lesion_cpm/1", "lesion_cpm", "lesions_found")
Stored = dict[str, dict[str, dict[str, list[float]]]]  # method, seed, metric: one per hospital


def overrides(folder: Path, rounds: int, steps: int) -> list[str]:
    """What the runs have in common."""
    return [
        "experiment=luna16_detection",
        f"data.root={folder / 'data'}",
        "data.batch_size=4",
        f"rounds={rounds}",
        f"local.steps={steps}",
        f"evaluation.every={rounds}",
        "pictures.format=none",
        "progress=false",
    ]


def trained(folder: Path, method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The test metrics of a run, which is trained if it is not there."""
    from medfed import Run, train

    run = folder / f"{method}_{seed}"
    if not (run / "summary.json").is_file():
        given = overrides(folder, options.rounds, options.steps)
        train(*given, f"algorithm={method}", f"seed={seed}", *options.also, folder=run)
    clients = Run(run).summary["clients"].values()
    return {name: [of[name] for of in clients] for name in METRICS}


def floors(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The test metrics of the untrained detector and of random boxes."""
    from medfed.common.seeding import numpy_rng
    from medfed.config.compose import load
    from medfed.config.description import describe, written
    from medfed.functional.detection import SCAN, lesion_scores, match_lesions
    from medfed.run.assembly import read_data, task_for

    given = [*overrides(folder, 1, 1), f"seed={seed}", *options.also]
    config = describe({**written(load(given)), "folder": str(folder / "floors")})
    data = read_data(config)
    _, task = task_for(config, data)
    untrained: dict[str, list[float]] = {name: [] for name in METRICS}
    random: dict[str, list[float]] = {name: [] for name in METRICS}
    for client in data.clients.values():
        measured = task.evaluate(client.eval_batches("test"))
        rows, rng = [], numpy_rng(seed, "random boxes", client.id)
        for batch in client.eval_batches("test"):
            mm = batch["spacing"][0].numpy()
            low, high = (batch["label"][0, :, at : at + 3].numpy() * mm for at in (0, 3))
            places = rng.random((50, 3)) * (np.array(batch["image"].shape[2:]) * mm)
            scores = rng.random(50)
            radii = (high - low).mean(1) / 2
            found = match_lesions(places, scores, (low + high) / 2, radii)
            rows.append((SCAN, 0.0, len(low)))
            rows += [(kind, score, 0) for kind, score in zip(found, scores, strict=True)]
        columns = map(np.array, zip(*rows, strict=True))
        cases = dict(zip(("found", "score", "lesions"), columns, strict=True))
        by_chance = lesion_scores(cases, np.ones((1, len(rows))))
        for name in METRICS:
            untrained[name].append(measured[name])
            random[name].append(float(by_chance[name][0]))
    return {"untrained": untrained, "random boxes": random}


def table(stored: Stored) -> list[str]:
    """The lines of the table: means over hospitals, then mean and range over seeds."""
    lines = ["| | seeds | sensitivity at 1 false alarm | CPM | found at all |"]
    lines.append("|---|---|---|---|---|")
    for method, seeds in stored.items():
        cells = []
        for name in METRICS:
            means = [float(np.mean(of[name])) for of in seeds.values()]
            ends = f" ({min(means):.2f} to {max(means):.2f})" if len(means) > 1 else ""
            cells.append(f"{np.mean(means):.2f}{ends}")
        lines.append(f"| {method} | {', '.join(seeds)} | {' | '.join(cells)} |")
    return lines


def paired(stored: Stored, metric: str = "lesion_cpm") -> list[str]:
    """The lines of a second table: differences of methods in the same seeds and hospitals."""
    lines = ["| CPM | difference, interval over seeds | seeds ahead | pairs ahead | behind |"]
    lines.append("|---|---|---|---|---|")
    known = [name for name in METHODS if name in stored]
    for other in [name for name in ("local", "fedavg") if name in known]:
        for method in [name for name in known if name not in ("local", other)]:
            common = [seed for seed in stored[method] if seed in stored[other]]
            pairs = np.array(
                [np.subtract(stored[method][s][metric], stored[other][s][metric]) for s in common]
            )
            seeds = pairs.mean(1)
            ends = ttest_1samp(seeds, 0).confidence_interval() if len(seeds) > 1 else (np.nan,) * 2
            cells = [
                f"{method} − {other}",
                f"{seeds.mean():+.3f} [{ends[0]:+.3f}, {ends[1]:+.3f}]",
                f"{(seeds > 0).sum()} of {len(seeds)}",
                f"{(pairs > 0).sum()} of {pairs.size}",
                str((pairs < 0).sum()),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Trains what the store lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--also", nargs="*", default=[], help="further overrides of the runs")
    options = parser.parse_args()
    path = options.store or options.folder / "detection.json"
    stored: Stored = json.loads(path.read_text()) if path.is_file() else {}
    for seed in options.seeds if options.rounds else ():
        for method in ("untrained", *options.methods):
            if str(seed) in stored.get(method, {}):
                continue
            of = (
                floors(options.folder, seed, options)
                if method == "untrained"
                else {method: trained(options.folder, method, seed, options)}
            )
            for name, metrics in of.items():
                stored.setdefault(name, {})[str(seed)] = metrics
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(stored, indent=1) + "\n")
            print(f"seed {seed}: {', '.join(of)}", file=sys.stderr, flush=True)
    print("\n".join([*table(stored), "", *paired(stored)]))


if __name__ == "__main__":
    main()
