"""Cells: single results, each stored under a hash of everything that it depends on.

A cell depends on the resolved configuration (except where and how a run works), on the data (their
files, or the configured parameters of generated data), on the code that computes it, and on the
versions of the libraries. A file is a whole cell or absent; a cell with another hash is stale, and
no report uses it.

The hash of the code ignores comments and docstrings.

It covers the syntax trees of the modules that a configuration names, and of all modules of this
package and of plugins that they import. So a method's cells become stale if the method or any code
that it uses has changed; cells of other methods do not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, Literal

from medfed.common.untrusted import read_json
from medfed.config.allowed import is_plugin
from medfed.config.description import RunDescription, written
from medfed.config.sections import targets
from medfed.records.folder import NOT_THE_EXPERIMENT
from medfed.standalone.errors import CheckpointError, DataError
from medfed.standalone.files import digest, json_text, write_json


def code_hash(targets: Iterable[str]) -> str:
    """Returns the hash of the code behind dotted names.

    Example:
        >>> code_hash(["medfed.personalize.ditto.Ditto"]) == code_hash(["medfed.personalize.apfl"])
        False
        >>> code_hash(["torch.optim.SGD"]) == code_hash([])
        True
    """
    return hash_of(frozenset(m for t in targets if (m := _module(t))))


@cache
def hash_of(modules: frozenset[str]) -> str:
    """Returns the hash of modules and of all that they import; computed once in a process."""
    waiting, hashes = list(modules), dict[str, str]()
    while waiting:
        module = waiting.pop()
        if module in hashes or (file := _module_file(module)) is None:
            continue
        hashes[module], imported = read_code(file)
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = (resolve_name(name, package) for name in imported)
        waiting += [m for name in names if (m := _module(name))]
    lines = [f"{module} {hashes[module]}" for module in sorted(hashes)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _module_file(module: str) -> Path | None:
    """Returns the file of a module without importing it: only its package is looked up."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    if not rest:
        return origin
    base = origin.parent.joinpath(*rest)
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((p for p in candidates if p.is_file()), None)


@cache
def _module(name: str) -> str:
    """The longest prefix of a dotted name that is a module of medfed or a plugin; else empty."""
    parts = name.split(".")
    if parts[0] != "medfed" and not is_plugin(name):
        return ""
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if _module_file(module) is not None:
            return module
    return ""


@cache
def read_code(file: Path) -> tuple[str, tuple[str, ...]]:
    """Returns a hash of a file's code, and its imports, relative ones as they are."""
    # A file is read once: what a process has loaded does not change while it is edited.
    tree = ast.parse(file.read_bytes())
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            imported |= {f"{start}{name.name}" for name in node.names}
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant(str())), *_] as body:
                del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(sorted(imported))


Stage = Literal["tune", "final"]
LIBRARIES = (
    *("torch", "pytorch-lightning", "monai", "numpy", "scipy", "scikit-learn", "numba"),
    *("nibabel", "SimpleITK", "pydicom", "pillow"),
)
ROOT = "medfed.run.cell"  # what runs a cell
# The data's content is part of a result; their path and cache are not.
_PLACES = ("data.path", "data.root", "data.cache", "threads", "source", "checkpoint")
_SAMPLE = 1 << 16  # bytes of each file that a fingerprint reads


@dataclass(frozen=True)
class _File:
    """The content of a cell's file."""

    name: str
    key: str
    result: dict[str, Any]
    sha256: str


@dataclass(frozen=True)
class Cell:
    """One result."""

    suite: str
    variant: str  # the task
    method: str
    # ``tune``: a setting is evaluated on validation patients, without reading test patients;
    # ``final``: the best setting is evaluated on test patients.
    stage: Stage
    trial: int  # the number of the setting; the first is the default
    split: int  # the number of the split of the patients
    config: Mapping[str, Any] = field(repr=False, compare=False)  # the configuration
    key: str  # the hash of everything that it depends on
    finetuned: bool = False  # whether every client then trains a copy of the model

    @property
    def place(self) -> str:
        """Its place without the key: its suite, variant, method and so on."""
        named = f"{self.stage}_trial_{self.trial}_split_{self.split}"
        return f"{self.suite}/{self.variant}/{self.method}/{named}"

    def file(self, out: Path) -> Path:
        """Returns its file."""
        return out / "cells" / f"{self.place}-{self.key[:16]}.json"


def cell_key(config: RunDescription, stage: Stage, finetuned: bool) -> tuple[str, dict[str, Any]]:
    """Returns the hash of everything that a cell depends on, and the configuration to send."""
    plain = config.values.plain()
    settings = _without(plain, (*NOT_THE_EXPERIMENT, *_PLACES))
    content = {
        "stage": stage,
        "finetuned": finetuned,
        "config": settings,
        "device": {key: plain["trainer"].get(key) for key in ("accelerator", "precision")},
        "data": _data_fingerprint(plain["data"].get("path")),
        "code": code_hash([ROOT, *(str(node["_target_"]) for _, node in targets(plain))]),
        "libraries": libraries(),
    }
    # Without facts of the data, which the runner fills in.
    return digest(content), written(config)


@cache
def libraries() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that compute results."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **{name: version(name) for name in LIBRARIES}}


@cache
def _data_fingerprint(path: str | None) -> str:
    """Returns a hash of data: of each file its name, size and beginning; empty without a path."""
    if path is None:
        return ""
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{path} does not exist; set data.path to the folder of the data.")
    total = hashlib.sha256()
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    for file in files:
        with file.open("rb") as opened:
            start = hashlib.sha256(opened.read(_SAMPLE)).hexdigest()
        name = file.relative_to(root) if file != root else file.name
        total.update(f"{name}\0{file.stat().st_size}\0{start}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def _without(node: Mapping[str, Any], out: tuple[str, ...], at: str = "") -> dict[str, Any]:
    rest = {k: v for k, v in node.items() if f"{at}{k}" not in out}
    inner = {k: _without(v, out, f"{at}{k}.") for k, v in rest.items() if isinstance(v, dict)}
    return rest | inner


def write_cell(out: Path, cell: Cell, result: Mapping[str, Any]) -> None:
    """Writes a finished cell, whole or not at all."""
    as_read = json.loads(json_text(result))  # lists for tuples, null for what is no number
    content = {"name": cell.place, "key": cell.key, "result": result}
    write_json(cell.file(out), {**content, "sha256": digest(as_read)})


def read_cell(out: Path, cell: Cell) -> dict[str, Any] | None:
    """Reads a cell."""
    path = cell.file(out)
    if not path.is_file():
        return None
    known = read_json(path, _File)
    if (known.name, known.key, digest(known.result)) != (cell.place, cell.key, known.sha256):
        raise CheckpointError(
            f"{path} has changed since the benchmark wrote it; remove it, and the benchmark runs "
            f"the cell {cell.place} again."
        )
    return known.result


def stale_cells(out: Path, cells: list[Cell]) -> Iterator[str]:
    """Yields the places of cells that exist only under another key."""
    for cell in cells:
        file = cell.file(out)
        if not file.is_file() and any(file.parent.glob(f"{Path(cell.place).name}-*.json")):
            yield cell.place
