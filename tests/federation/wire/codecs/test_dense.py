"""Bytes of the dense codecs."""

import struct

import numpy as np
import pytest
import torch

from medfed.federation.wire.codecs.base import HEADER_BYTES
from medfed.federation.wire.codecs.dense import Dense
from medfed.standalone.errors import CodecError, ConfigError
from tests.sweeps import sweep

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


@sweep(
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
)
def test_foreign_and_torn_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        Dense().decode(data)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        Dense("int8")


def round_trip(dtype: str, values: torch.Tensor) -> torch.Tensor:
    codec = Dense(dtype)
    return codec.decode(codec.encode(values), length=len(values))


def test_half_precision_takes_two_bytes_and_says_it_is_lossy() -> None:
    values = torch.randn(100)
    assert len(Dense("float16").encode(values)) == HEADER_BYTES + 2 + 200
    assert len(Dense("bfloat16").encode(values)) == HEADER_BYTES + 200
    assert not Dense("float16").lossless
    assert not Dense("bfloat16").lossless


@sweep("scale", [1e-38, 1e-6, 1.0, 65504.0, 1e6, 1e37])
def test_float16_neither_overflows_nor_underflows(scale: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() * scale
    values = values.float()
    back = round_trip("float16", values)
    assert back.dtype == torch.float32
    largest = values.double().abs().max()
    bound = torch.maximum(values.double().abs() * 2**-11, largest * 2**-39)
    # The smallest float32 numbers have no finer neighbours.
    assert bool(((back.double() - values.double()).abs() <= bound.clamp(min=2**-149)).all())


def test_float16_keeps_what_numpy_holds_in_half_precision() -> None:
    values = torch.from_numpy(np.float32(np.float16([1 / 3, -2e-7, 1.0, 0.0, 30000.0])))
    assert round_trip("float16", values).tolist() == values.tolist()


def test_bfloat16_is_torchs_rounding_and_saturates() -> None:
    values = torch.tensor([1 / 3, -1e-30, 3.4028e38, -3.4028e38, 1e-45])
    expected = values.to(torch.bfloat16).float()
    limit = torch.finfo(torch.bfloat16).max
    assert round_trip("bfloat16", values).tolist() == expected.clamp(-limit, limit).tolist()


@sweep("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_no_elements(dtype: str) -> None:
    assert round_trip(dtype, torch.zeros(0)).shape == (0,)


def test_double_beyond_single_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="Element 1 is 1e"):
        Dense().encode(torch.tensor([0, 1e60], dtype=torch.float64))
    assert round_trip("float64", torch.tensor([1e60], dtype=torch.float64)).tolist() == [1e60]


def test_only_flat_tensors() -> None:
    with pytest.raises(ValueError, match=r"not \(2, 2\)"):
        Dense().encode(torch.zeros(2, 2))
