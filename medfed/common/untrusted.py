"""Reads files from outside, and checks their content before it is used."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from medfed.common.schemas import fit, parse_json
from medfed.standalone.errors import CheckpointError, MedfedError, first_line
from medfed.standalone.files import original, refuse_special

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_USUAL = "copy it again or repeat the run"
_DEPTH = 64  # deepest nesting of YAML, far beyond any configuration


@contextmanager
def reading(path: Path, what_to_do: str = "") -> Iterator[None]:
    """Turns any error while a file is read into one sentence.

    Example:
        >>> with reading(Path("run/summary.json")):
        ...     float("x")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.CheckpointError: run/summary.json cannot be read (could not \
convert string to float: 'x'); copy it again or repeat the run.
    """
    refuse_special(path)
    try:
        yield
    except MedfedError:
        raise
    except FileNotFoundError as error:
        usual = "repeat the run (an older version may not have written it), or copy it again"
        raise CheckpointError(f"{path} is missing; {what_to_do or usual}.") from error
    except Exception as error:  # parsers raise anything, from RecursionError to zlib's
        # A YAML error also names this source file, at length; a codec's error says no more.
        why = getattr(error, "problem", None) or first_line(error)
        if (mark := getattr(error, "problem_mark", None)) is not None:
            why = f"line {mark.line + 1}: {why}"
        elif isinstance(error, UnicodeDecodeError):
            why = "it is no UTF-8"
        then = what_to_do or _USUAL
        raise CheckpointError(f"{path} cannot be read ({why!s:.200}); {then}.") from error


def read_json(path: Path, kind: type[T] = dict[str, Any], what_to_do: str = "") -> T:  # type: ignore[assignment]
    """Reads a JSON file as a type; `what_to_do`: where it cannot be read."""
    with reading(path, what_to_do):
        content: Any = parse_json(path, finite=False)  # a metric may be NaN
        return _fitted(path, content, kind, what_to_do)


def read_yaml(path: Path, kind: Any = dict[str, Any], what_to_do: str = "") -> dict[str, Any]:
    """Reads a YAML file with a mapping of plain values.

    `what_to_do`: with a file that a person has written, and that cannot be read.
    """
    # It refuses aliases, which can expand without end, extreme nesting, and tags.
    import yaml  # type: ignore[import-untyped]

    loader = _yaml_loader()
    with reading(path, what_to_do):
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it refers to parts of itself")
            if depth > _DEPTH:
                raise ValueError(f"it is nested more than {_DEPTH} deep")
        content = yaml.load(text, Loader=loader)
        if what_to_do and not isinstance(content, dict):
            raise ValueError("it has no lines of a key, a colon, a space and a value")
        _fitted(path, content, kind)
        return dict(content)


@cache
def _yaml_loader() -> Any:
    """OmegaConf's SafeLoader; by libyaml, if PyYAML has it, ten times as fast."""
    import yaml
    from omegaconf._utils import get_yaml_loader

    safe = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return safe

    class Loader(yaml.cyaml.CParser, safe):  # type: ignore[misc, name-defined, valid-type]
        def __init__(self, text: str) -> None:
            yaml.cyaml.CParser.__init__(self, text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


def _fitted(path: Path, content: Any, kind: type[T], what_to_do: str = "") -> T:
    try:
        return fit(content, kind)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not as a run writes it ({error}); {what_to_do or _USUAL}."
        ) from error


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Reads a CSV file with a header and complete rows."""
    with reading(path):
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, strict=True)
            if lacking := [c for c in columns if c not in (table.fieldnames or ())]:
                raise ValueError(f"it has no column {lacking[0]}")
            rows = list(table)
        for number, row in enumerate(rows, 2):
            if None in row or None in row.values():
                raise ValueError(f"row {number} is incomplete")
    return [{column: original(cell) for column, cell in row.items()} for row in rows]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file of weights."""
    from safetensors.torch import load_file

    from medfed.common.tensors import first_non_finite

    with reading(path):
        tensors: dict[str, Tensor] = load_file(path)
    if (name := first_non_finite(tensors)) is not None:
        raise CheckpointError(
            f"{path} holds NaN or infinity in {name}: training failed, or the file is damaged; "
            "copy it again or repeat the run."
        )
    return tensors


def read_checkpoint(path: Path, **how: Any) -> Any:
    """Reads a file that PyTorch wrote, without ever running code in it."""
    import torch

    with reading(path):
        return torch.load(path, **{"map_location": "cpu", **how, "weights_only": True})
