"""Builds the channel of a run, as far as its method converges with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from medfed.config.compose import build
from medfed.config.description import RunDescription
from medfed.config.sections import Section
from medfed.federation.aggregation import Aggregation
from medfed.federation.algorithm import Algorithm
from medfed.federation.lightning.collect import warn
from medfed.federation.wire.channel import Channel, Link
from medfed.federation.wire.codecs.base import Codec
from medfed.federation.wire.fixed_point import FEWEST, FixedPoint
from medfed.standalone.errors import ConfigError, did_you_mean


def build_channel(config: RunDescription, algorithm: Algorithm, clients: int) -> Channel:
    """Builds both directions of the channel, from the sections ``codec`` and ``channel``."""
    codecs, links = config.codec, config.channel
    codec = build(codecs["up"])
    only = _only(algorithm, codec, links["up"])
    up = build(links["up"], codec=codec, place="channel.up", **only)
    down = build(links["down"], codec=build(codecs["down"]), place="channel.down")
    if up.parts is not None:
        check_parts(up.parts, algorithm.parts_sent, "channel.up.parts")
    return Channel(up, down, seed=config.seed, sums=sums_of(config, algorithm, up, clients))


def sums_of(
    config: RunDescription, algorithm: Algorithm, up: Link, clients: int
) -> FixedPoint | None:
    """Returns the parts that the server receives only as sums; None without ``channel.secure``."""
    if (secure := config.channel.get("secure")) is None:
        return None
    if secure != "masks":
        raise ConfigError(f"channel.secure must be masks or null, not {secure!r}.")
    name = algorithm.title
    parts = tuple(part for part in algorithm.parts_sent if part in algorithm.parts_averaged)
    if not parts or algorithm.trains_centrally:
        why = f"{name} needs more of what each client sends than a mean over all clients"
        hint = "choose another algorithm (medfed methods METHOD says which take means)"
    elif algorithm.mask_aware:
        why = "algorithm.mask_aware=true averages each weight over other clients"
        hint = "set algorithm.mask_aware=false"
    elif type(algorithm.aggregation) is not Aggregation:
        why = f"aggregation={type(algorithm.aggregation).__name__.lower()} compares the clients"
        hint = "choose aggregation=mean"
    elif not up.direct or not up.codec.lossless or up.shift is not None or up.zstd is not None:
        why = "codec.up and channel.up make messages of single clients smaller"
        hint = "set codec.up=fp32, and channel.up.cer.gamma=0, channel.up.shift=null and "
        hint += "channel.up.zstd=null"
    elif clients < FEWEST:
        why = f"{clients} clients are too few to hide one in a sum of {FEWEST}"
        hint = "let more take part"
    else:
        if others := [part for part in algorithm.parts_sent if part not in parts]:
            warn(
                f"channel.secure=masks covers the part {' and '.join(parts)} of what clients send "
                f"by {name}; the server receives {' and '.join(others)} of each client."
            )
        return FixedPoint(parts, config.channel["range"])
    raise ConfigError(
        f"channel.secure=masks does not go with this: {why}. Either {hint}, or set "
        "channel.secure=null."
    )


def _only(algorithm: Algorithm, codec: Codec, link: Section) -> dict[str, Any]:
    """Restricts a lossy codec to the parts of a method that stalls if others lose anything."""
    name, coded = algorithm.title, algorithm.parts_compressible
    if coded is None or codec.lossless or codec.cast:
        return {}
    if not coded:
        raise ConfigError(
            f"{name} compresses its messages itself and does not converge with a lossy codec on "
            "top; set codec.up=fp32, and choose the share of the entries by algorithm.keep."
        )
    if not codec.unbiased or link.feedback or link.shift is not None:
        raise ConfigError(
            f"{name} converges only with an unbiased codec, without error feedback and shift; set "
            "codec.up to randomk, qsgd or terngrad, and channel.up.feedback and shift to null."
        )
    if {str(part).rpartition("/")[2] for part in link.parts or coded} != set(coded):
        raise ConfigError(
            f"{name} converges only if the codec encodes nothing but {', '.join(coded)}; set "
            "channel.up.parts=null."
        )
    return {"parts": list(coded), "feedback": False}


def check_parts(patterns: Iterable[str], known: Iterable[str], key: str) -> None:
    """Checks that each pattern can match a part.

    Example:
        >>> check_parts(["fit/shared"], ["shared"], "channel.up.parts")
        >>> check_parts(["share"], ["shared"], "channel.up.parts")
        Traceback (most recent call last):
        ...
        medfed.standalone.errors.ConfigError: channel.up.parts names 'share', which never travels (did you mean shared?); the parts are shared.
    """  # noqa: E501
    names = list(known)
    for pattern in patterns:
        part = pattern.rpartition("/")[2]
        if not any(Link(parts=[part]).compresses("", name) for name in names):
            parts = f"the parts are {', '.join(names)}" if names else "nothing travels"
            hint = did_you_mean(part, names)
            raise ConfigError(f"{key} names {pattern!r}, which never travels{hint}; {parts}.")
