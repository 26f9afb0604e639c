"""The clients of a federation on one rank or many: who holds whom, and what checkpoints hold.

Which client works on which rank, and the tasks of a round: the same number on every rank.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn

from medfed.common.errors import CheckpointError
from medfed.federation.budget import Passes
from medfed.federation.federation import Federation
from medfed.federation.lightning.collect import gather_named, rank, world_size

# How much longer than its best assignment a round must take before clients change ranks.
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


def assign(
    work: Mapping[str, float], ranks: int, owners: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Assigns clients to ranks so that all are done at about the same time.

    The longest work goes first, to whichever rank has the least so far. The longest rank then
    takes at most 4/3 of what the best assignment would (Graham: Bounds on multiprocessing timing
    anomalies, SIAM J. Appl. Math. 17(2), 1969). Clients of equal work are assigned in turn.

    Args:
        work: What each client's work costs.
        ranks: Number of ranks.
        owners: Where the clients are; ``work`` is in seconds then. They stay where they are unless
            the longest rank saves a tenth of its time, and :data:`SECONDS`.

    Example:
        >>> assign({"a": 1, "b": 1, "c": 1}, ranks=2)
        {'a': 0, 'b': 1, 'c': 0}
        >>> assign({"a": 1, "b": 2, "c": 3}, ranks=2, owners={"a": 0, "b": 1, "c": 0})
        {'a': 1, 'b': 1, 'c': 0}
    """
    order = sorted(work, key=lambda c: -work[c])
    loads, assigned = [0.0] * ranks, {}
    for client in order:
        assigned[client] = loads.index(min(loads))
        loads[assigned[client]] += work[client]
    if owners is not None:
        kept = [0.0] * ranks
        for client in order:
            kept[owners[client]] += work[client]
        if max(kept) <= max(WORTH_MOVING * max(loads), max(loads) + SECONDS):
            return {c: owners[c] for c in work}
    return {c: assigned[c] for c in work}


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


class ClientsOfRanks(pl.LightningModule):
    """Holds a federation of which each rank trains the clients that are assigned to it.

    Args:
        federation: All clients.

    Attributes:
        next_round: The round to come.
        owners: The rank of each client.
        seconds: What each client's last round took, on several ranks.
    """

    def __init__(self, federation: Federation) -> None:
        super().__init__()
        self.federation = federation
        self.next_round = 0
        self.owners: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._warm = False

    @property
    def owned(self) -> list[str]:
        """The clients that this rank trains and whose state it holds."""
        return self._share(self.federation.ids)

    def _share(self, clients: Iterable[str]) -> list[str]:
        if not self.owners:
            self.owners = assign(self._work(self.federation.ids), world_size())
        here = rank()
        return [c for c in clients if self.owners[c] == here]

    def _work(self, clients: Iterable[str]) -> dict[str, float]:
        """What a round of each client costs, as far as it is known; the same on every rank."""
        members = self.federation.clients
        expected = {c: members[c].expected_work for c in {*clients, *self.seconds}}
        expected_seconds = costs(expected, self.seconds)
        return {c: expected_seconds[c] for c in clients}

    def _reassign(self, cohort: Sequence[str]) -> None:
        """Has clients of a cohort move to ranks with less to do; a collective call."""
        if world_size() == 1 or not self.seconds:
            return
        mine = self._share(cohort)
        better = assign(self._work(cohort), world_size(), self.owners)
        moved = [c for c in cohort if better[c] != self.owners[c]]
        if moved:
            states = self._gather_states([c for c in mine if c in moved])
            steps, passes = self.gather_steps(), self.gather_passes()
            for client in moved:
                local = self.federation.clients[client]
                local.load_state_dict(states[client])
                local.steps_done, local.passes = steps[client], passes[client]
            self.owners |= better

    def _count_time(self) -> None:
        """Takes the times of a round for its clients' costs; in the first one libraries warm up."""
        if self._warm:
            self.seconds |= self._taken
        self._taken, self._warm = {}, True

    def gather_steps(self) -> dict[str, int]:
        """Returns the gradient steps of every client so far; a collective call."""
        clients = self.federation.clients
        own = {c: str(clients[c].steps_done).encode() for c in self.owned}
        return {c: int(n) for c, n in gather_named(own, self.device).items()}

    def gather_passes(self) -> dict[str, Passes]:
        """Returns the passes through the network of every client so far; a collective call."""
        clients = self.federation.clients
        own = {c: json.dumps(clients[c].passes).encode() for c in self.owned}
        return {c: Passes(*json.loads(n)) for c, n in gather_named(own, self.device).items()}

    def _gather_states(self, own: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Returns what clients keep, by default all of this rank and of all; a collective call.

        A rank's clients are saved together, so that what they share (the decoded shared part) is
        one tensor in the checkpoint and after resuming, too.
        """
        mine = self.owned if own is None else own
        states = {c: self.federation.clients[c].state_dict() for c in mine}
        if world_size() == 1:
            return states
        buffer = io.BytesIO()
        torch.save(states, buffer)
        gathered = gather_named({str(rank()): buffer.getvalue()}, self.device)
        return {c: state for data in gathered.values() for c, state in _load(data).items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the server, every client of every rank and the ledger; a collective call."""
        states = self._gather_states()
        steps, passes = self.gather_steps(), self.gather_passes()
        # The network holds whichever client came last: scratch, and not part of the result.
        checkpoint["state_dict"] = {}
        checkpoint["federation"] = {
            "algorithm": type(self.federation.algorithm).__name__,
            "next_round": self.next_round,
            "steps": {c: int(steps[c]) for c in self.federation.ids},
            "passes": {c: tuple(passes[c]) for c in self.federation.ids},
            "server": self.federation.server,
            "memory": self.federation.memory,
            "clients": {c: states[c] for c in self.federation.ids},
            "ledger": self.federation.ledger.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores what :meth:`on_save_checkpoint` saved.

        Raises:
            CheckpointError: If the checkpoint is of another algorithm or other clients, or training
                is to go on from one of a version that counted no passes.
        """
        saved = self.restore(checkpoint)
        if self.trainer.state.fn == TrainerFn.FITTING:
            if "passes" not in saved:
                raise CheckpointError(
                    "This checkpoint is of an older version, which did not count gradient passes; "
                    "finish the run with that version, or repeat it."
                )
            # A test of the selected round must not forget what later rounds cost.
            self.federation.ledger.load_state_dict(saved["ledger"])
            self.next_round = saved["next_round"]
            for client, local in self.federation.clients.items():
                local.steps_done = saved["steps"][client]
                local.passes = Passes(*saved["passes"][client])

    def restore(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Puts back the states of a checkpoint, without what training on needs; returns its record.

        Raises:
            CheckpointError: If the checkpoint is of another algorithm or other clients.
        """
        saved: dict[str, Any] | None = checkpoint.get("federation")
        federation = self.federation
        if saved is None:
            raise CheckpointError(
                "This checkpoint holds no federation; choose one of a medfed run."
            )
        name = type(federation.algorithm).__name__
        if saved["algorithm"] != name or list(saved["clients"]) != federation.ids:
            raise CheckpointError(
                f"This checkpoint is of {saved['algorithm']} with the clients "
                f"{', '.join(saved['clients'])}, the run is of {name} with "
                f"{', '.join(federation.ids)}."
            )
        federation.server, federation.memory = saved["server"], saved["memory"]
        for client, local in federation.clients.items():
            local.load_state_dict(saved["clients"][client])
        federation.to(self.device)
        return saved


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
