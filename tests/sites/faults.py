"""A transport on which things go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from medfed.sites.wire import Request, Silent
from tests.sites.direct import Direct

Event = Callable[[Request], bool]


@dataclass
class Faulty:
    """Loses, delays, repeats or replaces what passes, where a rule says so.

    Attributes:
        inner: The transport that works.
        deaf: Requests that do not arrive.
        lose: Requests that arrive, and whose reply is lost.
        repeat: Requests that arrive twice.
        late: Requests that arrive only when the next one for the site is sent, after it.
        before: Called with every request before it is sent.
        seen: All requests, in order.
    """

    inner: Direct
    deaf: Event = lambda _: False
    lose: Event = lambda _: False
    repeat: Event = lambda _: False
    late: Event = lambda _: False
    before: Callable[[Request], None] = lambda _: None
    seen: list[Request] = field(default_factory=list)
    waiting: dict[str, list[bytes]] = field(default_factory=dict)

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        asked = Request.from_bytes(request)
        self.before(asked)
        self.seen.append(asked)
        if self.deaf(asked):
            raise Silent
        if self.late(asked):
            self.waiting.setdefault(site, []).append(request)
            raise Silent
        reply = self.inner.call(site, request, timeout)
        for old in self.waiting.pop(site, []):
            self.inner.call(site, old, timeout)
        if self.repeat(asked):
            assert self.inner.call(site, request, timeout) == reply
        if self.lose(asked):
            raise Silent
        return reply


def once(event: Event) -> Event:
    """The first request for which a rule holds, and no other."""
    done = []

    def rule(asked: Request) -> bool:
        if done or not event(asked):
            return False
        done.append(asked)
        return True

    return rule


def is_at(kind: str, site: str, round: int, phase: int | None = None) -> Event:
    """Requests of one kind to one site in one round, in one phase of it or any."""
    return lambda r: (r.kind, r.site, r.round) == (kind, site, round) and phase in (None, r.phase)
