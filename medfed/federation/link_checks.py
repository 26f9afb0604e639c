"""Checks of a link's options."""

from __future__ import annotations

from collections.abc import Sequence

from medfed.errors import ConfigError


def check_options(
    place: str,
    feedback: bool | None,
    shift: float | str | None,
    zstd: int | None,
    parts: Sequence[str] | None,
) -> None:
    """Checks the options of a link; see :class:`medfed.federation.link.Link`.

    Raises:
        ConfigError: If a value is out of range or two exclude each other.

    Example:
        >>> check_options("channel.up", None, 2, None, None)
        Traceback (most recent call last):
        ...
        medfed.errors.ConfigError: channel.up.shift must be auto, a step in (0, 1] or null, not 2.
    """
    if shift is not None and shift != "auto" and not _is_step(shift):
        raise ConfigError(f"{place}.shift must be auto, a step in (0, 1] or null, not {shift}.")
    if shift is not None and feedback:
        raise ConfigError(
            f"{place}.feedback=true and {place}.shift={shift} exclude each other: both carry over "
            "what a message lacked; set one of them to null."
        )
    if zstd is not None and not 1 <= zstd <= 22:
        raise ConfigError(f"{place}.zstd must be a level from 1 to 22 or null, not {zstd}.")
    if parts is not None and (isinstance(parts, str) or not parts):
        raise ConfigError(
            f"{place}.parts must be a list of patterns such as [shared] or null, not {parts!r}."
        )


def _is_step(shift: float | str) -> bool:
    return isinstance(shift, int | float) and 0 < shift <= 1
