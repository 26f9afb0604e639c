"""The path of personal models as the coupling grows, after Figure 2 of the pFedNet paper.

Runs of pFedNet that differ only in λ (``algorithm.strength``) give, after their last round, the
personal models Z(λ) and the coupling Σ_E ‖z_i − z_j‖_p, which at converged solutions falls as λ
grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from medfed.common.errors import CheckpointError
from medfed.common.files import csv_text
from medfed.common.scores import label_of
from medfed.common.untrusted import read_checkpoint, reading
from medfed.config.compose import build
from medfed.records.folder import Run
from medfed.reports.methods import Comparison, Finding, sweeps

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
_STRENGTH = "algorithm.strength"
_GROUPS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito
_GROUP_MARKERS = "os^D"
_CAPTION = (
    "Personal models as the coupling λ grows, after their last round; the metric is that of the "
    "selected round."
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
    shares: Floats | None
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
        shares = [""] * len(self.clients) if self.shares is None else self.shares.tolist()
        rows = []
        for k, strength in enumerate(self.strengths.tolist()):
            scores = [float(self.coupling[k]), float(self.scores[k])]
            for client, share, place in zip(self.clients, shares, places[k].tolist(), strict=True):
                rows.append([strength, client, share, *place, *scores])
        head = ["strength", "client", "positive_share", "pc1", "pc2", "coupling"]
        return csv_text([*head, f"mean_test_{self.metric}"], rows)

    def places(self) -> tuple[Floats, Floats]:
        """Returns the models (K, N, 2) in two principal components, and the variance in each."""
        from sklearn.decomposition import PCA  # late: half a second

        points = self.models.reshape(-1, self.models.shape[-1])
        found = PCA(2).fit(points)
        places = found.transform(points).reshape(*self.models.shape[:2], 2)
        return places, found.explained_variance_ratio_

    def draw(self) -> Figure:
        """Draws the models in a plane, and coupling and metric against λ."""
        places, variance = self.places()
        end = "consensus" if self.is_consensus() else "mean"
        label = f"{end} at λ = {self.strengths[-1]:g}"
        score = f"test {label_of(self.metric)},\nmean over clients"
        first, last = self.strengths[0], self.strengths[-1]
        figure = Figure(figsize=(13, 6.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1.55, 1))
        plane = figure.add_subplot(grid[:, 0])
        _paths(plane, self.strengths, places, self.shares)
        end = places[-1].mean(0)
        plane.plot(*end, "*", color="black", ms=17, mec="white", mew=1, label=label, zorder=6)
        plane.set(
            title=f"Personal models from λ = {first:g} (small) to {last:g} (large)",
            xlabel=f"first principal component ({variance[0]:.0%} of the variance)",
            ylabel=f"second principal component ({variance[1]:.0%})",
        )
        plane.legend(
            fontsize=9.5, loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False, ncols=5
        )
        plane.margins(0.08)
        plane.grid(alpha=0.25)
        norm = "∞" if np.isinf(self.p) else f"{self.p:g}"
        upper = figure.add_subplot(grid[0, 1])
        _against(upper, self.strengths, self.coupling, rf"$\sum_E\|z_i-z_j\|_{{{norm}}}$")
        upper.set_title("Distance of neighbours after the last round")
        lower = figure.add_subplot(grid[1, 1])
        _against(lower, self.strengths, self.scores, score)
        lower.set_title("Metric of the selected round")
        lower.set_xlabel("λ (equal spaces, not to scale)")
        return figure


def lambda_path(comparison: Comparison) -> LambdaPath | None:
    """Reads the longest λ path among the methods, or returns None where no three λ are.

    Args:
        comparison: Methods; of several seeds the first is drawn.

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
        positive_shares(runs[0]),
        float(runs[0].config.algorithm.p),
    )


def find(comparison: Comparison) -> Finding:
    """Finds how personal models draw together as λ grows."""
    path = lambda_path(comparison)
    if path is None:
        return Finding()
    name, told = "lambda_path", [path.describe()]
    return Finding(told, {name: path.to_csv()}, {name: path.draw()}, {name: _CAPTION})


def read_solution(run: Run) -> tuple[Tensor, float]:
    """Returns the personal models (N, d) after the last round and their coupling.

    Args:
        run: A finished run of pFedNet.

    Raises:
        CheckpointError: If its last checkpoint is missing or torn.
    """
    # Late: comparing runs needs neither PyTorch nor Lightning, except for this.
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


def positive_shares(run: Run) -> Floats | None:
    """Returns each client's share of the last class, for tables with two classes."""
    if not str(run.config.data._target_).endswith("TabularDataModule"):
        return None
    data: Any = build(run.config.data)
    data.setup()
    counts = np.stack([c.label_counts.numpy() for c in data.clients.values()]).astype(float)
    if counts.shape[1] != 2:
        return None
    shares: Floats = counts[:, 1] / counts.sum(1)
    return shares


def rising_steps(strengths: Floats, coupling: Floats) -> list[tuple[float, float]]:
    """Returns the neighbouring strengths between which the coupling rises.

    Example:
        >>> rising_steps(np.array([0.0, 0.1, 1.0]), np.array([5.0, 2.0, 3.0]))
        [(0.1, 1.0)]
    """
    slack = _SLACK * coupling.max()
    steps = zip(pairwise(strengths), pairwise(coupling), strict=True)
    return [(float(a), float(b)) for (a, b), (c, d) in steps if d > c + slack]


def _paths(axes: Any, strengths: Floats, places: Floats, shares: Floats | None) -> None:
    """Draws a line per client, small points for small λ, and writes λ along one of them."""
    count, clients, _ = places.shape
    groups = np.zeros(clients) if shares is None else np.round(shares, 2)
    distinct = sorted(set(groups.tolist()))
    sizes = np.linspace(14, 52, count)
    named: set[float] = set()
    for i in range(clients):
        k = distinct.index(groups[i])
        colour = (
            _GROUPS[k]
            if len(distinct) <= len(_GROUPS)
            else to_hex(colormaps["viridis"](0.92 * k / (len(distinct) - 1)))
        )
        x, y = places[:, i].T
        axes.plot(x, y, color=colour, lw=1.1, alpha=0.75)
        label = f"{groups[i]:.0%} positive" if shares is not None else "clients"
        marker = _GROUP_MARKERS[k % len(_GROUP_MARKERS)]
        axes.scatter(
            x,
            y,
            s=sizes,
            color=colour,
            marker=marker,
            edgecolor="white",
            lw=0.5,
            zorder=3,
            label=None if groups[i] in named else label,
        )
        named.add(float(groups[i]))
    _name_strengths(axes, strengths, places)


def _name_strengths(axes: Any, strengths: Floats, places: Floats) -> None:
    """Writes λ along the path that starts farthest from the end, above and below it in turn."""
    far = int(np.linalg.norm(places[0] - places[-1].mean(0), axis=1).argmax())
    extent = np.ptp(places.reshape(-1, 2), axis=0) * (0.14, 0.04)  # of a label
    taken: dict[bool, Floats] = {}
    for k, (strength, place) in enumerate(zip(strengths, places[:, far], strict=True)):
        above = k % 2 == 0
        last = taken.get(above)
        if k == len(strengths) - 1 or (last is not None and (abs(place - last) < extent).all()):
            continue  # the last one is in the legend
        axes.annotate(
            f"λ = {strength:g}",
            place,
            xytext=(-4, 8 if above else -8),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            zorder=5,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
        taken[above] = place


def _against(axes: Any, strengths: Floats, values: Floats, label: str) -> None:
    """Draws values over λ, equally spaced: 0 has no place on a logarithmic axis."""
    axes.plot(values, "o-", color="#0072B2", lw=1.8, ms=6)
    axes.set_xticks(range(len(strengths)), [f"{s:g}" for s in strengths], fontsize=9)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
