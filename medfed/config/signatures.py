"""What constructors accept, read from their source: nothing is imported, so a mistake costs little.

``torch.optim.SGD`` is found by following the files of its package, dataclasses by their fields,
classes by ``__init__``, both with what they inherit. An annotation that is not made of plain types
tells nothing; the constructor itself will judge the value.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from medfed.common.errors import ConfigError, DataError, did_you_mean

PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
# medfed.common.files.ExistingPath, which is text to everybody else.
EXISTING_PATH = "ExistingPath"


_WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


class Accepts(NamedTuple):
    """What an argument may be.

    Attributes:
        kinds: Plain types.
        existing: Whether text names a file or folder that must be there.
    """

    kinds: frozenset[type]
    existing: bool = False


def check_types(node: DictConfig, paths: bool = False) -> None:
    """Compares plain values with the annotations of the constructors that will receive them.

    Args:
        node: Any node; those with ``_target_``, itself or below it, are checked.
        paths: Whether files and folders that must be there are looked for, too.

    Raises:
        ConfigError: If a value is of another type; the key is named.
        DataError: If it names a file or folder that must be there and is not.

    Example:
        >>> node = {"_target_": "medfed.federation.cohort.Cohort", "fraction": "half"}
        >>> check_types(OmegaConf.create({"cohort": node}))
        Traceback (most recent call last):
        ...
        medfed.common.errors.ConfigError: cohort.fraction must be a number, not 'half'.
    """
    hints = accepted(str(node["_target_"])) if "_target_" in node else {}
    for key in node:
        if OmegaConf.is_interpolation(node, str(key)):
            continue  # checked where it is defined
        value = node[key]
        if isinstance(value, DictConfig):
            check_types(value, paths)
        elif (hint := hints.get(str(key))) is not None:
            where = node._get_full_key(str(key))
            if not _is_any_of(value, hint.kinds):
                words = " or ".join(word for kind, word in _WORDS.items() if kind in hint.kinds)
                raise ConfigError(f"{where} must be {words}, not {value!r}.")
            if paths and hint.existing and isinstance(value, str):
                check_exists(where, value)


def check_exists(key: str, value: str) -> None:
    """Checks that a file or folder of the user's is there.

    Raises:
        DataError: If not.

    Example:
        >>> check_exists("data.path", "/no/such/folder")
        Traceback (most recent call last):
        ...
        medfed.common.errors.DataError: /no/such/folder does not exist; set data.path to a file or \
folder that is there.
    """
    path = Path(value).expanduser()
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"{value} does not exist{did_you_mean(path.name, beside)}; set {key} to a file or "
            "folder that is there."
        )


def _is_any_of(value: object, kinds: frozenset[type]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, tuple(kinds)) or (isinstance(value, int) and float in kinds)


def accepted(target: str) -> dict[str, Accepts]:
    """Returns what the arguments of a constructor or function may be, where that is plain.

    Args:
        target: Its dotted name.

    Example:
        >>> accepted("medfed.federation.cohort.Cohort")["fraction"].kinds == {float}
        True
        >>> accepted("no.such.thing")
        {}
    """
    found = _definition(*_split(target))
    if found is None:
        return {}
    arguments = {}
    for name, annotation in _arguments(*found):
        if (accepts := _accepts(annotation)) is not None:
            arguments[name] = accepts
    return arguments


def _accepts(annotation: ast.expr | None) -> Accepts | None:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if sides := [_accepts(side) for side in _sides(annotation)]:
        known = [side for side in sides if side is not None]
        if len(known) < len(sides):
            return None
        kinds = frozenset[type]().union(*(side.kinds for side in known))
        return Accepts(kinds, any(side.existing for side in known))
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return Accepts(frozenset({type(None)}))
    if isinstance(annotation, ast.Name) and annotation.id in PLAIN:
        return Accepts(frozenset({PLAIN[annotation.id]}))
    if isinstance(annotation, ast.Name) and annotation.id == EXISTING_PATH:
        return Accepts(frozenset({str}), existing=True)
    # No value of a configuration is a tensor.
    is_tensor = isinstance(annotation, ast.Name) and annotation.id == "Tensor"
    return Accepts(frozenset()) if is_tensor else None


def _sides(annotation: ast.expr | None) -> list[ast.expr]:
    """Returns the members of a union, however it is written; none of anything else."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [annotation.left, annotation.right]
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        inside = annotation.slice
        if annotation.value.id == "Union" and isinstance(inside, ast.Tuple):
            return inside.elts
        if annotation.value.id == "Optional":
            return [inside, ast.Constant(None)]
    return []


class _Module(NamedTuple):
    """A source file and what it calls its own."""

    name: str
    is_package: bool
    definitions: dict[str, ast.ClassDef | ast.FunctionDef]
    imports: dict[str, tuple[str, str]]


Definition = tuple[_Module, ast.ClassDef | ast.FunctionDef]


def _split(target: str) -> tuple[str, str]:
    module, _, name = target.rpartition(".")
    return module, name


def _definition(module: str, name: str) -> Definition | None:
    """Finds a class or function, also where its module only hands it on."""
    for _ in range(8):
        source = _read(module)
        if source is None:
            return None
        if name in source.definitions:
            return source, source.definitions[name]
        if name not in source.imports:
            return None
        module, name = source.imports[name]
    return None


def _arguments(source: _Module, node: ast.ClassDef | ast.FunctionDef) -> Iterator[Argument]:
    """Yields arguments with their annotations, those of base classes first."""
    if isinstance(node, ast.FunctionDef):
        yield from _of_function(node)
        return
    own = next(
        (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if own is None or own.args.kwarg is not None:
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base  # of a generic class
            if isinstance(base, ast.Name):
                found = _definition(source.name, base.id)
                if found is not None:
                    yield from _arguments(*found)
    if own is not None:
        yield from _of_function(own)
    elif _is_dataclass(node):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, field.annotation


Argument = tuple[str, ast.expr | None]


def _of_function(node: ast.FunctionDef) -> Iterator[Argument]:
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        yield argument.arg, argument.annotation


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


@lru_cache(maxsize=256)
def _read(module: str) -> _Module | None:
    path = _file(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    is_package = path.name == "__init__.py"
    definitions, imports = {}, {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, is_package, node)
            for alias in node.names:
                imports[alias.asname or alias.name] = (origin, alias.name)
    return _Module(module, is_package, definitions, imports)


def _origin(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = module.split(".") if is_package else module.split(".")[:-1]
    here = here[: len(here) - node.level + 1]
    return ".".join([*here, *([node.module] if node.module else [])])


def _file(module: str) -> Path | None:
    """Returns the file of a module; only the name of its package is looked up."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
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
