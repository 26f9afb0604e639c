"""The state of a run across sites while it runs, and every byte that goes over the network.

The coordinator writes ``status.json`` whenever something changes, and ``traffic.csv`` with it; the
ledger counts only the method's messages, as a simulation does. ``medfed site status`` shows both in
the terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from rich.console import Group
from rich.text import Text

from medfed.common import schemas, untrusted
from medfed.common.console import Terminal, short, size
from medfed.common.tables import Table
from medfed.records.folder import RunFolder
from medfed.sites import wire
from medfed.sites.words import words_for
from medfed.standalone import errors, files

_COLUMNS = ("site", "kind", "requests", "down", "up")


class Traffic:
    """Counts requests and replies with their heads, by site and kind; threads may add at once.

    Example:
        >>> traffic = Traffic()
        >>> traffic.add("va", "fit", 100, 80)
        >>> traffic.total()
        (100, 80)
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._lock = Lock()

    def add(self, site: str, kind: str, down: int, up: int, requests: int = 1) -> None:
        """Adds a request and its reply."""
        with self._lock:
            before = self.counts.get((site, kind), (0, 0, 0))
            now = zip(before, (requests, down, up), strict=True)
            self.counts[site, kind] = tuple(a + b for a, b in now)  # type: ignore[assignment]

    def total(self) -> tuple[int, int]:
        """Returns all bytes to the sites and from them."""
        return sum(c[1] for c in self.counts.values()), sum(c[2] for c in self.counts.values())

    def read(self, path: Path) -> None:
        """Adds what an earlier process of the run has counted."""
        if path.is_file():
            for row in untrusted.read_rows(path, _COLUMNS):
                down, up, requests = (int(row[name]) for name in ("down", "up", "requests"))
                self.add(row["site"], row["kind"], down, up, requests)

    def write(self, path: Path) -> None:
        """Writes ``traffic.csv``."""
        rows = [(*key, *counts) for key, counts in sorted(self.counts.items())]
        files.write_text(path, files.csv_text(_COLUMNS, rows))


class SiteState(msgspec.Struct):
    """A site: there, or why it is not, since when, and the last round that it took part in.

    With ``privacy.example`` also epsilon so far, if the site declares it.
    """

    state: str
    since: str
    round: wire.RoundNumber
    epsilon: float | None = None


class Status(msgspec.Struct):
    """The content of ``status.json``."""

    rounds: schemas.Count  # how many rounds there will be
    round: wire.RoundNumber = 0  # the round that runs, from 0
    doing: str = "starts"  # what happens in it
    since: str = ""  # since when
    sites: dict[str, SiteState] = {}  # the sites' states
    # What is unusual about what sites have sent before the first round.
    remarks: list[str] = []

    def change(self, doing: str, round: int, away: Mapping[str, str], at: dict[str, int]) -> None:
        """Takes over what has changed."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        if (doing, round) != (self.doing, self.round):
            self.doing, self.round, self.since = doing, round, now
        for site, last in at.items():
            state = away.get(site, "there")
            known = self.sites.get(site)
            since = known.since if known is not None and known.state == state else now
            self.sites[site] = SiteState(state, since, last)


@contextmanager
def ended(status: Status, traffic: Traffic, run: RunFolder) -> Iterator[None]:
    """Writes how a run ends, and why."""
    try:
        yield
        how = "finished"
    except BaseException as error:
        is_known = isinstance(error, errors.MedfedError | SystemExit)
        how = f"stopped ({str(error).rstrip('.') if is_known else type(error).__name__})"
        raise
    finally:
        status.change(how, status.round, {}, {})
        keep(status, traffic, run)


def tables(run: RunFolder) -> Group:
    """Returns the state of a run as tables."""
    if not run.status_json.is_file():
        why = "is no folder of a run across sites (it has no status.json)"
        raise errors.ConfigError(f"run={run.folder} {why}.")
    status, traffic = untrusted.read_json(run.status_json, Status), Traffic()
    traffic.read(run.traffic_csv)
    title = f"Round {min(status.round + 1, status.rounds)} of {status.rounds}: {status.doing}"
    sites, kinds = [], []
    noisy = any(site.epsilon is not None for site in status.sites.values())
    files = {"sites": run.withdrawn_json, "absent": run.absences_json}
    every = ((key, file) for key, file in files.items() if file.is_file())
    read = {key: untrusted.read_json(file, dict[str, Any]) for key, file in every}
    left, absent = (read.get(key, {}).get(key, {}) for key in files)
    missed = Counter(site for names in absent.values() for site in names)
    for name, site in status.sites.items():
        state = "withdrawn" if name in left else site.state
        state += f", missed {missed[name]}" if missed[name] else ""
        counts = [c for (known, _), c in traffic.counts.items() if known == name]
        sizes = (size(sum(c[i] for c in counts)) for i in (1, 2))
        line = [short(name), short(state, 1000), site.since, str(site.round + 1), *sizes]
        spent = "not said" if site.epsilon is None else f"{site.epsilon:.3g}"
        sites.append([*line, *[spent] * noisy])
    for kind, meaning in words_for("requests").items():
        if counts := [c for (_, known), c in traffic.counts.items() if known == kind]:
            requests, down, up = (sum(column) for column in zip(*counts, strict=True))
            kinds.append([kind, f"{requests:,}", size(down), size(up), meaning])
    of_sites = ["site", "state", "since", "last round", "sent to it", "received from it"]
    of_sites += ["epsilon"] * noisy
    of_kinds = ("request", "how many", "to sites", "from sites", "what it is")
    return Group(
        Table.of(of_sites, sites, prose=(0, 1, 2)).printed(f"{title}, since {status.since}"),
        Table.of(of_kinds, kinds, prose=(0, 4)).printed("What left and reached all sites"),
        *(Text(short(line, 300)) for line in status.remarks),
    )


def show(folder: Path) -> None:
    """Prints the state of a run."""
    Terminal().print(tables(RunFolder(folder)))


def keep(status: Status, traffic: Traffic, run: RunFolder) -> None:
    """Writes the state and the traffic of a run."""
    files.write_json(run.status_json, msgspec.to_builtins(status))
    traffic.write(run.traffic_csv)
