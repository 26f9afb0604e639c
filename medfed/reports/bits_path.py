"""Bits per weight: test metric against them, and what clients with few gain from richer partners.

Runs that differ only in ``algorithm.bits`` (and the seed) give a path, one for every method with
quantised models. Where a run deals its clients different bits, the poorest of them are compared
with themselves in the run in which all clients have these few bits.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from omegaconf import OmegaConf

from medfed.personalize.quantized_layers import deal_bits
from medfed.reports.comparison import Cell, Comparison, Method
from medfed.reports.sweeps import number_of, sweeps

BITS = "algorithm.bits"
_CLIENT_BITS = "algorithm.client_bits"
_SHORTEST = 2  # numbers of bits that make a path


class BitsPoint(NamedTuple):
    """One run.

    Attributes:
        bits: Average bits per quantised weight; 32 is full precision.
        seed: The seed of the run.
        mean: Test metric of the selected round, mean over clients.
        worst: The same of the worst client.
    """

    bits: float
    seed: int
    mean: float
    worst: float


@dataclass(frozen=True)
class BitsPath:
    """One method with growing bits.

    Attributes:
        name: The method.
        metric: The metric's name.
        points: A point per number of bits and seed, by bits.
    """

    name: str
    metric: str
    points: tuple[BitsPoint, ...]

    @property
    def bits(self) -> list[float]:
        """The distinct numbers of bits, ascending."""
        return sorted({p.bits for p in self.points})

    def over_seeds(self, field: str) -> list[float]:
        """Returns the mean over seeds of a field of the points, for each number of bits.

        Example:
            >>> points = [BitsPoint(b, s, 0.25 * b + s, 0.0) for b in (1, 2) for s in (0, 1)]
            >>> BitsPath("qupel", "accuracy", tuple(points)).over_seeds("mean")
            [0.75, 1.0]
        """
        return [
            float(np.mean([getattr(p, field) for p in self.points if p.bits == b]))
            for b in self.bits
        ]

    def describe(self) -> str:
        """Says in a sentence what fewer bits cost.

        Example:
            >>> points = (BitsPoint(2, 0, 0.875, 0.5), BitsPoint(32, 0, 0.9, 0.5))
            >>> BitsPath("qupel", "accuracy", points).describe()
            'Bits per weight of qupel: mean test accuracy 0.8750 (2), 0.9000 (32).'
        """
        means = self.over_seeds("mean")
        told = ", ".join(f"{m:.4f} ({b:g})" for b, m in zip(self.bits, means, strict=True))
        return f"Bits per weight of {self.name}: mean test {self.metric} {told}."


class Partners(NamedTuple):
    """Clients with few bits, in company of richer ones and among themselves.

    Attributes:
        name: The method.
        poor: Bits of the poor clients.
        rich: Bits of their partners.
        clients: How many are poor.
        among_rich: Their mean test metric beside the richer partners.
        among_poor: Theirs, the same clients', where all have as few bits.
        gain: The first less the second, seed by seed.
    """

    name: str
    poor: int
    rich: tuple[int, ...]
    clients: int
    among_rich: Cell
    among_poor: Cell
    gain: Cell

    def describe(self, metric: str) -> str:
        """Says in a sentence what richer partners change."""
        rich = " or ".join(str(b) for b in self.rich)
        spread = "" if self.gain.sd is None else f" ± {self.gain.sd:.4f} over seeds"
        return (
            f"Partners of {self.name}: the {self.clients} clients with {self.poor} per weight have "
            f"a mean test {metric} of {self.among_rich.value:.4f} beside partners with {rich} and "
            f"{self.among_poor.value:.4f} beside partners with {self.poor} "
            f"({self.gain.value:+.4f}{spread})."
        )


def bits_paths(comparison: Comparison) -> list[BitsPath]:
    """Reads a path for every method that was run with several numbers of bits.

    Args:
        comparison: The methods and their runs.
    """
    groups = [g for g in sweeps(comparison.methods, BITS) if len(g) >= _SHORTEST]
    names = [str(g[0].runs[0].summary["algorithm"]) for g in groups]
    return [
        _path(name if names.count(name) == 1 else f"{name} {i + 1}", group, comparison.metric)
        for i, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def partners(comparison: Comparison) -> list[Partners]:
    """Compares poor clients beside richer partners with themselves beside poor ones.

    Args:
        comparison: The methods and their runs.
    """
    quantising = [m for m in comparison.methods if has_bits(m)]
    found = []
    for group in sweeps(quantising, BITS, lambda key: key.startswith(_CLIENT_BITS)):
        dealt = [_dealt(m, comparison.clients) for m in group]
        uniform = {min(d.values()): m for m, d in zip(group, dealt, strict=True) if _equal(d)}
        mixed = [(m, d) for m, d in zip(group, dealt, strict=True) if not _equal(d)]
        found += [
            _partners(m, uniform[min(d.values())], d, comparison.metric)
            for m, d in mixed
            if min(d.values()) in uniform
        ]
    return found


def to_csv(paths: Sequence[BitsPath]) -> str:
    """Returns a line per method, number of bits and seed.

    Example:
        >>> print(to_csv([BitsPath("qupel", "iou", (BitsPoint(2.5, 0, 0.5, 0.25),))]), end="")
        method,bits,seed,mean_test_iou,worst_test_iou
        qupel,2.5,0,0.5,0.25
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metric = paths[0].metric
    writer.writerow(["method", "bits", "seed", f"mean_test_{metric}", f"worst_test_{metric}"])
    for path in paths:
        for point in path.points:
            writer.writerow([path.name, f"{point.bits:g}", *point[1:]])
    return text.getvalue()


def _path(name: str, methods: Sequence[Method], metric: str) -> BitsPath:
    points = [
        BitsPoint(number_of(m, BITS), run.seed, scores["mean"], scores["worst"])
        for m in methods
        for run in m.runs
        for scores in (run.summary["federation"][metric],)
    ]
    return BitsPath(name, metric, tuple(points))


def has_bits(method: Method) -> bool:
    """Whether a method quantises, or could."""
    return OmegaConf.select(method.runs[0].config, BITS) is not None


def _dealt(method: Method, clients: Sequence[str]) -> dict[str, int]:
    """Returns the bits of each client, as the method deals them."""
    config = method.runs[0].config.algorithm
    given = OmegaConf.to_container(config.client_bits) if config.client_bits else {}
    assert isinstance(given, dict)
    named = {str(c): int(b) for c, b in given.items()}
    return deal_bits(float(config.bits), list(clients), named)


def _equal(dealt: Mapping[str, int]) -> bool:
    return len(set(dealt.values())) == 1


def _partners(mixed: Method, uniform: Method, dealt: Mapping[str, int], metric: str) -> Partners:
    least = min(dealt.values())
    poor = [c for c, b in dealt.items() if b == least]
    beside, among = (
        [float(np.mean([run.summary["clients"][c][metric] for c in poor])) for run in m.runs]
        for m in (mixed, uniform)
    )
    return Partners(
        str(mixed.runs[0].summary["algorithm"]),
        least,
        tuple(sorted(set(dealt.values()) - {least})),
        len(poor),
        Cell.of(beside),
        Cell.of(among),
        Cell.of([a - b for a, b in zip(beside, among, strict=True)]),
    )
