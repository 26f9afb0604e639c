"""Requests and replies as bytes: a head in JSON that is checked word for word, then a body.

    mfs1 | hash of all that follows, 16 bytes | length of the head, 4 bytes | head | body

The hash detects damage in transit; the transport decides who may send. The body is a packet
(:mod:`medfed.federation.wire.packet`) or empty; nothing is ever unpickled. Each kind of request and
of reply is a class here, and :mod:`medfed.sites.gate` says what a site checks before it answers. A
request names its site, session, round, attempt and phase, and the site's last round as the
coordinator knows it (``at``; ``START`` before the first). A reply repeats all of these, so that a
late reply, or one from another site, is recognised.

A site that does not do what a request asks answers with :class:`Declined` and a status: ``busy``,
as a site answers one request at a time; ``unready``, as the site was restarted and needs a greeting
first; ``refused``, with a word of :data:`REASONS`; ``failed``, with only the type of the error: its
text, which may hold anything, stays in the log of the site.

A transport does not interpret the bytes. At the coordinator it sends a request to a site and
returns the reply, or raises :class:`Silent` if none arrives in time; one thread per site calls it,
in parallel. At a site it passes each request to :class:`Answers` and sends the result; it may use
several threads, deliver a request twice, late, or never, and lose a reply. It must ensure that only
the named site can answer to its name (by mutual TLS, say), as names are trusted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, Union

import msgspec

from medfed.common.schemas import Count, Number, fit, parse_json
from medfed.standalone.errors import CodecError, first_line

MAGIC = b"mfs1"
_HASH = 16
_FIRST = len(MAGIC) + _HASH + 4
HEAD_LIMIT = 1 << 24
"""Bytes of the largest head."""
START = -1
"""Where a site is before its first round."""
Status = Literal["ok", "busy", "unready", "refused", "failed"]
REASONS = (
    *("bytes", "site", "session", "job", "stale", "order", "replay", "round", "message"),
    *("agreed", "policy", "code", "sums", "answers", "few"),
)
RoundNumber = Annotated[int, msgspec.Meta(ge=START, lt=1 << 31)]
Position = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Samples = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class Head(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """What a request and its reply have in common."""

    site: Name  # the site of the request
    session: Name = ""  # the coordinator process's random id
    round: RoundNumber = START  # the round's number
    attempt: Position = 0  # how often the round has already been tried
    phase: Position = 0  # position of the phase within the round
    # The last round that the site took part in, as the coordinator believes.
    at: RoundNumber = START
    body: bytes = b""  # a packet, or empty

    @property
    def kind(self) -> str:
        """The kind of request."""
        return str(self.__struct_config__.tag)

    def place(self) -> tuple[Any, ...]:
        """The kind and what a reply repeats."""
        return self.kind, *(getattr(self, name) for name in _REPEATED)

    def to_bytes(self) -> bytes:
        """Returns the bytes that travel."""
        head = msgspec.to_builtins(self, builtin_types=(bytes,))
        body = head.pop("body")
        text = json.dumps(head, separators=(",", ":")).encode()
        return framed(len(text).to_bytes(4, "little"), text, body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what :meth:`to_bytes` wrote, and trusts nothing in it."""
        head, body = _unpacked(data)
        what = "request" if cls is Request else "reply"
        try:
            if "body" in head:
                raise ValueError("its head holds a body")
            message: Self = fit({**head, "body": body}, _KINDS[what])
            names = (message.site, message.session)
            if any(not name.isprintable() for name in names):
                raise ValueError("a name cannot be printed")
            message.check()
        except ValueError as error:
            raise CodecError(f"A {what} cannot be read ({first_line(error)}).") from error
        return message

    def check(self) -> None:
        """Raises ValueError if the content is invalid beyond its types."""


_REPEATED = tuple(name for name in Head.__struct_fields__ if name != "body")


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client of the federation, and its training samples."""

    id: str
    num_samples: Samples


class PublicKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a site tells all others for one sum, in hexadecimal digits; its certificate as text."""

    mask: str
    box: str
    seal: str
    samples: Samples = 1  # of the site; a study counts patients
    certificate: str = ""
    signature: str = ""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site's facts after it has read its data and built the model."""

    num_samples: Samples  # training samples
    weights: str  # hash of the initial weights
    # Facts that the network must fit, such as numbers of channels and classes, as JSON.
    data: Mapping[str, Any]
    absent: list[str] = []  # the channels of which the site has no file


class Greeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site's facts before it reads its data."""

    agreed: Mapping[str, str]  # a hash for each key of the configuration that all sites must share
    data: Mapping[str, Any]  # facts of the data that all sites must share, as JSON
    # Of medfed, PyTorch and MONAI there; its commit, and the device.
    versions: Mapping[str, Name] = {}


class Request(Head, frozen=True):
    """A request of the coordinator to a site."""


class Reply(Head, frozen=True):
    """A site's reply."""

    status: ClassVar[Status] = "ok"  # whether it was done
    reason: ClassVar[str] = ""  # why not

    @classmethod
    def to(cls, request: Request, **rest: Any) -> Self:
        """Returns a reply to a request."""
        return cls(**{name: getattr(request, name) for name in _REPEATED}, **rest)

    def answers(self, request: Request) -> bool:
        """Returns whether it is the reply to this request, and no other."""
        return self.place() == request.place()


class Greeted(Reply, frozen=True, kw_only=True, tag="hello"):
    """Hashes of agreed keys, facts of the data, versions."""

    greeting: Greeting


class Described(Reply, frozen=True, tag="agree"):
    """The next message about the data, or the facts after the last one."""

    facts: Facts | None = None


class Begun(Reply, frozen=True, kw_only=True, tag="begin"):
    """The rounds that the site can go back to."""

    rounds: list[RoundNumber]


class Announced(Reply, frozen=True, kw_only=True, tag="keys"):
    """Public keys; given: the sites of a sum of this round to which shares were given."""

    keys: PublicKeys
    given: list[str] = []


class Shared(Reply, frozen=True, kw_only=True, tag="shares"):
    """A box for each other site."""

    boxes: dict[str, str]


class Trained(Reply, frozen=True, kw_only=True, tag="fit"):
    """A message of the method, and the steps and passes so far."""

    steps: Count
    passes: tuple[Count, Count]


class Unmasked(Reply, frozen=True, kw_only=True, tag="unmask"):
    """Shares."""

    shares: dict[str, str]


class Measured(Reply, frozen=True, kw_only=True, tag="evaluate"):
    """Metrics, whether training diverges, threshold and calibration; whether patients are few."""

    metrics: dict[str, float]
    diverged: bool = False
    point: dict[str, Number] | None = None
    small: bool = False


class Tested(Reply, frozen=True, kw_only=True, tag="across"):
    """Metrics on the test patients; body: the site's own model."""

    metrics: dict[str, float]


class Committed(Trained, frozen=True, kw_only=True, tag="commit"):
    """Steps and passes, the training loss, and the privacy that was spent."""

    loss: Number | None = None
    epsilon: Number | None = None


class Loaded(Reply, frozen=True, kw_only=True, tag="load"):
    """A hash of what the site keeps."""

    digest: str


class Told(Reply, frozen=True, tag="ask"):
    """Of a part of a study the site's whole numbers under masks, or its estimates as JSON."""


class Taken(Reply, frozen=True, tag="bring"):
    """Nothing: the bundle is the agreed one, and is kept."""


class Joined(Reply, frozen=True, kw_only=True, tag="onboard"):
    """An answer, or metrics on the test patients."""

    metrics: dict[str, float]


class Declined(Reply, frozen=True, kw_only=True, tag="declined"):
    """What was asked was not done."""

    of: str  # the kind of the request
    # What the site is, or does.
    status: Literal["busy", "unready", "refused", "failed"]  # type: ignore[misc]
    # Of what is refused, one of :data:`REASONS`; of what failed, the error's type.
    reason: str = ""  # type: ignore[misc]

    @property
    def kind(self) -> str:
        """See the base class."""
        return self.of

    def check(self) -> None:
        """See the base class."""
        if self.status == "failed" and not re.fullmatch(r"\w{1,80}", self.reason):
            raise ValueError("the type of an error is not a name")
        if self.status == "refused" and self.reason not in REASONS:
            raise ValueError(f"{self.reason!r:.40} is not a reason")
        if self.of not in KINDS:
            raise ValueError(f"{self.of!r:.40} is no kind of request")


Answer = TypeVar("Answer", bound="Reply")


class Asking(Request, Generic[Answer], frozen=True):
    """A request, and the class of its reply if the site does what it asks."""


class Hello(Asking[Greeted], frozen=True, tag="hello"):
    """Asks for what must be equal everywhere."""


class Agree(Asking[Described], frozen=True, tag="agree"):
    """Asks for a message about the data; body: the answer to the last; phase: its number."""


class Begin(Asking[Begun], frozen=True, kw_only=True, tag="begin"):
    """Starts a session: who takes part, and the federation's name."""

    job: str
    clients: list[Client]


class Keys(Asking[Announced], frozen=True, kw_only=True, tag="keys"):
    """Asks for keys for a sum under masks."""

    cohort: list[str]


class Shares(Asking[Shared], frozen=True, kw_only=True, tag="shares"):
    """Asks for shares of the site's secrets; brings the keys of all."""

    keys: dict[str, PublicKeys]


class Fit(Asking[Trained], frozen=True, kw_only=True, tag="fit"):
    """Asks to train in one phase of a round; boxes: the other sites' shares for this one."""

    cohort: list[str]
    boxes: dict[str, str] = {}


class Unmask(Asking[Unmasked], frozen=True, kw_only=True, tag="unmask"):
    """Asks for the shares that unmask a sum of these sites."""

    sent: list[str]


class Evaluate(Asking[Measured], frozen=True, kw_only=True, tag="evaluate"):
    """Asks for metrics of the present model."""

    split: Literal["val", "test"]
    trained: bool
    selected: RoundNumber = START
    point: dict[str, Number] | None = None


class Across(Asking[Tested], frozen=True, kw_only=True, tag="across"):
    """Asks for the site's model, or for metrics of another's, which is the body."""

    of: str


class Commit(Asking[Committed], frozen=True, kw_only=True, tag="commit"):
    """Asks to keep the round that was trained; needed: rounds that must stay, too."""

    needed: list[RoundNumber]


class Load(Asking[Loaded], frozen=True, tag="load"):
    """Asks to go back to the round ``at``."""


class Bring(Asking[Taken], frozen=True, kw_only=True, tag="bring"):
    """Brings a bundle that the plan of a study names; body: its files."""

    of: Name


class Ask(Asking[Told], frozen=True, kw_only=True, tag="ask"):
    """Asks for a step (phase) of a part (round) of a study; body: what the step starts from."""

    boxes: dict[str, str] = {}


class Onboard(Asking[Joined], frozen=True, kw_only=True, tag="onboard"):
    """Asks a hospital that joins a question, or sends the last message."""

    last: bool
    job: str
    clients: list[Client]
    point: dict[str, Number] | None = None


def declined(request: Request, why: Status, word: str = "") -> Declined:
    """Returns the reply of a site that does not do what a request asks."""
    return Declined.to(request, of=request.kind, status=why, reason=word)


def unreadable(site: str) -> bytes:
    """Returns a site's reply to bytes that it cannot read."""
    return Declined(site, of="hello", status="refused", reason="bytes").to_bytes()


def _concrete(base: type[Head]) -> list[Any]:
    """The classes of requests or replies."""
    below = [one for sub in base.__subclasses__() for one in _concrete(sub)]
    return [base, *below] if str(base.__struct_config__.tag).islower() else below


_KINDS: dict[str, Any] = {
    what: Union[tuple(_concrete(base))]  # noqa: UP007 - of a list
    for what, base in (("request", Request), ("reply", Reply))
}
KINDS = tuple(str(one.__struct_config__.tag) for one in _concrete(Request))
"""All kinds of requests."""


def framed(*pieces: bytes) -> bytes:
    """Puts magic and hash before the pieces of a message."""
    checksum = hashlib.blake2b(digest_size=_HASH)
    for piece in pieces:
        checksum.update(piece)
    return b"".join((MAGIC, checksum.digest(), *pieces))


def _unpacked(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns head and body."""
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


class Silent(Exception):  # noqa: N818 - it is no error of the program: hospitals go silent
    """There was no reply: the site is down, too slow, or its reply was lost."""


class Answers(Protocol):
    """A site's interface for the transport: :class:`medfed.sites.site.Site`."""

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request; never raises, for any bytes."""


class Transport(Protocol):
    """The coordinator's end."""

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Sends a request to a site and waits for its reply; many threads call in parallel."""
