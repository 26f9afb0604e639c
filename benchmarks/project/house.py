"""The house in numbers: files, lines, import levels, and what it costs to come in.

    python benchmarks/project/house.py                        # this tree
    python benchmarks/project/house.py --tree OTHER_CLONE     # another one, by the same rules

A module's level is one above the highest that it imports at the top of its file. A code line is no
blank line, comment or docstring. The table of questions in ``docs/design.md`` says which files and
functions answer each; their lines are counted as they stand. Moves are counted from the command
`train experiment=brats_pfednet` to its first gradient. Times are CPU seconds of whole processes,
the least of some; what a command takes above its libraries is less the time of importing these.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
from sklearn.datasets import load_breast_cancer

FAILING = {
    "an unknown key": ["roundz=3"],
    "an unknown option": ["algorithm=fedavgg"],
    "a value of another type": ["local.steps=many"],
    "a path that is not there": ["data.path=/no/such/folder"],
    "a value that the algorithm refuses": ["algorithm.strength=-1"],
}
# Runs a script up to the first backward pass, where a federation begins to train.
FIRST_STEP = """
import os, resource, runpy, sys, torch
def stop(*_, **__):
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("CPU", used.ru_utime + used.ru_stime, flush=True)
    os._exit(0)
torch.Tensor.backward = stop
sys.argv = ["scripts/train.py", *sys.argv[1:]]
runpy.run_path("scripts/train.py", run_name="__main__")
"""
# The same, watching the calls of the package's own functions. A move is a call in another file than
# the call before it; what runs because a module is imported is none. A loop over cases or clients
# repeats its moves, which a reader makes once: those from one file to one function count once, too.
MOVES = """
import json, os, runpy, sys, torch
package = os.path.abspath("medfed") + os.sep
calls, config, moves, last, imports, once, files = 0, 0, 0, None, 0, set(), set()
def watch(frame, event, _):
    global calls, config, moves, last, imports
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    if not file.startswith(package):
        return
    if name == "<module>":
        imports += {"call": 1, "return": -1}.get(event, 0)
    elif event == "call" and not imports:
        calls += 1
        config += file.startswith(package + "config")
        if file != last:
            moves += 1
            once.add((last, file, name))
        last = file
        files.add(file)
def stop(*_, **__):
    sys.setprofile(None)
    print("MOVES", json.dumps([calls, config, moves, len(once), len(files)]), flush=True)
    os._exit(0)
torch.Tensor.backward = stop
sys.argv = ["scripts/train.py", *sys.argv[1:]]
sys.setprofile(watch)
runpy.run_path("scripts/train.py", run_name="__main__")
"""
# What each command cannot do without; whatever else it imports counts as its own time.
LIBRARIES_OF = {
    "train": "torch, pytorch_lightning, monai",
    "predict": "torch, monai",
    "report": "numpy, matplotlib.pyplot",
}
QUIET = ("progress=false", "logger=none")
LIBRARIES = """
import os, resource
import {names}
used = resource.getrusage(resource.RUSAGE_SELF)
print("CPU", used.ru_utime + used.ru_stime, flush=True)
os._exit(0)
"""


def modules(package: Path) -> dict[str, Path]:
    """Returns all modules of a package by their dotted names."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, known: dict[str, Path], top_only: bool) -> set[str]:
    """Returns the package's own modules that a file imports."""
    found = set()
    nodes: list[ast.AST] = [parsed(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        deeper = not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            deeper = False
        if deeper or not top_only:
            nodes += ast.iter_child_nodes(node)
    return found & known.keys()


def docstring_lines(path: Path) -> set[int]:
    """Returns the numbers of the lines of a file's docstrings."""
    lines: set[int] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and _is_text(first.value):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(path: Path) -> int:
    """Returns the lines of a file that are no blank lines, comments or docstrings."""
    text = path.read_text(encoding="utf-8")
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(path))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def structure(tree: Path) -> dict[str, int]:
    """Returns what the imports and the files of a tree say."""
    known = modules(tree / "medfed")
    everywhere = nx.DiGraph()
    at_the_top = nx.DiGraph()
    for graph, top_only in ((everywhere, False), (at_the_top, True)):
        graph.add_nodes_from(known)
        for name, path in known.items():
            graph.add_edges_from((name, other) for other in imports(path, known, top_only))
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    inward = {n: list(everywhere.predecessors(n)) for n, p in known.items() if p.stem != "__init__"}
    single = [n for n, by in inward.items() if len(by) == 1 and _folder(by[0]) == _folder(n)]
    acyclic = nx.condensation(at_the_top)
    return {
        "files": len(known),
        "code lines": sum(code_lines(path) for path in known.values()),
        "docstring lines": sum(len(docstring_lines(path)) for path in known.values()),
        "import levels": nx.dag_longest_path_length(acyclic) + 1,
        "modules that one neighbour reads": len(single),
        "functions that take a DictConfig": sum(configured(path) for path in known.values()),
        "cycles": sum(len(c) > 1 for c in nx.strongly_connected_components(everywhere)),
    }


def questions(tree: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """Returns the files that answer each question of ``docs/design.md``, and functions of them."""
    page = (tree / "docs/design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", page, re.MULTILINE)
    step = re.compile(r"`([\w/]+\.py)`(?: \(((?:`[\w.]+`(?:, )?)+)\))?")
    return {
        question: [(file, re.findall(r"[\w.]+", names)) for file, names in step.findall(answer)]
        for question, answer in rows
    }


def spans(path: Path, name: str) -> list[range]:
    """Returns the lines of what a file defines by a name, such as ``Round`` or ``Round.fit``."""
    every = _definitions(parsed(path))
    return [lines for known, lines in every if f".{known}".endswith(f".{name}")]


def _definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, range]]:
    for inner in getattr(node, "body", ()):
        names: list[str] = []
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            names = [inner.name]
        elif isinstance(inner, ast.Assign | ast.AnnAssign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            yield within + name, range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
        if isinstance(inner, ast.ClassDef):
            yield from _definitions(inner, f"{within}{inner.name}.")


def reading(tree: Path) -> Iterator[tuple[str, int]]:
    """Yields how much a newcomer opens, and reads, for each question of ``docs/design.md``."""
    for question, steps in questions(tree).items():
        opened = read = 0
        for file, names in steps:
            path = tree / "medfed" / file
            whole = len(path.read_text(encoding="utf-8").splitlines())
            named = {line for name in names for lines in spans(path, name) for line in lines}
            opened += whole
            read += len(named) or whole
        yield f"lines to open: {question}", opened
        yield "    of these, in the functions to read", read


def configured(path: Path) -> int:
    """Returns how many functions of a file have a parameter that is a DictConfig."""
    count = 0
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            kinds = [ast.unparse(a.annotation) for a in every if a and a.annotation]
            count += any("DictConfig" in kind for kind in kinds)
    return count


def _folder(name: str) -> str:
    return name.rpartition(".")[0]


def cpu_seconds(command: list[str], tree: Path, repeats: int) -> float:
    """Returns the least CPU time of a whole process, or the one that it tells."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        told = [line for line in done.stdout.splitlines() if line.startswith("CPU ")]
        if FIRST_STEP in command and not told:
            raise SystemExit(f"The run did not come to its first step: {done.stderr}")
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append(float(told[0].split()[1]) if told else spent)
    return min(times)


def first_gradient(tree: Path) -> dict[str, int]:
    """Returns how a tree comes from the command to the first gradient of an experiment."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        keys = ["experiment=brats_pfednet", *QUIET, f"data.root={folder}/data"]
        for number in range(2):  # the first makes the generated cohort
            command = [sys.executable, "-c", MOVES, *keys, f"hydra.run.dir={folder}/{number}"]
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("MOVES ")]
    if not lines:
        raise SystemExit(f"The run did not come to its first gradient: {done.stderr}")
    calls, config, moves, once, files = json.loads(lines[0].removeprefix("MOVES "))
    return {
        "calls of the package to the first gradient": calls,
        "of these in config/, percent": round(100 * config / calls),
        "moves between files to the first gradient": moves,
        "of these, each counted once": once,
        "files visited to the first gradient": files,
    }


def entrance(tree: Path, repeats: int) -> dict[str, float]:
    """Returns the CPU seconds of the ways into a tree."""
    python, script = sys.executable, "scripts/train.py"
    ways = {"import medfed": [python, "-c", "import medfed"]}
    ways |= {f"a command with {kind}": [python, script, *o] for kind, o in FAILING.items()}
    for name, libraries in LIBRARIES_OF.items():
        ways[f"libraries of {name}"] = [python, "-c", LIBRARIES.format(names=libraries)]
    alone = LIBRARIES.format(names=LIBRARIES_OF["train"])
    ways["libraries of train, no collection"] = [python, "-c", "import gc; gc.disable()" + alone]
    with tempfile.TemporaryDirectory() as folder:
        new = f"hydra.run.dir={folder}/${{now:%H-%M-%S-%f}}"  # each run has a folder of its own
        first = [python, "-c", FIRST_STEP, *QUIET, new]
        cpu_seconds(first, tree, 1)  # makes the generated cohort
        ways["train: the default run to its first step"] = first
        finished = finish(Path(folder), tree)
        ways["predict: a table of 20 patients"] = [python, "scripts/predict.py", *finished]
        pages = f"out={folder}/report", f"runs={folder}/runs", "figures=false"
        ways["report: a page on two runs"] = [python, "scripts/report.py", *pages]
        seconds = {name: cpu_seconds(command, tree, repeats) for name, command in ways.items()}
    for name in LIBRARIES_OF:
        (whole,) = (value for way, value in seconds.items() if way.startswith(f"{name}: "))
        seconds[f"{name} above its libraries"] = whole - seconds[f"libraries of {name}"]
    return seconds


def finish(folder: Path, tree: Path) -> tuple[str, ...]:
    """Trains two runs and exports a model; returns what a prediction by it is asked with."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    runs = [f"{folder}/runs/{method}" for method in ("local", "fedavg")]
    short = ("experiment=clinical_pfednet", "rounds=2", "local.steps=2", "pictures.format=none")
    commands = [
        ["train", *short, *QUIET, f"algorithm={Path(run).name}", f"hydra.run.dir={run}"]
        for run in runs
    ]
    commands.append(["export", f"run={runs[0]}", "client=hospital_0", f"out={folder}/bundles"])
    for name, *keys in commands:
        command = [sys.executable, f"scripts/{name}.py", *keys]
        subprocess.run(command, cwd=tree, env=env, capture_output=True, check=True)
    table = load_breast_cancer()
    rows = [",".join(table.feature_names), *(",".join(map(str, r)) for r in table.data[:20])]
    (folder / "patients.csv").write_text("\n".join(rows) + "\n")
    places = {"bundle": "bundles/hospital_0", "input": "patients.csv", "output": "risks.csv"}
    return (*(f"{key}={folder / place}" for key, place in places.items()), "overwrite=true")


def main() -> None:
    """Prints the figures of a tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--repeats", type=int, default=5, help="0: neither moves nor times")
    options = parser.parse_args()
    tree = options.tree.resolve()
    gc.disable()  # it would look through all syntax trees again and again, which all stay
    for name, count in structure(tree).items():
        print(f"{name:<48}{count:>10}")
    for name, count in reading(tree):
        print(f"{name:<58}{count:>6}")
    if options.repeats:
        for name, count in first_gradient(tree).items():
            print(f"{name:<48}{count:>10}")
        seconds = entrance(tree, options.repeats)
        for name, value in seconds.items():
            print(f"{name:<48}{value:>10.2f}")


if __name__ == "__main__":
    main()
