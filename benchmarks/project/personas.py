"""What three newcomers wait for: the first insight, advice on their own table, and a decision.

    python benchmarks/project/personas.py                     # this tree
    python benchmarks/project/personas.py --tree OTHER_CLONE  # another one

- Clone to first insight: README's first example, or ``make demo`` where there is none.
- Own CSV to advice: ``medfed advise`` on a table of 569 patients of five clinics.
- Report to decision: ``medfed report`` on the runs of the first path, and the words on its page
  before the first method that it recommends.

Each command is a process of one thread, with its CPU and wall seconds.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from html import unescape
from pathlib import Path

from sklearn.datasets import load_breast_cancer

QUIET = ("progress=false", "logger=none")


def first_example(tree: Path, runs: Path) -> list[str]:
    """Returns the training command of README's first example, or that of the demo."""
    sweep = f"hydra.sweep.dir={runs}"
    if (tree / "configs/experiment/digits_conflict.yaml").is_file():
        methods, seeds = "algorithm=pfednet,fedavg,local", "seed=0,1,2,3,4"
        return ["train", "-m", "experiment=digits_conflict", methods, seeds, sweep, *QUIET]
    return [
        "train",
        "-m",
        "experiment=brats_pfednet",
        "algorithm=pfednet,fedavg,local",
        sweep,
        *QUIET,
    ]


def write_clinics(path: Path) -> None:
    """Writes a table of patients with an outcome and one of five clinics."""
    table = load_breast_cancer()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*table.feature_names, "outcome", "clinic"])
        for n, (row, outcome) in enumerate(zip(table.data, table.target, strict=True)):
            writer.writerow([*row.tolist(), outcome, f"clinic_{n % 5}"])


def spent(command: list[str], tree: Path, folder: Path) -> tuple[float, float]:
    """Runs a script of a tree; returns its CPU and wall seconds."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    line = [sys.executable, str(tree / "scripts" / f"{command[0]}.py"), *command[1:]]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - began


def words_before_decision(page: Path) -> int:
    """Returns how many words a reader meets before a method that the page shows."""
    html = re.sub(r"<(style|svg|script).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    text = unescape(re.sub(r"<[^>]+>", " ", html.partition("<h1")[2])).partition(">")[2]
    found = re.search(r"\b(pfednet|FedAvg|local training)\b", text)
    return len(text[: found.start()].split()) if found else -1


def main() -> None:
    """Prints a line for each command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    tree = parser.parse_args().tree.resolve()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_clinics(folder / "table.csv")
        data = ("data=csv", "data.path=table.csv", "data.label=outcome", "data.centre=clinic")
        page = folder / "page"
        commands = {
            "clone to first insight, training": first_example(tree, folder / "runs"),
            "report to decision": ["report", f"runs={folder / 'runs'}", f"out={page}"],
            "own CSV to advice": ["advise", *data, "model=logistic"],
        }
        for name, command in commands.items():
            cpu, wall = spent(command, tree, folder)
            print(f"{name:<34}{cpu:>8.1f} s CPU{wall:>8.1f} s", flush=True)
        print(f"{'words before the decision':<34}{words_before_decision(page / 'report.html'):>8}")


if __name__ == "__main__":
    main()
