"""Files from elsewhere: read whole, and checked for what they must hold before they are used."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfed.common.errors import CheckpointError, MedfedError, first_line
from medfed.common.files import original
from medfed.common.strict_json import read_strict_json

if TYPE_CHECKING:
    from torch import Tensor

ANY = "*"
NUMBER = (int, float)
_DEPTH = 64  # of nested YAML; no configuration comes near


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong while a file is read into one sentence.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is missing, torn, or holds something else.

    Example:
        >>> with reading(Path("run/summary.json")):
        ...     float("x")
        Traceback (most recent call last):
        ...
        medfed.common.errors.CheckpointError: run/summary.json cannot be read (could not convert \
string to float: 'x'); copy it again or repeat the run.
    """
    try:
        yield
    except MedfedError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing; repeat the run (an older version may not have written it), or "
            "copy it again."
        ) from error
    except Exception as error:  # whatever parsers raise, from RecursionError to zlib's
        # A YAML error names its place, this file, at length.
        why = getattr(error, "problem", None) or first_line(error)
        raise CheckpointError(
            f"{path} cannot be read ({why!s:.200}); copy it again or repeat the run."
        ) from error


def misfit(content: Any, shape: Any, place: str = "it") -> str | None:
    """Says where content is not of a shape.

    Args:
        content: What JSON or YAML gave.
        shape: A type, or several of which one will do; ``[shape]`` for a list; a mapping from names
            that must be there, or from :data:`ANY` for all names, to shapes.
        place: What the content is called.

    Returns:
        What is wrong, or ``None``.

    Example:
        >>> shape = {"rounds": int, "clients": {ANY: {ANY: NUMBER}}}
        >>> misfit({"rounds": 3, "clients": {"a": {"dice": 0.5}}}, shape)
        >>> misfit({"rounds": 3, "clients": {"a": {"dice": "0.5"}}}, shape)
        "clients.a.dice is '0.5'"
        >>> misfit([], shape), misfit({"rounds": 3}, shape)
        ('it is a list', 'clients is missing')
    """
    if isinstance(shape, Mapping):
        if not isinstance(content, Mapping):
            return f"{place} is {_told(content)}"
        for name, inner in shape.items():
            if name != ANY and name not in content:
                return f"{name if place == 'it' else f'{place}.{name}'} is missing"
            for key in content if name == ANY else [name]:
                below = str(key) if place == "it" else f"{place}.{key}"
                wrong = misfit(content[key], inner, below) if isinstance(key, str) else below
                if wrong:
                    return wrong
        return None
    if isinstance(shape, list):
        if not isinstance(content, list):
            return f"{place} is {_told(content)}"
        found = (misfit(c, shape[0], f"{place}[{i}]") for i, c in enumerate(content))
        return next((f for f in found if f), None)
    is_bool_by_chance = isinstance(content, bool) and shape is not bool
    return (
        None
        if isinstance(content, shape) and not is_bool_by_chance
        else (f"{place} is {_told(content)}")
    )


def _told(content: object) -> str:
    kinds = {list: "a list", dict: "a mapping", type(None): "empty"}
    return kinds.get(type(content), f"{content!r:.60}")


def read_json(path: Path, shape: Any = None) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping.

    Args:
        path: The file.
        shape: What it must hold; see :func:`misfit`.

    Raises:
        CheckpointError: If it is missing, torn, or of another shape.
    """
    with reading(path):
        content = read_strict_json(path, finite=False)  # a metric may be NaN
        _check(path, content, shape)
    return dict(content)


def read_yaml(path: Path, shape: Any = None) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping of plain values, as a program wrote it.

    Aliases, which can unfold without end, depth that no program writes, and tags are refused.

    Args:
        path: The file.
        shape: What it must hold; see :func:`misfit`.

    Raises:
        CheckpointError: If it is missing, torn, or of another shape.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf._utils import get_yaml_loader

    with reading(path):
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it refers to parts of itself")
            if depth > _DEPTH:
                raise ValueError(f"it is nested more than {_DEPTH} deep")
        content = yaml.load(text, Loader=get_yaml_loader())  # a SafeLoader
        _check(path, content, shape)
    return dict(content)


def _check(path: Path, content: Any, shape: Any) -> None:
    if wrong := misfit(content, {} if shape is None else shape):
        raise CheckpointError(
            f"{path} does not hold what a run writes ({wrong}); copy it again or repeat the run."
        )


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Reads a CSV file with a header; every row is whole.

    Args:
        path: The file.
        columns: Columns that must be there.

    Raises:
        CheckpointError: If it is missing or torn, or lacks a column.
    """
    with reading(path):
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, strict=True)
            if lacking := [c for c in columns if c not in (table.fieldnames or ())]:
                raise ValueError(f"it has no column {lacking[0]}")
            rows = list(table)
        for number, row in enumerate(rows, 2):
            if None in row or None in row.values():
                raise ValueError(f"row {number} is not whole")
    return [{column: original(cell) for column, cell in row.items()} for row in rows]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file of weights.

    Raises:
        CheckpointError: If it is missing or torn, or holds what no model can use: NaN or infinity.
    """
    from safetensors.torch import load_file

    from medfed.common.tensors import first_non_finite

    with reading(path):
        tensors: dict[str, Tensor] = load_file(path)
    if (name := first_non_finite(tensors)) is not None:
        raise CheckpointError(
            f"{path} holds NaN or infinity in {name}: the training failed, or the file is damaged; "
            "copy it again or repeat the run."
        )
    return tensors


def read_checkpoint(path: Path, **how: Any) -> Any:
    """Reads a file of PyTorch's; no code in it is ever run.

    Args:
        path: The file.
        how: Further arguments of ``torch.load``.

    Raises:
        CheckpointError: If it is missing or torn, or would run code.
    """
    import torch

    with reading(path):
        return torch.load(path, **{"map_location": "cpu", **how, "weights_only": True})
