"""Requests and replies as bytes: a head in JSON that is checked word for word, then a body.

    mfs1 | hash of all that follows, 16 bytes | length of the head, 4 bytes | head | body

The hash detects damage in transit; the transport decides who may send. The body is a packet
(:mod:`medfed.federation.wire.packet`) or empty; nothing is ever unpickled. A request names its
site, session, round, attempt and phase, and the site's last round as the coordinator knows it
(``at``; ``START`` before the first). A reply repeats all of these, so that a late reply, or one
from another site, is recognised.

| kind | asks for | content, body | reply's content, body |
|---|---|---|---|
| hello | what must be equal everywhere | | hashes of agreed keys, facts of the data, versions |
| agree | its message about its data (phase: the message's number) | answer | message, or Facts |
| begin | a session: who takes part | clients, job | rounds that it can go back to |
| keys | keys for a sum under masks ([masks](masks.py)) | cohort | public keys |
| shares | shares of its secrets | keys of all | a box for each other site |
| fit | training in one phase of a round | boxes, message | steps and passes, message |
| unmask | its shares for the sum | sites in the sum | shares |
| evaluate | metrics of the present model | split, trained, message | metrics, whether it diverges |
| across | the site's model, or metrics of another's | of, message or model | metrics, model |
| commit | to keep the round that was trained | rounds still needed | steps and passes |
| load | to go back to the round ``at`` | | hash of what it keeps |
| onboard | to join: a question, or the end | steps, last, clients, job, message | metrics, answer |

Every reply has a status: ``ok``; ``busy``, as a site answers one request at a time; ``unready``, as
the site was restarted and needs a greeting first; ``refused``, with a word of :data:`REASONS`;
``failed``, with only the type of the error: its text, which may hold anything, stays in the log of
the site.

The module also defines the transport of bytes: a protocol.

A transport does not interpret the bytes. At the coordinator it sends a request to a site and
returns the reply, or raises :class:`Silent` if none arrives in time; one thread per site calls it,
in parallel. At a site it passes each request to :class:`Answers` and sends the result; it may use
several threads, deliver a request twice, late, or never, and lose a reply. Nothing else is
required: both ends refuse foreign bytes.

A new transport is a class with :meth:`Transport.call`, and at the other end a call of
:meth:`Answers.answer`. It must ensure that only the named site can answer to its name (by mutual
TLS, say), as names are trusted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec

from medfed.common.errors import CodecError, first_line
from medfed.common.schemas import Count, Number, fit, parse_json

MAGIC = b"mfs1"
_HASH = 16
_FIRST = len(MAGIC) + _HASH + 4
HEAD_LIMIT = 1 << 24
"""Bytes of the largest head."""
START = -1
"""Where a site is before its first round."""
Kind = (
    Literal["hello", "agree", "begin", "keys", "shares", "fit", "unmask"]
    | Literal["evaluate", "across", "commit", "load", "onboard"]
)
Status = Literal["ok", "busy", "unready", "refused", "failed"]
REASONS = (
    *("bytes", "site", "session", "job", "stale", "order", "replay", "round", "message"),
    *("agreed", "policy", "code", "sums"),
)
RoundNumber = Annotated[int, msgspec.Meta(ge=START, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Samples = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class _Client(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    num_samples: Samples


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    mask: str
    box: str
    seal: str
    certificate: str = ""
    signature: str = ""


class _Announced(_Keys):
    given: list[str] = []


_COHORT, _JOB = ("cohort", list[str]), (("job", str), ("clients", list[_Client]))
_SPENT = (("steps", Count), ("passes", tuple[Count, Count]))
_POINT = ("point", dict[str, Number] | None, None)
_METRICS = (("metrics", dict[str, float]), ("diverged", bool, False), _POINT)
_Side = tuple[tuple[Any, ...], ...] | type[_Announced]
_MEMBERS: dict[Kind, tuple[_Side, _Side]] = {
    "hello": (
        (),
        (("agreed", dict[str, str]), ("data", dict[str, Any]), ("versions", dict[str, Name], {})),
    ),
    "agree": ((), (("facts", dict[str, Any]),)),
    "begin": (_JOB, (("rounds", list[RoundNumber]),)),
    "keys": ((_COHORT,), _Announced),
    "shares": ((("keys", dict[str, _Keys]),), (("boxes", dict[str, str]),)),
    "fit": ((_COHORT, ("boxes", dict[str, str], {})), _SPENT),
    "unmask": ((("sent", list[str]),), (("shares", dict[str, str]),)),
    "evaluate": (
        (("split", str), ("trained", bool), ("selected", RoundNumber, START), _POINT),
        _METRICS,
    ),
    "across": ((("of", str),), (("metrics", dict[str, float]),)),
    "commit": (
        (("needed", list[RoundNumber]),),
        (*_SPENT, *((name, Number | None, None) for name in ("loss", "epsilon"))),
    ),
    "load": ((), (("digest", str),)),
    "onboard": ((("last", bool), ("steps", int), *_JOB), _METRICS),
}
"""Of each kind what its requests and its replies hold: names, types, and defaults."""


def _struct(kind: Kind, side: _Side) -> type[msgspec.Struct]:
    """The type of the content of requests or replies of a kind."""
    if isinstance(side, type):
        return side
    return msgspec.defstruct(kind, side, forbid_unknown_fields=True)


_CONTENTS = {kind: tuple(_struct(kind, s) for s in sides) for kind, sides in _MEMBERS.items()}
_EMPTY = _CONTENTS["load"][0]


@dataclass(frozen=True)
class Head:
    """The head of a request, which its reply repeats.

    Attributes:
        kind: The kind of request.
        site: The site of the request.
        session: The coordinator process's random id.
        round: The round's number.
        attempt: How often the round has already been tried.
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


class Message(Head):
    """A request or a reply: a head, which may say more than its kind, content and a body."""

    content: Mapping[str, Any]
    body: bytes

    def check(self) -> None:
        """Refuses content that is not of its kind.

        Raises:
            ValueError: If something is invalid.
        """
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """Returns the bytes that travel."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "body"}
        text = json.dumps(head, separators=(",", ":")).encode()
        return framed(len(text).to_bytes(4, "little"), text, self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what :meth:`to_bytes` wrote, and trusts nothing in it.

        Raises:
            CodecError: If the bytes are foreign, incomplete, or invalid for this class.
        """
        head, body = _unpacked(data)
        try:
            message = fit({**head, "body": body}, cls)
            if odd := {f.name for f in fields(cls) if f.name != "body"} ^ head.keys():
                raise ValueError(f"its {min(odd)!r:.40} is missing or unknown")
            names = (message.site, message.session)
            if any(not name.isprintable() or len(name) > 1000 for name in names):
                raise ValueError("a name cannot be printed")
            message.check()
        except ValueError as error:
            what = cls.__name__.lower()
            raise CodecError(f"A {what} cannot be read ({first_line(error)}).") from error
        return message


@dataclass(frozen=True)
class Request(Message):
    """A request of the coordinator to a site.

    Attributes:
        content: The kind's further fields.
        body: A packet.
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)

    def check(self) -> None:
        """See the class."""
        _check_content(self.content, _CONTENTS[self.kind][0])


@dataclass(frozen=True)
class Reply(Message):
    """A site's reply.

    Attributes:
        status: Whether it was done.
        reason: Of what is refused, one of :data:`REASONS`; of what failed, the error's type.
        content: The further fields of this kind of reply.
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

    def check(self) -> None:
        """See the class."""
        if self.status == "failed" and not re.fullmatch(r"\w{1,80}", self.reason):
            raise ValueError("the type of an error is not a name")
        if self.status == "refused" and self.reason not in REASONS:
            raise ValueError(f"{self.reason!r:.40} is not a reason")
        kind = _CONTENTS[self.kind][1] if self.status == "ok" else _EMPTY
        _check_content(self.content, kind)


@dataclass(frozen=True)
class Facts:
    """A site's facts after it has read its data and built the model.

    Attributes:
        num_samples: Training samples.
        weights: Hash of the initial weights.
        data: Facts that the network must fit, such as numbers of channels and classes, as JSON.
        absent: The channels of which the site has no file.
    """

    num_samples: Samples
    weights: str
    data: Mapping[str, Any]
    absent: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Returns them as JSON."""
        return {**vars(self), "data": dict(self.data)}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Facts:
        """Reads them.

        Raises:
            CodecError: If they are invalid.
        """
        try:
            return fit(content, cls)
        except ValueError as error:
            raise CodecError(f"The site's facts are invalid ({error}).") from error


@dataclass(frozen=True)
class Greeting:
    """A site's facts before it reads its data.

    Attributes:
        agreed: A hash for each key of the configuration that all sites must share.
        data: Facts of the data that all sites must share, as JSON.
        versions: Of medfed, PyTorch and MONAI there; its commit, and the device.
    """

    agreed: Mapping[str, str]
    data: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)


def framed(*pieces: bytes) -> bytes:
    """Puts magic and hash before the pieces of a message."""
    checksum = hashlib.blake2b(digest_size=_HASH)
    for piece in pieces:
        checksum.update(piece)
    return b"".join((MAGIC, checksum.digest(), *pieces))


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
        raise CodecError(f"A head of {size} bytes is announced, but it is missing or too long.")
    try:
        # A metric that the data leave undefined is NaN.
        head = parse_json(data[_FIRST : _FIRST + size], dict[str, Any], finite=False)
    except ValueError as error:
        raise CodecError(f"The head cannot be read ({first_line(error)}).") from error
    return head, data[_FIRST + size :]


def _check_content(content: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    try:
        fit(content, kind)
    except ValueError as error:
        raise ValueError(f"its content: {error}") from None


class Silent(Exception):  # noqa: N818 - it is no error of the program: hospitals go silent
    """There was no reply: the site is down, too slow, or its reply was lost."""


class Answers(Protocol):
    """A site's interface for the transport: :class:`medfed.sites.site.Site`."""

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request; never raises, for any bytes."""


class Transport(Protocol):
    """The coordinator's end."""

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Sends a request to a site and waits for its reply; called from many threads in parallel.

        Args:
            site: Its name.
            request: The bytes.
            timeout: Seconds to wait.

        Returns:
            The reply.

        Raises:
            Silent: If no reply arrives in time, or the site is known to be down.
        """
