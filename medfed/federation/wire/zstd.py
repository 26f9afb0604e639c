"""The optional last stage: bytes to fewer bytes, without loss (Zstandard, RFC 8878)."""

from __future__ import annotations

from typing import Any

from medfed.common.errors import CodecError, ConfigError, first_line

LEVELS = range(1, 23)


def compress(data: bytes, level: int = 3) -> bytes:
    """Returns one Zstandard frame that states the length of ``data``.

    Args:
        data: Any bytes.
        level: From 1 (fastest) to 22 (smallest).

    Raises:
        ConfigError: If the level is outside, or the package ``zstandard`` is not installed.

    Example:
        >>> len(compress(bytes(10_000))) < 40
        True
    """
    if level not in LEVELS:
        raise ConfigError(f"zstd level={level} must be from {LEVELS[0]} to {LEVELS[-1]}.")
    frame: bytes = library().ZstdCompressor(level=level).compress(data)
    return frame


def decompress(data: bytes, limit: int) -> bytes:
    """Returns what :func:`compress` was given.

    Args:
        data: One frame.
        limit: The most bytes that are accepted; a frame that states more, or nothing, is refused
            before anything is allocated.

    Raises:
        CodecError: If the frame is foreign, torn, damaged or larger than ``limit``.
        ConfigError: If the package ``zstandard`` is not installed.

    Example:
        >>> decompress(compress(b"abc"), limit=3)
        b'abc'
    """
    zstd = library()
    try:
        stated = zstd.get_frame_parameters(data).content_size
        if stated > limit:
            raise CodecError(f"A compressed message of {stated} bytes exceeds {limit} bytes.")
        whole: bytes = zstd.ZstdDecompressor().decompress(
            data, max_output_size=limit, allow_extra_data=False
        )
    except (zstd.ZstdError, MemoryError) as error:
        why = first_line(error)
        raise CodecError(f"A compressed message cannot be read ({why}).") from error
    if len(whole) != stated:
        raise CodecError(f"A compressed message of {stated} bytes holds {len(whole)}.")
    return whole


def library() -> Any:
    """Returns the package ``zstandard``.

    Raises:
        ConfigError: If it is not installed, with the command that installs it.
    """
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "The zstd stage needs the package zstandard: pip install zstandard."
        ) from error
    return zstandard
