"""Memberships of a run with canonical models over its rounds, compared with planted groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medfed.datamodules.partitions.by_group import group_of
from medfed.standalone.errors import ConfigError
from medfed.standalone.files import csv_text

_LINKED = 300  # largest number of clients that a linkage orders

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Memberships:
    """Memberships of N clients in K canonical models."""

    history: Floats  # (R + 1, N, K), the start and every round
    clients: tuple[str, ...]  # n names, in order
    groups: tuple[int, ...] | None = None  # n planted groups, or ``None`` if none are known
    truth: Floats | None = None  # (N, K') true mixtures, or ``None``
    # Index in ``history`` of the round that validation selected, whose models are exported;
    # ``None``: the last one.
    selected: int | None = None

    @classmethod
    def of(
        cls,
        clients: Sequence[str],
        history: Tensor,
        best: int | None = None,
        mixtures: Mapping[str, Sequence[float]] | None = None,
    ) -> Memberships:
        """Takes over the memberships of a run, (R + 1, N, K)."""
        truth = np.array([mixtures[client] for client in clients]) if mixtures else None
        values = history.detach().cpu().double().numpy()
        selected = None if best is None else best + 1  # the start stands before the rounds
        return cls(values, tuple(clients), planted_groups(clients), truth, selected)

    @property
    def final(self) -> int:
        """The last round, counted from 1; 0 is the start."""
        return len(self.history) - 1

    @property
    def round(self) -> int:
        """The selected round, counted from 1; 0 is the start."""
        return self.final if self.selected is None else self.selected

    @property
    def rows(self) -> Floats:
        """(N, K) memberships of the selected round."""
        return np.asarray(self.history[self.round])

    def summary(self) -> dict[str, Any]:
        """Returns what ``summary.json`` says about the memberships."""
        summary: dict[str, Any] = {"models": self.rows.shape[1], **self._recovery(self.round)}
        if self.truth is not None:
            summary["half_l1_at_start"] = float(half_l1(self.history[0], self.truth).mean())
        if self.round != self.final:
            summary["last"] = self._recovery(self.final)
        return summary

    def _recovery(self, round: int) -> dict[str, Any]:
        rows = np.asarray(self.history[round])
        recovery: dict[str, Any] = {"round": round, "leading": len(set(rows.argmax(1).tolist()))}
        if self.groups is not None:
            from sklearn.metrics import adjusted_rand_score  # few runs need it

            recovery["planted_groups"] = len(set(self.groups))
            recovery["adjusted_rand"] = float(adjusted_rand_score(self.groups, rows.argmax(1)))
        if self.truth is not None:
            recovery["half_l1"] = float(half_l1(rows, self.truth).mean())
        return recovery

    def to_csv(self) -> str:
        """Returns a row per round and client; round 0 is the start."""
        return csv_text(
            ["round", "client", *(f"model_{k}" for k in range(self.rows.shape[1]))],
            (
                [round, client, *(f"{value:.6g}" for value in row)]
                for round, rows in enumerate(self.history)
                for client, row in zip(self.clients, rows, strict=True)
            ),
        )


def planted_groups(clients: Sequence[str]) -> tuple[int, ...] | None:
    """Reads the label groups from the clients' names; ``None`` unless every name has a group.

    Example:
        >>> planted_groups(["group_0_hospital_0", "group_1_hospital_0"])
        (0, 1)
        >>> planted_groups(["group_0_hospital_0", "Cleveland"]) is None
        True
    """
    try:
        return tuple(group_of(client) for client in clients)
    except ConfigError:
        return None


def leaf_order(rows: Floats) -> list[int]:
    """Orders clients (N, K) so that like memberships are neighbours: by an average linkage.

    A linkage of very many clients takes too long; they are ordered by their largest membership.

    Example:
        >>> leaf_order(np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]))
        [1, 2, 0]
    """
    if len(rows) < 2:
        return list(range(len(rows)))
    if len(rows) > _LINKED:
        return np.lexsort((-rows.max(1), rows.argmax(1))).tolist()  # type: ignore[no-any-return]
    from scipy.cluster.hierarchy import leaves_list, linkage  # only pictures need it

    tree = linkage(rows, "average", metric="cityblock", optimal_ordering=True)
    return [int(i) for i in leaves_list(tree)]


def matched(rows: Floats, truth: Floats) -> Floats:
    """Renumbers canonical models, whose order is arbitrary, to fit the true ones best.

    PPFL compares up to a permutation; linear assignment gives the best one. Returns the columns of
    `rows` (N, max(K, K')), those without a true one last.

    Example:
        >>> matched(np.array([[0.2, 0.8], [1.0, 0.0]]), np.array([[0.9, 0.1], [0.0, 1.0]])).tolist()
        [[0.8, 0.2], [0.0, 1.0]]
    """
    from scipy.optimize import linear_sum_assignment  # few runs need it

    width = max(rows.shape[1], truth.shape[1])
    wide, true = (np.pad(r, ((0, 0), (0, width - r.shape[1]))) for r in (rows, truth))
    cost = np.abs(true[:, :, None] - wide[:, None, :]).sum(0)
    return np.asarray(wide[:, linear_sum_assignment(cost)[1]])


def half_l1(rows: Floats, truth: Floats) -> Floats:
    """Half the L1 distance (N,) of memberships to true mixtures, in [0, 1]; see PPFL, Figure 11.

    One renumbering of models fits all clients best.

    Example:
        >>> half_l1(np.array([[0.0, 1.0]]), np.array([[0.75, 0.25]])).tolist()
        [0.25]
    """
    width = max(rows.shape[1], truth.shape[1])
    true = np.pad(truth, ((0, 0), (0, width - truth.shape[1])))
    return np.asarray(np.abs(matched(rows, truth) - true).sum(1) / 2)
