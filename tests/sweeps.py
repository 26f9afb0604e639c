"""Many values of one test that are one case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


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
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
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
        asked = [p for p in known if p.name not in {*keys, "subtests"}]
        one = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([one, *asked])  # type: ignore[attr-defined]
        run.swept, run.rows = plain, rows  # type: ignore[attr-defined]
        return run

    return decorate
