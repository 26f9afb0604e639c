"""What is reported of a benchmark that is killed again and again (SIGKILL) and run again.

A small suite is first benchmarked undisturbed by two workers. Then the same command starts from
nothing, is killed with all of its processes at a random moment, is started again, and so on until
it has come to its end; and all that from nothing again, until it was killed often enough. Every
end is compared with the undisturbed one: all cells, but for the CPU seconds that they took, and all
files of the report, byte for byte; not Optuna's journal, which keeps the time of day. Counted as
left over are files of the benchmark's folder that an undisturbed one does not have, and processes
that have outlived the kill by five seconds.

Moments are drawn evenly from the start of the command to three times as long as it takes until its
first cell is there. Run with ``python benchmarks/trust/kill_benchmark.py --kills 20``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kill import outlived  # type: ignore[import-not-found]  # beside this file

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
title: Four hospitals of breast-cancer patients
experiment: clinical_pfednet
overrides: ["model.selection=[auroc,max]", partition.num_clients=4]
lr: [0.01, 1.0]
splits: folds
dial: δ
variants:
  one: {dial: 1, overrides: [partition.delta=1]}
  four: {dial: 4, overrides: [partition.delta=4]}
sizes:
  smoke: {splits: 1, trials: 2, overrides: [rounds=1, local.steps=2]}
  small: {splits: 3, trials: 3, overrides: [rounds=3, local.steps=5]}
  full: {splits: 3, trials: 3, overrides: [rounds=3, local.steps=5]}
"""


def start(folder: Path, size: str) -> subprocess.Popen[bytes]:
    """Starts the benchmark of a folder in a process group of its own."""
    (folder / "temporary").mkdir(parents=True, exist_ok=True)
    words = ["suite=four", "methods=[ditto,fedprox]", "variants=all", "workers=2", f"size={size}"]
    places = [f"plugins={folder.parent}", f"out={folder / 'out'}"]
    log = (folder / "log").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *words, *places],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def cells(folder: Path) -> list[Path]:
    """The cells that are finished."""
    return list((folder / "out" / "cells").rglob("[!.]*.json"))


def left(folder: Path) -> dict[str, Any]:
    """What is in the benchmark's folder: hashes of the report, the results of cells."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in (folder / "out").rglob("*") if p.is_file()):
        name = str(path.relative_to(folder / "out"))
        if name == "tuning.journal":
            found[name] = ""
        elif path in cells(folder):
            content = json.loads(path.read_text("utf-8"))
            content.pop("sha256")  # of the result with its seconds
            content["result"].pop("cpu_seconds")
            found[name] = content
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for a benchmark that must succeed."""
    if process.wait(timeout=600):
        raise RuntimeError((folder / "log").read_text("utf-8", "replace")[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--size", choices=("smoke", "small"), default="small", help="of the suite")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "suites").mkdir()
        (Path(root) / "suites" / "four.yaml").write_text(SUITE, "utf-8")
        undisturbed, folder = Path(root) / "undisturbed", Path(root) / "killed"
        process, began = start(undisturbed, args.size), time.monotonic()
        while process.poll() is None and not cells(undisturbed):
            time.sleep(0.01)
        span = 3 * (time.monotonic() - began)
        finish(process, undisturbed)
        expected = left(undisturbed)
        kills = extra = torn = ends = equal = 0
        while kills < args.kills:
            shutil.rmtree(folder, ignore_errors=True)
            ended = False
            while not ended:
                process = start(folder, args.size)
                if kills < args.kills:
                    try:
                        process.wait(timeout=draw.uniform(0, span))
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
                        extra += outlived(process.pid)
                        kills += 1
                        torn += len(cells(folder)) < len(cells(undisturbed))
                        continue
                finish(process, folder)
                ended = True
            found = left(folder)
            more = sorted(found.keys() - expected.keys())
            differ = sorted(n for n, what in expected.items() if found.get(n) != what)
            for what, names in (("left over", more), ("differs or is missing", differ)):
                if names:
                    print(f"{what}: {', '.join(names)}", file=sys.stderr)
            ends, equal, extra = ends + 1, equal + (not differ), extra + len(more)
        print(
            f"{kills} kills ({torn} of them with cells to come), {ends} benchmarks of "
            f"{len(cells(undisturbed))} cells finished: {equal} with the same cells and report, "
            f"{extra} left over"
        )
    if equal < ends or extra:
        sys.exit(1)


if __name__ == "__main__":
    main()
