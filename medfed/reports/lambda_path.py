"""The path of personal models as the coupling grows, after Figure 2 of the pFedNet paper.

Runs of pFedNet that differ only in λ (``algorithm.strength``) give, after their last round, the
personal models Z(λ) and the coupling Σ_E ‖z_i − z_j‖_p, which at converged solutions falls as λ
grows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from medfed.config import build
from medfed.datamodules.tabular import TabularDataModule
from medfed.errors import CheckpointError
from medfed.federation.callbacks.checkpoint import last_whole
from medfed.reports.comparison import Comparison, Method
from medfed.reports.runs import Run
from medfed.reports.sweeps import sweeps

_STRENGTH = "algorithm.strength"
_SHORTEST = 3  # strengths that make a path
_SLACK = 1e-6  # relative: how far a solver's tolerance may lift the coupling


@dataclass(frozen=True)
class LambdaPath:
    """Personal models for growing λ.

    Attributes:
        strengths: (K,) λ, ascending.
        models: (K, N, d) personal models after the last round.
        coupling: (K,) Σ_E ‖z_i − z_j‖_p.
        scores: (K,) mean test metric of the selected round.
        metric: The metric's name.
        clients: N names.
        shares: (N,) share of positives among the training samples, or None where there is none.
        p: The norm.
    """

    strengths: NDArray[np.float64]
    models: NDArray[np.float64]
    coupling: NDArray[np.float64]
    scores: NDArray[np.float64]
    metric: str
    clients: tuple[str, ...]
    shares: NDArray[np.float64] | None
    p: float

    def components(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns all models in their first two principal components.

        Returns:
            (K, N, 2) coordinates, and the two shares of the variance.
        """
        count, clients, size = self.models.shape
        return principal_components(self.models.reshape(-1, size), (count, clients))

    def rises(self) -> list[tuple[float, float]]:
        """Returns the neighbouring λ between which the coupling rises; none if it falls."""
        return rising_steps(self.strengths, self.coupling)

    def spread(self) -> NDArray[np.float64]:
        """Returns (K,) largest distances of a model from the mean of the models."""
        centred = self.models - self.models.mean(1, keepdims=True)
        largest: NDArray[np.float64] = np.linalg.norm(centred, axis=2).max(1)
        return largest

    def is_consensus(self) -> bool:
        """Whether the largest λ has one model for all, to a thousandth of the first spread."""
        spread = self.spread()
        return bool(spread[-1] <= 1e-3 * spread[0])

    def describe(self) -> str:
        """Returns what the path shows, for the report."""
        rises = self.rises()
        first, last = self.coupling[0], self.coupling[-1]
        if rises:
            where = ", ".join(f"{a:g} to {b:g}" for a, b in rises)
            fall = f"does not fall monotonically: it rises from λ = {where}"
        else:
            fall = "falls monotonically in this run"
        end = "all clients share one model" if self.is_consensus() else "the models still differ"
        return (
            f"λ path: after the last round Σ over edges of ‖z_i − z_j‖_{self.p:g} {fall} "
            f"({first:.4g} at λ = {self.strengths[0]:g}, {last:.4g} at λ = "
            f"{self.strengths[-1]:g}, where {end})."
        )

    def to_csv(self) -> str:
        """Returns a line per λ and client."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        fixed = ["strength", "client", "positive_share", "pc1", "pc2", "coupling"]
        writer.writerow([*fixed, f"mean_test_{self.metric}"])
        places, _ = self.components()
        for k, strength in enumerate(self.strengths.tolist()):
            for i, client in enumerate(self.clients):
                share = "" if self.shares is None else float(self.shares[i])
                numbers = [*places[k, i].tolist(), float(self.coupling[k]), float(self.scores[k])]
                writer.writerow([strength, client, share, *numbers])
        return text.getvalue()


def lambda_path(comparison: Comparison) -> LambdaPath | None:
    """Reads the longest λ path among the methods, or returns None where no three λ are.

    Args:
        comparison: Methods; of several seeds the first is drawn.

    Raises:
        CheckpointError: If a run's last checkpoint is missing or torn.
    """
    methods = _sweep(comparison.methods)
    if len(methods) < _SHORTEST:
        return None
    runs = [m.runs[0] for m in methods]
    solutions = [read_solution(run) for run in runs]
    return LambdaPath(
        np.array([float(r.config.algorithm.strength) for r in runs]),
        np.stack([z.numpy() for z, _ in solutions]),
        np.array([c for _, c in solutions]),
        np.array([m.federation(comparison.metric, "mean").value for m in methods]),
        comparison.metric,
        comparison.clients,
        positive_shares(runs[0]),
        float(runs[0].config.algorithm.p),
    )


def read_solution(run: Run) -> tuple[torch.Tensor, float]:
    """Returns the personal models (N, d) after the last round and their coupling.

    Args:
        run: A finished run of pFedNet.

    Raises:
        CheckpointError: If its last checkpoint is missing or torn.
    """
    path = last_whole(run.folder / "checkpoints")
    if path is None:
        raise CheckpointError(f"{run.folder}/checkpoints holds no checkpoint; repeat the run.")
    server = torch.load(path, weights_only=True, map_location="cpu")["federation"]["server"]
    z = torch.cat([t.flatten(1).double() for t in server["personal"].values()], dim=1)
    start, end = server["graph"]["edges"].T
    apart = torch.linalg.vector_norm(z[start] - z[end], ord=float(run.config.algorithm.p), dim=1)
    return z, float(apart.sum())


def positive_shares(run: Run) -> NDArray[np.float64] | None:
    """Returns each client's share of the last class, for tables with two classes."""
    if not str(run.config.data._target_).endswith(TabularDataModule.__name__):
        return None
    data: Any = build(run.config.data)
    data.setup()
    counts = np.stack([c.label_counts.numpy() for c in data.clients.values()]).astype(float)
    if counts.shape[1] != 2:
        return None
    shares: NDArray[np.float64] = counts[:, 1] / counts.sum(1)
    return shares


def principal_components(
    points: NDArray[np.float64], shape: tuple[int, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Projects points on their first two principal components.

    Args:
        points: (n, d).
        shape: How the n points are arranged.

    Returns:
        ``(*shape, 2)`` coordinates and the two components' shares of the variance.

    Example:
        >>> line = np.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
        >>> places, shares = principal_components(line, (3,))
        >>> np.abs(places[:, 0]).round(6).tolist(), shares.round(6).tolist()
        ([5.0, 0.0, 5.0], [1.0, 0.0])
    """
    centred = points - points.mean(0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    padded = np.zeros((len(points), 2))
    padded[:, : min(2, len(values))] = (left * values)[:, :2]
    variance = np.zeros(2)
    variance[: min(2, len(values))] = values[:2] ** 2
    return padded.reshape(*shape, 2), variance / max(float((values**2).sum()), 1e-300)


def rising_steps(
    strengths: Sequence[float] | NDArray[np.float64],
    coupling: Sequence[float] | NDArray[np.float64],
) -> list[tuple[float, float]]:
    """Returns the neighbouring strengths between which the coupling rises.

    Example:
        >>> rising_steps([0.0, 0.1, 1.0], [5.0, 2.0, 3.0])
        [(0.1, 1.0)]
    """
    slack = _SLACK * float(max(coupling))
    steps = zip(pairwise(strengths), pairwise(coupling), strict=True)
    return [(float(a), float(b)) for (a, b), (c, d) in steps if d > c + slack]


def _sweep(methods: Sequence[Method]) -> list[Method]:
    """Returns the largest group of pFedNet methods that differ only in λ, by growing λ."""
    pfednet = [m for m in methods if m.runs[0].summary["algorithm"] == "pfednet"]
    return next(iter(sweeps(pfednet, _STRENGTH)), [])
