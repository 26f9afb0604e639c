"""Bytes of the dense codec."""

import struct

import pytest
import torch

from medfed.errors import ConfigError
from medfed.federation.codecs import CodecError, Dense
from medfed.federation.codecs.base import HEADER_BYTES

VALUES = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -1.5, 1 / 3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_round_trip_is_exact(dtype: str) -> None:
    codec, values = Dense(dtype), VALUES.to(getattr(torch, dtype))
    back = codec.decode(codec.encode(values))
    assert back.dtype == values.dtype
    assert codec.lossless
    assert back.numpy().tobytes() == values.numpy().tobytes()


def test_bytes_are_a_header_and_little_endian_numbers() -> None:
    data = Dense().encode(torch.tensor([1.0, -2.0]))
    assert data == struct.pack("<2sBBQ2f", b"mf", 1, 1, 2, 1.0, -2.0)
    assert HEADER_BYTES == 12


def test_nothing_is_a_header() -> None:
    data = Dense().encode(torch.zeros(0))
    assert len(data) == HEADER_BYTES
    assert Dense().decode(data).shape == (0,)


def test_encode_takes_views_and_parameters() -> None:
    strided = torch.arange(6.0)[::2]
    assert Dense().decode(Dense().encode(strided)).tolist() == [0, 2, 4]
    parameter = torch.nn.Parameter(torch.ones(2))
    assert Dense().decode(Dense().encode(parameter)).tolist() == [1, 1]


def test_decoded_tensors_are_the_receivers_own() -> None:
    data = Dense().encode(torch.zeros(2))
    Dense().decode(data).add_(1)
    assert Dense().decode(data).tolist() == [0, 0]


def test_double_in_float32_is_rounded_once() -> None:
    value = torch.tensor([1 / 3], dtype=torch.float64)
    assert Dense().decode(Dense().encode(value)).tolist() == value.float().tolist()


GOOD = Dense().encode(torch.ones(3))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[: HEADER_BYTES - 1],
        GOOD[:-1],
        GOOD + b"\0",
        b"xx" + GOOD[2:],
        GOOD[:2] + b"\x02" + GOOD[3:],
        Dense("float64").encode(torch.ones(3, dtype=torch.float64)),
    ],
    ids=["empty", "short header", "truncated", "too long", "magic", "version", "other codec"],
)
def test_foreign_and_torn_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        Dense().decode(data)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        Dense("float16")
