"""The path of personal models as the coupling grows, after Figure 2 of the pFedNet paper.

Runs of pFedNet that differ only in λ (``algorithm.strength``) give, after their last round, the
personal models Z(λ) and the coupling Σ_E ‖z_i − z_j‖_p, which at converged solutions falls as λ
grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from medfed.common.errors import CheckpointError
from medfed.common.files import csv_text
from medfed.common.scores import label_of
from medfed.common.untrusted import read_checkpoint, reading
from medfed.config.compose import build
from medfed.records.folder import Run
from medfed.reports.charts import Look, Picture, curves, looks_in_order, panels
from medfed.reports.methods import Comparison, Finding, sweeps

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
_STRENGTH = "algorithm.strength"
_CAPTION = (
    "Personal models after the last round as the coupling λ grows, a path for each client with its "
    "share of positive samples; and the test metric of the selected round."
)
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

    strengths: Floats
    models: Floats
    coupling: Floats
    scores: Floats
    metric: str
    clients: tuple[str, ...]
    shares: tuple[float | None, ...]
    p: float

    def is_consensus(self) -> bool:
        """Whether the largest λ has one model for all, to a thousandth of the first spread."""
        centred = self.models - self.models.mean(1, keepdims=True)
        spread = np.linalg.norm(centred, axis=2).max(1)  # the largest distance from the mean
        return bool(spread[-1] <= 1e-3 * spread[0])

    def describe(self) -> str:
        """Returns what the path shows, for the report."""
        rises = rising_steps(self.strengths, self.coupling)
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
        places, _ = self.places()
        rows = []
        for k, strength in enumerate(self.strengths.tolist()):
            scores = [float(self.coupling[k]), float(self.scores[k])]
            for client, share, place in zip(
                self.clients, self.shares, places[k].tolist(), strict=True
            ):
                rows.append([strength, client, share, *place, *scores])
        head = ["strength", "client", "positive_share", "pc1", "pc2", "coupling"]
        return csv_text([*head, f"mean_test_{self.metric}"], rows)

    def places(self) -> tuple[Floats, Floats]:
        """Returns the models (K, N, 2) in two principal components, and the variance in each."""
        from sklearn.decomposition import PCA  # importing it takes half a second

        points = self.models.reshape(-1, self.models.shape[-1])
        plane = PCA(2).fit(points)
        places = plane.transform(points).reshape(*self.models.shape[:2], 2)
        return places, plane.explained_variance_ratio_

    def draw(self) -> Figure:
        """Draws the models in a plane, and coupling and metric against λ."""
        places, variance = self.places()
        names = [
            client if share is None else f"{client} {share:.0%}"
            for client, share in zip(self.clients, self.shares, strict=True)
        ]
        lines = {name: [(x, y) for x, y in places[:, n].tolist()] for n, name in enumerate(names)}
        first, last = f"{self.strengths[0]:g}", f"{self.strengths[-1]:g}"
        below = (
            f"first principal component ({variance[0]:.0%} of the variance), λ = {first} to {last}"
        )
        left = f"second component ({variance[1]:.0%})"
        against = {
            f"Σ over edges of ‖z_i − z_j‖_{self.p:g}, last round": self.coupling,
            f"test {label_of(self.metric)}, selected round": self.scores,
        }
        figure, (plane, *others) = panels(3)
        curves(lines, below, left, looks_in_order(names), axes=plane)
        for axes, (label, values) in zip(others, against.items(), strict=True):
            points = {"all": list(zip(self.strengths.tolist(), values.tolist(), strict=True))}
            curves(points, "λ (equal steps)", label, {"all": Look("c0")}, evenly=True, axes=axes)
        return figure


def lambda_path(comparison: Comparison) -> LambdaPath | None:
    """Reads the longest λ path among the methods, or returns None where no three λ are.

    Args:
        comparison: The methods; the path has the first seed of each.

    Raises:
        CheckpointError: If a run's last checkpoint is missing or torn.
    """
    pfednet = [m for m in comparison.methods if m.algorithm == "pfednet"]
    methods = next(iter(sweeps(pfednet, _STRENGTH)), [])
    if len(methods) < _SHORTEST:
        return None
    runs = [m.runs[0] for m in methods]
    solutions = [read_solution(run) for run in runs]
    return LambdaPath(
        np.array([float(m.setting(_STRENGTH)) for m in methods]),
        np.stack([z.numpy() for z, _ in solutions]),
        np.array([c for _, c in solutions]),
        np.array([m.score(comparison.metric).value for m in methods]),
        comparison.metric,
        comparison.clients,
        positive_shares(runs[0], comparison.clients),
        float(runs[0].config.algorithm.p),
    )


def find(comparison: Comparison) -> Finding:
    """Finds how personal models draw together as λ grows."""
    path = lambda_path(comparison)
    if path is None:
        return Finding()
    name, picture = "lambda_path", Picture(path.draw(), _CAPTION)
    return Finding([path.describe()], {name: path.to_csv()}, {name: picture})


def read_solution(run: Run) -> tuple[Tensor, float]:
    """Returns the personal models (N, d) after the last round and their coupling.

    Args:
        run: A finished run of pFedNet.

    Raises:
        CheckpointError: If its last checkpoint is missing or torn.
    """
    # Imported here, as no other part of a comparison needs PyTorch or Lightning.
    import torch

    from medfed.federation.lightning.checkpoint import last_whole

    path = last_whole(run.checkpoints)
    if path is None:
        raise CheckpointError(f"{run.checkpoints} holds no checkpoint; repeat the run.")
    server = read_checkpoint(path)["federation"]["server"]
    with reading(path):
        z = torch.cat([t.flatten(1).double() for t in server["personal"].values()], dim=1)
        start, end = server["graph"]["edges"].T
        order = float(run.config.algorithm.p)
        apart = torch.linalg.vector_norm(z[start] - z[end], ord=order, dim=1)
    return z, float(apart.sum())


def positive_shares(run: Run, clients: Sequence[str]) -> tuple[float | None, ...]:
    """Returns each client's share of the last class, for tables with two classes."""
    unknown = (None,) * len(clients)
    if not str(run.config.data._target_).endswith("TabularDataModule"):
        return unknown
    data: Any = build(run.config.data)
    data.setup()
    counts = np.stack([c.label_counts.numpy() for c in data.clients.values()]).astype(float)
    return unknown if counts.shape[1] != 2 else tuple((counts[:, 1] / counts.sum(1)).tolist())


def rising_steps(strengths: Floats, coupling: Floats) -> list[tuple[float, float]]:
    """Returns the neighbouring strengths between which the coupling rises.

    Example:
        >>> rising_steps(np.array([0.0, 0.1, 1.0]), np.array([5.0, 2.0, 3.0]))
        [(0.1, 1.0)]
    """
    slack = _SLACK * coupling.max()
    steps = zip(pairwise(strengths), pairwise(coupling), strict=True)
    return [(float(a), float(b)) for (a, b), (c, d) in steps if d > c + slack]
