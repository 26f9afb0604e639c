"""Pictures of a communication sweep: bytes against gamma, metric against bytes, savings, front.

What runs send that differ in codec or CER's strength: bytes by part, savings, the front.

After Figures 8 and 10 of the pFedNet paper. Runs that differ in codec or channel are gathered with
their ledgers. A first transfer of weights is dense and a sketch travels once, so bytes per round
are those of the median round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from medfed.common.console import size
from medfed.common.files import csv_text
from medfed.common.scores import label_of, smaller_is_better
from medfed.federation.wire.ledger import Entry, Ledger
from medfed.records.folder import Run
from medfed.reports.methods import Cell, Comparison, Finding, Method
from medfed.reports.runs import differences
from medfed.reports.scores import (
    BYTES,
    client_dots,
    method_style,
    over_clients,
    range_bars,
)

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
                told = ", ".join(f"{percent(1 - share)} {d}" for d, share in shares.items())
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


def cumulative(ledger: Ledger) -> dict[int, int]:
    """Returns the bytes that had travelled when each round ended.

    Example:
        >>> cumulative(Ledger(Entry(r, "fit", "a", "up", "shared", 5, 80) for r in (0, 0, 1)))
        {0: 10, 1: 15}
    """
    sums = {int(str(r)): count for (r,), count in sorted(ledger.totals("round").items())}
    return dict(zip(sums, accumulate(sums.values()), strict=True))


def family_name(run: Run, algorithm: bool) -> str:
    """Names what is on the wire, gamma left out: ``STC 5 % + zstd``.

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
    "communication_gamma": "Bytes per round in both directions and the test metric against γ.",
    "communication_curves": "Validation metric against rounds and against the bytes until then.",
    "communication_clients": "What each client saved against dense fp32.",
    "communication_front": "Test metric against bytes, and the methods that none beats in both.",
}
_LINES = ("-", "--", ":", "-.")


def find(comparison: Comparison) -> Finding:
    """Finds what codecs and CER save, and what that costs."""
    if (sweep := communication(comparison)) is None:
        return Finding()
    figures = {}
    if sweep.sweeps():
        figures["communication_gamma"] = gamma_curves(sweep)
        figures["communication_curves"] = learning_curves(sweep)
        figures["communication_clients"] = client_savings(sweep)
    figures["communication_front"] = front(sweep)
    tables = {"communication": sweep.to_csv(), "communication_front": sweep.front_csv()}
    return Finding(sweep.describe(), tables, figures, _CAPTIONS)


def gamma_curves(sweep: Communication) -> Figure:
    """Draws bytes per round, both ways, and the test metric against gamma (Figure 8)."""
    families = sweep.sweeps()
    gammas = sorted({s.gamma for group in families.values() for s in group})
    figure = Figure(figsize=(12.6, 4.3), layout="constrained")
    panels = figure.subplots(1, 3)
    for k, (name, group) in enumerate(families.items()):
        colour, marker = method_style(k, len(families))
        x = np.array([gammas.index(s.gamma) for s in group])
        counts = [np.array([s.rounds(way) for s in group]) for way in ("up", "down")]
        tables = [100 * table / table[:1].clip(1) for table in counts]  # of what is sent without
        tables.append(np.array([s.method.scores(sweep.metric) for s in group]))
        start = "/".join(size(round(group[0].per_round(way).value)) for way in ("up", "down"))
        label = f"{name}\n({start} at γ = 0)"
        for axes, table in zip(panels, tables, strict=True):
            axes.plot(x, table.mean(1), color=colour, marker=marker, lw=1.8, ms=5, label=label)
            axes.fill_between(x, table.min(1), table.max(1), color=colour, alpha=0.16, lw=0)
    for axes, way in zip(panels[:2], ("up", "down"), strict=True):
        axes.axhline(100, color="0.4", lw=0.8)
        axes.set(ylabel=f"bytes {way} per round, % of those at γ = 0")
        axes.set_title(_largest_saving(families, way), fontsize=10)
    panels[2].set_title("Metric of the rounds that validation selected", fontsize=10)
    panels[2].set_ylabel(f"test {label_of(sweep.metric)}, mean over clients")
    for axes in panels:
        axes.set_xticks(range(len(gammas)), [f"{g:g}" for g in gammas])
        axes.set_xlabel("γ / mean magnitude (not to scale)")
        axes.grid(alpha=0.3, which="both")
    _legend(figure, panels[0].get_legend_handles_labels()[0], sweep, "band: range")
    return figure


def learning_curves(sweep: Communication) -> Figure:
    """Draws the validation metric against rounds and cumulative bytes (Figure 10)."""
    families = sweep.families()
    gammas = sorted({s.gamma for s in sweep.sent})
    figure = Figure(figsize=(12.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    ends: dict[str, list[float]] = {}
    for k, (name, group) in enumerate(families.items()):
        for sent in group:
            colour = method_style(gammas.index(sent.gamma), len(gammas))[0]
            rounds, values, counts = _history(sent, sweep.metric)
            ends.setdefault(name, []).append(float(values[-1]))
            style = {"color": colour, "ls": _LINES[k % 4], "marker": "os^DvPX*"[k % 8]}
            left.plot(rounds + 1, values, ms=5, lw=1.6, **style)
            right.plot(counts, values, ms=5, lw=1.6, **style)
    left.set(xlabel="round", ylabel=f"validation {label_of(sweep.metric)}, mean over clients")
    left.set_title(_last_apart(ends), fontsize=10)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="bytes that had travelled, up and down, all clients")
    right.set_title(_cheapest(families), fontsize=10)
    _bytes_axis(right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    handles = [
        Line2D([], [], color="0.3", ls=_LINES[k % 4], marker="os^DvPX*"[k % 8], label=name)
        for k, name in enumerate(families)
    ]
    handles += [
        Line2D([], [], color=method_style(k, len(gammas))[0], lw=4, label=f"γ = {g:g}")
        for k, g in enumerate(gammas)
    ]
    _legend(figure, handles, sweep, "mean")
    return figure


def client_savings(sweep: Communication) -> Figure:
    """Draws how many times less than with fp32 each client sent and received."""
    values = {
        f"{s.family}, γ = {s.gamma:g}": {
            c: [ledger.savings(client=c) for ledger in s.ledgers] for c in sweep.clients
        }
        for group in sweep.families().values()
        for s in group
    }
    figure = client_dots(values, sweep.metric)
    axes = figure.axes[0]
    axes.set_ylabel("dense fp32 / what travelled, whole run")
    table = np.array([list(v.values()) for v in values.values()])
    apart = max(float((row.max() - row.min()) / row.mean()) for row in table.mean(2))
    axes.set_title(f"Clients save alike: within {100 * apart:.1f} % of each other", fontsize=10)
    axes.set_ylim(bottom=0)
    return figure


def front(sweep: Communication) -> Figure:
    """Draws the mean test metric against all bytes, and the methods that no other one beats."""
    figure = Figure(figsize=(11.0, 5.6), layout="constrained")
    axes = figure.subplots()
    best = sweep.front()
    points = np.array([(s.total().value, sweep.score(s).value) for s in sweep.sent])
    algorithms = list(dict.fromkeys(s.method.algorithm for s in sweep.sent))
    looks = {a: method_style(k, len(algorithms)) for k, a in enumerate(algorithms)}
    for i, sent in enumerate(sweep.sent):
        style = {"ms": 7, "mec": "white", "mew": 0.5}
        if i in best:
            style = {"ms": 9, "mec": "black", "mew": 1.6}
        values = np.array([sent.method.scores(sweep.metric)])
        look = looks[sent.method.algorithm]
        range_bars(axes, points[i, 0], values, look, lw=1, zorder=3, **style)
    order = sorted(best, key=lambda i: points[i, 0])
    axes.step(*points[order].T, where="post", color="black", lw=1.1, ls="--", zorder=2)
    _bytes_axis(axes)
    axes.set(xlabel=BYTES, ylabel=f"test {label_of(sweep.metric)}, mean over clients")
    better = "below" if smaller_is_better(sweep.metric) else "above"
    axes.set_title(
        f"{len(best)} of {len(points)} methods have none {better} and left of them "
        "(black edges, dashed line)",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    _name_points(axes, points, [_wire(s) for s in sweep.sent])
    handles = [
        Line2D([], [], color=colour, ls="", marker=marker, ms=8, label=algorithm)
        for algorithm, (colour, marker) in looks.items()
    ]
    _legend(figure, handles, sweep, "bar: range")
    return figure


def _name_points(axes: Any, points: NDArray[np.float64], names: Sequence[str]) -> None:
    """Writes a name beside each point: right, left, above or below, where none is yet."""
    axes.margins(x=0.09)
    places = axes.transData.transform(points) * 72 / axes.figure.dpi  # in typographic points
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for (x, y), point, name in zip(places, points, names, strict=True):
        width = 4.1 * len(name)
        sides = [(7, 3), (-7 - width, -4), (-width / 2, 6), (-width / 2, -14), (7, -4), (7, -13)]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + 8) for dx, dy in sides]
        clashes = [
            sum(a < g and e < c and b < h and f < d for e, f, g, h in taken) for a, b, c, d in boxes
        ]
        best = int(np.argmin(clashes))
        taken.append(boxes[best])
        axes.annotate(name, point, sides[best], textcoords="offset points", fontsize=7.5)


def _wire(sent: Sent) -> str:
    """Names a method without its algorithm."""
    gamma = f", γ = {sent.gamma:g}" if sent.gamma else ""
    return sent.family.removeprefix(f"{sent.method.algorithm}, ") + gamma


def _history(
    sent: Sent, metric: str
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Evaluated rounds, the metric's mean over clients and seeds, and bytes until then."""
    rounds, lines = over_clients(sent.method, metric, np.nanmean)
    ends = [cumulative(ledger) for ledger in sent.ledgers]
    counts = np.array([[e.get(r, max(e.values())) for r in rounds.tolist()] for e in ends])
    return rounds, lines.mean(0), counts.mean(0)


def _largest_saving(families: dict[str, list[Sent]], way: str) -> str:
    """Says how much the largest gamma's bytes are below those without CER."""
    told = []
    for name, group in families.items():
        first, last = (group[k].per_round(way).value for k in (0, -1))
        told.append(f"{name}: {100 * (1 - last / max(first, 1)):.0f} %")
    head = f"γ = {next(iter(families.values()))[-1].gamma:g} saves {way}"
    return f"{head}\n" + "; ".join(told[:2]) + ("; ..." if len(told) > 2 else "")


def _last_apart(ends: dict[str, list[float]]) -> str:
    """Says by how much gamma moves the metric after the last round."""
    apart, name = max((max(v) - min(v), n) for n, v in ends.items())
    return f"γ moves the last value by up to {apart:.3f} ({name})"


def _cheapest(families: dict[str, list[Sent]]) -> str:
    """Says which family sends least without CER, and how much less than the dearest."""
    counts = {n: g[0].total().value for n, g in families.items()}
    low, high = (pick(counts, key=lambda n: counts[n]) for pick in (min, max))
    if low == high:
        return f"{low}: {size(round(counts[low]))} without CER"
    return f"{low} sends {counts[high] / counts[low]:.1f} times fewer bytes than {high}"


def _bytes_axis(axes: Any) -> None:
    """Logarithmic bytes with a few readable labels."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: size(round(count))))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, handles: Sequence[Artist], sweep: Communication, what: str) -> None:
    """Puts one legend right of all panels."""
    several = any(len(s.ledgers) > 1 for s in sweep.sent)
    title = f"{what} over seeds" if several else None
    figure.legend(
        handles=handles, loc="outside right center", frameon=False, fontsize=9, title=title
    )
