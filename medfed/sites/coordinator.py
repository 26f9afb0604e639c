"""The server's half across sites: the whole cohort completes a round, or the round is repeated.

A round is repeated with a smaller cohort if a site is silent, busy, or gives an unusable answer;
neither end keeps anything of the attempt. (A missing reply within a round would make the two ends
of a lossy channel differ for ever, and leave methods of several phases with half a message.) So the
result equals a simulation with ``cohort.absent`` from the run folder's ``absences.json``.

Sites commit before the server does: after a stop in between, all go back by one round, which all
have kept. An absent site is asked again before every round, and takes part once it answers.

The module also holds the progress of the sites, which a coordinator needs to resume.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from medfed.common.console import shown
from medfed.common.errors import CodecError, NonFiniteError, SiteError, first_line
from medfed.common.schemas import fit
from medfed.common.scores import limits_of
from medfed.common.tensors import State
from medfed.federation.algorithm import Cohort
from medfed.federation.budget import Passes
from medfed.federation.federation import Federation, Round, count
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.message import Message
from medfed.federation.wire.packet import Packet
from medfed.functional.points import Point, common
from medfed.sites import calls, wire
from medfed.sites.masks import context_of, needed, unmasked
from medfed.sites.wire import START, Answer, Asking, Facts


@dataclass
class SitesProgress:
    """The progress of the sites, which the coordinator's checkpoints hold for resuming.

    Attributes:
        at: The last round that each site took part in.
        spent: Steps and passes of each.
        absent: The absent sites of each round.
        rounds: ``at`` after the last rounds and the best one, which sites may have to restore.
        left_out: Round, site and reason, each time that a site was left out.
        epsilons: What the run has spent on a site's patients, as the site declares it.
    """

    at: dict[str, int]
    spent: dict[str, tuple[int, Passes]]
    absent: dict[int, list[str]] = field(default_factory=dict)
    rounds: dict[int, dict[str, int]] = field(default_factory=dict)
    left_out: list[tuple[int, str, str]] = field(default_factory=list)
    epsilons: dict[str, float] = field(default_factory=dict)

    @classmethod
    def new(cls, sites: Sequence[str]) -> SitesProgress:
        """Returns the progress before the first round."""
        return cls(dict.fromkeys(sites, START), dict.fromkeys(sites, (0, Passes())))

    def state_dict(self) -> dict[str, Any]:
        """Returns it in a form that ``weights_only=True`` loads."""
        saved: dict[str, Any] = msgspec.to_builtins(self)
        return saved

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> SitesProgress:
        """Reads what :meth:`state_dict` returned."""
        return fit(saved, cls)


_log = logging.getLogger(__name__)
Metrics = dict[str, dict[str, float]]
INNOCENT = (calls.SILENT, calls.BUSY, calls.UNREADY)  # reasons that do not count against a site


_ROUNDING = 1e-6  # by which a metric may exceed its limits
_FAR = 1e6  # times what most sites send; no training comes near
_HUGE = 1e18  # whose square, summed over sites, is still a number in single precision


class Lost(Exception):  # noqa: N818 - it leads to another attempt
    """The sites without which a round must start again, each with the reason."""

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)


class _Masks(NamedTuple):
    """What the coordinator knows of the masks of one phase: nothing that unmasks a site.

    Attributes:
        context: See :func:`medfed.sites.masks.context_of`.
        keys: What each site has announced.
        boxes: Of each site the shares for each other, encrypted.
    """

    context: str
    keys: dict[str, wire.PublicKeys]
    boxes: dict[str, dict[str, str]]

    def for_site(self, site: str) -> dict[str, Any]:
        """What a site is sent with its message."""
        boxes = {other: given[site] for other, given in self.boxes.items() if other != site}
        return {"boxes": boxes} if boxes else {}


@dataclass(eq=False)
class Coordinator:
    """Runs rounds across sites.

    Args:
        caller: Reaches them.
        federation: The server's half, without clients.
        facts: The sites' facts about their models, by site.
        answers: The answers to the sites before they built their models.
        job: Names the federation, so that no site mixes its rounds with another's.
        progress: The progress so far.
        best: Gives the best round so far.
        withdrawn: Sites that have withdrawn.
        tell: Called with what happens, the round, the absent sites and the last round of each.
    """

    caller: calls.Caller
    federation: Federation
    facts: Mapping[str, Facts]
    answers: Sequence[bytes]
    job: str
    progress: SitesProgress
    best: Callable[[], int | None] = lambda: None
    withdrawn: Sequence[str] = ()
    tell: Callable[[str, int, Mapping[str, str], Mapping[str, int]], None] = lambda *_: None

    def __post_init__(self) -> None:
        self.terms = self.caller.terms
        gone = dict.fromkeys(self.withdrawn, "it has withdrawn")
        self.away = {**self.caller.lacking, **gone}
        self._probes: dict[str, Future[str | None]] = {}
        self._planned: Cohort = self.federation.cohort
        self._turn = 0
        self._at: Mapping[str, int] = {}  # the last round of each site up to the tested one
        self._summed: tuple[str, ...] = ()  # sites of a sum of this round, which stays the only one
        self._faults: Counter[str] = Counter()
        self._largest = ""  # the site whose last message was far larger than those of the others
        self._metrics: dict[str, frozenset[str]] = {}  # names, by split
        self.diverged: list[str] = []  # sites at which the last evaluation says so
        self.losses: dict[str, float] = {}  # of the last round's training steps, by site
        self.points: dict[str, Point] = {}  # of tested sites, with the digits that leave them

    def begin(self) -> None:
        """Starts a session at every site.

        Raises:
            SiteError: If a site cannot start, or has lost a round that is needed.
        """
        method = self.federation.algorithm
        if self.federation.channel.sums is not None and len(method.phases(0)) > 1:
            _log.warning(
                "%s has several phases in a round: if a site is lost after a round's first sum "
                "under masks, the round waits for it, as a sum without it would reveal its update.",
                type(method).__name__,
            )
        there = [c for c in self.federation.ids if c not in {*self.withdrawn, *self.away}]
        futures = {c: self.caller.in_thread(self._begin, c) for c in there}
        wrong = {c: why for c, future in futures.items() if (why := future.result())}
        if wrong:
            raise SiteError(f"{calls.sentence(wrong)}.")

    def _say(self, doing: str, round: int) -> None:
        self.tell(doing, round, self.away, self.progress.at)

    def _begin(self, site: str) -> str | None:
        clients = [wire.Client(c, self.facts[c].num_samples) for c in self.federation.ids]
        asked = self.caller.request(wire.Begin, site, clients=clients, job=self.job)
        reply = self.caller.one(asked, self.terms.timeout)
        if isinstance(reply, str):
            return reply
        if (at := self.progress.at[site]) not in (START, *reply.rounds):
            return f"it has not kept round {at + 1}, which it should restore"
        return None

    def round(self, number: int, evaluated: bool = True) -> Metrics:
        """Runs a round with the sites that stay until its end.

        Args:
            number: Its number.
            evaluated: Whether it is followed by an evaluation.

        Returns:
            The metrics of every site that answered, in the order of clients.

        Raises:
            SiteError: If no quorum takes part within the terms' patience.
            NonFiniteError: If a loss at a site is not finite.
        """
        left, attempt = self.terms.patience, 0
        self._summed = ()
        out: dict[str, str] = {}  # of this round, unless there is no quorum otherwise
        self.readmit(list(self.away))
        while True:
            began = time.monotonic()
            cohort = self._gather(number, out, began + left)
            left -= time.monotonic() - began  # however long the sites train
            try:
                return self._attempt(number, attempt, cohort, evaluated)
            except Lost as lost:
                attempt += 1
                self.leave_out(lost.why, number)
                _log.warning("Round %d starts again.", number + 1)
                anew = [c for c, why in lost.why.items() if why == calls.UNREADY and c not in out]
                out |= lost.why
                self.readmit(anew)  # it has not missed anything yet

    def leave_out(self, why: Mapping[str, str], number: int) -> None:
        """Continues without some sites until they answer again.

        Args:
            why: The reason for each.
            number: The round in which they were lost.
        """
        self.away |= why
        self._faults.update(c for c, reason in why.items() if reason not in INNOCENT)
        self.progress.left_out += [(number, site, reason) for site, reason in why.items()]
        if why:
            _log.warning("Round %d continues without %s.", number + 1, calls.sentence(why))

    def _gather(self, number: int, out: Mapping[str, str], end: float) -> tuple[str, ...]:
        """Returns the sites that take part, and marks the others as absent."""
        federation = self.federation
        planned = self._planned.of(federation.ids, federation.seed, number)
        least = self._least(planned)
        if self._summed:  # a sum of other sites would show the difference
            planned, least = self._summed, len(self._summed)
        while len([c for c in planned if c not in self.away]) < least:
            if time.monotonic() >= end:
                if self._summed:
                    raise SiteError(
                        f"Round {number + 1} has a sum of {', '.join(map(shown, planned))}, and "
                        "one of fewer sites would reveal the others' numbers: "
                        f"{calls.sentence(self.away)}. Resume the run when they are back."
                    )
                raise SiteError(
                    f"Round {number + 1} needs {least} of its {len(planned)} sites, but too few "
                    f"answer: {calls.sentence(self.away)}. Resume the run when they are back."
                )
            self._say("waits for sites", number)
            if out:
                time.sleep(min(1.0, self.terms.grace))
            self.readmit(list(self.away))
        self._say("trains", number)
        return self._cohort(number, [c for c in planned if c not in self.away])

    def _least(self, planned: Sequence[str]) -> int:
        """The smallest cohort of a round for which these sites are planned."""
        federation = self.federation
        able = [c for c in planned if c not in self.withdrawn]
        full = federation.algorithm.card.full_cohort
        least = len(planned) if full else max(1, math.ceil(self.terms.quorum * len(able)))
        fewest = 1 if federation.channel.sums is None else FEWEST
        return min(len(planned), max(least, federation.algorithm.aggregation.least, fewest))

    def _cohort(self, number: int, there: Sequence[str]) -> tuple[str, ...]:
        """Continues a round with some of the sites that are planned for it."""
        federation = self.federation
        planned = self._planned.of(federation.ids, federation.seed, number)
        missing = [c for c in planned if c not in there]
        absent = {n: names for n, names in self.progress.absent.items() if n != number}
        self.progress.absent = absent | ({number: missing} if missing else {})
        federation.cohort = replace(
            self._planned, absent={**self._planned.absent, **self.progress.absent}
        )
        return federation.members(number)

    def readmit(self, sites: Sequence[str]) -> None:
        """Checks briefly whether absent sites are back.

        Args:
            sites: The sites; those with repeated unusable answers stay excluded.
        """
        able = [c for c in sites if c not in self.withdrawn]
        sites = [c for c in able if self._faults[c] < self.terms.faults]
        for site in sites:
            if site not in self._probes:
                self._probes[site] = self.caller.in_thread(self._welcome, site)
        wait([self._probes[c] for c in sites], self.terms.probe)
        for site in sites:
            if self._probes[site].done():
                why = self._probes.pop(site).result()
                if why is None:
                    del self.away[site]
                    _log.info("%s is back.", shown(site))
                else:
                    self.away[site] = why

    def _welcome(self, site: str) -> str | None:
        reply = calls.catch_up(self.caller, site, self.answers)
        if isinstance(reply, str):
            return reply
        if (now := reply.facts) is None:
            return "it sends more messages about its data than before"
        try:
            calls.compare_models(self.facts[site], now, "before", site)
        except SiteError as error:
            return str(error).rstrip(".")
        return calls.other_samples(self.facts[site], now) or self._begin(site)

    def _attempt(
        self, number: int, attempt: int, cohort: tuple[str, ...], evaluated: bool
    ) -> Metrics:
        """Tries a round once; if it fails, the server's state does not change."""
        federation, at = self.federation, self.progress.at
        server, memory, ledger = federation.server, dict(federation.memory), federation.ledger
        far = list(federation.far)
        spent, where = dict(self.progress.spent), {"round": number, "attempt": attempt}
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
        kept = {**self.progress.rounds, number: dict(self.progress.at)}
        last = sorted(kept)[-2:]
        self.progress.rounds = {n: kept[n] for n in kept if n in last or n == self.best()}
        return metrics

    def _train(self, where: dict[str, int], cohort: tuple[str, ...]) -> list[str]:
        """Runs all phases with the cohort; returns the sites that were sent anything."""
        federation, memory = self.federation, dict(self.federation.memory)
        current = federation.open(where["round"])
        trained, is_open = set[str](), True
        while is_open:
            bodies = dict[bytes, bytes]()  # sites that are sent the same share it
            masks = self._keys(current, where)
            asked = {}
            for c in current.recipients:
                body = bodies.setdefault(sent := current.sent(c).to_bytes(), sent)
                more = {"cohort": list(cohort), **masks.for_site(c)}
                place = self._place(c, current, where)
                asked[c] = self.caller.request(wire.Fit, c, body=body, **place, **more)
            replies, wrong = self._answers(asked)
            del asked, bodies  # which may be large, as the replies are
            packets, forms = {}, dict[str, Any]()
            for site in list(replies):
                reply = replies.pop(site)
                try:
                    packet = Packet.from_bytes(reply.body, federation.most_elements)
                    self._check(packet, current.phase, forms)
                    packets[site] = packet
                except CodecError as error:
                    wrong[site] = f"its message cannot be used: {str(error).rstrip('.')}"
                self._note(site, reply)
            if wrong:
                current = self._reopened(current, packets, wrong, memory)
            packets = self._unmasked(current, where, masks, packets)
            trained.update(packets)
            try:
                is_open = current.exchange(packets, self._check_sizes)
            except CodecError as error:
                if error.client is None:
                    raise
                raise Lost({error.client: str(error).rstrip(".")}) from error
            except KeyError as error:
                # The method reads parts and scalars by name; only the method knows the names.
                name = error.args[0]
                lacking = [c for c, p in packets.items() if name not in {*p.parts, *p.scalars}]
                if not lacking:
                    raise
                raise Lost(dict.fromkeys(lacking, f"its message has no {name!s:.60}")) from error
        return [c for c in federation.ids if c in trained]

    def _place(self, site: str, current: Round, where: Mapping[str, int]) -> dict[str, Any]:
        """Where a site's request is, in the open phase of a round."""
        return {"phase": current.position, "at": self.progress.at[site], **where}

    def _keys(self, current: Round, where: Mapping[str, int]) -> _Masks:
        """Lets the sites of a phase make keys for masks, and share their secrets.

        Raises:
            Lost: If a site does not; also where the sites have given their shares to a sum of
                others of this round, before the coordinator was restarted.
        """
        sites = current.recipients
        if self.federation.channel.sums is None or len(sites) < FEWEST:
            return _Masks("", {}, {})
        places = {c: self._place(c, current, where) for c in sites}
        ask = self.caller.request
        asked = {c: ask(wire.Keys, c, cohort=sites, **at) for c, at in places.items()}
        announced = self._needed(asked)
        keys = {c: reply.keys for c, reply in announced.items()}
        for before in {tuple(reply.given) for reply in announced.values()}:
            if not self._summed and len(before) >= FEWEST and {*before} < {*sites}:
                self._summed = before
                raise Lost({})
        shares = {c: ask(wire.Shares, c, keys=keys, **at) for c, at in places.items()}
        boxes = {c: reply.boxes for c, reply in self._needed(shares).items()}
        wrong = {c: "its shares are not for all sites" for c in sites if {*boxes[c], c} != {*sites}}
        if wrong:
            raise Lost(wrong)
        head = asked[sites[0]]
        return _Masks(context_of(head, sites), keys, boxes)

    def _reopened(
        self,
        current: Round,
        packets: Mapping[str, Packet],
        lost: Mapping[str, str],
        memory: dict[Direction, State],
    ) -> Round:
        """Continues a round without sites that sent nothing usable, if the sum can be unmasked.

        Raises:
            Lost: If it cannot; or if the other sites would have been sent something else in a round
                without these, so that a simulation would differ.
        """
        federation, number, there = self.federation, current.number, list(packets)
        least = self._least(self._planned.of(federation.ids, federation.seed, number))
        least = max(least, needed(len(current.recipients)))
        if federation.channel.sums is None or current.position or self._summed:
            raise Lost(lost)
        if len(there) < least:
            raise Lost(lost)
        sent = {c: current.sent(c).to_bytes() for c in there}
        self._cohort(number, there)
        federation.memory = memory
        again = federation.open(number)
        if again.recipients != there or any(again.sent(c).to_bytes() != sent[c] for c in there):
            raise Lost(lost)
        self.leave_out(lost, number)
        return again

    def _unmasked(
        self, current: Round, where: Mapping[str, int], masks: _Masks, packets: dict[str, Packet]
    ) -> dict[str, Packet]:
        """Returns packets whose sum has no mask; each of them still has.

        Raises:
            Lost: If too few sites give their shares.
            SiteError: If the shares do not fit together.
        """
        sums, sites = self.federation.channel.sums, current.recipients
        if sums is None or not sites or not (length := len(sums.read(packets[sites[0]]))):
            return packets
        places = {c: self._place(c, current, where) for c in sites}
        ask = self.caller.request
        asked = {c: ask(wire.Unmask, c, sent=sites, **at) for c, at in places.items()}
        self._summed = current.cohort
        replies, why = self.caller.all(asked, self.terms.timeout)
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

    def _check(self, packet: Packet, phase: str, forms: dict[str, Any]) -> None:
        """Checks a site's reply against what it may send, and against earlier replies of others."""
        federation = self.federation
        if packet.phase != phase:
            raise CodecError(f"It is of phase {packet.phase!r:.40}.")
        if extra := set(packet.parts) - set(federation.algorithm.leaves):
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

    def _check_sizes(self, replies: Mapping[str, Message]) -> None:
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

    def _note(self, site: str, reply: wire.Trained) -> None:
        self.progress.spent[site] = reply.steps, Passes(*reply.passes)

    def _needed(self, asked: Mapping[str, Asking[Answer]]) -> dict[str, Answer]:
        """Sends a request to sites that must all answer."""
        replies, why = self._answers(asked)
        if why:
            raise Lost(why)
        return replies

    def _answers(
        self, asked: Mapping[str, Asking[Answer]]
    ) -> tuple[dict[str, Answer], dict[str, str]]:
        """Sends a request to sites, and returns the replies, and reasons where there are none."""
        replies, why = self.caller.all(asked, self.terms.timeout)
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

    def _evaluate(self, where: dict[str, int], trained: Sequence[str]) -> Metrics:
        """Evaluates all sites that answer; those that have trained must answer."""
        self._say("evaluates", where["round"])
        there = [c for c in self.federation.ids if c not in self.away]
        asked = {c: self._measure(c, "val", c in trained, self.progress.at, where) for c in there}
        metrics, why = self._measured(asked)
        if lost := {c: reason for c, reason in why.items() if c in trained}:
            raise Lost(lost)
        self.leave_out(why, where["round"])
        return metrics

    def _measured(self, asked: Mapping[str, wire.Evaluate]) -> tuple[Metrics, dict[str, str]]:
        replies, why = self.caller.all(asked, self.terms.timeout)
        metrics = {c: reply.metrics for c, reply in replies.items()}
        self.points |= {c: reply.point for c, reply in replies.items() if reply.point is not None}
        names = Counter(frozenset(m) for m in metrics.values()).most_common(1)
        split = next((r.split for r in asked.values()), "")
        usual = self._metrics.setdefault(split, names[0][0]) if names else frozenset()
        strange = {c: said for c, m in metrics.items() if (said := _impossible(m, usual))}
        self.diverged = [c for c, reply in replies.items() if reply.diverged]
        return {c: m for c, m in metrics.items() if c not in strange}, why | strange

    def _measure(
        self,
        site: str,
        split: str,
        trained: bool,
        at: Mapping[str, int],
        where: dict[str, int],
        **more: Any,
    ) -> wire.Evaluate:
        said = {"split": split, "trained": trained, "at": at[site], **more, **where}
        body = self.federation.delivery(site).to_bytes()
        return self.caller.request(wire.Evaluate, site, body=body, **said)

    def _commit(self, where: dict[str, int], trained: Sequence[str]) -> None:
        asked = {}
        for site in trained:
            at, kept = self.progress.at[site], self.progress.rounds.values()
            rounds = sorted({at, *(one[site] for one in kept)} - {START})
            asked[site] = self.caller.request(wire.Commit, site, at=at, needed=rounds, **where)
        replies = self._needed(asked)
        for site, reply in replies.items():
            self._note(site, reply)
            if reply.epsilon is not None:
                self.progress.epsilons[site] = reply.epsilon
        losses = {site: reply.loss for site, reply in replies.items()}
        self.losses = {site: loss for site, loss in losses.items() if loss is not None}

    def digests(self, rounds: int) -> dict[str, str]:
        """Returns the hashes of the server and of every site that answers, after the last round."""
        replies: dict[str, wire.Loaded] = {}
        for _ in range(2):  # again those that answer after another greeting
            self.readmit(list(self.away))
            left = [c for c in self.federation.ids if c not in {*self.away, *replies}]
            at, ask = self.progress.at, self.caller.request
            asked = {c: ask(wire.Load, c, round=rounds, at=at[c]) for c in left}
            answers, why = self.caller.all(asked, self.terms.timeout)
            replies |= answers
            self.leave_out(why, rounds)
        there = [c for c in self.federation.ids if c in replies]
        digests = {f"client/{c}": replies[c].digest for c in there}
        return {"server": self.federation.digests()["server"], **digests}

    def test(self, rounds: int, selected: int | None) -> Metrics:
        """Evaluates the model of the selected round on every site's test data.

        Args:
            rounds: How many rounds there were.
            selected: The selected round; ``None``: the last one.
        """
        self._say("tests", rounds)
        self._turn += 1
        at = self.progress.rounds.get(rounds - 1 if selected is None else selected)
        at = self.progress.at if at is None else at
        self._at = at
        where = {"round": rounds, "attempt": self._turn}
        chosen = {"selected": START if selected is None else selected}
        tested: Metrics = {}

        def ask(sites: Sequence[str], more: Mapping[str, Mapping[str, Any]]) -> None:
            asked = {
                c: self._measure(c, "test", False, at, where, **chosen, **more.get(c, {}))
                for c in sites
            }
            metrics, why = self._measured(asked)
            tested.update(metrics)
            self.leave_out(why, rounds)

        for _ in range(2):
            self.readmit(list(self.away))
            ask([c for c in self.federation.ids if c not in self.away and c not in tested], {})
        # Sites are asked again, with what only all points together say.
        others = common(self.points)
        again = {
            c: {"point": others}
            for c, point in self.points.items()
            if "variance" in others or (others and "threshold" not in point)
        }
        ask([c for c in again if c not in self.away], again)
        self._say("has finished", rounds)
        return {c: tested[c] for c in self.federation.ids if c in tested}

    def across(self, rounds: int) -> dict[str, Metrics]:
        """Evaluates each site's tested model at every site, where both policies allow it.

        Args:
            rounds: How many rounds there were.

        Returns:
            Metrics by model and by the site whose patients they are of, empty where it refused.
        """
        self._say("tests every model at every site", rounds)
        federation = self.federation
        there = [c for c in federation.ids if c not in self.away]
        values: dict[str, Metrics] = {}
        refused: dict[str, str] = {}

        def ask(bodies: Mapping[str, bytes], of: str = "") -> dict[str, wire.Tested]:
            place: dict[str, Any] = {"round": rounds, "attempt": self._turn}
            asked = {}
            for c, body in bodies.items():
                said = {"of": of or c, "at": self._at[c], "body": body, **place}
                asked[c] = self.caller.request(wire.Across, c, **said)
            replies, why = self.caller.all(asked, self.terms.timeout)
            for site, metrics in ((c, reply.metrics) for c, reply in replies.items()):
                if wrong := _impossible(metrics, frozenset(metrics)):
                    why[site] = wrong
            refused.update(why)
            return {c: reply for c, reply in replies.items() if c not in why}

        for owner, sent in ask({c: federation.delivery(c).to_bytes() for c in there}).items():
            try:
                packet = Packet.from_bytes(sent.body, federation.most_elements)
            except CodecError as error:
                refused[owner] = f"its model cannot be used: {first_line(error).rstrip('.')}"
                continue
            others = ask({c: sent.body for c in there if c != owner}, owner) | {owner: sent}
            metrics = {c: reply.metrics for c, reply in others.items()}
            values[owner] = {c: dict(metrics.get(c, {})) for c in there}
            ways: dict[str, Direction] = {c: "up" if c == owner else "down" for c in others}
            for site, way in ways.items():
                count(federation.ledger, packet, rounds, "across", site, way)
        if refused:
            _log.warning("Not every model was tested at every site: %s.", calls.sentence(refused))
        self._say("has finished", rounds)
        return values


def _largest(reply: Message) -> float:
    """The largest magnitude in a message; a scalar, such as a count, only where it is huge."""
    tensors = [t for part in reply.parts.values() for t in part.values() if t.numel()]
    scalars = [abs(value) for value in reply.scalars.values() if abs(value) > _HUGE]
    return max((*(float(t.abs().max()) for t in tensors), *scalars), default=0.0)


def _impossible(metrics: Mapping[str, float], names: frozenset[str]) -> str:
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
