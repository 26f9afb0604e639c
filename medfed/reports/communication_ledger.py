"""What one run sent: by part, per round, cumulated; and what stands on its wire."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from medfed.errors import CheckpointError
from medfed.federation.ledger import Entry
from medfed.reports.runs import Run


class Traffic(NamedTuple):
    """What one client sent or received of one part in a whole run."""

    client: str
    direction: str
    part: str
    bytes: int
    dense: int
    per_round: float


def read_ledger(run: Run) -> list[Entry]:
    """Reads what a run sent.

    Raises:
        CheckpointError: If ``ledger.csv`` is missing or has other columns.
    """
    path = run.folder / "ledger.csv"
    try:
        with path.open() as file:
            return [
                Entry(
                    int(r["round"]), r["phase"], r["client"], r["direction"], r["part"],
                    int(r["bytes"]), int(r["dense"]),
                )
                for r in csv.DictReader(file)
            ]  # fmt: skip
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); repeat the run.") from error


def traffic(entries: Sequence[Entry]) -> list[Traffic]:
    """Sums a ledger by client, direction and part.

    Example:
        >>> sent = enumerate((80, 8, 10))
        >>> ledger = [Entry(r, "fit", "a", "up", "shared", b, 80) for r, b in sent]
        >>> traffic(ledger)[0][3:]
        (98, 240, 10.0)
    """
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for e in entries:
        groups.setdefault((e.client, e.direction, e.part), []).append(e)
    rounds = sorted({e.round for e in entries})
    rows = []
    for key, mine in groups.items():
        by_round = Counter[int]()
        for e in mine:
            by_round[e.round] += e.bytes
        middle = float(np.median([by_round[r] for r in rounds]))
        rows.append(Traffic(*key, sum(e.bytes for e in mine), sum(e.dense for e in mine), middle))
    return rows


def median_round(entries: Sequence[Entry], direction: str) -> float:
    """Returns what all clients sent in the median round in one direction.

    Example:
        >>> sent = enumerate((80, 8, 10))
        >>> ledger = [Entry(r, "fit", "a", "up", "shared", b, 80) for r, b in sent]
        >>> median_round(ledger, "up"), median_round(ledger, "down")
        (10.0, 0.0)
    """
    sums = Counter[int]()
    for e in entries:
        sums[e.round] += e.bytes if e.direction == direction and e.phase != "deliver" else 0
    return float(np.median([n for r, n in sums.items() if r >= 0] or [0]))


def cumulative(entries: Sequence[Entry]) -> dict[int, int]:
    """Returns the bytes that had travelled when each round ended.

    Example:
        >>> cumulative([Entry(r, "fit", "a", "up", "shared", 5, 80) for r in (0, 0, 1)])
        {0: 10, 1: 15}
    """
    sums = Counter[int]()
    for e in entries:
        sums[e.round] += e.bytes
    rounds = sorted(sums)
    ends = np.cumsum([sums[r] for r in rounds]).tolist()
    return dict(zip(rounds, ends, strict=True))


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
