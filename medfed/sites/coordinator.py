"""The server's half across sites: the whole cohort completes a round, or the round is repeated.

A round is repeated with a smaller cohort if a site is silent, busy, or gives an unusable answer;
neither end keeps anything of the attempt. (A missing reply within a round would make the two ends
of a lossy channel differ for ever, and leave methods of several phases with half a message.) So the
result equals a simulation with ``cohort.absent`` from the run folder's ``absences.json``.

Sites commit before the server does: after a stop in between, all go back by one round, which all
have kept. The attendance (:mod:`medfed.sites.attendance`) says who takes part, and the
requests (:mod:`medfed.sites.requests`) what is asked and summed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from medfed.common.tensors import State
from medfed.federation.federation import Round
from medfed.federation.wire.ledger import Direction, Ledger
from medfed.federation.wire.packet import Packet
from medfed.functional.conformal import common
from medfed.sites import calls, wire
from medfed.sites.attendance import Attendance
from medfed.sites.masks import needed
from medfed.sites.requests import Lost, Metrics, Requests, impossible
from medfed.sites.wire import START
from medfed.standalone.errors import CodecError, first_line

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Coordinator:
    """Runs rounds across sites.

    `losses`: of the last round's training steps, by site.
    """

    attendance: Attendance
    best: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        self.requests = Requests(self.attendance)  # what is asked and summed
        self.caller, self.federation = self.attendance.caller, self.attendance.federation
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
                return self._attempt(number, attempt, cohort, evaluated)
            except Lost as lost:
                attempt += 1
                self.attendance.leave_out(lost.why, number)
                _log.warning("Round %d starts again.", number + 1)
                anew = [c for c, why in lost.why.items() if why == calls.UNREADY and c not in out]
                out |= lost.why
                self.attendance.readmit(anew)  # it has not missed anything yet

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
            masks = self.requests.keys(current, where)
            asked = self.requests.of_phase(wire.Fit, current, where, cohort=list(cohort))
            for c, request in asked.items():
                body = bodies.setdefault(sent := current.sent(c).to_bytes(), sent)
                asked[c] = replace(request, body=body, boxes=masks.for_site(c))
            replies, wrong = self.requests.answers(asked)
            del asked, bodies  # which may be large, as the replies are
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
                current = self._reopened(current, packets, wrong, memory)
            packets = self.requests.unmasked(current, where, masks, packets)
            trained.update(packets)
            try:
                is_open = current.close_phase(packets, self.requests.check_sizes)
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

    def _reopened(
        self,
        current: Round,
        packets: Mapping[str, Packet],
        lost: Mapping[str, str],
        memory: dict[Direction, State],
    ) -> Round:
        """Continues a round without sites that sent nothing usable, if the sum can be unmasked."""
        federation, number, there = self.federation, current.number, list(packets)
        least = max(self.attendance.least(number), needed(len(current.recipients)))
        late = federation.channel.sums is None or current.position or self.attendance.summed
        if late or len(there) < least:
            raise Lost(lost)
        sent = {c: current.sent(c).to_bytes() for c in there}
        self.attendance.of_round(number, there)
        federation.memory = memory
        again = federation.open(number)
        if again.recipients != there or any(again.sent(c).to_bytes() != sent[c] for c in there):
            raise Lost(lost)
        self.attendance.leave_out(lost, number)
        return again

    def _evaluate(self, where: dict[str, int], trained: Sequence[str]) -> Metrics:
        """Evaluates all sites that answer; those that have trained must answer."""
        self.attendance.say("evaluates", where["round"])
        at, there = self.progress.at, self.attendance.there
        asked = {c: self._measure(c, "val", c in trained, at, where) for c in there}
        metrics, why = self.requests.measured(asked)
        if lost := {c: reason for c, reason in why.items() if c in trained}:
            raise Lost(lost)
        self.attendance.leave_out(why, where["round"])
        return metrics

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
        replies = self.requests.needed(asked)
        for site, reply in replies.items():
            self.requests.note(site, reply)
            if reply.epsilon is not None:
                self.progress.epsilons[site] = reply.epsilon
        losses = {site: reply.loss for site, reply in replies.items()}
        self.losses = {site: loss for site, loss in losses.items() if loss is not None}

    def digests(self, rounds: int) -> dict[str, str]:
        """Returns the hashes of the server and of every site that answers, after the last round."""
        replies: dict[str, wire.Loaded] = {}
        for _ in range(2):  # again those that answer after another greeting
            self.attendance.readmit()
            left = [c for c in self.attendance.there if c not in replies]
            at, ask = self.progress.at, self.caller.request
            asked = {c: ask(wire.Load, c, round=rounds, at=at[c]) for c in left}
            answers, why = self.caller.all(asked, self.caller.terms.timeout)
            replies |= answers
            self.attendance.leave_out(why, rounds)
        there = [c for c in self.federation.ids if c in replies]
        digests = {f"client/{c}": replies[c].digest for c in there}
        return {"server": self.federation.digests()["server"], **digests}

    def test(self, rounds: int, selected: int | None) -> Metrics:
        """Evaluates the model of the selected round on every site's test data.

        `selected`: the selected round; ``None``: the last one.
        """
        self.attendance.say("tests", rounds)
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
            metrics, why = self.requests.measured(asked)
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
            place: dict[str, Any] = {"round": rounds, "attempt": self._turn}
            asked = {}
            for c, body in bodies.items():
                said = {"of": of or c, "at": self._at[c], "body": body, **place}
                asked[c] = self.caller.request(wire.Across, c, **said)
            replies, why = self.caller.all(asked, self.caller.terms.timeout)
            for site, reply in replies.items():
                if wrong := impossible(reply.metrics, frozenset(reply.metrics)):
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
                federation.ledger.count(packet.sizes(), rounds, "across", site, way)
        if refused:
            _log.warning("Not every model was tested at every site: %s.", calls.sentence(refused))
        self.attendance.say("has finished", rounds)
        return values
