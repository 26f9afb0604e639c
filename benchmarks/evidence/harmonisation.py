"""What harmonisation before training changes: metrics per hospital with and without it.

    python benchmarks/evidence/harmonisation.py experiment=heart_pfednet data.path=DIR \
        --ways data.scaling=client data.scaling=pooled data.scaling=combat

Each way is a set of keys, separated by spaces within quotes. Every way trains each method on the
same splits, once per seed. The table has the test metric by which rounds are selected: its mean
over the seeds, and behind it the mean of the differences to the first way, with the smallest and
the largest difference.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

import numpy as np

from medfed.config.compose import described
from medfed.run.train import train

QUIET = ("logger=none", "pictures.format=none", "progress=false")


def measured(keys: list[str], folder: Path) -> dict[str, float]:
    """Trains once; the selected metric of every hospital's test patients, and their mean."""
    config = described([*keys, *QUIET, f"folder={folder}"])
    summary = train(config)[0]
    metric = summary["selection"][0]
    by_client = {name: of[metric] for name, of in summary["clients"].items()}
    return {**by_client, "mean": float(np.nanmean(list(by_client.values())))}


def main() -> None:
    """Prints a line per method, hospital and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("keys", nargs="+", help="keys of medfed train")
    parser.add_argument("--ways", nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", default=["pfednet", "fedavg", "local"])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for method in given.methods:
            runs = {
                way: [
                    measured(
                        [*given.keys, *shlex.split(way), f"algorithm={method}", f"seed={seed}"],
                        Path(folder, f"{method}_{n}_{seed}"),
                    )
                    for seed in range(given.seeds)
                ]
                for n, way in enumerate(given.ways)
            }
            first = runs[given.ways[0]]
            for way, of in runs.items():
                for name in of[0]:
                    apart = [one[name] - other[name] for one, other in zip(of, first, strict=True)]
                    mean = np.mean([one[name] for one in of])
                    ends = f"{np.mean(apart):+.4f} [{min(apart):+.4f}, {max(apart):+.4f}]"
                    print(f"{method:10}{way:40}{name:14}{mean:.4f}  {ends}", flush=True)


if __name__ == "__main__":
    main()
