"""What a coordinator asks of sites in a round, what it checks of their replies, and their sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from medfed.common.console import shown
from medfed.common.scores import limits_of
from medfed.federation.budget import Passes
from medfed.federation.federation import Round
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.message import Message
from medfed.federation.wire.packet import Packet
from medfed.functional.points import Point
from medfed.sites import wire
from medfed.sites.attendance import Attendance
from medfed.sites.masks import context_of, needed, unmasked
from medfed.sites.wire import Answer, Asking
from medfed.standalone.errors import CodecError, NonFiniteError, SiteError, first_line

Metrics = dict[str, dict[str, float]]
Kind = TypeVar("Kind", bound=wire.Request)
_ROUNDING = 1e-6  # by which a metric may exceed its limits
_FAR = 1e6  # times what most sites send; no training comes near
_HUGE = 1e18  # whose square, summed over sites, is still a number in single precision


class Lost(Exception):  # noqa: N818 - it leads to another attempt
    """The sites without which a round must start again, each with the reason."""

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)


class Masks(NamedTuple):
    """What the coordinator knows of the masks of one phase: nothing that unmasks a site.

    Attributes:
        context: See :func:`medfed.sites.masks.context_of`.
        keys: What each site has announced.
        boxes: Of each site the shares for each other, encrypted.
    """

    context: str
    keys: dict[str, wire.PublicKeys]
    boxes: dict[str, dict[str, str]]

    def for_site(self, site: str) -> dict[str, str]:
        """What a site is sent with its message."""
        return {other: given[site] for other, given in self.boxes.items() if other != site}


@dataclass(eq=False)
class Requests:
    """Sends the requests of a round to sites, and refuses replies that no site can have.

    Args:
        attendance: Who takes part.

    Attributes:
        diverged: Sites at which the last evaluation says so.
        points: Of tested sites, with the digits that leave them.
        small: Whether tested sites have too few test patients for a verdict.
        usual: The names of the metrics of most sites, by split.
    """

    attendance: Attendance
    diverged: list[str] = field(default_factory=list)
    points: dict[str, Point] = field(default_factory=dict)
    small: dict[str, bool] = field(default_factory=dict)
    usual: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caller, self.federation = self.attendance.caller, self.attendance.federation
        self._largest = ""  # the site whose last message was far larger than those of the others

    def of_phase(
        self, kind: type[Kind], current: Round, where: Mapping[str, int], **more: Any
    ) -> dict[str, Kind]:
        """Returns a request to each site of the open phase of a round."""
        place, at = {"phase": current.position, **where, **more}, self.attendance.progress.at
        return {c: self.caller.request(kind, c, at=at[c], **place) for c in current.recipients}

    def keys(self, current: Round, where: Mapping[str, int]) -> Masks:
        """Lets the sites of a phase make keys for masks, and share their secrets.

        Raises:
            Lost: If a site does not; also where the sites have given their shares to a sum of
                others of this round, before the coordinator was restarted.
        """
        sites = current.recipients
        if self.federation.channel.sums is None or len(sites) < FEWEST:
            return Masks("", {}, {})
        asked = self.of_phase(wire.Keys, current, where, cohort=sites)
        announced = self.needed(asked)
        keys = {c: reply.keys for c, reply in announced.items()}
        for before in {tuple(reply.given) for reply in announced.values()}:
            if not self.attendance.summed and len(before) >= FEWEST and {*before} < {*sites}:
                self.attendance.summed = before
                raise Lost({})
        shares = self.of_phase(wire.Shares, current, where, keys=keys)
        boxes = {c: reply.boxes for c, reply in self.needed(shares).items()}
        wrong = {c: "its shares are not for all sites" for c in sites if {*boxes[c], c} != {*sites}}
        if wrong:
            raise Lost(wrong)
        return Masks(context_of(asked[sites[0]], sites), keys, boxes)

    def unmasked(
        self, current: Round, where: Mapping[str, int], masks: Masks, packets: dict[str, Packet]
    ) -> dict[str, Packet]:
        """Returns packets whose sum has no mask; each of them still has.

        Raises:
            Lost: If too few sites give their shares.
            SiteError: If the shares do not fit together.
        """
        sums, sites = self.federation.channel.sums, current.recipients
        if sums is None or not sites or not (length := len(sums.read(packets[sites[0]]))):
            return packets
        asked = self.of_phase(wire.Unmask, current, where, sent=sites)
        self.attendance.summed = current.cohort
        replies, why = self.caller.all(asked, self.caller.terms.timeout)
        if len(replies) < needed(len(masks.keys)):
            raise Lost(why)
        shares = {c: reply.shares for c, reply in replies.items()}
        try:
            rest = unmasked(masks.context, masks.keys, sites, shares, length)
        except ValueError as error:
            raise SiteError(
                f"Round {current.number + 1} cannot be summed ({first_line(error)}): a site gives "
                "wrong shares of its masks. Resume the run without it, or set channel.secure=null."
            ) from error
        return {**packets, sites[0]: sums.added(packets[sites[0]], rest)}

    def check(self, packet: Packet, phase: str, forms: dict[str, Any]) -> None:
        """Checks a site's reply against what it may send, and against earlier replies of others."""
        federation = self.federation
        if packet.phase != phase:
            raise CodecError(f"It is of phase {packet.phase!r:.40}.")
        if extra := set(packet.parts) - set(federation.algorithm.parts_sent):
            raise CodecError(f"It holds {min(extra)!r:.40}, which may not leave a site.")
        assert federation.trainer is not None
        entries = federation.trainer.model.entries
        for part, encoded in packet.parts.items():
            form = (encoded.kind, encoded.layout)
            known = all(n in entries and entries[n].shape == shape for n, shape, _ in form[1])
            if not known and (part in ("shared", "personal") or forms.get(part, form) != form):
                raise CodecError(f"Its part {part:.60} has other names or shapes than it should.")
            forms.setdefault(part, form)
        if (sums := federation.channel.sums) is not None:
            sums.read(packet)
            summed = [(p, e.layout) for p, e in sorted(packet.parts.items()) if p in sums.parts]
            if forms.setdefault("", summed) != summed:
                raise CodecError("Its summed parts are not those of the other sites.")

    def check_sizes(self, replies: Mapping[str, Message]) -> None:
        """Leaves out sites whose numbers are so large that sums of all would overflow.

        Raises:
            Lost: If there are any.
        """
        if not (sizes := {site: _largest(reply) for site, reply in replies.items()}):
            return
        usual = sorted(sizes.values())[(len(sizes) - 1) // 2]
        most = min(_HUGE, _FAR * max(1.0, usual))
        if far := {site: size for site, size in sizes.items() if size > most}:
            text = "its message holds {:.3g}, and those of most sites at most {:.3g}"
            raise Lost({site: text.format(size, usual) for site, size in far.items()})
        first = max(sizes, key=lambda site: sizes[site])
        self._largest = first if sizes[first] > 100 * max(1.0, usual) else ""

    def note(self, site: str, reply: wire.Trained) -> None:
        """Notes what a site has spent."""
        self.attendance.progress.spent[site] = reply.steps, Passes(*reply.passes)

    def needed(self, asked: Mapping[str, Asking[Answer]]) -> dict[str, Answer]:
        """Sends a request to sites that must all answer."""
        replies, why = self.answers(asked)
        if why:
            raise Lost(why)
        return replies

    def answers(
        self, asked: Mapping[str, Asking[Answer]]
    ) -> tuple[dict[str, Answer], dict[str, str]]:
        """Sends a request to sites, and returns the replies, and reasons where there are none."""
        replies, why = self.caller.all(asked, self.caller.terms.timeout)
        for site, reason in why.items():
            if f"({NonFiniteError.__name__})" in reason:
                request, hint = asked[site], ""
                if self._largest not in ("", site):
                    hint = (
                        f" The cause may be site {shown(self._largest)}, whose last message holds "
                        "numbers over 100 times as large as those of most sites."
                    )
                raise NonFiniteError(
                    f"Site {shown(site)}, round {request.round + 1}: a loss or reply is not "
                    f"finite, or {reason}; lower optimizer.lr or set local.clip.{hint}"
                )
        return replies, why

    def measured(self, asked: Mapping[str, wire.Evaluate]) -> tuple[Metrics, dict[str, str]]:
        """Returns the metrics of sites, and reasons where there are none."""
        replies, why = self.caller.all(asked, self.caller.terms.timeout)
        metrics = {c: reply.metrics for c, reply in replies.items()}
        self.points |= {c: reply.point for c, reply in replies.items() if reply.point is not None}
        self.small |= {c: reply.small for c, reply in replies.items()}
        names = Counter(frozenset(m) for m in metrics.values()).most_common(1)
        split = next((r.split for r in asked.values()), "")
        usual = self.usual.setdefault(split, names[0][0]) if names else frozenset()
        strange = {c: said for c, m in metrics.items() if (said := impossible(m, usual))}
        self.diverged = [c for c, reply in replies.items() if reply.diverged]
        return {c: m for c, m in metrics.items() if c not in strange}, why | strange


def _largest(reply: Message) -> float:
    """The largest magnitude in a message; a scalar, such as a count, only where it is huge."""
    tensors = [t for part in reply.parts.values() for t in part.values() if t.numel()]
    scalars = [abs(value) for value in reply.scalars.values() if abs(value) > _HUGE]
    return max((*(float(t.abs().max()) for t in tensors), *scalars), default=0.0)


def impossible(metrics: Mapping[str, float], names: frozenset[str]) -> str:
    """Says what no site can have measured; empty where all can be."""
    if {*metrics} != names:
        return "it has other metrics"
    for name, value in metrics.items():
        low, high = limits_of(name)
        if name.partition("/")[0] == "loss":
            low = -_HUGE  # the loss of a plugin may be negative
        if value < low - _ROUNDING or value > high + _ROUNDING or math.inf > abs(value) > _HUGE:
            return f"its {shown(name)} is {value:.3g}"
    return ""
