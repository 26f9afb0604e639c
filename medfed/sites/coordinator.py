"""The server's half across sites: the whole cohort completes a round, or the round is repeated.

A round is repeated with a smaller cohort if a site is silent, busy, or gives an unusable answer;
neither end keeps anything of the attempt. (A missing reply within a round would make the two ends
of a lossy channel differ for ever, and leave methods of several phases with half a message.) So the
result equals a simulation with ``cohort.absent`` from the run folder's ``absences.json``.

Sites commit before the server does: after a stop in between, all go back by one round, which all
have kept. The attendance (:mod:`medfed.sites.attendance`) says who takes part; :class:`Requests`
holds what is asked of sites, what is checked of their replies, and their sums.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from medfed.common.console import short
from medfed.common.scores import limits_of
from medfed.federation import aggregation, budget
from medfed.federation.round import Round
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import Message, Packet
from medfed.functional.conformal import common
from medfed.functional.points import Point
from medfed.sites import calls, wire
from medfed.sites.attendance import Attendance
from medfed.sites.masks import context_of, needed, unmasked
from medfed.sites.wire import START, Answer, Asking
from medfed.sites.words import in_words
from medfed.standalone.errors import CodecError, NonFiniteError, SiteError, first_line

_log = logging.getLogger(__name__)
_AskShares = Callable[..., Mapping[str, wire.Shared]]
Replies = Mapping[str, wire.Unmasked]
Packets = dict[str, Packet]
Metrics = dict[str, dict[str, float]]
Where = Mapping[str, int]  # a round and its attempt
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
    """What the coordinator knows of the masks of one phase: nothing that unmasks a site."""

    context: str  # see :func:`medfed.sites.masks.context_of`
    keys: dict[str, wire.PublicKeys]  # what each site has announced
    boxes: dict[str, dict[str, str]]  # of each site the shares for each other, encrypted

    @classmethod
    def of(cls, announced: Mapping[str, wire.Announced], ask: _AskShares) -> Masks:
        """Lets all sites that have announced keys divide their secrets among them."""
        keys = {c: reply.keys for c, reply in announced.items()}
        boxes = {c: reply.boxes for c, reply in ask(wire.Shares, keys=keys).items()}
        wrong = {c: "its shares are not for all sites" for c in keys if {*boxes[c], c} != {*keys}}
        if wrong:
            raise Lost(wrong)
        return cls(context_of(next(iter(announced.values())), [*keys]), keys, boxes)

    def for_site(self, site: str) -> dict[str, str]:
        """What a site is sent with its message."""
        return {other: boxes_of[site] for other, boxes_of in self.boxes.items() if other != site}

    def rest(self, sent: Sequence[str], replies: Replies, length: int, **kind: Any) -> Any:
        """What to add to the sum of what some sites have sent, so that no mask is left in it."""
        shares = {c: reply.shares for c, reply in replies.items()}
        try:
            return unmasked(self.context, self.keys, sent, shares, length, **kind)
        except ValueError as error:
            sites = ", ".join(map(short, sent))
            raise SiteError(in_words("unmasked", sites=sites, why=first_line(error))) from error


@dataclass(eq=False)
class Requests:
    """Sends the requests of a round to sites, and refuses replies that no site can have."""

    attendance: Attendance
    diverged: list[str] = field(default_factory=list)  # sites at which the last evaluation says so
    # Of tested sites, with the digits that leave them.
    points: dict[str, Point] = field(default_factory=dict)
    # Whether tested sites have too few test patients for a verdict.
    small: dict[str, bool] = field(default_factory=dict)
    # The names of the metrics of most sites, by split.
    usual: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caller, self.federation = self.attendance.caller, self.attendance.federation
        self._largest = ""  # the site whose last message was far larger than those of the others

    def of_phase(self, kind: type[Kind], now: Round, where: Where, **more: Any) -> dict[str, Kind]:
        """Returns a request to each site of the open phase of a round."""
        place, at = {"phase": now.position, **where, **more}, self.attendance.progress.at
        return {c: self.caller.request(kind, c, at=at[c], **place) for c in now.recipients}

    def keys(self, current: Round, where: Where) -> Masks:
        """Lets the sites of a phase make keys for masks, and share their secrets."""
        sites = current.recipients
        if self.federation.channel.sums is None or len(sites) < FEWEST:
            return Masks("", {}, {})
        requests = self.of_phase(wire.Keys, current, where, cohort=sites)
        announced = self.needed(requests)
        # Sites may have given their shares to others before the coordinator was restarted.
        for before in {tuple(reply.given) for reply in announced.values()}:
            if not self.attendance.summed and len(before) >= FEWEST and {*before} < {*sites}:
                self.attendance.summed = before
                raise Lost({})

        def ask(kind: type[wire.Shares], **more: Any) -> dict[str, wire.Shared]:
            return self.needed(self.of_phase(kind, current, where, **more))

        return Masks.of(announced, ask)

    def unmasked(self, now: Round, where: Where, masks: Masks, packets: Packets) -> Packets:
        """Returns packets whose sum has no mask; each of them still has."""
        sums, sites = self.federation.channel.sums, now.recipients
        if sums is None or not sites or not (length := len(sums.read(packets[sites[0]]))):
            return packets
        requests = self.of_phase(wire.Unmask, now, where, sent=sites)
        self.attendance.summed = now.cohort
        replies, why = self.caller.all(requests)
        if len(replies) < needed(len(masks.keys)):
            raise Lost(why)
        rest = masks.rest(sites, replies, length)
        return {**packets, sites[0]: sums.added(packets[sites[0]], rest)}

    def check(self, packet: Packet, phase: str, forms: dict[str, Any]) -> None:
        """Checks a site's reply against what it may send, and against earlier replies of others."""
        federation = self.federation
        if packet.phase != phase:
            raise CodecError(f"It is of phase {packet.phase!r:.40}.")
        if extra := set(packet.parts) - set(federation.algorithm.parts_sent):
            raise CodecError(f"It holds {min(extra)!r:.40}, which may not leave a site.")
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

    def check_sizes(self, replies: Mapping[str, Message], norms: aggregation.Norms) -> None:
        """Leaves out sites whose numbers are so large that sums of all would overflow."""
        sizes: dict[str, float] = {}
        for site, reply in replies.items():  # of scalars, such as counts, only huge ones
            scalars = (abs(value) for value in reply.scalars.values() if abs(value) > _HUGE)
            sizes[site] = max(0.0, *(n.get(site, 0.0) for n in norms.values()), *scalars, 0.0)
        if not sizes:
            return
        usual = sorted(sizes.values())[(len(sizes) - 1) // 2]
        most = min(_HUGE, _FAR * max(1.0, usual))
        if far := {site: size for site, size in sizes.items() if size > most}:
            text = "its message has the norm {:.3g}, and those of most sites at most {:.3g}"
            raise Lost({site: text.format(size, usual) for site, size in far.items()})
        first = max(sizes, key=lambda site: sizes[site])
        self._largest = first if sizes[first] > 100 * max(1.0, usual) else ""

    def note(self, site: str, reply: wire.Trained) -> None:
        """Notes what a site has spent."""
        self.attendance.progress.spent[site] = reply.steps, budget.Passes(*reply.passes)

    def needed(self, requests: Mapping[str, Asking[Answer]]) -> dict[str, Answer]:
        """Sends a request to sites that must all answer."""
        replies, why = self.answers(requests)
        if why:
            raise Lost(why)
        return replies

    def answers(self, requests: Mapping[str, Asking[Answer]]) -> calls.Divided[Answer]:
        """Sends a request to sites, and returns the replies, and reasons where there are none."""
        replies, why = self.caller.all(requests)
        for site, reason in why.items():
            if f"({NonFiniteError.__name__})" in reason:
                request, hint = requests[site], ""
                if self._largest not in ("", site):
                    hint = in_words("largest", site=short(self._largest))
                where = {"site": short(site), "round": request.round + 1}
                raise NonFiniteError(in_words("not_finite", reason=reason, hint=hint, **where))
        return replies, why

    def measured(self, requests: Mapping[str, wire.Evaluate]) -> tuple[Metrics, dict[str, str]]:
        """Returns the metrics of sites, and reasons where there are none."""
        replies, why = self.caller.all(requests)
        metrics = {c: reply.metrics for c, reply in replies.items()}
        self.points |= {c: reply.point for c, reply in replies.items() if reply.point is not None}
        self.small |= {c: reply.small for c, reply in replies.items()}
        names = Counter(frozenset(m) for m in metrics.values()).most_common(1)
        split = next((r.split for r in requests.values()), "")
        usual = self.usual.setdefault(split, names[0][0]) if names else frozenset()
        strange = {c: reason for c, m in metrics.items() if (reason := impossible(m, usual))}
        self.diverged = [c for c, reply in replies.items() if reply.diverged]
        return {c: m for c, m in metrics.items() if c not in strange}, why | strange


def impossible(metrics: Mapping[str, float], names: frozenset[str]) -> str:
    """Says what no site can have measured; empty where all can be."""
    if {*metrics} != names:
        return "it has other metrics"
    for name, value in metrics.items():
        low, high = limits_of(name)
        if name.partition("/")[0] == "loss":
            low = -_HUGE  # the loss of a plugin may be negative
        if value < low - _ROUNDING or value > high + _ROUNDING or math.inf > abs(value) > _HUGE:
            return f"its {short(name)} is {value:.3g}"
    return ""


@dataclass(eq=False)
class Coordinator:
    """Runs rounds across sites."""

    attendance: Attendance
    best: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        self.requests = Requests(self.attendance)  # what is asked and summed
        self.caller, self.federation = self.attendance.caller, self.attendance.federation
        # The losses of the last round's training steps, by site.
        self.progress, self.losses = self.attendance.progress, dict[str, float]()
        self._turn = 0
        self._at: Mapping[str, int] = {}  # the last round of each site up to the tested one

    def round(self, number: int, evaluated: bool = True) -> Metrics:
        """Runs a round with the sites that stay until its end."""
        left, attempt = self.caller.terms.patience, 0
        self.attendance.summed = ()
        out: dict[str, str] = {}  # of this round, unless there is no quorum otherwise
        self.attendance.readmit()
        while True:
            began = time.monotonic()
            cohort = self.attendance.gather(number, out, began + left)
            left -= time.monotonic() - began  # however long the sites train
            try:
                return self._attempt({"round": number, "attempt": attempt}, cohort, evaluated)
            except Lost as lost:
                attempt += 1
                self.attendance.leave_out(lost.why, number)
                _log.warning("Round %d starts again.", number + 1)
                anew = [c for c, why in lost.why.items() if why == calls.UNREADY and c not in out]
                out |= lost.why
                self.attendance.readmit(anew)  # it has not missed anything yet

    def _attempt(self, where: Where, cohort: Sequence[str], evaluated: bool) -> Metrics:
        """Tries a round once; if it fails, the server's state does not change."""
        federation, at = self.federation, self.progress.at
        server, memory, ledger = federation.server, dict(federation.memory), federation.ledger
        far = list(federation.far)
        spent, number = dict(self.progress.spent), where["round"]
        federation.ledger = Ledger()
        try:
            trained = self._train(where, cohort)
            metrics = self._evaluate(where, trained) if evaluated else {}
            self._commit(where, trained)
        except BaseException:
            federation.server, federation.memory, federation.ledger = server, memory, ledger
            self.progress.spent, federation.far = spent, far
            raise
        for entry in federation.ledger.entries:
            ledger.add(entry)
        federation.ledger = ledger
        self.progress.at = at | dict.fromkeys(trained, number)
        marks = {**self.progress.rounds, number: dict(self.progress.at)}
        last = sorted(marks)[-2:]
        self.progress.rounds = {n: marks[n] for n in marks if n in last or n == self.best()}
        return metrics

    def _train(self, where: Where, cohort: Sequence[str]) -> list[str]:
        """Runs all phases with the cohort; returns the sites that were sent anything."""
        federation = self.federation
        self._memory = dict(federation.memory)
        current = Round(federation, where["round"])
        trained, is_open = set[str](), True
        while is_open:
            bodies = dict[bytes, bytes]()  # sites that are sent the same share it
            masks = self.requests.keys(current, where)
            fits = self.requests.of_phase(wire.Fit, current, where, cohort=list(cohort))
            for c, request in fits.items():
                body = bodies.setdefault(sent := current.sent[c].to_bytes(), sent)
                fits[c] = replace(request, body=body, boxes=masks.for_site(c))
            replies, wrong = self.requests.answers(fits)
            del fits, bodies  # which may be large, as the replies are
            packets, forms = {}, dict[str, Any]()
            for site in list(replies):
                reply = replies.pop(site)
                try:
                    packet = Packet.from_bytes(reply.body, federation.most_elements)
                    self.requests.check(packet, current.phase, forms)
                    packets[site] = packet
                except CodecError as error:
                    wrong[site] = f"its message cannot be used: {str(error).rstrip('.')}"
                self.requests.note(site, reply)
            if wrong:
                current = self._reopened(current, packets, wrong)
            packets = self.requests.unmasked(current, where, masks, packets)
            trained.update(packets)
            names = {c: {*packet.parts, *packet.scalars} for c, packet in packets.items()}
            try:
                for site in current.recipients:
                    current.receive(site, packets.pop(site))  # which may be large
                is_open = current.close_phase(self.requests.check_sizes)
            except CodecError as error:
                if error.client is None:
                    raise
                raise Lost({error.client: str(error).rstrip(".")}) from error
            except (KeyError, aggregation.AbsentPartError) as error:
                # The method reads parts and scalars by name; only the method knows the names.
                name = (
                    error.part if isinstance(error, aggregation.AbsentPartError) else error.args[0]
                )
                lacking = [c for c, known in names.items() if name not in known]
                if not lacking:
                    raise
                raise Lost(dict.fromkeys(lacking, f"its message has no {name!s:.60}")) from error
        return [c for c in federation.ids if c in trained]

    def _reopened(self, current: Round, packets: Packets, lost: Mapping[str, str]) -> Round:
        """Continues a round without sites that sent nothing usable, if the sum can be unmasked."""
        federation, number, there = self.federation, current.number, list(packets)
        least = max(self.attendance.least(number), needed(len(current.recipients)))
        late = federation.channel.sums is None or current.position or self.attendance.summed
        if late or len(there) < least:
            raise Lost(lost)
        sent = {c: current.sent[c].to_bytes() for c in there}
        self.attendance.of_round(number, there)
        federation.memory = self._memory
        again = Round(federation, number)
        if again.recipients != there or any(again.sent[c].to_bytes() != sent[c] for c in there):
            raise Lost(lost)
        self.attendance.leave_out(lost, number)
        return again

    def _evaluate(self, where: Mapping[str, Any], trained: Sequence[str]) -> Metrics:
        """Evaluates all sites that answer; those that have trained must answer."""
        self.attendance.say("evaluates", where["round"])
        at, there = self.progress.at, self.attendance.there
        where = {**where, "split": "val"}
        evaluations = {c: self._measure(c, at, trained=c in trained, **where) for c in there}
        metrics, why = self.requests.measured(evaluations)
        if lost := {c: reason for c, reason in why.items() if c in trained}:
            raise Lost(lost)
        self.attendance.leave_out(why, where["round"])
        return metrics

    def _measure(self, site: str, at: Mapping[str, int], **content: Any) -> wire.Evaluate:
        body = self.federation.delivery(site).to_bytes()
        return self.caller.request(wire.Evaluate, site, at=at[site], body=body, **content)

    def _commit(self, where: Where, trained: Sequence[str]) -> None:
        commits, progress = dict[str, wire.Commit](), self.progress
        for site in trained:
            at = progress.at[site]
            rounds = sorted({at, *(one[site] for one in progress.rounds.values())} - {START})
            commits[site] = self.caller.request(wire.Commit, site, at=at, needed=rounds, **where)
        replies = self.requests.needed(commits)
        for site, reply in replies.items():
            self.requests.note(site, reply)
        progress.epsilons |= {c: r.epsilon for c, r in replies.items() if r.epsilon is not None}
        self.losses = {c: r.loss for c, r in replies.items() if r.loss is not None}

    def digests(self, rounds: int) -> dict[str, str]:
        """Returns the hashes of the server and of every site that answers, after the last round."""
        replies: dict[str, wire.Loaded] = {}
        for _ in range(2):  # again those that answer after another greeting
            self.attendance.readmit()
            left = [c for c in self.attendance.there if c not in replies]
            at, ask = self.progress.at, self.caller.request
            requests = {c: ask(wire.Load, c, round=rounds, at=at[c]) for c in left}
            answers, why = self.caller.all(requests)
            replies |= answers
            self.attendance.leave_out(why, rounds)
        there = [c for c in self.federation.ids if c in replies]
        digests = {f"client/{c}": replies[c].digest for c in there}
        return {"server": self.federation.digests()["server"], **digests}

    def test(self, rounds: int, selected: int | None) -> Metrics:
        """Evaluates the model of the selected round on every site's test data."""
        self.attendance.say("tests", rounds)
        self._turn += 1
        last = rounds - 1 if selected is None else selected
        at = self._at = self.progress.rounds.get(last, self.progress.at)
        chosen = START if selected is None else selected
        where: dict[str, Any] = {"round": rounds, "attempt": self._turn, "selected": chosen}
        tested: Metrics = {}

        def ask(sites: Sequence[str], more: Mapping[str, Mapping[str, Any]]) -> None:
            place = {**where, "split": "test", "trained": False}
            evaluations = {c: self._measure(c, at, **place, **more.get(c, {})) for c in sites}
            metrics, why = self.requests.measured(evaluations)
            tested.update(metrics)
            self.attendance.leave_out(why, rounds)

        for _ in range(2):
            self.attendance.readmit()
            ask([c for c in self.attendance.there if c not in tested], {})
        # Sites are asked again, with what only all points together say.
        others = common(self.requests.points)
        again = {
            c: {"point": others}
            for c, point in self.requests.points.items()
            if {*others} - {"threshold"} or (others and "threshold" not in point)
        }
        ask([c for c in again if c not in self.attendance.away], again)
        self.attendance.say("has finished", rounds)
        return {c: tested[c] for c in self.federation.ids if c in tested}

    def across(self, rounds: int) -> dict[str, Metrics]:
        """Evaluates each site's tested model at every site, where both policies allow it.

        Returns metrics by model and by the site whose patients they are of, empty where it refused.
        """
        self.attendance.say("tests every model at every site", rounds)
        federation, there = self.federation, self.attendance.there
        values, refused = dict[str, Metrics](), dict[str, str]()

        def ask(bodies: Mapping[str, bytes], of: str = "") -> dict[str, wire.Tested]:
            request = partial(self.caller.request, wire.Across, round=rounds, attempt=self._turn)
            at = self._at
            bodies_of = {
                c: request(c, of=of or c, at=at[c], body=body) for c, body in bodies.items()
            }
            replies, why = self.caller.all(bodies_of)
            every = ((c, impossible(r.metrics, frozenset(r.metrics))) for c, r in replies.items())
            why |= {c: wrong for c, wrong in every if wrong}
            refused.update(why)
            return {c: reply for c, reply in replies.items() if c not in why}

        for owner, sent in ask({c: federation.delivery(c).to_bytes() for c in there}).items():
            try:
                packet = Packet.from_bytes(sent.body, federation.most_elements)
            except CodecError as error:
                refused[owner] = f"its model cannot be used: {first_line(error).rstrip('.')}"
                continue
            others = ask({c: sent.body for c in there if c != owner}, owner) | {owner: sent}
            values[owner] = {c: others[c].metrics if c in others else {} for c in there}
            for site in others:
                way: Direction = "up" if site == owner else "down"
                federation.ledger.count(packet.sizes(), rounds, "across", site, way)
        if refused:
            _log.warning("Not every model was tested at every site: %s.", calls.sentence(refused))
        self.attendance.say("has finished", rounds)
        return values
