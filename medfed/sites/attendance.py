"""Who takes part in a round across sites, who is away and why, and how far each site is.

An absent site is asked again before every round, and takes part once it answers. The progress of
the sites is what a coordinator needs to resume.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from medfed.common import console, schemas
from medfed.federation import algorithm, budget
from medfed.federation.federation import Federation
from medfed.federation.wire.fixed_point import FEWEST
from medfed.sites import calls, wire
from medfed.sites.words import in_words
from medfed.standalone.errors import SiteError

_log = logging.getLogger(__name__)
INNOCENT = (calls.SILENT, calls.BUSY, calls.UNREADY)  # reasons that do not count against a site


class SitesProgress(msgspec.Struct):
    """The progress of the sites, which the coordinator's checkpoints hold for resuming."""

    at: dict[str, int]  # the last round that each site took part in
    spent: dict[str, tuple[int, budget.Passes]]  # steps and passes of each
    absent: dict[int, list[str]] = {}  # the absent sites of each round
    # ``at`` after the last rounds and the best one, which sites may have to restore.
    rounds: dict[int, dict[str, int]] = {}
    # Round, site and reason, each time that a site was left out.
    left_out: list[tuple[int, str, str]] = []
    # What the run has spent on a site's patients, as the site declares it.
    epsilons: dict[str, float] = {}

    @classmethod
    def new(cls, sites: Sequence[str]) -> SitesProgress:
        """Returns the progress before the first round."""
        return cls(dict.fromkeys(sites, wire.START), dict.fromkeys(sites, (0, budget.Passes())))

    def state_dict(self) -> dict[str, Any]:
        """Returns it in a form that ``weights_only=True`` loads."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> SitesProgress:
        """Reads what :meth:`state_dict` returned."""
        return schemas.fit(saved, cls)


@dataclass(eq=False)
class Attendance:
    """Knows which sites take part in a round."""

    caller: calls.Caller
    federation: Federation
    facts: Mapping[str, wire.Facts]
    answers: Sequence[bytes]
    job: str  # names the federation, so that no site mixes its rounds with another's
    progress: SitesProgress
    withdrawn: Sequence[str] = ()
    tell: Callable[[str, int, Mapping[str, str], Mapping[str, int]], None] = lambda *_: None
    summed: tuple[str, ...] = ()  # sites of a sum of this round, which stays the only one

    def __post_init__(self) -> None:
        # The absent sites, each with the reason.
        self.away = {**self.caller.lacking, **dict.fromkeys(self.withdrawn, "it has withdrawn")}
        self.planned: algorithm.Cohort = self.federation.cohort  # the cohort of the configuration
        self._probes: dict[str, Future[str | None]] = {}
        self._faults: Counter[str] = Counter()

    @property
    def there(self) -> list[str]:
        """The sites that are not away, in the order of clients."""
        return [c for c in self.federation.ids if c not in self.away]

    def say(self, doing: str, round: int) -> None:
        """Says what happens."""
        self.tell(doing, round, self.away, self.progress.at)

    def begin(self) -> None:
        """Starts a session at every site."""
        method = self.federation.algorithm
        if self.federation.channel.sums is not None and len(method.phases(0)) > 1:
            _log.warning(
                "%s has several phases in a round: if a site is lost after a round's first sum "
                "under masks, the round waits for it, as a sum without it would reveal its update.",
                type(method).__name__,
            )
        futures = {c: self.caller.in_thread(self._begin, c) for c in self.there}
        wrong = {c: why for c, future in futures.items() if (why := future.result())}
        if wrong:
            raise SiteError(f"{calls.sentence(wrong)}.")

    def _begin(self, site: str) -> str | None:
        clients = [wire.Client(c, self.facts[c].num_samples) for c in self.federation.ids]
        begin = self.caller.request(wire.Begin, site, clients=clients, job=self.job)
        reply = self.caller.one(begin, self.caller.terms.timeout)
        if isinstance(reply, str):
            return reply
        if (at := self.progress.at[site]) not in (wire.START, *reply.rounds):
            return f"it has not kept round {at + 1}, which it should restore"
        return None

    def leave_out(self, why: Mapping[str, str], number: int) -> None:
        """Continues without some sites until they answer again."""
        self.away |= why
        self._faults.update(c for c, reason in why.items() if reason not in INNOCENT)
        self.progress.left_out += [(number, site, reason) for site, reason in why.items()]
        if why:
            _log.warning("Round %d continues without %s.", number + 1, calls.sentence(why))

    def gather(self, number: int, out: Mapping[str, str], end: float) -> tuple[str, ...]:
        """Returns the sites that take part, and marks the others as absent."""
        planned, least = self.of_plan(number), self.least(number)
        if self.summed:  # a sum of other sites would show the difference
            planned, least = self.summed, len(self.summed)
        while len([c for c in planned if c not in self.away]) < least:
            self.say("waits for sites", number)
            if time.monotonic() >= end:
                why = f"needs {least} of its {len(planned)} sites, but too few answer"
                if self.summed:
                    names = ", ".join(map(console.short, planned))
                    why = f"has a sum of {names}, and one of fewer would reveal others' numbers"
                words = {"why": why, "away": calls.sentence(self.away)}
                raise SiteError(in_words("no_quorum", round=number + 1, **words))
            if out:
                time.sleep(min(1.0, self.caller.terms.grace))
            self.readmit()
        self.say("trains", number)
        return self.of_round(number, [c for c in planned if c not in self.away])

    def of_plan(self, number: int) -> tuple[str, ...]:
        """The sites of a round if none were away."""
        return self.planned.of(self.federation.ids, self.federation.seed, number)

    def least(self, number: int) -> int:
        """The smallest cohort of a round."""
        federation, planned = self.federation, self.of_plan(number)
        able = [c for c in planned if c not in self.withdrawn]
        full = federation.algorithm.card.full_cohort
        least = len(planned) if full else max(1, math.ceil(self.caller.terms.quorum * len(able)))
        fewest = 1 if federation.channel.sums is None else FEWEST
        return min(len(planned), max(least, federation.algorithm.aggregation.least, fewest))

    def of_round(self, number: int, there: Sequence[str]) -> tuple[str, ...]:
        """Continues a round with some of the sites that are planned for it."""
        missing = [c for c in self.of_plan(number) if c not in there]
        absent = {n: names for n, names in self.progress.absent.items() if n != number}
        self.progress.absent = absent | ({number: missing} if missing else {})
        every = {**self.planned.absent, **self.progress.absent}
        self.federation.cohort = replace(self.planned, absent=every)
        return self.federation.members(number)

    def readmit(self, sites: Sequence[str] | None = None) -> None:
        """Checks briefly whether absent sites are back."""
        able = [c for c in (self.away if sites is None else sites) if c not in self.withdrawn]
        sites = [c for c in able if self._faults[c] < self.caller.terms.faults]
        for site in sites:
            if site not in self._probes:
                self._probes[site] = self.caller.in_thread(self._welcome, site)
        wait([self._probes[c] for c in sites], self.caller.terms.probe)
        for site in sites:
            if self._probes[site].done():
                why = self._probes.pop(site).result()
                if why is None:
                    del self.away[site]
                    _log.info("%s is back.", console.short(site))
                else:
                    self.away[site] = why

    def _welcome(self, site: str) -> str | None:
        now, _ = calls.catch_up(self.caller, site, self.answers)
        if isinstance(now, str):
            return now
        try:
            calls.compare_models(self.facts[site], now, "before", site)
        except SiteError as error:
            return str(error).rstrip(".")
        return calls.other_samples(self.facts[site], now) or self._begin(site)
