"""Requests and replies as bytes: a head in JSON that is checked word for word, then a body.

    mfs1 | hash of all that follows, 16 bytes | length of the head, 4 bytes | head | body

The hash finds what was damaged on the way; who may send is the transport's affair. The body is a
packet (:mod:`medfed.federation.wire.packet`) or empty; nothing is ever unpickled. A
request says whom it is for, in which session, to which round, attempt and phase it belongs, and at
which round the coordinator believes the site to be (``at``, the last one that the site took part
in; ``START`` before any). A reply repeats all of that, so that one that was lost, late or of
somebody else is known.

| kind | asks for | content, body | reply's content, body |
|---|---|---|---|
| hello | what must be equal everywhere | | hashes of agreed keys, facts of the data |
| agree | what it tells others of its data (phase: the how-manieth) | answer | message, or Facts |
| begin | a session: who takes part | clients, job | rounds that it can go back to |
| fit | training in one phase of a round | message | steps and passes, message |
| evaluate | metrics of the present model | split, trained, message | metrics |
| commit | to keep the round that was trained | rounds still needed | steps and passes |
| load | to go back to the round ``at`` | | hash of what it keeps |
| onboard | to join: a question, or the end | steps, last, clients, job, message | metrics, answer |

Every reply has a status: ``ok``; ``busy``, as one request at a time is answered; ``unready``, as
the site was started anew and must be greeted first; ``refused``, with a word of :data:`REASONS`;
``failed``, with the type of the error and no more: its text, which may hold anything, stays in the
log of the site.

How bytes reach the sites and come back: a protocol, and two transports to test with.

A transport knows nothing of what it carries. At the coordinator it calls a site with a request and
returns the reply, or raises :class:`Silent` when none came in time; calls to several sites are made
at once, from as many threads. At a site it hands each request to :class:`Answers` and sends what
that returns; it may do so from several threads, hand on a request twice, late, or not at all, and
lose a reply. Nothing else is asked of it: bytes that others wrote are refused by both ends.

A transport of one's own is a class with :meth:`Transport.call`, and at the other end a call of
:meth:`Answers.answer`. It must see to it that only the named site can be called by its name
(mutual TLS, say), as names are believed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from medfed.common.errors import CodecError, first_line
from medfed.common.schemas import Count, fit, parse_json

MAGIC = b"mfs1"
_HASH = 16
_FIRST = len(MAGIC) + _HASH + 4
HEAD_LIMIT = 1 << 24
"""Bytes of the largest head."""
START = -1
"""Where a site is before its first round."""
Kind = Literal["hello", "agree", "begin", "fit", "evaluate", "commit", "load", "onboard"]
Status = Literal["ok", "busy", "unready", "refused", "failed"]
REASONS = (
    *("bytes", "site", "session", "job", "stale", "order", "replay", "round", "message"),
    *("agreed", "policy"),
)
RoundNumber = Annotated[int, msgspec.Meta(ge=START, lt=1 << 31)]
Samples = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    """What a request or reply of one kind has beside its head."""


class _Client(_Content):
    id: str
    num_samples: Samples


class _Begin(_Content):
    clients: list[_Client]
    job: str


class _Evaluate(_Content):
    split: str
    trained: bool
    selected: RoundNumber = START


class _Commit(_Content):
    needed: list[RoundNumber]


class _Onboard(_Content):
    last: bool
    steps: int
    job: str
    clients: list[_Client]


class _Greeted(_Content):
    agreed: dict[str, str]
    data: dict[str, Any]


class _AgreedOn(_Content):
    facts: dict[str, Any]


class _Begun(_Content):
    rounds: list[RoundNumber]


class _Spent(_Content):
    steps: Count
    passes: tuple[Count, Count]


class _Measured(_Content):
    metrics: dict[str, float]


class _Loaded(_Content):
    digest: str


_CONTENTS: dict[Kind, tuple[type[_Content], type[_Content]]] = {
    "hello": (_Content, _Greeted),
    "agree": (_Content, _AgreedOn),
    "begin": (_Begin, _Begun),
    "fit": (_Content, _Spent),
    "evaluate": (_Evaluate, _Measured),
    "commit": (_Commit, _Spent),
    "load": (_Content, _Loaded),
    "onboard": (_Onboard, _Measured),
}
"""Of each kind what its requests and its replies hold."""


@dataclass(frozen=True)
class Head:
    """What a request says of itself, and its reply repeats.

    Attributes:
        kind: What is asked for.
        site: Whom the request is for.
        session: Of the coordinator's process, drawn anew whenever it starts.
        round: The round's number.
        attempt: How often the round has been begun before.
        phase: Position of the phase within the round.
        at: The last round that the site took part in, as the coordinator believes.
    """

    kind: Kind
    site: str
    session: str = ""
    round: RoundNumber = START
    attempt: RoundNumber = 0
    phase: RoundNumber = 0
    at: RoundNumber = START


@dataclass(frozen=True)
class Request(Head):
    """What the coordinator asks of a site.

    Attributes:
        content: What else the kind has.
        body: A packet.
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Returns the bytes that travel."""
        return _packed(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Request:
        """Reads what :meth:`to_bytes` wrote, and trusts nothing in it.

        Raises:
            CodecError: If the bytes are foreign, torn, or state what no request has.
        """
        head, body = _unpacked(data)
        try:
            found = _checked(cls, head)
            _check_content(found.content, _CONTENTS[found.kind][0])
        except ValueError as error:
            raise CodecError(f"A request cannot be read ({first_line(error)}).") from error
        return replace(found, body=body)


@dataclass(frozen=True)
class Reply(Head):
    """What a site answers.

    Attributes:
        status: Whether it was done.
        reason: Of what is refused, one of :data:`REASONS`; of what failed, the error's type.
        content: What else the kind's reply has.
        body: A packet.
    """

    status: Status = "ok"
    reason: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)

    @classmethod
    def to(cls, request: Request, status: Status = "ok", reason: str = "", **rest: Any) -> Reply:
        """Returns a reply to a request."""
        asked = {f.name: getattr(request, f.name) for f in fields(Head)}
        return cls(**asked, status=status, reason=reason, **rest)

    def answers(self, request: Request) -> bool:
        """Returns whether it is the reply to this request, and no other."""
        return all(getattr(self, f.name) == getattr(request, f.name) for f in fields(Head))

    def to_bytes(self) -> bytes:
        """Returns the bytes that travel."""
        return _packed(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Reply:
        """Reads what :meth:`to_bytes` wrote, and trusts nothing in it.

        Raises:
            CodecError: If the bytes are foreign, torn, or state what no reply has.
        """
        head, body = _unpacked(data)
        try:
            found = _checked(cls, head)
            if found.status == "failed" and not re.fullmatch(r"\w{1,80}", found.reason):
                raise ValueError("the type of an error is no name")
            if found.status == "refused" and found.reason not in REASONS:
                raise ValueError(f"{found.reason!r:.40} is no reason")
            kind = _CONTENTS[found.kind][1] if found.status == "ok" else _Content
            _check_content(found.content, kind)
        except ValueError as error:
            raise CodecError(f"A reply cannot be read ({first_line(error)}).") from error
        return replace(found, body=body)


@dataclass(frozen=True)
class Facts:
    """What a site says of itself once it has read its data and built the model.

    Attributes:
        num_samples: Training samples.
        weights: Hash of the initial weights.
        data: What the network must fit, such as numbers of channels and classes, as JSON.
    """

    num_samples: Samples
    weights: str
    data: Mapping[str, Any]

    def content(self) -> dict[str, Any]:
        """Returns them as JSON."""
        return {"num_samples": self.num_samples, "weights": self.weights, "data": dict(self.data)}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Facts:
        """Reads them.

        Raises:
            CodecError: If they are none.
        """
        try:
            return fit(content, cls)
        except ValueError as error:
            raise CodecError(
                f"What the site says of itself is not understood ({error})."
            ) from error


@dataclass(frozen=True)
class Greeting:
    """What a site says before it reads its data.

    Attributes:
        agreed: A hash for each key of the configuration that all must have alike.
        data: What must be the same of the data for a model to mean the same, as JSON.
    """

    agreed: Mapping[str, str]
    data: Mapping[str, Any]


Message = TypeVar("Message", "Request", "Reply")


def _packed(message: Request | Reply) -> bytes:
    head = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "body"}
    text = json.dumps(head, separators=(",", ":")).encode()
    return framed(len(text).to_bytes(4, "little"), text, message.body)


def framed(*pieces: bytes) -> bytes:
    """Puts magic and hash before the pieces of a message."""
    found = hashlib.blake2b(digest_size=_HASH)
    for piece in pieces:
        found.update(piece)
    return b"".join((MAGIC, found.digest(), *pieces))


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns head and body.

    Raises:
        CodecError: If the head is missing, too long, torn or no mapping.
    """
    if not isinstance(data, bytes) or data[:4] != MAGIC or len(data) < _FIRST:
        raise CodecError("These bytes are not of a medfed site or coordinator.")
    rest = memoryview(data)[4 + _HASH :]
    if hashlib.blake2b(rest, digest_size=_HASH).digest() != data[4 : 4 + _HASH]:
        raise CodecError("These bytes were damaged on the way.")
    size = int.from_bytes(rest[:4], "little")
    if size > min(HEAD_LIMIT, len(data) - _FIRST):
        raise CodecError(f"A head of {size} bytes is announced, and is not there or too long.")
    try:
        # A metric that the data leave undefined is NaN.
        head = parse_json(data[_FIRST : _FIRST + size], dict[str, Any], finite=False)
    except ValueError as error:
        raise CodecError(f"The head cannot be read ({first_line(error)}).") from error
    return head, data[_FIRST + size :]


def _checked(cls: type[Message], head: dict[str, Any]) -> Message:
    """Returns a message without body of a head that has all fields, each of its type.

    Raises:
        ValueError: If it has not.
    """
    found = fit(head, cls)
    if odd := {f.name for f in fields(cls) if f.name != "body"} ^ head.keys():
        raise ValueError(f"its {min(odd)!r:.40} is missing or unknown")
    if any(not text.isprintable() or len(text) > 1000 for text in (found.site, found.session)):
        raise ValueError("a name cannot be printed")
    return found


def _check_content(content: Mapping[str, Any], kind: type[_Content]) -> None:
    try:
        fit(content, kind)
    except ValueError as error:
        raise ValueError(f"its content: {error}") from None


LIMIT = 1 << 32
"""Bytes of the largest request or reply that a pipe takes."""


class Silent(Exception):  # noqa: N818 - it is no error of the program: hospitals go silent
    """No reply came: the site is down, too slow, or its reply was lost."""


class Answers(Protocol):
    """A site, as the transport at its end sees it: :class:`medfed.sites.site.Site`."""

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request; never raises, whatever the bytes are."""


class Transport(Protocol):
    """The coordinator's end."""

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Sends a request to a site and waits for its reply; called from many threads at once.

        Args:
            site: Its name.
            request: The bytes.
            timeout: Seconds to wait.

        Returns:
            The reply.

        Raises:
            Silent: If none came in time, or the site is known to be down.
        """


class Direct:
    """Sites in this process, for tests and for a rehearsal; every message crosses as bytes.

    Args:
        sites: The sites by name; one may be replaced, or taken away.
    """

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self.sites = dict(sites)
        # Training draws from the random stream of the process, so one after the other.
        self._lock = threading.Lock()

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :meth:`Transport.call`; there is no waiting."""
        if site not in self.sites:
            raise Silent
        with self._lock:
            return bytes(self.sites[site].answer(bytes(request)))


class Pipes:
    """Each site a process of its own on this machine, at the other end of a pipe.

    Args:
        starts: By site, what its process makes the site of: a function that can be pickled.

    Example:
        >>> pipes = Pipes({})
        >>> pipes.close()
    """

    def __init__(self, starts: Mapping[str, Callable[[], Answers]]) -> None:
        self._starts = dict(starts)
        self._locks = {site: threading.Lock() for site in starts}
        self._ends: dict[str, Connection] = {}
        self._unanswered: dict[str, int] = dict.fromkeys(starts, 0)
        self.processes: dict[str, BaseProcess] = {}
        for site in starts:
            self.start(site)

    def start(self, site: str) -> None:
        """Starts a site's process, again if it has ended."""
        # Forked from a process that has imported once and done nothing else, where there is such.
        there = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if there else "spawn")
        if there:
            context.set_forkserver_preload(["medfed.sites.site"])
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(
            target=serve, args=(theirs, self._starts[site]), daemon=True
        )
        process.start()
        theirs.close()
        self._ends[site], self.processes[site], self._unanswered[site] = ours, process, 0

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """See :meth:`Transport.call`."""
        end = time.monotonic() + timeout
        if not self._locks[site].acquire(timeout=timeout):
            raise Silent
        try:
            pipe = self._ends[site]
            pipe.send_bytes(request)
            self._unanswered[site] += 1
            while pipe.poll(max(0.0, end - time.monotonic())):
                reply = pipe.recv_bytes(LIMIT)
                self._unanswered[site] -= 1
                if not self._unanswered[
                    site
                ]:  # else it is of a call that nobody waits for any more
                    return reply
            raise Silent
        except (OSError, EOFError) as error:
            raise Silent from error
        finally:
            self._locks[site].release()

    def close(self) -> None:
        """Ends all processes."""
        for pipe in self._ends.values():
            pipe.close()
        for process in self.processes.values():
            process.join(5)
            process.kill()


def serve(pipe: Connection, start: Callable[[], Answers]) -> None:
    """Answers what comes through a pipe until its other end is closed.

    Args:
        pipe: This end.
        start: Makes the site.
    """
    site = start()
    try:
        while True:
            pipe.send_bytes(site.answer(pipe.recv_bytes(LIMIT)))
    except (EOFError, OSError):
        return
