"""The house in numbers: files, lines, import levels, and what it costs to come in.

    python benchmarks/house.py                        # this tree
    python benchmarks/house.py --tree OTHER_CLONE     # another one, by the same rules

A module's level is one above the highest that it imports at the top of its file. A code line is no
blank line, comment or docstring. Times are CPU seconds of whole processes, the least of some.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import resource
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

import networkx as nx

FAILING = {
    "an unknown key": ["roundz=3"],
    "an unknown option": ["algorithm=fedavgg"],
    "a value of another type": ["local.steps=many"],
    "a path that is not there": ["data.path=/no/such/folder"],
    "a value that the algorithm refuses": ["algorithm.strength=-1"],
}
# Runs a script up to the first backward pass, where a federation begins to train.
FIRST_STEP = """
import os, resource, runpy, sys
from medfed.federation.engine.gradients import Gradients
def stop(*_, **__):
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("CPU", used.ru_utime + used.ru_stime, flush=True)
    os._exit(0)
Gradients.add = stop
sys.argv = ["scripts/train.py", *sys.argv[1:]]
runpy.run_path("scripts/train.py", run_name="__main__")
"""
LIBRARIES = """
import os, resource
import torch, pytorch_lightning, monai
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


def imports(path: Path, known: dict[str, Path], top_only: bool) -> set[str]:
    """Returns the package's own modules that a file imports."""
    found = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
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


def code_lines(path: Path) -> int:
    """Returns the lines of a file that are no blank lines, comments or docstrings."""
    text = path.read_text(encoding="utf-8")
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and _is_text(first.value):
                told.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - told)


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
        "import levels": nx.dag_longest_path_length(acyclic) + 1,
        "modules that one neighbour reads": len(single),
        "cycles": sum(len(c) > 1 for c in nx.strongly_connected_components(everywhere)),
    }


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


def entrance(tree: Path, repeats: int) -> dict[str, float]:
    """Returns the CPU seconds of the ways into a tree."""
    python, script = sys.executable, "scripts/train.py"
    ways = {"import medfed": [python, "-c", "import medfed"]}
    ways |= {f"a command with {kind}": [python, script, *o] for kind, o in FAILING.items()}
    ways["libraries alone"] = [python, "-c", LIBRARIES]
    ways["libraries alone, no collection"] = [python, "-c", "import gc; gc.disable()" + LIBRARIES]
    with tempfile.TemporaryDirectory() as folder:
        new = f"hydra.run.dir={folder}/${{now:%H-%M-%S-%f}}"  # each run has a folder of its own
        quiet = ["progress=false", "logger=none", new]
        first = [python, "-c", FIRST_STEP, *quiet]
        cpu_seconds(first, tree, 1)  # makes the generated cohort
        ways["the default run to its first step"] = first
        return {name: cpu_seconds(command, tree, repeats) for name, command in ways.items()}


def main() -> None:
    """Prints the figures of a tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--repeats", type=int, default=5, help="0: no times")
    options = parser.parse_args()
    tree = options.tree.resolve()
    for name, count in structure(tree).items():
        print(f"{name:<48}{count:>10}")
    if options.repeats:
        seconds = entrance(tree, options.repeats)
        first, libraries = seconds["the default run to its first step"], seconds["libraries alone"]
        seconds["first step above the libraries"] = first - libraries
        for name, value in seconds.items():
            print(f"{name:<48}{value:>10.2f}")


if __name__ == "__main__":
    main()
