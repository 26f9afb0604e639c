"""From the sections ``codec`` and ``channel`` of a configuration to the channel of a federation."""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig

from medfed.config import build
from medfed.errors import ConfigError, did_you_mean
from medfed.federation.algorithm import Algorithm
from medfed.federation.channel import Channel
from medfed.federation.ledger import Direction
from medfed.federation.link import Link

DIRECTIONS: tuple[Direction, ...] = ("up", "down")


def build_channel(config: DictConfig, algorithm: Algorithm) -> Channel:
    """Builds both directions of the channel.

    Args:
        config: The whole configuration.
        algorithm: Whose parts travel.

    Raises:
        ConfigError: If a value is out of range, or the patterns of parts match nothing.
    """
    links = {direction: _build_link(config, direction) for direction in DIRECTIONS}
    if links["up"].parts is not None:
        check_parts(links["up"].parts, algorithm.leaves, "channel.up.parts")
    return Channel(links["up"], links["down"], seed=config.seed)


def _build_link(config: DictConfig, direction: Direction) -> Link:
    codec = build(config.codec[direction])
    link: Link = build(config.channel[direction], codec=codec, place=f"channel.{direction}")
    return link


def check_parts(patterns: Iterable[str], known: Iterable[str], key: str) -> None:
    """Checks that each pattern can match a part.

    Args:
        patterns: Patterns as ``PART`` or ``PHASE/PART``.
        known: The parts that there are.
        key: What an error calls the patterns.

    Raises:
        ConfigError: If one matches nothing.

    Example:
        >>> check_parts(["fit/shared"], ["shared"], "channel.up.parts")
        >>> check_parts(["share"], ["shared"], "channel.up.parts")
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: channel.up.parts names 'share', which never travels (did you \
mean shared?); the parts are shared.
    """
    names = list(known)
    for pattern in patterns:
        part = pattern.rpartition("/")[2]
        if not any(Link(parts=[part]).compresses("", name) for name in names):
            parts = f"the parts are {', '.join(names)}" if names else "nothing travels"
            hint = did_you_mean(part, names)
            raise ConfigError(f"{key} names {pattern!r}, which never travels{hint}; {parts}.")
