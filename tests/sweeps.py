"""Many values of one test that are one case, unless one asks for a row.

A run without ``-k`` has a case per test, which spares pytest thousands. With ``-k`` each row is a
case of its own, so ``pytest tests/functional/test_prox.py -k "test_unknown_norm and -1"`` runs one.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

ROW = "_row"


def sweep(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Is written like ``pytest.mark.parametrize``, for tables that pytest need not list.

    Every value is tested, and each that fails is reported with what it was. Each has a folder, an
    undoing and an output of its own where the test asks for ``tmp_path``, ``monkeypatch`` or
    ``capsys``; no other fixture is made anew, so that a test must leave it as it was.

    Args:
        names: What the values are called, as an argument or several.
        values: One for each time that the test runs.
    """
    table = list(values)
    keys = (names,) if isinstance(names, str) else tuple(names)

    def decorate(test: Callable) -> Callable:
        plain = getattr(test, "swept", test)
        inner = getattr(test, "rows", lambda: iter([{}]))

        def rows() -> Iterator[dict[str, Any]]:
            for value in table:
                row = (
                    {keys[0]: value}
                    if isinstance(names, str)
                    else dict(zip(keys, value, strict=True))
                )
                for rest in inner():
                    yield {**row, **rest}

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, _row: dict[str, Any] | None, **fixtures: Any) -> None:
            if _row is not None:
                plain(**fixtures, **_row)
                return
            for number, row in enumerate(rows()):
                own = dict(fixtures)
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    if "tmp_path" in own:
                        own["tmp_path"] = fixtures["tmp_path"] / str(number)
                        own["tmp_path"].mkdir()
                    if "capsys" in own:
                        own["capsys"].readouterr()
                    with subtests.test(**{k: str(v)[:200] for k, v in row.items()}):
                        plain(**own, **row)

        known = inspect.signature(test).parameters.values()
        asked = [p for p in known if p.name not in {*keys, "subtests", ROW}]
        ours = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("subtests", ROW)
        ]
        run.__signature__ = inspect.Signature([*ours, *asked])  # type: ignore[attr-defined]
        run.swept, run.rows = plain, rows  # type: ignore[attr-defined]
        return run

    return decorate


def list_rows(metafunc: pytest.Metafunc, alone: bool) -> None:
    """Gives a sweep its rows.

    Args:
        metafunc: A test.
        alone: Whether each row is a case, named by its values.
    """
    if ROW not in metafunc.fixturenames:
        return
    if not alone:
        metafunc.parametrize(ROW, [pytest.param(None, id=pytest.HIDDEN_PARAM)])
        return
    rows = list(metafunc.function.rows())
    metafunc.parametrize(ROW, rows, ids=["-".join(map(_word, row.values())) for row in rows])


def _word(value: Any) -> str:
    text = re.sub(r" at 0x\w+", "", getattr(value, "__name__", None) or str(value))
    return re.sub(r"[^\w.+\\/-]+", "_", text)[:40]
