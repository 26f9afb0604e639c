"""The lossless last stage."""

import sys

import pytest

from medfed.federation.wire.channel import compress, decompress
from medfed.standalone.errors import CodecError, ConfigError
from tests.sweeps import sweep

zstandard = pytest.importorskip("zstandard")
DATA = b"".join(i.to_bytes(4, "little") for i in range(5000))


@sweep("level", [1, 3, 22])
@sweep("data", [b"", b"x", DATA, bytes(10**6)])
def test_round_trip(data, level):
    frame = compress(data, level)
    assert decompress(frame, limit=len(data)) == data
    # The library by itself agrees on what a frame is.
    assert zstandard.decompress(frame) == data


def test_equal_bytes_for_equal_data():
    assert compress(DATA, 3) == compress(bytes(DATA), 3)
    assert len(compress(DATA, 22)) < len(compress(DATA, 1)) < len(DATA)


def test_bombs_are_refused_before_they_grow():
    bomb = compress(bytes(10**8), 19)
    assert len(bomb) < 20_000
    with pytest.raises(CodecError, match="100000000 bytes exceeds 1000 bytes"):
        decompress(bomb, limit=1000)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**6))
    with pytest.raises(CodecError, match="exceeds"):
        decompress(silent, limit=10**7)


def test_torn_foreign_and_damaged_frames_are_refused():
    frame = compress(DATA, 3)
    for cut in (0, 1, 5, len(frame) // 2, len(frame) - 1):
        with pytest.raises(CodecError):
            decompress(frame[:cut], limit=10**6)
    for wrong in (frame + b"\0", b"not a frame at all", DATA):
        with pytest.raises(CodecError):
            decompress(wrong, limit=10**6)
    refused = 0
    for place in range(8 * 40):
        damaged = bytearray(frame)
        damaged[place // 8] ^= 1 << place % 8
        try:
            assert len(decompress(bytes(damaged), limit=10**6)) <= 10**6
        except CodecError:
            refused += 1
    assert refused > 100


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install zstandard"):
        compress(b"")
