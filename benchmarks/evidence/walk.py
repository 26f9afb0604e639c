"""The six commands of docs/walk.md on real hospitals, and the CPU seconds that each takes.

python benchmarks/evidence/walk.py --heart FOLDER --strokes IST_CSV
python benchmarks/evidence/walk.py --heart FOLDER --only study train --overrides rounds=2
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "walk.md"
STROKES = ("experiment=stroke", "partition.patients=[176,1000]", "model=logistic")
OF_HEART = "experiment=heart_pfednet"


def commands() -> list[list[str]]:
    """Returns the commands of the page, which are of heart disease."""
    lines = re.findall(r"^medfed (.+)$", PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line.partition("  #")[0]) for line in lines]


def of_strokes(words: list[str]) -> list[str]:
    """Returns a command of the page for strokes."""
    renamed = {OF_HEART: STROKES, "by=sex": ("by=SEX",)}
    return [new for word in words for new in renamed.get(word, (word,))]


def seconds(words: list[str], folder: Path) -> float:
    """Runs a command of medfed; returns its CPU seconds, those of a pilot's runs among them."""
    known = {*folder.rglob("cells/**/*.json")}  # of processes that this one never waits for
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call = "import sys; from medfed.commands.main import main; main(sys.argv[1:])"
    root = str(PAGE.parents[1])
    done = subprocess.run(
        [sys.executable, "-c", call, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"medfed {shlex.join(words)}: {done.stderr or done.stdout}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    last = [line for line in done.stdout.splitlines() if line.strip()][-12:]
    print("\n".join(["", f"$ medfed {shlex.join(words)}", *last]), file=sys.stderr)
    cells = {*folder.rglob("cells/**/*.json")} - known
    runs = sum(json.loads(cell.read_text())["result"]["cpu_seconds"] for cell in cells)
    return float(runs) + after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Reads the arguments, runs the commands, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heart", type=Path, help="the folder of the four files of UCI")
    parser.add_argument("--strokes", type=Path, help="the International Stroke Trial's table")
    parser.add_argument("--only", nargs="+", help="the first words of commands, such as study")
    parser.add_argument("--overrides", nargs="*", default=[], help="of study, advise and train")
    given = parser.parse_args()
    places = {"heart": given.heart, "strokes": given.strokes}
    print("| command | " + " | ".join(f"{n}, CPU s" for n, p in places.items() if p) + " |")
    print("|---|" + "---|" * sum(p is not None for p in places.values()))
    with tempfile.TemporaryDirectory() as folder:
        for words in commands():
            if given.only and words[0] not in given.only:
                continue
            cells = []
            for name, path in places.items():
                if path is None:
                    continue
                (where := Path(folder) / name).mkdir(exist_ok=True)
                of = [w if "data.path=" not in w else f"data.path={path.resolve()}" for w in words]
                of = of_strokes(of) if name == "strokes" else of
                of += given.overrides * (words[0] in ("study", "advise", "train"))
                cells.append(f"{seconds(of, where):.0f}")
            shown = [words[0], *(w for w in words[1:] if w.startswith(("without", "by=")))]
            print(f"| `medfed {' '.join(shown)}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
