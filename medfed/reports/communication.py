"""What a sweep over codecs and CER's strength shows: bytes by part, savings, the front.

After Figures 8 and 10 of the pFedNet paper. Runs that differ in codec or channel are gathered with
their ledgers. A first transfer of weights is dense and a sketch travels once, so bytes per round
are those of the median round.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from omegaconf import OmegaConf

from medfed.federation.callbacks.evaluation import smaller_is_better
from medfed.federation.ledger import Entry
from medfed.reports.communication_ledger import (
    Traffic,
    family_name,
    median_round,
    read_ledger,
    traffic,
)
from medfed.reports.comparison import Cell, Comparison, Method
from medfed.reports.runs import differences

_SHORTEST = 3  # methods that make a sweep
_WIRE = ("codec.", "channel.")


@dataclass(frozen=True)
class Sent:
    """A method of the sweep: what its runs sent, and what came of it.

    Attributes:
        method: Its runs, one per seed.
        family: Everything but gamma: algorithm, codecs, last stage.
        gamma: CER's strength on the way up.
        ledgers: The entries of each seed's run.
    """

    method: Method
    family: str
    gamma: float
    ledgers: tuple[tuple[Entry, ...], ...]

    def total(self, **where: object) -> Cell:
        """Returns the bytes of the whole run, pooled over seeds."""
        return Cell.of([_total(entries, where) for entries in self.ledgers])

    def per_round(self, direction: str) -> Cell:
        """Returns the bytes of the median round in one direction, pooled over seeds."""
        return Cell.of([median_round(entries, direction) for entries in self.ledgers])

    def saving(self, client: str) -> list[float]:
        """Returns per seed how many times less than with fp32 a client sent and received."""
        mine = [[e for e in entries if e.client == client] for entries in self.ledgers]
        return [sum(e.dense for e in m) / max(sum(e.bytes for e in m), 1) for m in mine]


@dataclass(frozen=True)
class Communication:
    """A sweep over what stands on the wire.

    Attributes:
        sent: The methods.
        metric: The metric of the pictures.
        clients: Names of the clients.
    """

    sent: tuple[Sent, ...]
    metric: str
    clients: tuple[str, ...]

    def families(self) -> dict[str, list[Sent]]:
        """Returns the methods by everything but gamma, by growing gamma."""
        groups: dict[str, list[Sent]] = {}
        for one in sorted(self.sent, key=lambda s: s.gamma):
            groups.setdefault(one.family, []).append(one)
        return groups

    def sweeps(self) -> dict[str, list[Sent]]:
        """Returns the families that have several gammas, of which 0 is one."""
        return {n: g for n, g in self.families().items() if len(g) > 1 and g[0].gamma == 0}

    def score(self, sent: Sent, statistic: str = "mean") -> Cell:
        """Returns the test metric of the selected rounds, over clients and pooled over seeds."""
        return sent.method.federation(self.metric, statistic)

    def front(self) -> frozenset[int]:
        """Returns which methods no other one beats in bytes and mean metric."""
        sign = -1.0 if smaller_is_better(self.metric) else 1.0
        cost = [s.total().value for s in self.sent]
        return pareto_front(cost, [sign * self.score(s).value for s in self.sent])

    def describe(self) -> list[str]:
        """Returns a line for every gamma: what CER saves against gamma = 0, and what it costs."""
        lines = []
        for name, group in self.sweeps().items():
            first = group[0]
            for one in group[1:]:
                saved = {d: 1 - _pairs(one, first, d) for d in ("up", "down")}
                told = ", ".join(f"{spread(v, percent=True)} {d}" for d, v in saved.items())
                change = self.score(one).value - self.score(first).value
                lines.append(
                    f"CER with γ = {one.gamma:g} before {name} saves {told} per round; "
                    f"{self.metric} {change:+.4f} to {self.score(one).value:.4f}."
                )
        return lines

    def to_csv(self) -> str:
        """Returns a line per run, client, direction and part; the bytes add up to the ledger."""
        head = ["method", "family", "gamma", "seed", *Traffic._fields]
        rows = (
            [one.method.name, one.family, one.gamma, run.seed, *row]
            for one in self.sent
            for run, entries in zip(one.method.runs, one.ledgers, strict=True)
            for row in traffic(entries)
        )
        return _csv(head, rows)

    def front_csv(self) -> str:
        """Returns a line per method: bytes, metric with spread, and whether it is on the front."""
        head = ["family", "gamma", "seeds", "bytes", "bytes_up", "bytes_down"]
        head += ["per_round_up", "per_round_down"]
        head += [f"{s}{m}_{self.metric}" for m in ("mean", "worst") for s in ("", "sd_")]
        front = self.front()
        rows = []
        for i, one in enumerate(self.sent):
            counts = [one.total(), one.total(direction="up"), one.total(direction="down")]
            counts += [one.per_round("up"), one.per_round("down")]
            scores = [self.score(one), self.score(one, "worst")]
            numbers = [c.value for c in counts] + [v for c in scores for v in (c.value, c.sd)]
            rows.append([one.family, one.gamma, len(one.ledgers), *numbers, int(i in front)])
        return _csv([*head, "on_front"], rows)


def communication(comparison: Comparison) -> Communication | None:
    """Gathers a sweep over codecs or channels, or returns None where there is none.

    Raises:
        CheckpointError: If a ledger cannot be read.
    """
    methods = comparison.methods
    changed = {k for m in methods for k in differences(methods[0].runs[0], m.runs[0])}
    if len(methods) < _SHORTEST or not any(k.startswith(_WIRE) for k in changed):
        return None
    several = len({m.runs[0].summary["algorithm"] for m in methods}) > 1
    sent = [
        Sent(
            m,
            family_name(m.runs[0], several),
            float(OmegaConf.select(m.runs[0].config, "channel.up.cer.gamma") or 0.0),
            tuple(tuple(read_ledger(run)) for run in m.runs),
        )
        for m in methods
    ]
    return Communication(tuple(sent), comparison.metric, comparison.clients)


def pareto_front(cost: Sequence[float], value: Sequence[float]) -> frozenset[int]:
    """Returns the positions that no other one beats: cheaper and no worse, or better and no dearer.

    Example:
        >>> sorted(pareto_front([1.0, 2.0, 3.0, 2.0], [0.5, 0.7, 0.6, 0.6]))
        [0, 1]
    """
    pairs = list(zip(cost, value, strict=True))
    return frozenset(
        i
        for i, (c, v) in enumerate(pairs)
        if not any(d <= c and w >= v and (d, w) != (c, v) for d, w in pairs)
    )


def spread(values: np.ndarray[tuple[int], np.dtype[np.float64]], percent: bool = False) -> str:
    """Writes the mean over seeds, and its standard deviation where there are several.

    Example:
        >>> spread(np.array([0.25, 0.75]), percent=True), spread(np.array([0.5]))
        ('50.0 ± 25.0 %', '0.5000')
    """
    mean, sd = Cell.of(values.tolist())
    scale, digits, unit = (100, 1, " %") if percent else (1, 4, "")
    text = f"{scale * mean:.{digits}f}"
    return text + (f" ± {scale * sd:.{digits}f}" if sd is not None else "") + unit


def _pairs(one: Sent, first: Sent, direction: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Bytes of the median round against those of ``first``, seed by seed."""
    ours = [median_round(entries, direction) for entries in one.ledgers]
    theirs = [median_round(entries, direction) for entries in first.ledgers]
    return np.array(ours) / np.maximum(theirs, 1.0)


def _total(entries: Sequence[Entry], where: dict[str, object]) -> float:
    return float(sum(e.bytes for e in entries if all(getattr(e, k) == v for k, v in where.items())))


def _csv(head: Sequence[str], rows: object) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)  # type: ignore[arg-type]
    return text.getvalue()
