"""What runs send that differ in codec or in CER's strength: bytes by part, savings, the front.

After Figures 8 and 10 of the pFedNet paper. The first transfer of weights is dense and a sketch
travels once, so bytes per round are those of the median round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfed.common.files import csv_text
from medfed.common.scores import label_of, smaller_is_better
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.records.folder import Run
from medfed.reports.charts import Canvas, curves, looks_in_order, stacked
from medfed.reports.methods import Cell, Comparison, Finding, Method
from medfed.reports.runs import differences

_SHORTEST = 3  # methods that make a sweep
_WIRE = ("codec.", "channel.")
_DELIVERY = "deliver"  # of the result, once, after the last round


class Traffic(NamedTuple):
    """What one client sent or received of one part in a whole run."""

    client: str
    direction: str
    part: str
    bytes: int
    dense: int
    per_round: float


@dataclass(frozen=True)
class Sent:
    """A method of the sweep: what its runs sent, and what came of it.

    Attributes:
        method: Its runs, one per seed.
        family: Everything but gamma: algorithm, codecs, last stage.
        gamma: CER's strength on the way up.
        ledgers: What each seed's run sent.
    """

    method: Method
    family: str
    gamma: float
    ledgers: tuple[Ledger, ...]

    def total(self, **where: object) -> Cell:
        """Returns the bytes of the whole run, pooled over seeds."""
        return Cell.of([ledger.total(**where) for ledger in self.ledgers])

    def rounds(self, direction: str) -> NDArray[np.float64]:
        """Returns per seed the bytes of the median round in one direction."""
        return np.array([median_round(ledger, direction) for ledger in self.ledgers])

    def per_round(self, direction: str) -> Cell:
        """Returns the bytes of the median round in one direction, pooled over seeds."""
        return Cell.of(self.rounds(direction).tolist())


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
        return sent.method.score(self.metric, statistic)

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
                shares = {d: one.rounds(d) / first.rounds(d).clip(1) for d in ("up", "down")}
                saved = ", ".join(f"{percent(1 - share)} {d}" for d, share in shares.items())
                change = self.score(one).value - self.score(first).value
                lines.append(
                    f"CER with γ = {one.gamma:g} before {name} saves {saved} per round; "
                    f"{self.metric} {change:+.4f} to {self.score(one).value:.4f}."
                )
        return lines

    def to_csv(self) -> str:
        """Returns a line per run, client, direction and part; the bytes add up to the ledger."""
        head = ["method", "family", "gamma", "seed", *Traffic._fields]
        rows = (
            [one.method.name, one.family, one.gamma, run.seed, *row]
            for one in self.sent
            for run, ledger in zip(one.method.runs, one.ledgers, strict=True)
            for row in traffic(ledger)
        )
        return csv_text(head, rows)

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
        return csv_text([*head, "on_front"], rows)


def communication(comparison: Comparison) -> Communication | None:
    """Gathers a sweep over codecs or channels, or returns None where there is none.

    Raises:
        CheckpointError: If a ledger cannot be read.
    """
    methods = comparison.methods
    changed = {k for m in methods for k in differences(methods[0].runs[0], m.runs[0])}
    if len(methods) < _SHORTEST or not any(k.startswith(_WIRE) for k in changed):
        return None
    several = len({m.algorithm for m in methods}) > 1
    sent = [
        Sent(
            m,
            family_name(m.runs[0], several),
            float(m.setting("channel.up.cer.gamma") or 0.0),
            tuple(run.ledger for run in m.runs),
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


def percent(shares: NDArray[np.float64]) -> str:
    """Writes the mean over seeds in percent, and its standard deviation where there are several.

    Example:
        >>> percent(np.array([0.25, 0.5, 0.75])), percent(np.array([0.5]))
        ('50.0 ± 25.0 %', '50.0 %')
    """
    mean, sd = Cell.of((100 * shares).tolist())
    return f"{mean:.1f}" + (f" ± {sd:.1f}" if sd is not None else "") + " %"


def traffic(ledger: Ledger) -> list[Traffic]:
    """Sums a ledger by client, direction and part.

    Example:
        >>> sent = enumerate((80, 8, 10))
        >>> ledger = Ledger(Entry(r, "fit", "a", "up", "shared", b, 80) for r, b in sent)
        >>> traffic(ledger)[0][3:]
        (98, 240, 10.0)
    """
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for e in ledger.entries:
        groups.setdefault((e.client, e.direction, e.part), []).append(e)
    rounds = dict.fromkeys((e.round for e in ledger.entries if e.phase != _DELIVERY), 0)
    rows = []
    for key, mine in groups.items():
        by_round = Counter(rounds)
        for e in mine:
            by_round[e.round] += e.bytes
        middle = float(np.median([by_round[r] for r in rounds] or [0]))
        rows.append(Traffic(*key, sum(e.bytes for e in mine), sum(e.dense for e in mine), middle))
    return rows


def median_round(ledger: Ledger, direction: str) -> float:
    """Returns what all clients sent in the median round in one direction.

    Example:
        >>> sent = enumerate((80, 8, 10))
        >>> ledger = Ledger(Entry(r, "fit", "a", "up", "shared", b, 80) for r, b in sent)
        >>> median_round(ledger, "up"), median_round(ledger, "down")
        (10.0, 0.0)
    """
    sums = Counter[int]()
    for e in ledger.entries:
        if e.phase != _DELIVERY and e.round >= 0:
            sums[e.round] += e.bytes if e.direction == direction else 0
    return float(np.median([*sums.values()] or [0]))


def family_name(run: Run, algorithm: bool) -> str:
    """Names the codecs of a run without gamma: ``STC 5 % + zstd``.

    Args:
        run: A run.
        algorithm: Whether the algorithm is part of the name.
    """
    up, down = (link_name(run, direction) for direction in ("up", "down"))
    name = up if up == down else f"{up} up, {down} down"
    return f"{run.summary['algorithm']}, {name}" if algorithm else name


def link_name(run: Run, direction: str) -> str:
    """Names the codec of a direction and what stands around it, gamma left out."""
    codec, link = run.config.codec[direction], run.config.channel[direction]
    names = {
        "STC": "STC", "TopK": "top-k", "RandomK": "random-k", "TernGrad": "TernGrad",
        "SignSGD": "sign", "QSGD": "QSGD", "RunLength": "run-length",
    }  # fmt: skip
    kind = str(codec._target_).rpartition(".")[2]
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    name = names.get(kind, kind) if kind != "Dense" else short[codec.dtype]
    for key in ("sparsity", "fraction"):
        if key in codec:
            name += f" {100 * codec[key]:g} %"
    if not codec.get("runs", True):
        name += ", gaps only"
    if codec.get("codebook_bits"):
        name += f", {2**codec.codebook_bits} values"
    if link.shift is not None:
        name += ", DIANA"
    if link.feedback is False:
        name += ", no feedback"
    return name + (" + zstd" if link.zstd is not None else "")


_CAPTIONS = {
    "communication": "Bytes per round against γ, as a percentage of those at γ = 0, and the test "
    "metric. A line is the mean over seeds."
}


def find(comparison: Comparison) -> Finding:
    """Finds what codecs and CER save, and what that costs."""
    if (sweep := communication(comparison)) is None:
        return Finding()
    tables = {"communication": sweep.to_csv(), "communication_front": sweep.front_csv()}
    pictures = {"communication": draw(sweep).figure()} if sweep.sweeps() else {}
    return Finding(sweep.describe(), tables, pictures, _CAPTIONS)


def draw(sweep: Communication) -> Canvas:
    """Draws bytes per round, up and down, and the test metric against gamma (Figure 8)."""
    families = sweep.sweeps()
    panels = {}
    for way in ("up", "down"):
        panels[f"bytes {way} per round, % of those at γ = 0"] = {
            name: [
                (one.gamma, float(np.mean(100 * one.rounds(way) / group[0].rounds(way).clip(1))))
                for one in group
            ]
            for name, group in families.items()
        }
    panels[f"test {label_of(sweep.metric)}, mean over clients"] = {
        name: [(one.gamma, sweep.score(one).value) for one in group]
        for name, group in families.items()
    }
    looks = looks_in_order(families)
    axis = "γ / mean magnitude (equal steps)"
    return stacked(
        *(curves(lines, axis, label, looks, evenly=True) for label, lines in panels.items())
    )
