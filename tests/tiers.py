"""Which tests are short, by the CPU seconds that each took.

    pytest --tier short               # what a newcomer waits for
    pytest --tier rest                # all others
    pytest --seconds tests/seconds.json   # measures every case, and writes which are short

A case is short if it took less than a limit, below which lie `SHARE` of all cases. A case that
stands for a promise of the README is marked ``promise``, and is short whatever it takes. A case
that was never measured is short, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("seconds.json")
SHARE = 0.94
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def long_ones(record: Path = RECORD) -> set[str]:
    """Returns the cases that are not short unless they stand for a promise."""
    measured = json.loads(record.read_text())
    return {case for case, seconds in measured["cases"].items() if seconds >= measured["limit"]}


def of_tier(items: list[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divides cases into those of a tier and the others, in their order."""
    late = long_ones()
    inside: list[pytest.Item] = []
    outside: list[pytest.Item] = []
    for item in items:
        short = item.nodeid not in late or item.get_closest_marker("promise") is not None
        (inside if short == (tier == "short") else outside).append(item)
    return inside, outside


def summary(cases: dict[str, float]) -> dict[str, object]:
    """Returns the limit, and the cases that took at least that long.

    Example:
        >>> summary({"a": 0.0, "b": 0.1, "c": 3.0})["cases"]
        {'c': 3.0}
    """
    ordered = sorted(cases.values())
    limit = max(0.05, ordered[min(int(SHARE * len(ordered)), len(ordered) - 1)])
    late = {case: round(cases[case], 2) for case in sorted(cases) if cases[case] >= limit}
    return {"limit": round(limit, 3), "all": len(cases), "cases": late}


class Stopwatch:
    """Measures the CPU seconds of every case, with the processes that it starts.

    Workers write a line per case; who started them adds the lines up at the end.
    """

    def __init__(self, record: Path) -> None:
        self.record = record
        self.lines = Path(f"{record}.{os.environ.get('PYTEST_XDIST_TESTRUNUID', 'alone')}.lines")
        self.before = cpu_seconds()

    def pytest_collection_finish(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        now = cpu_seconds()
        with self.lines.open("a") as file:
            file.write(json.dumps([item.nodeid, now - self.before]) + "\n")
        self.before = now
        return result  # type: ignore[return-value]


def write(record: Path, files: Iterable[Path]) -> None:
    """Writes the record from the lines of all workers, and removes these."""
    cases: dict[str, float] = {}
    for path in files:
        for line in path.read_text().splitlines():
            case, seconds = json.loads(line)
            cases[case] = max(seconds, cases.get(case, 0.0))
        path.unlink()
    record.write_text(json.dumps(summary(cases), indent=0) + "\n")


def cpu_seconds() -> float:
    """Returns the CPU time of this process, its children that ended, and those that live."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        number = int(path.parent.name)
        ticks[number] = sum(map(int, fields[11:15]))
        children.setdefault(int(fields[1]), []).append(number)
    if not ticks:  # no Linux: without the children that live
        return sum(os.times()[:4])
    total, waiting = 0, [os.getpid()]
    while waiting:
        number = waiting.pop()
        total += ticks.get(number, 0)
        waiting += children.get(number, [])
    return total / TICK
