"""Small federations whose sites are in this process; every message crosses as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medfed.common.scores import rounded
from medfed.config.compose import described
from medfed.sites.calls import Terms
from medfed.sites.policy import Policy
from medfed.sites.run import coordinate
from medfed.sites.site import ConfiguredSite, Site
from medfed.sites.wire import Transport
from tests.sites.direct import Direct

EQUAL = ("hashes.json", "metrics.csv", "ledger.csv")
# Waits that end by what happens: no busy machine exceeds them. What waits in vain is IMPATIENT.
QUICK = Terms(timeout=250, hello=250, grace=0.05, probe=250, patience=250)
IMPATIENT = replace(QUICK, patience=0)


class Rehearsal(Policy, frozen=True):
    """Allows statistics of few patients, as small data give them; no site's file can."""

    def check_statistics(self, statistics) -> None:
        """Allows all."""


def site(folder: Path, name: str, *overrides: str, sites: Sequence[str] | None = None) -> Site:
    """One site; its rounds are kept below ``folder``. It has the data of all, unless there are
    ``sites``, each with its own."""
    config = described([*overrides, f"folder={folder}"])
    return Site(ConfiguredSite(config, name, sites, Rehearsal()), folder / name)


def direct(folder: Path, names: list[str], *overrides: str) -> Direct:
    """The sites of a run in this process."""
    return Direct({name: site(folder, name, *overrides) for name in names})


def across(
    folder: Path, transport: Transport, names: list[str], *overrides: str, terms: Terms = QUICK
):
    """Runs an experiment across sites; returns its summary."""
    return coordinate(described([*overrides, f"folder={folder}"]), transport, names, terms)


def same(one: Path, other: Path, files: tuple[str, ...] = EQUAL) -> list[str]:
    """Files that two run folders do not have alike, byte for byte.

    But for the digits of metrics that stay at a site.
    """
    return [name for name in files if _shared(one / name) != _shared(other / name)]


def as_left(value):
    """Metrics, in any mappings, with the digits that leave a site."""
    if isinstance(value, dict):
        return {name: as_left(each) for name, each in value.items()}
    return rounded(value) if isinstance(value, float) else value


def _shared(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines()
    if path.name != "metrics.csv":
        return lines
    cells = [line.split(b",") for line in lines]
    return [b"%r" % [*c[:3], *(_digits(value) for value in c[3:])] for c in cells]


def _digits(value: bytes) -> object:
    try:
        return rounded(float(value))
    except ValueError:  # a name, or undefined
        return value
