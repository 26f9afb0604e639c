"""How many patients must stand behind a statistic that leaves a client.

A sketch of one row is that row, a minimum is one patient's value, and a median of three values is
one, too. Across hospitals a statistic of too few patients is refused; a simulation says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LEAST = 20  # patients behind any statistic
TIMES = 5  # patients for each number or row of a statistic
CATEGORY = 5  # patients of a client behind the name of a category; the others have none in common.


def divided(counts: Mapping[str, int], least: int) -> dict[str, int | None]:
    """Withholds the counts of few patients, and a second one from which the only one follows.

    Example:
        >>> divided({"train": 60, "val": 3, "test": 20}, least=5)
        {'train': 60, 'val': None, 'test': None}
        >>> divided({"train": 60, "val": 0, "test": 20}, least=5)
        {'train': 60, 'val': 0, 'test': 20}
    """
    hidden = [name for name, count in counts.items() if 0 < count < least]
    if len(hidden) == 1:
        others = [name for name, count in counts.items() if count and name not in hidden]
        hidden += sorted(others, key=lambda name: counts[name])[:1]
    return {name: None if name in hidden else count for name, count in counts.items()}


@dataclass(frozen=True)
class Statistic:
    """A statistic of a client's patients, other than weights and gradients.

    Example:
        >>> Statistic("va", "a sketch", "algorithm.graph.sketch_size", 8, 30).too_few()
        'At va, too few patients stand behind a sketch (algorithm.graph.sketch_size): 30 of at least 40.'
        >>> Statistic("va", "a sketch", "algorithm.graph.sketch_size", 4, 30).too_few()
        >>> Statistic("va", "a mean", "data.scaling", 1, 30).too_few(least=50)
        'At va, too few patients stand behind a mean (data.scaling): 30 of at least 50.'
    """  # noqa: E501

    client: str
    what: str  # its words
    key: str  # the keys that decide it
    size: int  # the numbers, rows or classes that are computed from the same patients
    patients: int  # how many stand behind it

    @property
    def remedy(self) -> str:
        """What to do so that it is not sent."""
        pooled = self.key.startswith("data.scaling")
        return "set data.scaling=client" if pooled else f"change {self.key}"

    def too_few(self, least: int = 0) -> str | None:
        """Says that too few patients stand behind it; ``None`` if they are enough."""
        floor = max(LEAST, least, TIMES * self.size)
        if self.patients >= floor:
            return None
        of = f"{self.what} ({self.key}): {self.patients} of at least {floor}."
        return f"At {self.client}, too few patients stand behind {of}"


def remark(statistics: Iterable[Statistic]) -> list[str]:
    """Returns the line of a simulation whose statistics hospitals would refuse; none if all pass.

    Example:
        >>> remark([Statistic("va", "a mean", "data.scaling", 1, 3)] * 3)
        ['Hospitals would refuse this run: at va, too few patients stand behind a mean \
(data.scaling): 3 of at least 20; and 2 more such statistics.']
    """
    lines = [line for statistic in statistics if (line := statistic.too_few())]
    more = f"; and {len(lines) - 1} more such statistics." if len(lines) > 1 else "."
    return [f"Hospitals would refuse this run: a{lines[0][1:-1]}{more}"] if lines else []
