"""Calls all sites in parallel, retries once, and verifies every reply."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar, cast

from medfed.common.console import short
from medfed.datamodules.one_site import Claims, Exchanged, Merging
from medfed.sites import status, wire
from medfed.sites.wire import Answer, Asking, Facts, Greeting, Silent, Transport
from medfed.sites.words import in_words, words_for
from medfed.standalone.checks import check_fields, within
from medfed.standalone.errors import CodecError, SiteError, few

Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=wire.Request)
CaughtUp = tuple[Facts | str, list[Exchanged]]
Divided = tuple[dict[str, Answer], dict[str, str]]
_Seconds = Annotated[float, within("[0, inf)")]
SILENT, BUSY, UNREADY = "it did not answer", "it was busy", "it was restarted"
ENDED = "the run has ended"


@dataclass(frozen=True)
class Terms:
    """When a coordinator waits, and when it continues without a site."""

    # Share of a round's cohort that must take part; methods that need all clients in every round
    # wait for all.
    quorum: Annotated[float, within("(0, 1]")] = 0.5
    # Seconds that a site may take for one request, such as the local steps of a phase.
    timeout: _Seconds = 600.0
    # Seconds that it may take to start: to import, and to read and prepare its data.
    hello: _Seconds = 3600.0
    grace: _Seconds = 10.0  # seconds for requesting a lost reply again
    # Seconds before a round in which an absent site may report that it is back.
    probe: _Seconds = 2.0
    patience: _Seconds = 3600.0  # seconds to wait for a quorum before the run stops, to be resumed
    # Unusable answers or failures after which a site is excluded until the run is resumed; silence
    # does not count.
    faults: float = 3
    across: bool = False  # whether each site's model is tested at every site, at the end

    def __post_init__(self) -> None:
        check_fields("terms", self)


class Caller:
    """Sends requests to sites in parallel, and accepts only replies to these requests.

    It is a context manager: at its end no thread sends a request any more, not even one that asks
    whether an absent site is back.
    """

    def __init__(self, transport: Transport, sites: Sequence[str], terms: Terms) -> None:
        self.transport = transport
        self.sites = list(sites)
        self.terms = terms
        # A new random id per coordinator process, which identifies messages of an earlier one.
        self.session = secrets.token_hex(8)
        # Sites that did not answer when a run was resumed, with the reason.
        self.lacking: dict[str, str] = {}
        self.traffic = status.Traffic()  # counts every byte
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all threads; no transport can stop a call, so it waits for these as for a probe."""
        self._ended.set()
        end = time.monotonic() + self.terms.probe
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def in_thread(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Calls a function in a new thread, for which the program does not wait at exit."""
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=work, name="medfed-site", daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()
        return future

    def request(self, kind: type[Kind], site: str, **rest: Any) -> Kind:
        """Returns a request of this session."""
        return kind(site, self.session, **rest)

    def requests(self, kind: type[Kind], to: Iterable[str], **rest: Any) -> dict[str, Kind]:
        """Returns the same request to each of some sites."""
        return {site: self.request(kind, site, **rest) for site in to}

    def all(self, requests: Mapping[str, Asking[Answer]]) -> Divided[Answer]:
        """Sends requests to several sites in parallel."""
        return _divided(self._sent(self.one, requests, self.terms.timeout))

    def _sent(
        self, way: Callable[..., Answer | str], requests: Mapping[str, Asking[Answer]], waits: float
    ) -> dict[str, Future[Answer | str]]:
        return {c: self.in_thread(way, request, waits) for c, request in requests.items()}

    def one(self, request: Asking[Answer], timeout: float) -> Answer | str:
        """Sends a request to one site; retries once without a reply, which may have been lost."""
        data, waits = request.to_bytes(), (timeout, min(timeout, self.terms.grace))
        for number, seconds in enumerate(waits):
            answer = b""
            if self._ended.is_set():
                return ENDED
            try:
                answer = self.transport.call(request.site, data, seconds)
                reply = wire.Reply.from_bytes(answer)
            except Silent:
                continue
            except CodecError as error:
                return f"its reply cannot be read: {str(error).rstrip('.')}"
            finally:
                self.traffic.add(request.site, request.kind, len(data), len(answer))
            if not reply.answers(request):
                if reply.status == "refused" and reply.reason == "bytes":
                    return "it could not read the request"
                if number == 0:  # a late reply to another request
                    continue
                return "its reply belongs to another request"
            return cast("Answer", reply) if reply.status == "ok" else refusal(reply)
        return SILENT

    def everyone(self, requests: Mapping[str, Asking[Answer]]) -> dict[str, Answer]:
        """Sends a request to all sites before the first round; all must answer."""
        replies, wrong = _divided(self._sent(self.hello, requests, self.terms.hello))
        if wrong:
            raise SiteError(in_words("all_answer", why=sentence(wrong)))
        return replies

    def greet_some(self, requests: Mapping[str, Asking[Answer]]) -> dict[str, Answer]:
        """Greets sites, and continues with those that answer.

        A site may need as long as before the first round, as it may have been started again. Once
        a quorum answers, the others have no longer than for any request.
        """
        futures = self._sent(self.hello, requests, self.terms.hello)
        end, least = time.monotonic() + self.terms.hello, self.terms.quorum * len(futures)
        while waiting := [f for f in futures.values() if not f.done()]:
            answers = (f.result() for f in futures.values() if f.done())
            if sum(isinstance(answer, wire.Reply) for answer in answers) >= least:
                end, least = min(end, time.monotonic() + self.terms.timeout), math.inf
            if (left := end - time.monotonic()) <= 0:
                break
            wait(waiting, left, return_when=FIRST_COMPLETED)
        replies, late = _divided({c: future for c, future in futures.items() if future.done()})
        self.lacking = {c: late.get(c, SILENT) for c in futures if c not in replies}
        if not replies:
            raise SiteError(f"No site answers: {sentence(self.lacking)}.")
        self.sites = list(replies)
        return replies

    def hello(self, request: Asking[Answer], timeout: float) -> Answer | str:
        """Greets a site until it answers; it may still be reading its data."""
        end = time.monotonic() + timeout
        while True:
            answer = self.one(request, max(0.0, end - time.monotonic()))
            if answer != BUSY or time.monotonic() >= end:
                return answer
            self._ended.wait(min(1.0, max(0.0, end - time.monotonic())))


def _divided(answers: Mapping[str, Future[Answer | str]]) -> Divided[Answer]:
    """Divides answers into replies and reasons why there are none."""
    every = {c: future.result() for c, future in answers.items()}
    replies = {c: reply for c, reply in every.items() if not isinstance(reply, str)}
    return replies, {c: why for c, why in every.items() if isinstance(why, str)}


def refusal(reply: wire.Reply) -> str:
    """Says why a reply cannot be used."""
    if reply.status == "failed":
        return f"it failed ({reply.reason}); see the log of {reply.site}"
    unknown = f"it refused the request ({reply.reason})"
    if reply.status == "refused":
        return words_for("refused").get(reply.reason, unknown).format(site=reply.site)
    return {"busy": BUSY, "unready": UNREADY}.get(reply.status, unknown)


def greet(caller: Caller, some: bool = False) -> dict[str, Greeting]:
    """Requests the facts that all sites must share; all must answer equally."""
    hellos = caller.requests(wire.Hello, caller.sites)
    replies = caller.greet_some(hellos) if some else caller.everyone(hellos)
    greetings = {c: r.greeting for c, r in replies.items()}
    first, *others = caller.sites
    for site in others:
        compare(greetings[first], greetings[site], first, site)
    return greetings


def agree_on_data(
    caller: Caller, server: Merging, claims: Claims | None = None
) -> tuple[dict[str, Facts], list[bytes], list[Exchanged]]:
    """Lets sites agree on the inputs; then each reads its data and builds the model.

    Returns each site's facts, the answers (which a restarted site needs), and the byte records, in
    the order of a simulation.
    """
    answers: list[bytes] = []
    exchanged: list[Exchanged] = []
    next(server, None)
    while True:
        body = answers[-1] if answers else b""
        requests_of_phase = caller.requests(wire.Agree, caller.sites, phase=len(answers), body=body)
        replies = caller.everyone(requests_of_phase)
        facts = {c: r.facts for c, r in replies.items() if r.facts is not None}
        if len(facts) == len(replies):
            break
        if facts:
            first = short(next(iter(facts)))
            raise SiteError(f"Site {first} sends fewer messages about its data than the others.")
        exchanged += [(c, "up", len(r.body)) for c, r in replies.items()]
        try:
            answers.append(server.send([r.body for r in replies.values()]))
        except StopIteration:
            raise SiteError(in_words("more_messages")) from None
        exchanged += [(c, "down", len(answers[-1])) for c in replies]
    for site, most in () if claims is None else claims.samples.items():
        if most > facts[site].num_samples:
            samples = facts[site].num_samples
            raise SiteError(in_words("claims", site=short(site), most=most, samples=samples))
    first, *others = caller.sites
    for site in others:
        compare_models(facts[first], facts[site], first, site)
    if nowhere := set.intersection(*(set(of.absent) for of in facts.values())):
        raise SiteError(in_words("nowhere", channel=short(min(nowhere))))
    return facts, answers, exchanged


def catch_up(caller: Caller, site: str, answers: Sequence[bytes]) -> CaughtUp:
    """Repeats `agree_on_data` for a site that was restarted or that joins.

    Returns its facts, or the reason why there are none; and the byte records.
    """
    exchanged, facts = list[Exchanged](), None
    for number, body in enumerate([b"", *answers]):
        question = caller.request(wire.Agree, site, phase=number, body=body)
        answer = caller.hello(question, caller.terms.hello)
        if isinstance(answer, str):
            return answer, exchanged
        facts = answer.facts
        if number < len(answers):
            exchanged += [(site, "up", len(answer.body)), (site, "down", len(answers[number]))]
    return facts or "it sends more messages about its data than the run needed", exchanged


def compare(one: Greeting, other: Greeting, name: str, site: str) -> None:
    """Checks that two ends have the same experiment."""
    _check_equal(one.agreed, other.agreed, f"another configuration than {short(name)}", site)
    _check_equal(one.data, other.data, f"other data than {short(name)}", site)


def other_versions(here: Mapping[str, str], sites: Mapping[str, Greeting]) -> list[str]:
    """Says where the versions at sites differ from the coordinator's.

    Example:
        >>> sites = {c: Greeting({}, {}, {"torch": c}) for c in ("2.13.0", "2.12.1")}
        >>> other_versions({"torch": "2.13.0"}, sites)
        ['torch is 2.13.0 at the coordinator, but 2.12.1 at 2.12.1; last digits may differ.']
    """
    remarks = []
    for name, version in here.items():
        others: dict[str, list[str]] = {}
        for site, greeting in sites.items():
            if (there := greeting.versions.get(name, "unknown")) != version:
                others.setdefault(there, []).append(short(site))
        if others:
            listed = " and ".join(f"{short(v)} at {', '.join(c)}" for v, c in others.items())
            text = f"{name} is {version} at the coordinator, but {listed}; last digits may differ."
            remarks.append(text)
    return remarks


def compare_models(one: Facts, other: Facts, name: str, site: str) -> None:
    """Checks that two ends have built the same model; arguments as in :func:`compare`."""
    _check_equal(one.data, other.data, f"another kind of data than {short(name)}", site)
    if one.weights != other.weights:
        raise SiteError(in_words("weights", site=short(site), name=short(name)))


def other_samples(before: Facts, now: Facts) -> str:
    """Says that a site claims another number of training samples than at first; empty if not."""
    if now.num_samples == before.num_samples:
        return ""
    return (
        f"it has {now.num_samples} training samples, and had {before.num_samples} when the run "
        "began; give it the same data, or start a new run"
    )


def _check_equal(one: Mapping[str, Any], other: Mapping[str, Any], what: str, site: str) -> None:
    if keys := [k for k in dict.fromkeys([*one, *other]) if one.get(k) != other.get(k)]:
        named = few([short(k, 60) + _apart(one.get(k), other.get(k)) for k in keys], 5)
        verb = "differs" if len(keys) == 1 else "differ"
        raise SiteError(in_words("differs", site=short(site), what=what, named=named, verb=verb))


def _apart(one: Any, other: Any) -> str:
    """Says which names of a list a site lacks, and which it has alone.

    Example:
        >>> _apart(["age", "sex"], ["age", "AGE"]), _apart(["a", "b"], ["b", "a"]), _apart(1, 2)
        (' (lacks sex, has AGE)', ' (in another order)', '')
    """
    if not (isinstance(one, list) and isinstance(other, list)):
        return ""
    both = {"lacks": [x for x in one if x not in other], "has": [x for x in other if x not in one]}
    what = [f"{verb} {short(few([*map(str, of)], 5), 200)}" for verb, of in both.items() if of]
    return f" ({', '.join(what) or 'in another order'})"


def sentence(why: Mapping[str, str]) -> str:
    """Names sites, each with a reason."""
    return "; ".join(f"{short(site)}: {reason}" for site, reason in why.items())
