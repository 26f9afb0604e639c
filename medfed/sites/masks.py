"""Masks that cancel in a sum, so that the coordinator learns the sum and no site's numbers.

Bonawitz et al.: Practical secure aggregation for privacy-preserving machine learning, CCS 2017,
with double masking. A sum takes four requests, each to all sites of a phase:

| request | a site |
|---|---|
| keys | makes two new X25519 keys and a seed b; sends the public keys and the hash of b |
| shares | divides its secret key s and b among all (Shamir), each share encrypted for its holder |
| fit | adds a stream from b, and one of each pair: of two sites one adds it, one subtracts it |
| unmask | gives its share of b of the sites that sent numbers, its share of s of the others |

Streams are ChaCha20's; keys come from X25519 by HKDF-SHA256 and are bound to session, round,
attempt, phase and sites. More than two thirds of the sites must give their shares. A site never
gives both shares of one peer: with both, the coordinator could unmask a message that came late.

Deviations: keys live for one phase of one attempt. A site gives shares for one set of sites per
phase of a round, also after a restart: sums with and without a site would reveal its numbers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from medfed.federation.wire.fixed_point import FEWEST, FixedPoint
from medfed.federation.wire.packet import Packet
from medfed.sites.policy import remembered
from medfed.sites.wire import Head, PublicKeys
from medfed.sites.words import in_words
from medfed.standalone.errors import CodecError

Keys = Mapping[str, PublicKeys]
"""Of each site what it has announced."""
Shares = Mapping[str, Mapping[str, str]]
"""Of each site the shares that it gives, by the site whose secret they are of."""
_PRIME = 2**521 - 1
_SHARE = 66  # bytes of a number below the prime


class Signer(Protocol):
    """A site's certificate, which the other sites can check."""

    def sign(self, data: bytes) -> dict[str, str]:
        """Returns the entries ``certificate`` and ``signature``."""

    def check(self, site: str, data: bytes, keys: PublicKeys) -> None:
        """Raises CodecError if another than this site has signed."""


class Certificate:
    """The certificate of a kit of NVIDIA FLARE, by the root that the kits of all sites share.

    Whoever holds the root's key can make a certificate in any site's name, so a site writes down
    which one each other site had first, in the file ``known``, and accepts no other.
    """

    def __init__(self, folder: Path, known: Path) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import padding

        self._x509, self._how = x509, (padding.PKCS1v15(), hashes.SHA256())
        self._text = (folder / "client.crt").read_text(encoding="utf-8")
        key = (folder / "client.key").read_bytes()
        self._key: Any = serialization.load_pem_private_key(key, None)
        self._root = x509.load_pem_x509_certificate((folder / "rootCA.pem").read_bytes())
        self._known = known

    def sign(self, data: bytes) -> dict[str, str]:
        """See :meth:`Signer.sign`."""
        signature = self._key.sign(data, *self._how)
        return {"certificate": self._text, "signature": signature.hex()}

    def check(self, site: str, data: bytes, keys: PublicKeys) -> None:
        """See :meth:`Signer.check`."""
        from cryptography.exceptions import InvalidSignature

        try:
            there = self._x509.load_pem_x509_certificate(keys.certificate.encode())
            there.verify_directly_issued_by(self._root)
            named = there.subject.get_attributes_for_oid(self._x509.NameOID.COMMON_NAME)
            if [name.value for name in named] != [site]:
                raise ValueError(site)
            key: Any = there.public_key()
            key.verify(bytes.fromhex(keys.signature), data, *self._how)
        except (TypeError, ValueError, InvalidSignature) as error:
            raise CodecError(f"The keys of {site} are not signed by its certificate.") from error
        self._recognise(site, there.fingerprint(self._how[1]).hex())

    def _recognise(self, site: str, fingerprint: str) -> None:
        """Writes down a site's first certificate; raises CodecError if it has another one."""
        with remembered(self._known, dict[str, str]) as known:
            if known.setdefault(site, fingerprint) != fingerprint:
                words = {"fingerprint": fingerprint, "known": self._known}
                raise CodecError(in_words("certificate", site=site, **words))


def needed(sites: int) -> int:
    """Returns how many of some sites must give their shares: more than two thirds, at least three.

    Example:
        >>> [needed(n) for n in (3, 4, 6, 20)]
        [3, 3, 5, 14]
    """
    return max(FEWEST, 2 * sites // 3 + 1)


def divided(secret: bytes, holders: int, least: int) -> list[bytes]:
    """Returns Shamir's shares of up to 64 bytes, of which any ``least`` give the secret.

    Example:
        >>> shares = divided(b"secret", 5, 3)
        >>> joined({5: shares[4], 1: shares[0], 3: shares[2]}, 6)
        b'secret'
    """
    terms = [secrets.randbelow(_PRIME) for _ in range(least - 1)] + [int.from_bytes(secret)]
    shares = []
    for x in range(1, holders + 1):
        value = 0
        for term in terms:
            value = (value * x + term) % _PRIME
        shares.append(value.to_bytes(_SHARE))
    return shares


def joined(shares: Mapping[int, bytes], length: int) -> bytes:
    """Returns the secret of :func:`divided`, by Lagrange's polynomial at 0."""
    secret = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % _PRIME, below * (other - x) % _PRIME
        secret += int.from_bytes(share) * above * pow(below, -1, _PRIME)
    if (secret % _PRIME).bit_length() > 8 * length:
        raise CodecError("Shares of a mask do not fit together.")
    return (secret % _PRIME).to_bytes(length)


def context_of(head: Head, sites: Sequence[str]) -> str:
    """Returns what the keys of one sum are bound to."""
    return json.dumps([head.session, head.round, head.attempt, head.phase, sorted(sites)])


class Half:
    """A site's half of one sum; without a signer its keys are not signed."""

    def __init__(
        self, name: str, head: Head, sites: Sequence[str], signer: Signer | None, samples: int = 1
    ) -> None:
        self.name, self.phase, self.sites, self._samples = name, head.phase, sorted(sites), samples
        self._context = context_of(head, sites)
        self._signer = signer
        self._mask, self._box = (_curve().X25519PrivateKey.generate() for _ in range(2))
        self._seed = secrets.token_bytes(32)
        self._keys: Keys = {}
        self._announced: PublicKeys | None = None
        self._shares: dict[str, tuple[bytes, bytes]] = {}  # shares of each site's key and seed

    def announced(self) -> PublicKeys:
        """Returns what all other sites must know."""
        mask, box = (k.public_key().public_bytes_raw().hex() for k in (self._mask, self._box))
        keys = PublicKeys(mask, box, hashlib.sha256(self._seed).hexdigest(), self._samples)
        if self._signer is not None:
            signed = self._signer.sign(self._signed(self.name, keys))
            keys = msgspec.structs.replace(keys, **signed)
        self._announced = keys
        return keys

    def _signed(self, site: str, keys: PublicKeys) -> bytes:
        return json.dumps([self._context, site, *msgspec.structs.astuple(keys)[:4]]).encode()

    @property
    def samples(self) -> int:
        """Of all sites, as each has signed; nobody else can change it."""
        return sum(one.samples for one in self._keys.values())

    def boxes(self, keys: Keys) -> dict[str, str]:
        """Returns each other site's shares, encrypted for it."""
        public = [one.mask for one in keys.values()]
        if sorted(keys) != self.sites or len({*public}) < len(public):
            raise CodecError("The keys are not those of all sites of this sum.")
        if keys[self.name] != self._announced:
            raise CodecError("The keys are those of another sum.")
        for site, one in keys.items():
            if self._signer is not None:
                self._signer.check(site, self._signed(site, one), one)
        self._keys, least = keys, needed(len(self.sites))
        both = (self._mask.private_bytes_raw(), self._seed)
        pairs = zip(*(divided(secret, len(self.sites), least) for secret in both), strict=True)
        shares = dict(zip(self.sites, pairs, strict=True))
        self._shares = {self.name: shares.pop(self.name)}
        return {
            site: self._lock(self.name, site).encrypt(bytes(12), b"".join(pair), None).hex()
            for site, pair in shares.items()
        }

    def _lock(self, sender: str, receiver: str) -> Any:
        """The cipher of one message from a site to another; each has a key of its own."""
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        other = receiver if sender == self.name else sender
        about = self._context, "box", sender, receiver
        return ChaCha20Poly1305(_derived(self._box, self._keys[other].box, *about))

    def masked(self, sums: FixedPoint, packet: Packet, boxes: Mapping[str, str]) -> Packet:
        """Returns the site's message with masks on what is summed, which `sums` says."""
        return sums.added(packet, self.mask(len(sums.read(packet)), boxes))

    def mask(self, length: int, boxes: Mapping[str, str], kind: type[Any] = np.uint32) -> Any:
        """Returns what the site adds to its numbers, modulo 2^32 or 2^64."""
        from cryptography.exceptions import InvalidTag

        if sorted([*boxes, self.name]) != self.sites or not self._keys:
            raise CodecError("The shares are not those of all sites of this sum.")
        opened = {**self._shares}
        for site, box in boxes.items():
            try:
                both = self._lock(site, self.name).decrypt(bytes(12), bytes.fromhex(box), None)
            except (InvalidTag, ValueError) as error:
                raise CodecError("A share was not encrypted by its site.") from error
            opened[site] = both[:_SHARE], both[_SHARE:]
        self._shares = opened
        total = stream(self._seed, length, kind)
        for site in boxes:
            total += _pair(self._mask, self._keys, self._context, self.name, site, length, kind)
        return total

    def shares(self, sent: Sequence[str]) -> dict[str, str]:
        """Returns a share for each site: of its seed if it has sent numbers, of its key if not."""
        there = {*sent}
        if len(there) < needed(len(self.sites)) or not {self.name} <= there <= {*self.sites}:
            raise CodecError("A sum of these sites is not to be unmasked.")
        shares = {site: pair[site in there].hex() for site, pair in self._shares.items()}
        self._shares = {}  # never the other kind
        return shares


def unmasked(
    about: str, keys: Keys, sent: Sequence[str], shares: Shares, length: int, kind: Any = np.uint32
) -> Any:
    """Returns what to add to the sum of the sites' numbers, so that no mask is left in it."""
    sites, least = sorted(keys), needed(len(keys))
    total = np.zeros(length, kind)
    for site in sites:
        secrets_of = {
            sites.index(giver) + 1: bytes.fromhex(one[site])
            for giver, one in list(shares.items())[:least]
            if site in one
        }
        secret = joined(secrets_of, 32)
        if site in sent:
            if hashlib.sha256(secret).hexdigest() != keys[site].seal:
                raise CodecError("Shares of a mask do not fit together.")
            total -= stream(secret, length, kind)
            continue
        key = _curve().X25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw().hex() != keys[site].mask:
            raise CodecError("Shares of a key do not fit together.")
        for other in sent:
            # What the missing site would have added, so that those of the others cancel.
            total += _pair(key, keys, about, site, other, length, kind)
    return total


def stream(key: bytes, length: int, kind: type[Any] = np.uint32) -> Any:
    """Returns numbers of an unsigned type that follow from a key of 32 bytes, ``(length,)``.

    Example:
        >>> stream(bytes(32), 2)
        array([2917185654, 2419978656], dtype=uint32)
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), None)
    each = np.dtype(kind).newbyteorder("<")
    data = cipher.encryptor().update(bytes(each.itemsize * length))
    return np.frombuffer(data, each).astype(kind)


def _pair(key: Any, keys: Keys, context: str, site: str, other: str, *like: Any) -> Any:
    """What a site adds for another, of a length and a type; the other adds the negative."""
    names = sorted((site, other))
    numbers = stream(_derived(key, keys[other].mask, context, "mask", *names), *like)
    return numbers if site == names[0] else np.negative(numbers)


def _derived(key: Any, public: str, *about: str) -> bytes:
    """A key of 32 bytes that two sites share."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    there = _curve().X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    info = json.dumps(["medfed", *about]).encode()
    return HKDF(SHA256(), 32, None, info).derive(key.exchange(there))


def _curve() -> Any:
    from cryptography.hazmat.primitives.asymmetric import x25519

    return x25519
