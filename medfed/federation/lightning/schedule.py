"""Which client works on which rank, and the tasks of a round: the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

# How much longer than its best deal a round must take before clients change ranks.
WORTH_MOVING, SECONDS = 1.1, 0.2


class Task(NamedTuple):
    """Work of some clients in one phase; a batch, in Lightning's terms.

    Attributes:
        round: The round's number.
        phase: The phase's name.
        clients: The clients, in the order in which they begin; ``None``: whichever are this rank's.
        closes: Whether it is the last task of its phase on every rank.
    """

    round: int
    phase: str
    clients: tuple[str, ...] | None
    closes: bool


def costs(expected: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns what each client's work in a round costs: its time so far, or else in proportion.

    Args:
        expected: What is known beforehand, such as samples times steps; positive.
        seconds: How long clients took in the last round in which they took part.

    Example:
        >>> costs({"a": 10, "b": 20, "c": 40}, {"a": 1.0, "b": 2.0})
        {'a': 1.0, 'b': 2.0, 'c': 4.0}
    """
    if not seconds:
        return dict(expected)
    each = median(taken / expected[client] for client, taken in seconds.items())
    return {client: seconds.get(client, size * each) for client, size in expected.items()}


def deal(
    work: Mapping[str, float], ranks: int, owners: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Deals clients to ranks so that all are done at about the same time.

    The longest work goes first, to whichever rank has the least so far. The longest rank then
    takes at most 4/3 of what the best deal would (Graham: Bounds on multiprocessing timing
    anomalies, SIAM J. Appl. Math. 17(2), 1969). Clients of equal work are dealt in turn.

    Args:
        work: What each client's work costs.
        ranks: Number of ranks.
        owners: Where the clients are; ``work`` is in seconds then. They stay where they are unless
            the longest rank saves a tenth of its time, and :data:`SECONDS`.

    Example:
        >>> deal({"a": 1, "b": 1, "c": 1}, ranks=2)
        {'a': 0, 'b': 1, 'c': 0}
        >>> deal({"a": 1, "b": 2, "c": 3}, ranks=2, owners={"a": 0, "b": 1, "c": 0})
        {'a': 1, 'b': 1, 'c': 0}
    """
    order = sorted(work, key=lambda c: -work[c])
    loads, dealt = [0.0] * ranks, {}
    for client in order:
        dealt[client] = loads.index(min(loads))
        loads[dealt[client]] += work[client]
    if owners is not None:
        kept = [0.0] * ranks
        for client in order:
            kept[owners[client]] += work[client]
        if max(kept) <= max(WORTH_MOVING * max(loads), max(loads) + SECONDS):
            return {c: owners[c] for c in work}
    return {c: dealt[c] for c in work}


def tasks_of_round(
    round: int, phases: Sequence[str], clients: Sequence[str] | None, together: int = 1
) -> list[Task]:
    """Returns the tasks of one rank in one round.

    Lightning waits for the first rank at every batch. So a rank of several has one task per phase,
    that of all its clients, and ranks only wait for each other where a phase closes.

    Args:
        round: The round's number.
        phases: The phases in order.
        clients: The clients that take part; ``None`` on a rank of several.
        together: How many clients a task has.

    Example:
        >>> [t.clients for t in tasks_of_round(0, ["fit"], ["a", "b", "c"], together=2)]
        [('a', 'b'), ('c',)]
        >>> [t.clients for t in tasks_of_round(0, ["fit", "tune"], None)]
        [None, None]
    """
    if clients is None:
        return [Task(round, phase, None, True) for phase in phases]
    groups = [tuple(clients[i : i + together]) for i in range(0, len(clients), together)] or [()]
    last = len(groups) - 1
    return [Task(round, p, group, i == last) for p in phases for i, group in enumerate(groups)]


class Tasks:
    """An iterable of the tasks that come next, of which Lightning asks a new iterator per epoch.

    Args:
        upcoming: Returns them: those of the next round, which may have other phases than the one
            before, or of an evaluation.
    """

    def __init__(self, upcoming: Callable[[], Sequence[Task]]) -> None:
        self.upcoming = upcoming

    def __iter__(self) -> Iterator[Task]:
        """Yields the tasks that come next."""
        return iter(self.upcoming())


class EvaluationTasks(Tasks):
    """Tasks whose number does not change; a list would be taken for several data loaders."""

    def __len__(self) -> int:
        return len(self.upcoming())
