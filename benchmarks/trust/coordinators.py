"""An adversarial coordinator against one real site: any sequence of requests, lies and repeats.

Hypothesis chooses the sequence: greetings, answers about the data with false limits, sessions,
rounds with any model, cohort and order, sums under masks of any sites, metrics of any models, a
hospital that joins, restarts of the site's process, and two jobs that ask at the same time. The
site is one of four, with a table of its own, an agreement and a policy. After every step the
machine checks what it has seen from outside, against the table and not against the site's gate:

- a site that trains never answers as one that joins; after the test it trains no further;
- behind the sums of a column are at least 20 patients strictly within the limits;
- an agreement has one answer to each message about the data, and no other scales them;
- a sum of an agreement has one set of sites;
- statistics leave for one of two studies whose patients differ by one;
- no more models are trained on in a phase, or evaluated, than the protocol needs, and no more are
  tested than the policy allows, over all jobs and restarts;
- what is counted only grows;
- a refused request changes nothing: no file but the logs, and nothing that the site remembers; of a
  question to the data the count alone stays, as a refusal says something of them;
- every refusal is in the log.

``--holes`` puts holes back that were found by hand, one at a time, and says after how many
sequences and CPU seconds the machine finds each.

Run with ``python benchmarks/trust/coordinators.py``; 10,000 sequences by default.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Lock, Thread, current_thread, main_thread
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from medfed.config.compose import build, described
from medfed.config.description import RunDescription
from medfed.datamodules.tables import agreement as tables
from medfed.federation.wire.channel import Channel, MessageContext
from medfed.federation.wire.packet import Message
from medfed.records import folder as records
from medfed.run import experiment
from medfed.sites import gate, masks, policy, wire
from medfed.sites import site as sites_site
from medfed.sites.agreement import Agreed, SiteFile
from medfed.sites.policy import COUNTED
from medfed.sites.run import coordinate
from medfed.sites.site import Site
from medfed.sites.site_folder import hospital
from medfed.standalone import files

SITE, OTHERS = "Basel", ("Bern", "Chur", "Davos")
SITES = (SITE, *OTHERS)
STUDY = (
    *("experiment=clinical_pfednet", "data=csv", "data.label=ill", "data.centre=hospital"),
    *("data.patient=patient", "data.scaling=pooled", "algorithm=fedavg", "channel.secure=masks"),
    *("rounds=2", "local.steps=1", "data.batch_size=64"),
)
POLICY = "{least_per_message: 20, test_metrics: 1, pictures: false}"
FLOOR, ROUNDS, TESTS = 20, 2, 1
MODELS = len(SITES) + 10  # of one round, as docs/sites.md promises
COLUMNS = ("age", "crp")
LOGS = (".txt", ".lock")  # endings of files that a refusal may change
AGREED = Agreed(SITES, STUDY)
FEWER = Agreed(SITES, (*STUDY, "data.most_patients=63"))  # trains on one patient fewer


def write_table(path: Path, name: str) -> None:
    """Writes the patients of one hospital."""
    rng = np.random.default_rng(SITES.index(name))
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["patient", "hospital", "age", "crp", "ill"])
        for n in range(80):
            row = [f"{name}{n:03d}", name, round(rng.normal(60, 9), 1)]
            out.writerow([*row, round(rng.lognormal(), 2), rng.integers(2)])


class File(SiteFile):
    """A site's file, whose configuration is composed once: it costs more than a sequence."""

    def config(self, agreed: Agreed) -> RunDescription:
        """See the base class."""
        return _composed(self.site, agreed, self.folder)


@cache
def _composed(name: str, agreed: Agreed, folder: Path) -> RunDescription:
    file = SiteFile.read(_home() / f"{name}.yaml")
    return file.config(agreed).replacing({"folder": str(folder)})


@cache
def _home() -> Path:
    """The folder of the tables and files of all sites."""
    folder = Path(tempfile.mkdtemp())
    for name in SITES:
        write_table(folder / f"{name}.csv", name)
        lines = f"site: {name}\ndata: {{path: {name}.csv}}\npolicy: {POLICY}\n"
        (folder / f"{name}.yaml").write_text(lines, encoding="utf-8")
    return folder


@contextmanager
def _built_once() -> Iterator[None]:
    """Objects without state, and Trainers that run nothing, are built once: half of a sequence."""
    kept: dict[str, Any] = {}

    def once(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(config: Any, *more: Any, **named: Any) -> Any:
            what = getattr(config, "trainer", config)  # of a run, whose folder is another each time
            key = repr((make, what, more, sorted(named.items())))
            if key not in kept:
                kept[key] = make(config, *more, **named)
            return kept[key]

        return made

    def text(self: RunDescription) -> str:
        return json.dumps({**self.values.plain(), "derived": dict(self.derived)})  # is YAML, too

    with (
        mock.patch("medfed.run.federating.build", once(build)),
        mock.patch.object(RunDescription, "yaml", text),
        mock.patch.object(records, "versions", cache(records.versions)),
        mock.patch.object(records, "commit_here", cache(records.commit_here)),
        mock.patch.object(sites_site, "commit_here", cache(records.commit_here)),
        mock.patch.object(experiment, "trainer_of", once(experiment.trainer_of)),
    ):
        yield


def started(name: str, folder: Path, agreed: Agreed = AGREED) -> Site:
    """A site as its process makes it."""
    file = File.read(_home() / f"{name}.yaml")
    return hospital(agreed, replace(file, folder=folder), lambda _: None)


class Honest:
    """A transport that keeps what an honest coordinator says to the site."""

    def __init__(self, sites: dict[str, Site]) -> None:
        self.sites = sites
        self.said: list[wire.Request] = []

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :class:`medfed.sites.wire.Transport`."""
        if site == SITE:
            self.said.append(wire.Request.from_bytes(request))
        return self.sites[site].answer(request)


@cache
def honest() -> tuple[list[wire.Request], np.ndarray[Any, Any]]:
    """What an honest coordinator says, and the (N, P) training rows of the site."""
    folder = Path(tempfile.mkdtemp())
    try:
        transport = Honest({name: started(name, folder / name) for name in SITES})
        config = described([*STUDY, "data.path=null", "logger=none", f"folder={folder / 'run'}"])
        coordinate(config, transport, SITES)
        data: Any = transport.sites[SITE].workplace
        return transport.said, data.data.train[SITE].rows[:, : len(COLUMNS)]
    finally:
        shutil.rmtree(folder)


def first(kind: type[wire.Request]) -> Any:
    """The first honest request of a kind."""
    return next(one for one in honest()[0] if isinstance(one, kind))


@cache
def model(kind: type[wire.Request], number: int) -> bytes:
    """An honest message, or one of other weights."""
    body: bytes = first(kind).body
    if not number:
        return body
    message, _ = Channel().decode(wire_packet(body), "down", None)
    parts = {p: {n: t + 0.1 * number for n, t in of.items()} for p, of in message.parts.items()}
    changed = Message(message.phase, parts, message.scalars, message.kinds)
    return Channel().encode(changed, "down", MessageContext(SITE), None)[0].to_bytes()


def wire_packet(body: bytes) -> Any:
    """A packet."""
    from medfed.federation.wire.packet import Packet

    return Packet.from_bytes(body)


def answers() -> list[bytes]:
    """Answers to the site's first message: the honest one, and lies."""
    told = [one for one in honest()[0] if isinstance(one, wire.Agree) and one.phase == 1]
    content = json.loads(told[0].body)
    ages = np.sort(honest()[1][:, 0])
    lies = [
        {"low": [ages[-2], 0.0], "median": [ages[-2], 1.0]},  # the oldest alone is within
        {"low": [1e3, 0.0], "median": [1e3, 1.0], "high": [2e3, 9.0]},  # nobody is
        {"low": [ages[0] - 1, 0.0], "high": [ages[1] - 1e-9, 9.0], "median": [0.0, 1.0]},
        {"low": [0.0, 0.0], "high": [200.0, 50.0], "median": [50.0, 1.0]},  # all are
    ]
    changed = [{**content, **lie} for lie in lies]
    return [told[0].body, *(json.dumps(one).encode() for one in changed)]


class Records(logging.Handler):
    """Counts the refusals and errors in a log."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Counts one."""
        self.count += record.levelno >= logging.WARNING


NUMBERS = st.integers(0, 3)
SLOTS = st.integers(0, 1)
PEERS = st.sampled_from([SITES, SITES, SITES[:3], SITES[:2], SITES[1:], (SITE,), ()])
ROUND = st.sampled_from([0, 0, 0, 1, 2, 3, -1])
ATTEMPT = st.sampled_from([0, 0, 1, 2])
AT = st.sampled_from([-1, -1, 0, 1])


class Coordinator(RuleBasedStateMachine):
    """Sends anything, and keeps what the site has let out under its agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = _home() / "site"  # the same for all, so that it is composed once
        self.folder.mkdir()
        self.log = Records()
        logger = logging.getLogger(f"medfed.sites.site.{SITE}")
        logger.addHandler(self.log)
        self.jobs = [started(SITE, self.folder), started(SITE, self.folder)]
        logger.addHandler(self.log)  # which a site's start has closed
        self.sessions = ["", ""]
        self.halves: dict[str, masks.Half] = {}
        self.boxes: dict[str, dict[str, str]] = {}
        self.last = first(wire.Hello)
        self.tested: set[str] = set()  # sessions
        self.answered: dict[int, set[bytes]] = {}
        self.trained: dict[tuple[int, int], set[bytes]] = {}
        self.evaluated: dict[int, set[bytes]] = {}
        self.models_tested: set[bytes] = set()
        self.sums: dict[tuple[int, int], set[frozenset[str]]] = {}
        self.counted: dict[str, list[str]] = {}
        self.studies: set[str] = set()  # of which statistics have left

    def teardown(self) -> None:
        """Closes the log, and removes the site's folder."""
        logger = logging.getLogger(f"medfed.sites.site.{SITE}")
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        shutil.rmtree(self.folder)

    def send(self, slot: int, asked: wire.Request) -> Any:
        """Sends a request to one job's process, and checks what comes back."""
        before, self.last, was = self.log.count, asked, self.state(slot)
        reply = wire.Reply.from_bytes(self.jobs[slot].answer(asked.to_bytes()))
        if reply.status != "ok":
            now = self.state(slot)
            if isinstance(asked, wire.Agree | wire.Fit):
                now, was = ({**of, COUNTED: b""} for of in (now, was))
            changed = [name for name in {*was, *now} if was.get(name) != now.get(name)]
            assert not changed, f"a refused {asked.kind} has changed {changed[0]}"
        if isinstance(asked, wire.Begin) and reply.status == "ok":
            place: Any = self.jobs[slot].workplace
            used = enumerate(place.answers, 1)
            known = all(body in self.answered.get(phase, ()) for phase, body in used)
            assert known, "it trains on data that a refused answer has scaled"
        assert reply.status == "ok" or self.log.count > before, f"{reply} is not in the log"
        if reply.status == "ok":
            self.note(asked, reply)
        return reply

    def state(self, slot: int) -> dict[str, Any]:
        """The files of the site but its logs, and what a job's process remembers."""
        site, gate_ = self.jobs[slot], self.jobs[slot].gate
        files_ = (p for p in self.folder.rglob("*") if p.is_file() and p.suffix not in LOGS)
        kept: dict[str, Any] = {str(p.relative_to(self.folder)): p.read_bytes() for p in files_}
        names = ("session", "samples", "latest", "phases", "here", "base", "half", "tested")
        kept |= {name: getattr(gate_, name) for name in (*names, "replies", "questions")}
        kept["folder"], kept["metrics"] = site.folder, dict(site.metrics)
        if gate_.started is not None:
            kept["client"] = site.federation.digests()[f"client/{SITE}"], site.client.steps_done
        return kept

    def note(self, asked: wire.Request, reply: Any) -> None:
        """Checks an answer against the agreement, the policy and the table."""
        place = asked.round, asked.phase
        assert not isinstance(asked, wire.Onboard), "a site that trains has joined"
        if isinstance(asked, wire.Agree) and asked.phase:
            bodies = self.answered.setdefault(asked.phase, set())
            bodies.add(asked.body)
            assert len(bodies) == 1, "an agreement has two answers about the data"
            if reply.body:
                self.check_sums(json.loads(asked.body))
        if isinstance(asked, wire.Agree) and reply.body:
            self.note_study(AGREED)
        if isinstance(asked, wire.Fit):
            assert asked.session not in self.tested, "it trains after the test"
            assert 0 <= asked.round < ROUNDS, "it trains in a round that is not agreed"
            assert asked.phase == 0, "it trains in a phase that the method does not have"
            self.add(self.trained, place, asked.body)
        if isinstance(asked, wire.Unmask):
            sets = self.sums.setdefault(place, set())
            sets.add(frozenset(asked.sent))
            assert len(sets) == 1, "a sum has two sets of sites"
        if isinstance(asked, wire.Across):
            raise AssertionError("a model crosses, which the policy does not allow")
        if isinstance(asked, wire.Evaluate) and asked.split == "val":
            self.add(self.evaluated, asked.round, asked.body)
        elif isinstance(asked, wire.Evaluate):
            assert asked.round > 0, "it is tested before the first round"
            self.tested.add(asked.session)
            self.models_tested.add(asked.body)
            assert len(self.models_tested) <= TESTS, "more models are tested than allowed"

    def note_study(self, agreed: Agreed) -> None:
        """Checks that statistics of two studies do not show the one patient between them."""
        self.studies.add(agreed.digest)
        assert len(self.studies) == 1, "statistics of two studies show one patient"

    @rule()
    def begin_the_other_study(self) -> None:
        """Asks for the first statistics of a study with one patient fewer."""
        site = started(SITE, self.folder, FEWER)
        logging.getLogger(f"medfed.sites.site.{SITE}").addHandler(self.log)
        if wire.Reply.from_bytes(site.answer(wire.Agree(SITE, "other").to_bytes())).status == "ok":
            self.note_study(FEWER)

    def add(self, seen: dict[Any, set[bytes]], place: Any, body: bytes) -> None:
        """Checks that a place has no more models than the protocol needs."""
        seen.setdefault(place, set()).add(body)
        assert len(seen[place]) <= MODELS, "more models than the protocol needs"

    def check_sums(self, answer: dict[str, Any]) -> None:
        """Checks that enough patients stand behind the sums of each column."""
        rows = honest()[1]
        for column, low, high in zip(rows.T, answer["low"], answer["high"], strict=True):
            within = int(((column > low) & (column < high)).sum())
            assert low >= high or within >= FLOOR, f"{within} patients are behind a sum"

    @rule(slot=SLOTS)
    def greet(self, slot: int) -> None:
        """Greets the site."""
        self.send(slot, wire.Hello(SITE, f"s{slot}"))

    @rule(slot=SLOTS, answer=st.integers(0, 4), last=st.booleans())
    def agree(self, slot: int, answer: int, last: bool) -> None:
        """Agrees on the data, with an honest answer or a lie."""
        self.send(slot, wire.Agree(SITE, f"s{slot}"))
        self.send(slot, wire.Agree(SITE, f"s{slot}", phase=1, body=answers()[answer]))
        if last:
            moments = next(o for o in honest()[0] if isinstance(o, wire.Agree) and o.phase == 2)
            self.send(slot, wire.Agree(SITE, f"s{slot}", phase=2, body=moments.body))

    @rule(slot=SLOTS, phase=st.sampled_from([3, 4, 1 << 30]), answer=st.integers(0, 4))
    def agree_ahead(self, slot: int, phase: int, answer: int) -> None:
        """Answers a message that the site has not sent."""
        reply = self.send(slot, wire.Agree(SITE, "s", phase=phase, body=answers()[answer]))
        assert reply.status != "ok", "it hears an answer to no message"

    @rule(slot=SLOTS, job=NUMBERS, session=NUMBERS, honest_sites=st.booleans())
    def begin(self, slot: int, job: int, session: int, honest_sites: bool) -> None:
        """Starts a session, of this or another job."""
        if not self.ready(slot):
            return
        named = first(wire.Begin).clients
        clients = named if honest_sites else [*named[:1], wire.Client("nobody", 10**9)]
        self.sessions[slot] = f"s{slot}{session}"
        where: dict[str, Any] = {"job": f"{job}{slot}" * 16, "clients": clients}
        self.send(slot, wire.Begin(SITE, self.sessions[slot], **where))

    def opened(self, slot: int) -> str:
        """Returns the id of a session, which begins if there is none."""
        if not self.sessions[slot]:
            self.begin(slot=slot, job=0, session=0, honest_sites=True)
        return self.sessions[slot]

    def ready(self, slot: int) -> bool:
        """Greets a site honestly, unless it was told a lie."""
        site: Any = self.jobs[slot].workplace
        if site.facts() is None and not self.answered.get(1, set()) - {answers()[0]}:
            self.agree(slot=slot, answer=0, last=True)
        return site.facts() is not None

    @rule(
        slot=SLOTS, round=ROUND, attempt=ATTEMPT, at=AT, number=st.integers(0, 20),
        cohort=PEERS, sent=PEERS, masked=st.booleans(), phase=st.sampled_from([0, 0, 0, 1, 9]),
    )  # fmt: skip
    def train(
        self, slot: int, round: int, attempt: int, at: int, number: int,
        cohort: tuple[str, ...], sent: tuple[str, ...], masked: bool, phase: int = 0,
    ) -> None:  # fmt: skip
        """Trains in a round, and unmasks a sum of some sites."""
        session = self.opened(slot)
        where: dict[str, Any] = {"round": round, "attempt": attempt, "at": at, "phase": phase}
        boxes: dict[str, str] = {}
        if masked:
            asked = wire.Keys(SITE, session, **where, cohort=[*cohort])
            reply = self.send(slot, asked)
            if reply.status == "ok":
                peers = {c: masks.Half(c, asked, cohort, None) for c in cohort if c != SITE}
                keys = {c: half.announced() for c, half in peers.items()} | {SITE: reply.keys}
                boxes = {c: half.boxes(keys)[SITE] for c, half in peers.items()}
                self.send(slot, wire.Shares(SITE, session, **where, keys=keys))
        body = model(wire.Fit, number)
        more: dict[str, Any] = {"cohort": [*cohort], "boxes": boxes}
        self.send(slot, wire.Fit(SITE, session, **where, body=body, **more))
        self.send(slot, wire.Unmask(SITE, session, **where, sent=[*sent]))

    @rule(
        slot=SLOTS, round=ROUND, attempt=ATTEMPT, at=AT, number=st.integers(0, 20),
        test=st.booleans(), trained=st.booleans(),
    )  # fmt: skip
    def evaluate(
        self, slot: int, round: int, attempt: int, at: int, number: int, test: bool, trained: bool
    ) -> None:
        """Asks for metrics of any model."""
        asked = wire.Evaluate(
            SITE, self.opened(slot), round, attempt, 0, at, model(wire.Evaluate, number),
            split="test" if test else "val", trained=trained,
        )  # fmt: skip
        self.send(slot, asked)

    @rule(slot=SLOTS, round=ROUND, attempt=ATTEMPT, at=AT, of=st.sampled_from(SITES))
    def cross(self, slot: int, round: int, attempt: int, at: int, of: str) -> None:
        """Asks for the site's model, or to test another's."""
        body = model(wire.Evaluate, 0)
        session = self.sessions[slot]
        self.send(slot, wire.Across(SITE, session, round, attempt, 0, at, body, of=of))

    @rule(slot=SLOTS, round=ROUND, attempt=ATTEMPT, at=AT, keep=st.booleans())
    def keep(self, slot: int, round: int, attempt: int, at: int, keep: bool) -> None:
        """Keeps a round, or goes back to one."""
        where = (SITE, self.sessions[slot], round, attempt, 0, at)
        self.send(slot, wire.Commit(*where, needed=[]) if keep else wire.Load(*where))

    @rule(slot=SLOTS, attempt=ATTEMPT, sent=st.sampled_from([SITES, SITES[:3]]))
    def begin_and_sum(self, slot: int, attempt: int, sent: tuple[str, ...]) -> None:
        """Starts an honest session, and makes the first sum, of all sites or without one."""
        self.begin(slot=slot, job=0, session=0, honest_sites=True)
        where: dict[str, Any] = {
            "slot": slot,
            "round": 0,
            "attempt": attempt,
            "at": -1,
            "number": 0,
        }
        self.train(**where, cohort=SITES, sent=sent, masked=True)

    @rule(slot=SLOTS, told=st.tuples(*[st.integers(0, 4)] * 2), last=st.booleans())
    def agree_twice_and_begin(self, slot: int, told: tuple[int, int], last: bool) -> None:
        """Two jobs hear answers about the data, of which one may be a lie; both begin."""
        for at, answer in zip((slot, 1 - slot), told, strict=True):
            self.agree(slot=at, answer=answer, last=last)
        for at in (0, 1):
            clients = first(wire.Begin).clients
            self.sessions[at] = f"s{at}b"
            asked = wire.Begin(SITE, self.sessions[at], job=f"b{at}" * 16, clients=clients)
            self.send(at, asked)

    @rule(slot=SLOTS, last=st.booleans(), number=NUMBERS, phase=NUMBERS)
    def onboard(self, slot: int, last: bool, number: int, phase: int) -> None:
        """Treats the site as one that joins the others."""
        if self.ready(slot):
            clients = [wire.Client(name, 40) for name in OTHERS]
            more: dict[str, Any] = {"last": last, "job": "j" * 31, "clients": clients}
            body = model(wire.Fit, number)
            self.send(slot, wire.Onboard(SITE, f"s{slot}", phase=phase, body=body, **more))

    @rule(slot=SLOTS)
    def restart(self, slot: int) -> None:
        """Starts the site's process again."""
        self.jobs[slot], self.sessions[slot] = started(SITE, self.folder), ""
        logging.getLogger(f"medfed.sites.site.{SITE}").addHandler(self.log)

    @rule(slot=SLOTS)
    def repeat(self, slot: int) -> None:
        """Sends the last request again."""
        self.send(slot, self.last)

    @rule(numbers=st.tuples(NUMBERS, NUMBERS))
    def at_once(self, numbers: tuple[int, int]) -> None:
        """Two jobs ask for the test at the same time."""
        requests: list[wire.Request] = []
        for slot, number in enumerate(numbers):
            self.begin(slot=slot, job=0, session=0, honest_sites=True)
            body = model(wire.Evaluate, number)
            where = (SITE, self.sessions[slot], ROUNDS, 0, 0, -1, body)
            requests.append(wire.Evaluate(*where, split="test", trained=False))
        replies: list[Any] = [None, None]

        def ask(slot: int) -> None:
            data = self.jobs[slot].answer(requests[slot].to_bytes())
            replies[slot] = wire.Reply.from_bytes(data)

        threads = [Thread(target=ask, args=(slot,)) for slot in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for asked, reply in zip(requests, replies, strict=True):
            if reply.status == "ok":
                self.note(asked, reply)

    def check_invariants(self, settings: Any, output: Any, runtimes: Any) -> None:
        """Checks after every step that what is counted only grows."""
        path = self.folder / COUNTED
        kept = json.loads(path.read_text()) if path.is_file() else {}
        now: dict[str, list[str]] = {k: v for one in kept.values() for k, v in one.items()}
        for key, items in self.counted.items():
            assert items == now.get(key, [])[: len(items)], f"{key} has forgotten what it counted"
        self.counted = now


@contextmanager
def _side_entrance() -> Iterator[None]:
    """A site that trains answers as one that joins, with steps that the coordinator chooses."""
    rule = gate.Rule((gate.Gate.next_question,), "")

    with (
        mock.patch.dict(gate.RULES, {wire.Onboard: rule}),
        mock.patch("medfed.sites.site.newcomer_of", _one_step),
    ):
        yield


def _one_step(module: Any, site: str, steps: int) -> Any:
    from medfed.federation import reference

    module.local.budget = replace(module.local.budget, steps=1)
    return reference.Newcomer(module.federation, module.federation.clients[site])


@contextmanager
def _all_rows_count() -> Iterator[None]:
    """The floor counts the patients that are summed, not those within the limits."""
    ask = tables.Moments.ask

    def without(self: Any, rows: Any, agreed: Any) -> dict[str, Any]:
        message = ask(self, rows, agreed)
        rows.contributing.clear()
        return message

    with mock.patch.object(tables.Moments, "ask", without):
        yield


@contextmanager
def _uncounted(*kinds: type[wire.Request]) -> Iterator[None]:
    """Some requests are not counted over jobs and restarts."""
    rules = {}
    for kind in kinds:
        rule = gate.RULES[kind]
        left = tuple(check for check in rule.checks if not isinstance(check, gate.Count))
        rules[kind] = rule._replace(checks=left)
    with mock.patch.dict(gate.RULES, rules):
        yield


@contextmanager
def _used_before_counted() -> Iterator[None]:
    """An answer about the data is used before the site looks whether it had another one."""
    usual = gate.RULES[wire.Agree]
    counts = [check for check in usual.checks if isinstance(check, gate.Count)]
    others = [check for check in usual.checks if check not in counts]
    rule = usual._replace(checks=(*others, *counts))
    with mock.patch.dict(gate.RULES, {wire.Agree: rule}):
        yield


@contextmanager
def _no_lock() -> Iterator[None]:
    """Two jobs read what was counted before either writes it."""
    barrier, read = Barrier(2), policy._read

    def slow(path: Path, kind: Any) -> Any:
        found = read(path, kind)
        if path.name == COUNTED and current_thread() is not main_thread():
            try:
                barrier.wait(1.0)
            except BrokenBarrierError:
                barrier.reset()
        return found

    write, writing = files.write_json, Lock()

    def one_by_one(path: Path, content: Any) -> None:
        with writing:  # at once, one of them would fail to rename its file
            write(path, content)

    with (
        mock.patch.object(policy, "FileLock", contextlib.nullcontext),
        mock.patch.object(policy, "_read", slow),
        mock.patch.object(files, "write_json", one_by_one),
    ):
        yield


@contextmanager
def _patients_forgotten() -> Iterator[None]:
    """The patients behind earlier statistics are not compared."""
    with mock.patch.object(policy.Counted, "add_patients", return_value=None):
        yield


@contextmanager
def _not_taken_back() -> Iterator[None]:
    """What a request changed before it was refused stays."""
    with mock.patch.object(Site, "_mark", return_value=lambda: None):
        yield


HOLES: dict[str, Callable[[], Any]] = {
    "1: a side entrance for one that joins": _side_entrance,
    "3: the floor counts rows that are summed": _all_rows_count,
    "3: another answer after a restart": lambda: _uncounted(wire.Agree),
    "3: a refused answer scales the data": _used_before_counted,
    "4: another set of sites in another job": lambda: _uncounted(wire.Unmask),
    "5: two jobs count at once": _no_lock,
    "two studies differ by one patient": _patients_forgotten,
    "a refused request moves the site": _not_taken_back,
}


def play(sequences: int, number: int = 0, steps: int = 12) -> tuple[int, str]:
    """Plays sequences until one breaks an invariant.

    Args:
        sequences: How many at most.
        number: Seed.
        steps: The most steps of each.

    Returns:
        How many were played, and what was broken; empty if nothing was.
    """
    played = 0

    class Counted(Coordinator):
        """Counts the sequences."""

        def __init__(self) -> None:
            nonlocal played
            played += 1
            super().__init__()

    how = settings(
        max_examples=sequences, stateful_step_count=steps, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    try:
        with _built_once(), contextlib.redirect_stdout(None):
            run_state_machine_as_test(seed(number)(Counted), settings=how)
    except AssertionError as error:
        return played, str(error).partition("\n")[0]
    return played, ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Plays against a site, with and without holes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=12, help="of a sequence, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--holes", type=int, default=2000, help="sequences for each; 0: none")
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)  # Lightning says much
    logging.getLogger("medfed").propagate = False
    torch.set_num_threads(1)
    honest()
    for name, hole in HOLES.items() if options.holes else ():
        began = time.process_time()
        with hole():
            count, broken = play(options.holes, options.seed, options.steps)
        took = time.process_time() - began
        print(
            f"{name}: {broken or 'not found'} ({count:,} sequences, {took:.1f} CPU s)", flush=True
        )
    began = time.process_time()
    count, broken = play(options.sequences, options.seed, options.steps)
    took = time.process_time() - began
    print(f"{count:,} sequences, {took:.0f} CPU s: {broken or 'nothing was broken'}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
