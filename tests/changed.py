"""Which tests a change can break, by the imports of the package and of the tests.

    make test-changed              # since the last commit
    make test-changed SINCE=main   # since a branch or commit

A test runs if its file has changed, or if it imports a file that has changed, directly or not.
Who composes configurations reaches whatever a configuration builds. What is no Python file counts
for all tests that read it: configurations for those that compose, documents for theirs.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
COMPOSER = "medfed.config.compose"
COMMANDS = "medfed.commands.main"
# A change of these can break any test.
EVERYTHING = ("pyproject.toml", "tests/conftest.py", "Makefile")
READERS = {
    "docs": ("tests/test_docs.py", "tests/test_evidence.py"),
    "README.md": ("tests/test_docs.py",),
    "examples": ("tests/test_examples.py",),
    "benchmarks": ("tests/test_benchmarks.py", "tests/test_evidence.py"),
}


def changed_files(since: str) -> list[str]:
    """Returns what differs from a commit, and what git does not know yet."""
    asked = (["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"])
    said = [subprocess.check_output(["git", *words], cwd=ROOT, text=True) for words in asked]
    return sorted({line for text in said for line in text.splitlines()})


def tests_of(changes: Iterable[str]) -> set[str] | None:
    """Returns the files of tests that these changes can break; None: all of them."""
    changes = list(changes)
    if any(path in EVERYTHING for path in changes):
        return None
    modules = {_module(path) for path in changes if path.startswith("medfed/")}
    if any(path.startswith(("configs/", "medfed/configs/")) for path in changes):
        modules.add(COMPOSER)
    helpers = {path for path in changes if path.startswith("tests/")}
    broken = set().union(*(_importers(module) for module in modules)) if modules else set()
    found = {_file(module) for module in broken if _file(module)}  # their doctests
    for path in map(str, sorted(p.relative_to(ROOT) for p in ROOT.glob("tests/**/*.py"))):
        files, imported = _reach(path)
        if helpers & files or broken & imported:
            found.add(path)
    for prefix, readers in READERS.items():
        if any(path == prefix or path.startswith(prefix + "/") for path in changes):
            found.update(readers)
    return {path for path in found if not path.startswith("tests/") or "test_" in path}


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("medfed", cache_dir=None)


@cache
def _importers(module: str) -> frozenset[str]:
    """A module and those that import it; where a configuration names one, the composer's, too."""
    if module not in _graph().modules:  # it is gone, or is no module
        return frozenset({module})
    found = {module, *_graph().find_downstream_modules(module)}
    if found & _built():
        found |= {COMPOSER, *_graph().find_downstream_modules(COMPOSER)}
    return frozenset(found)


@cache
def _built() -> frozenset[str]:
    """The modules of which a configuration names something."""
    named: set[str] = set()
    for path in (ROOT / "configs").glob("**/*.yaml"):
        for target in re.findall(r"_target_: *(medfed[\w.]*)", path.read_text()):
            while target and target not in _graph().modules:
                target = target.rpartition(".")[0]
            named.add(target)
    return frozenset(named)


@cache
def _reach(path: str) -> tuple[frozenset[str], frozenset[str]]:
    """The files of tests and the modules of medfed that a file of tests imports, with their own."""
    files, modules = {path}, set[str]()
    text = (ROOT / path).read_text()
    if re.search(r"scripts/|processes|subprocess|forks", text):
        modules.add(COMMANDS)  # it starts a command
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            helper = name.replace(".", "/") + ".py"
            if name.startswith("tests.") and helper not in files and (ROOT / helper).is_file():
                more, inner = _reach(helper)
                files |= more
                modules |= inner
            elif name in _graph().modules:
                modules.add(name)
    for folder in Path(path).parents:
        shared = str(folder / "conftest.py")
        if shared != path and shared != "tests/conftest.py" and (ROOT / shared).is_file():
            files.add(shared)
    return frozenset(files), frozenset(modules)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _file(module: str) -> str:
    for path in (module.replace(".", "/") + ".py", module.replace(".", "/") + "/__init__.py"):
        if (ROOT / path).is_file():
            return path
    return ""
