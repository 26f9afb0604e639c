"""The gate of a site: every request passes it, or is refused and logged.

:meth:`Gate.answer` takes a request and lets its answer out. :data:`RULES` says of each kind of
request what must hold before (agreement, session, round, phase) and before the answer leaves, what
is counted, which keys of the site's policy apply, and what the answer holds. The table in
``docs/sites.md`` is made of it. Counts are kept by agreement, in a file of the site: they only
grow, over all jobs, processes and restarts.

A site answers one request at a time (``busy`` otherwise) and every request once: a repeated request
gets the same bytes. A refused or failed request changes nothing at a site. But a question to the
data is counted before they are looked at, as a refusal says something of them, too.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from medfed.common import untrusted
from medfed.federation.algorithm import ClientInfo
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.wire.fixed_point import FEWEST
from medfed.federation.wire.packet import Packet
from medfed.records.folder import RunFolder
from medfed.sites import masks, wire
from medfed.sites.policy import TESTS, Counted, FullError, Item, Meter, Policy
from medfed.sites.wire import START, Reply, Request, Status
from medfed.sites.words import VetoError, veto
from medfed.standalone import neighbours
from medfed.standalone.errors import CodecError, MedfedError
from medfed.studies.parts import Part, Separate

MODELS = 10
"""Models of one round that may be trained on or evaluated, in addition to one for each site."""
ROUNDS = 5
"""Rounds that a coordinator may need: the last ones, and the best."""
_PARTS = 1000  # of a message, and characters of the name of each, which the ledger keeps
_REPLIES = 4  # the last ones, which may be asked for again; each may be as large as a model


class Refusal(Exception):  # noqa: N818 - it becomes a reply
    """A request that cannot be answered, with one of the reasons of `wire`."""

    def __init__(self, reason: str, status: Status = "refused") -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


def _refuse_if(wrong: object, reason: str, status: Status = "refused") -> None:
    if wrong:
        raise Refusal(reason, status)


class Agreement(Protocol):
    """What a site must know of its workplace: see :class:`medfed.sites.site.ConfiguredSite`."""

    name: str  # the site
    rounds: int  # how many are agreed on
    members: Sequence[str] | None  # all sites of the agreement, in order; ``None``: any
    joins: int  # steps that the site may take as the last one, which joins; 0: it trains with all
    parts: Sequence[Part | Separate]  # the parts of a study of statistics; none: it trains
    policy: Policy  # what the site allows

    @property
    def messages(self) -> int:
        """How many messages about its data the site can send by now."""

    def greeting(self) -> wire.Greeting:
        """Returns the facts that all sites must share."""

    def agree(self, number: int, answer: bytes) -> bytes | None:
        """Returns the site's next message about its data."""

    def facts(self) -> wire.Facts | None:
        """Returns the facts about the model."""

    def patients_behind(self) -> tuple[str, Sequence[str]]:
        """Returns where the data are, and the patients behind its statistics."""

    def join(self, everyone: Sequence[ClientInfo]) -> FederatedModule:
        """Returns the federation at this site."""


@dataclass(eq=False)
class Gate:
    """Where a site is in its session, and what it lets pass."""

    workplace: Agreement  # its agreement, policy and data
    answered: Counted  # what it has answered of this agreement
    go_to: Callable[[int], None]  # restores the state of a kept round, or refuses
    folder_of: Callable[[wire.Begin | wire.Onboard], Path]  # the folder of a federation
    mark: Callable[[], Callable[[], None]]  # returns what takes the site back to where it is now
    # Those of a round by the agreed method; requests give a position among them.
    phase_names: Callable[[int], Sequence[str]] = lambda _: ()
    session: str = ""  # the id of the coordinator's process that the site last greeted
    samples: Mapping[str, int] = field(default_factory=dict)  # of all clients of the session
    latest: tuple[int, int] = (START, 0)  # round and attempt of the last request
    phases: list[int] = field(default_factory=list)  # the positions that were answered of it
    here: int | None = START  # the kept round of the current state; None within a round
    base: int = START  # the kept round before the current one
    half: masks.Half | None = None  # the site's half of the sum under masks that is being made
    # How many questions the site has answered as one that joins; None: it does not.
    questions_answered: int | None = None
    questions: bytes = b""  # hashes of these, on which its model depends
    # The last ones to requests of this round, by the request's hash.
    replies: dict[bytes, bytes] = field(default_factory=dict)
    tested: bool = False  # whether the session's test metrics were asked for
    meter: Meter | None = None  # of the noisy gradients, with ``privacy.example``

    def __post_init__(self) -> None:
        self.log = logging.getLogger(f"medfed.sites.site.{self.workplace.name}")
        self.refused = self.log.getChild("refused")
        self.lock = threading.Lock()
        self.started: FederatedModule | None = None

    @property
    def module(self) -> FederatedModule:
        """The federation at this site, once a session has started."""
        assert self.started is not None
        return self.started

    def answer(self, data: bytes, do: Callable[[Any], Reply]) -> bytes:
        """Returns the reply to a request; errors become replies, too, and stand in the log."""
        try:
            request = Request.from_bytes(data)
        except CodecError as error:
            self.refused.warning("A request was refused: %s", error)
            return wire.unreadable(self.workplace.name)
        if not self.lock.acquire(blocking=False):
            return self._declined(request, Refusal("", "busy"))
        try:
            return self._answer(request, blake2b(data).digest(), do)
        except (VetoError, Refusal) as why:
            return self._declined(request, why)
        except Exception as error:
            # The error's text may name a patient or a file: it stays in this log.
            unexpected = not isinstance(error, MedfedError)
            self.log.error("%s failed: %s", _request_text(request), error, exc_info=unexpected)
            return wire.declined(request, "failed", type(error).__name__).to_bytes()
        finally:
            self.lock.release()

    def _declined(self, request: Request, why: VetoError | Refusal) -> bytes:
        sentence = "; needed: ".join([str(why) or why.status, *getattr(why, "__notes__", ())])
        self.refused.warning("%s was refused: %s", _request_text(request), sentence)
        return wire.declined(request, why.status, why.reason).to_bytes()

    def _answer(self, request: Request, key: bytes, do: Callable[[Any], Reply]) -> bytes:
        _refuse_if(request.site != self.workplace.name, "site")
        session = "" if isinstance(request, wire.Onboard) else request.session
        if session == self.session and (known := self.replies.get(key)):
            return known
        rule, take_back = RULES[type(request)], self.mark()
        try:
            for check in rule.checks:
                try:
                    check(self, request)
                except Refusal as why:
                    why.add_note(check.what if isinstance(check, Count) else str(check.__doc__))
                    raise
            reply = do(request)
            if self.meter is not None:
                self.meter.count()
        except Exception:
            take_back()
            raise
        for leave in rule.leaving:
            leave(self, request, reply)
        sent = reply.to_bytes()
        self.log.info("%s was answered: %s.", _request_text(request), rule.leaves)
        if not isinstance(request, wire.Hello | wire.Agree | wire.Begin):
            self.replies = dict([*self.replies.items(), (key, sent)][-_REPLIES:])
        return sent

    def start(
        self, session: str, clients: Sequence[wire.Client], module: FederatedModule | None
    ) -> None:
        """Starts a session at the initial state; without a federation it is one of a study."""
        self.session, self.samples = session, _samples(clients)
        self.tested, self.questions = False, b""
        self.started, self.meter = module, None
        if module is not None:
            self.phase_names = module.federation.algorithm.phases
        self.latest, self.phases, self.half, self.questions_answered = (START, 0), [], None, None
        self.here = self.base = START
        self.replies = {}

    def read(self, request: Request) -> Packet:
        """Returns the message of a request, of the phase that it names."""
        try:
            packet = Packet.from_bytes(request.body, self.module.federation.most_elements)
        except CodecError as error:
            self.refused.warning("A message was refused: %s", error)
            raise Refusal("message") from error
        longest = max(map(len, packet.parts), default=0)
        _refuse_if(max(len(packet.parts), longest) > _PARTS, "message")
        if isinstance(request, wire.Fit):
            name = self.phase_names(request.round)[request.phase]
            _refuse_if(packet.phase != name, "message")
        return packet

    def masked(self, reply: Packet, request: wire.Fit) -> Packet:
        """Adds masks to what is summed, which leaves under masks alone."""
        sums = self.module.federation.channel.sums
        if sums is None or not len(sums.read(reply)):
            return reply
        if self.half is None or not request.boxes:
            raise Refusal("sums")
        return self.half.masked(sums, reply, request.boxes)

    def epsilon(self) -> float | None:
        """Returns what the run has spent so far, unless ``policy.parts`` does not name it."""
        parts = self.workplace.policy.parts
        allowed = parts is None or "epsilon" in parts
        return self.meter.epsilon() if self.meter is not None and allowed else None

    def approved(self, request: Request) -> None:
        """The site's file names the study, if it names any, and allows it."""
        self.workplace.greeting()

    def next_message(self, request: wire.Agree) -> None:
        """The answers to all earlier messages came."""
        _refuse_if(request.phase >= self.workplace.messages, "order", "unready")

    def enough_patients(self, request: wire.Agree) -> None:
        """Enough patients contribute to each statistic of the message."""
        self.workplace.agree(request.phase, request.body)

    def known_patients(self, request: wire.Agree | wire.Ask) -> None:
        """Combined with statistics that left before, its own show enough patients."""
        self.remember_patients(request, keep=False)

    def remember_patients(self, request: Request, reply: Any = None, keep: bool = True) -> None:
        """They are remembered."""
        data, patients = self.workplace.patients_behind()
        self.answered.add_patients(data, patients, self.workplace.policy.least, keep)

    def trains(self, request: Request) -> None:
        """The agreement is one to train."""
        _refuse_if(self.workplace.joins or self.workplace.parts, "order")

    def is_study(self, request: Request) -> None:
        """The agreement is one of a study of statistics."""
        _refuse_if(not self.workplace.parts, "order")

    def may_evaluate(self, request: wire.Bring) -> None:
        """The site's file allows to evaluate models from elsewhere."""
        self.workplace.policy.check_across(False)

    def keys_for_sum(self, request: wire.Ask) -> None:
        """Of a sum, keys were made for this step; estimates need none."""
        if isinstance(self.workplace.parts[request.round], Separate):
            _refuse_if(request.boxes, "message")
        else:
            self.keys_made(request)
            _refuse_if(not request.boxes, "sums")

    def alone(self, request: Request) -> None:
        """The site has a session of its own, as it joins no finished run."""
        _refuse_if(self.workplace.joins, "order")

    def may_join(self, request: wire.Onboard) -> None:
        """The agreement is one by which this site joins the others as the last."""
        members, names = self.workplace.members, [client.id for client in request.clients]
        _refuse_if(not self.workplace.joins, "order")
        _refuse_if(members is not None and names != [*members[:-1]], "order")
        _refuse_if(self.workplace.name in names or len({*names}) < len(names), "message")
        _refuse_if(self.workplace.facts() is None, "order", "unready")

    def next_question(self, request: wire.Onboard) -> None:
        """It is the next question."""
        _refuse_if(request.phase and request.phase != self.questions_answered, "order", "unready")

    def named_job(self, request: wire.Begin | wire.Onboard) -> None:
        """The federation's name is plain."""
        _refuse_if(not re.fullmatch(r"\w{1,64}", request.job), "job")

    def same_federation(self, request: wire.Begin) -> None:
        """Its folder has no rounds of another federation."""
        path = RunFolder(self.folder_of(request)).job_json
        known = untrusted.read_json(path, dict[str, str]) if path.is_file() else {}
        _refuse_if(known.get("job", request.job) != request.job, "job")

    def few_folders(self, request: wire.Begin | wire.Onboard) -> None:
        """The site's file allows one more folder, or the federation has one."""
        folder = self.folder_of(request)
        others = [*folder.parent.glob("*/")] if folder.parent.is_dir() else []
        self.workplace.policy.check_folders(len({*others} - {folder}))

    def balanced(self, request: wire.Begin | wire.Onboard) -> None:
        """No site outweighs the others."""
        self._check_sizes(_samples(request.clients))

    def _check_sizes(self, samples: Mapping[str, int]) -> None:
        if not self.workplace.parts:  # sums of a study weigh every patient once
            self.workplace.policy.check_sizes(samples)

    def all_members(self, request: wire.Begin) -> None:
        """The sites are those of the agreement, this one with its samples."""
        _refuse_if(not request.session, "session")
        if (facts := self.workplace.facts()) is None:
            raise Refusal("order", "unready")
        names, members = [c.id for c in request.clients], self.workplace.members
        this = wire.Client(self.workplace.name, facts.num_samples)
        _refuse_if(this not in request.clients or len({*names}) < len(names), "message")
        _refuse_if(members is not None and names != [*members], "message")

    def in_session(self, request: Request) -> None:
        """The session is the last one that began."""
        _refuse_if(not self.session, "session", "unready")
        _refuse_if(request.session != self.session, "session")

    def training_round(self, request: Request) -> None:
        """Round and phase are those of the agreed method, and no test came before."""
        _refuse_if(not 0 <= request.round < self.workplace.rounds, "round")
        _refuse_if(request.phase >= len(self.phase_names(request.round)), "order")
        # A run that trains on after the test would select by it.
        _refuse_if(self.tested, "order")

    def in_cohort(self, request: wire.Keys | wire.Fit) -> None:
        """This site is in the round's cohort, and does not outweigh the others."""
        cohort, known = request.cohort, self.samples
        _refuse_if(self.workplace.name not in cohort or not {*cohort} <= {*known}, "message")
        self._check_sizes({name: known[name] for name in cohort})

    def several(self, request: wire.Keys) -> None:
        """At least three sites, each once."""
        _refuse_if(len({*request.cohort}) < max(FEWEST, len(request.cohort)), "message")

    def turn(self, request: Request) -> None:
        """The round that the request names is kept, and no later one was asked for."""
        turn = (request.round, request.attempt)
        _refuse_if(turn < self.latest, "stale")
        if turn == self.latest and self.phases:
            _refuse_if(request.at != self.base, "order")
            return
        self.go_to(request.at)
        self.here = request.at
        if turn != self.latest:
            self.latest, self.phases, self.half = turn, [], None
            self.replies = {}

    def new_phase(self, request: Request) -> None:
        """The phase comes after those that were answered."""
        _refuse_if(request.phase in self.phases, "replay")
        _refuse_if(any(phase > request.phase for phase in self.phases), "order")

    def keys_made(self, request: Request) -> None:
        """Keys were made for this phase."""
        _refuse_if(self.half is None or self.half.phase != request.phase, "order")

    def keys_if_boxes(self, request: wire.Fit) -> None:
        """With shares of others, keys were made for this phase."""
        if request.boxes:
            self.keys_made(request)

    def enough_in_sum(self, request: wire.Unmask) -> None:
        """The phase was trained, and more than two thirds of its sites are in the sum."""
        _refuse_if(request.phase not in self.phases, "order")
        assert self.half is not None
        there, sites = {*request.sent}, {*self.half.sites}
        _refuse_if(len(there) < masks.needed(len(sites)), "message")
        _refuse_if(not {self.workplace.name} <= there <= sites, "message")

    def after_training(self, request: Request) -> None:
        """A phase of the round was trained."""
        _refuse_if(not self.phases, "order", "unready")

    def before_training(self, request: Request) -> None:
        """No phase of the round was trained."""
        _refuse_if(self.phases, "order")

    def few_rounds(self, request: wire.Commit) -> None:
        """It keeps no more rounds than a coordinator needs."""
        _refuse_if(len(request.needed) > ROUNDS, "message")

    def as_trained(self, request: wire.Evaluate) -> None:
        """The site has trained in the round if the request says so, and only then."""
        (self.after_training if request.trained else self.before_training)(request)

    def measured_round(self, request: wire.Evaluate | wire.Across) -> None:
        """The round is one of the agreement; for the test the first round has ended."""
        is_test = not (isinstance(request, wire.Evaluate) and request.split == "val")
        _refuse_if(is_test and request.round < 1, "order")
        _refuse_if(not 0 <= request.round < self.workplace.rounds + is_test, "round")

    def after_test(self, request: Request) -> None:
        """The session's test metrics were asked for."""
        _refuse_if(not self.tested, "order")

    def questions_with(self, request: wire.Onboard) -> bytes:
        """Returns what a hospital that joins has heard by now, on which its model depends."""
        told = msgspec.to_builtins([request.clients, request.point])
        heard = sha256(json.dumps(told, sort_keys=True).encode() + request.body).digest()
        return (self.questions if request.phase else b"") + heard

    def may_cross(self, request: wire.Across) -> None:
        """The site's file allows to send its model, or to evaluate another's."""
        self.workplace.policy.check_across(request.of == self.workplace.name)

    def no_features(self, request: wire.Across) -> None:
        """A model that holds features of training patients stays here."""
        store = neighbours.store_in(self.module.local.split.base)
        if request.of == self.workplace.name and store is not None:
            raise veto("features")

    def basis(self, request: Request, with_point: bool = False) -> bytes:
        """Returns what an answer follows from: the message, the state and thresholds it meets."""
        content = [request.body]
        if isinstance(request, wire.Fit | wire.Evaluate | wire.Across):
            digests = self.module.federation.digests()
            content.append(digests[f"client/{self.workplace.name}"].encode())
            is_noisy = self.meter is not None or self.module.federation.noise is not None
            if is_noisy and isinstance(request, wire.Fit):  # the mean of many answers has no noise
                content.append(f"{request.session}/{request.attempt}".encode())
        if with_point and (point := getattr(request, "point", None)) is not None:
            content.append(json.dumps(point, sort_keys=True).encode())
        return b"".join(sha256(each).digest() for each in content)

    def tests_leave(self, request: wire.Evaluate | wire.Onboard, reply: Reply) -> None:
        """The site's file allows test metrics to leave; the model is kept all the same."""
        is_test = request.last if isinstance(request, wire.Onboard) else request.split == "test"
        if is_test:
            self.workplace.policy.check_tests()


def _samples(clients: Sequence[wire.Client]) -> dict[str, int]:
    return {client.id: client.num_samples for client in clients}


@dataclass(frozen=True)
class Count:
    """What is counted by agreement."""

    what: str  # in words
    of: Callable[[Gate, Any], Iterator[Item]]  # what is added to which counters, and their most
    reason: str = "replay"  # of the refusal of more

    def __call__(self, gate: Gate, request: Request) -> None:
        """Counts a request, or refuses it and counts nothing."""
        try:
            gate.answered.add(*self.of(gate, request))
        except FullError as error:
            raise Refusal(self.reason) from error


class Rule(NamedTuple):
    """What a site does with one kind of request."""

    # What must hold and what is counted, in order; the first sentence of each says it.
    checks: tuple[Callable[[Gate, Any], None] | Count, ...]
    leaves: str  # what the answer holds
    policy: tuple[str, ...] = ()  # the keys of the site's policy that apply
    # What must hold before the answer leaves, once the site has kept what is its own.
    leaving: tuple[Callable[[Gate, Any, Any], None], ...] = ()


def _model(key: str, once: bool = False) -> Callable[[Gate, Request], Iterator[Item]]:
    """Counts models, or answers to one question: one for each site and `MODELS` more, or one."""

    def of(gate: Gate, request: Request) -> Iterator[Item]:
        if request.body:
            place = key.format(round=request.round, phase=request.phase)
            yield place, _hash(gate.basis(request, True)), 1 if once else len(gate.samples) + MODELS

    return of


def _measured(gate: Gate, request: wire.Evaluate) -> Iterator[Item]:
    is_test = request.split == "test"
    yield from _model("test" if is_test else "validation/{round}")(gate, request)
    if is_test and request.point is not None:  # a model is decided once without, once with others'
        yield from _tests(gate, gate.basis(request, True), "points", 1)
    if is_test:
        yield from _tests(gate, gate.basis(request), least=1)


def _arrived(gate: Gate, request: wire.Bring | wire.Across) -> Iterator[Item]:
    yield from _model("test")(gate, request)
    yield from _tests(gate, gate.basis(request))


def _joining(gate: Gate, request: wire.Onboard) -> Iterator[Item]:
    yield from _model("onboard/{phase}")(gate, request)
    if request.last:
        yield from _tests(gate, gate.questions_with(request), least=1)


def _tests(gate: Gate, model: bytes, key: str = TESTS, least: int = 0) -> Iterator[Item]:
    """Counts a model by what it follows from; `least` are tested, but stay here."""
    if (most := gate.workplace.policy.test_metrics) is not None:
        yield key, _hash(model), max(most, least)


def _hash(content: bytes) -> str:
    return sha256(content).hexdigest()[:32]


def sum_key(gate: Gate, request: Request) -> str:
    """Returns the counter of the sets of sites of one sum; all steps of a study's part are one."""
    step = "" if gate.workplace.parts else f"/{request.phase}"
    return f"sum/{request.round}{step}"


def _summed(gate: Gate, request: wire.Unmask) -> Iterator[Item]:
    yield sum_key(gate, request), " ".join(sorted(request.sent)), 1


_OPENS: tuple[Callable[[Gate, Any], None], ...] = (
    *(Gate.in_session, Gate.training_round),
    *(Gate.in_cohort, Gate.turn, Gate.new_phase),
)
_TURN = (Gate.in_session, Gate.turn)
_STUDY = ("parts", "least", "least_per_message", "plugins", "privacy")
RULES: dict[type[Request], Rule] = {
    wire.Hello: Rule(
        (Gate.approved,), "hashes of agreed keys, names of channels and classes, versions", _STUDY
    ),
    wire.Agree: Rule(
        (
            *(Gate.approved, Gate.next_message, Gate.known_patients),
            Count("one answer to each message", _model("answer/{phase}", once=True), "answers"),
            Gate.enough_patients,  # last: it uses the answer
        ),
        "columns, names of categories, counts, sums and limits; at the end the number of samples",
        _STUDY,
        (Gate.remember_patients,),
    ),
    wire.Begin: Rule(
        (
            *(Gate.alone, Gate.named_job, Gate.same_federation, Gate.all_members),
            *(Gate.few_folders, Gate.balanced),
        ),
        "the numbers of the kept rounds",
        ("folders", "largest_share", "privacy"),
    ),
    wire.Keys: Rule((*_OPENS, Gate.several), "public keys for one sum", ("largest_share",)),
    wire.Shares: Rule((*_TURN, Gate.keys_made), "shares of the masks' secrets, encrypted"),
    wire.Fit: Rule(
        (
            *(Gate.trains, *_OPENS, Gate.keys_if_boxes),
            Count(
                "models that it trains on in a phase, noisy answers each",
                _model("fit/{round}/{phase}"),
            ),
        ),
        "the parts of the method's message, under masks if agreed; numbers of steps",
        ("parts", "least_per_message", "largest_share", "privacy"),
    ),
    wire.Unmask: Rule(
        (
            *(*_TURN, Gate.keys_made, Gate.enough_in_sum),
            Count("one set of sites for each sum", _summed, "sums"),
        ),
        "shares that unmask the sum",
    ),
    wire.Evaluate: Rule(
        (
            *(Gate.trains, Gate.in_session, Gate.measured_round, Gate.turn, Gate.as_trained),
            Count("models, states and thresholds: of a round, of the test in all", _measured),
        ),
        "metrics, threshold, calibration, quantiles in four digits; whether test patients are few",
        ("least", "test_metrics"),
        (Gate.tests_leave,),
    ),
    wire.Across: Rule(
        (
            *(Gate.trains, Gate.in_session, Gate.may_cross),
            *(Gate.measured_round, Gate.after_test, Gate.turn, Gate.no_features),
            Count("models, with those of the test", _arrived),
        ),
        "the personal model, or test metrics of another's in four digits",
        ("send_model", "evaluate_models", "test_metrics"),
    ),
    wire.Commit: Rule(
        (Gate.trains, *_TURN, Gate.after_training, Gate.few_rounds),
        "numbers of steps, training loss, epsilon",
    ),
    wire.Load: Rule((Gate.trains, *_TURN, Gate.before_training), "a hash of the state"),
    wire.Bring: Rule(
        (
            *(Gate.is_study, Gate.in_session, Gate.may_evaluate),
            Count("models, with those of the test", _arrived),
        ),
        "nothing: a bundle is compared with the agreed hash, and kept",
        ("evaluate_models", "test_metrics"),
    ),
    wire.Ask: Rule(
        (
            *(Gate.is_study, Gate.in_session, Gate.training_round),
            *(Gate.turn, Gate.new_phase, Gate.keys_for_sum, Gate.known_patients),
            Count("one question for each step", _model("ask/{round}/{phase}", True), "answers"),
        ),
        "counts and sums under masks, or estimates in four digits",
        ("least", "plans", "privacy"),
        (Gate.remember_patients,),
    ),
    wire.Onboard: Rule(
        (
            *(Gate.may_join, Gate.named_job, Gate.next_question),
            *(Gate.few_folders, Gate.balanced),
            Count("models for each question", _joining),
        ),
        "an answer of the method; at the end test metrics in four digits",
        ("parts", "least_per_message", "largest_share", "folders", "privacy", "test_metrics"),
        (Gate.tests_leave,),
    ),
}
"""What a site does with each kind of request."""


def _request_text(request: Request) -> str:
    """A request in the log: its kind and place, and nothing else from outside."""
    if request.round == START:
        return f"The request {request.kind}"
    if isinstance(request, wire.Load | wire.Across) or getattr(request, "split", "") == "test":
        return f"The request {request.kind} after round {request.round}"
    return f"The request {request.kind}, round {request.round + 1}, phase {request.phase + 1}"
