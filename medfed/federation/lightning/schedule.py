"""The tasks of a round on each rank: which client works in which phase, padded to equal length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """One client's work in one phase; a batch, in Lightning's terms.

    Attributes:
        round: The round's number.
        phase: The phase's name.
        client: The client, or ``None`` where a rank has nothing to do but must keep step.
        closes: Whether it is the last task of its phase on every rank.
    """

    round: int
    phase: str
    client: str | None
    closes: bool


def shard(clients: Sequence[str], rank: int, ranks: int) -> list[str]:
    """Returns the clients that a rank trains and whose state it holds.

    Example:
        >>> shard(["a", "b", "c"], rank=0, ranks=2)
        ['a', 'c']
    """
    return list(clients[rank::ranks])


def padded(
    chosen: Sequence[str], everyone: Sequence[str], rank: int, ranks: int
) -> list[str | None]:
    """Returns a rank's share of the chosen clients, padded to the longest share of any rank.

    Lightning synchronises at every batch, so that ranks with unequal numbers of tasks would wait
    for each other for ever.

    Example:
        >>> padded(["a", "b", "c"], ["a", "b", "c"], rank=1, ranks=2)
        ['b', None]
    """
    shares = [[c for c in shard(everyone, r, ranks) if c in set(chosen)] for r in range(ranks)]
    width = max(1, *(len(s) for s in shares))
    return [*shares[rank], *[None] * (width - len(shares[rank]))]


def tasks_of_round(
    round: int,
    phases: Sequence[str],
    cohort: Sequence[str],
    everyone: Sequence[str],
    rank: int = 0,
    ranks: int = 1,
) -> list[Task]:
    """Returns the tasks of one rank in one round.

    Args:
        round: The round's number.
        phases: The phases in order.
        cohort: The clients that take part.
        everyone: All clients, in the order by which they are dealt to ranks.
        rank: The rank.
        ranks: Number of ranks.

    Example:
        >>> [t.client for t in tasks_of_round(0, ["fit"], ["a", "c"], ["a", "b", "c"], 0, 2)]
        ['a', 'c']
        >>> [t.client for t in tasks_of_round(0, ["fit"], ["a", "c"], ["a", "b", "c"], 1, 2)]
        [None, None]
    """
    clients = padded(cohort, everyone, rank, ranks)
    last = len(clients) - 1
    return [Task(round, p, c, i == last) for p in phases for i, c in enumerate(clients)]


class RoundTasks:
    """An iterable of the next round's tasks, of which Lightning asks a new iterator per epoch.

    It has no length because a round may have other phases than the one before.

    Args:
        upcoming: Returns the tasks of the round that comes next.
    """

    def __init__(self, upcoming: Callable[[], Sequence[Task]]) -> None:
        self.upcoming = upcoming

    def __iter__(self) -> Iterator[Task]:
        """Yields the tasks of the round that comes next."""
        return iter(self.upcoming())


class EvaluationTasks:
    """One evaluation task per client; a list would be taken for several data loaders."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        """Yields the tasks."""
        return iter(self.tasks)
