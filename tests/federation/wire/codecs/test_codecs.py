"""What every codec promises and declares, for every configuration and the codec's own examples."""

import copy
import importlib
import math
import pkgutil
import struct

import numpy as np
import pytest
import torch

from medfed.federation.wire import codecs
from medfed.federation.wire.codecs import base
from medfed.federation.wire.codecs.base import HEADER_BYTES, Codec
from medfed.federation.wire.codecs.dense import Dense
from tests.federation.wire.codecs.cases import CASES, EVERY
from tests.sweeps import sweep


def rng(seed=0):
    return np.random.default_rng(seed)


def gaussian(d, seed=0):
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def stairs(d, seed=0):
    return gaussian(-(-d // 25), seed).repeat_interleave(25)[:d]


def cycle(codec, values, source=None):
    return codec.decode(codec.encode(values, source or rng()), length=len(values))


def test_every_codec_is_configured():
    for module in pkgutil.iter_modules(codecs.__path__, "medfed.federation.wire.codecs."):
        importlib.import_module(module.name)
    mine = {c for c in base._REGISTER.values() if c.__module__.startswith("medfed.")}
    assert mine <= {type(codec) for codec in CASES.values()}


@EVERY
def test_the_number_is_its_own(codec):
    assert base._REGISTER[codec.code] is type(codec)
    assert codec.code in codec.codes


@sweep("codes", [(), (Dense.codes[0],), (100,), (0,), (256,), (200, 100)])
def test_numbers_that_are_missing_taken_or_out_of_range_are_refused(codes):
    before = dict(base._REGISTER)
    with pytest.raises(
        TypeError, match=r"numbers that no other codec has, from 128 to 255; taken are 1 \(Dense"
    ):
        type("Other", (Codec,), {"codes": codes, "__module__": "elsewhere"})
    assert before == base._REGISTER


def test_numbers_of_other_packages(monkeypatch):
    # Other tests of this process may have loaded a plugin with this number.
    known = {code: kind for code, kind in base._REGISTER.items() if code != 200}
    monkeypatch.setattr(base, "_REGISTER", known)
    body = {"codes": (200,), "__module__": "elsewhere"}
    for _ in range(2):  # defined anew, it keeps its place
        other = type("Other", (Codec,), body)
    assert base._REGISTER[200] is other
    for name, bases in (("Another", (Codec,)), ("Heir", (other,))):
        with pytest.raises(TypeError, match=r"200 \(Other\)"):
            type(name, bases, body)


@EVERY
@sweep("d", [0, 1, 2, 63, 5000])
@sweep("make", [gaussian, stairs, torch.zeros])
def test_shape_and_type_come_back(codec, d, make):
    values = make(d)
    back = cycle(codec, values)
    assert back.shape == (d,)
    assert back.dtype == codec.dtype
    assert back.device.type == "cpu"
    # The receiver may write into it.
    back.add_(1)
    if codec.lossless:
        assert torch.equal(back - 1, (values.to(back.dtype) + 1) - 1)


@EVERY
def test_header_and_zeros(codec):
    data = codec.encode(torch.zeros(100), rng())
    assert HEADER_BYTES <= 16
    assert data[:HEADER_BYTES] == struct.pack("<2sBBQ", b"mf", 1, codec.code, 100)
    assert not cycle(codec, torch.zeros(100)).any()


@EVERY
def test_lossless_means_bit_for_bit(codec):
    exact = []
    for values in (gaussian(1000), stairs(1000)):
        values[:3] = torch.tensor([0.0, -0.0, 1e-45])
        exact.append(cycle(codec, values).float().numpy().tobytes() == values.numpy().tobytes())
    assert all(exact) == codec.lossless


@EVERY
def test_bytes_are_a_function_of_tensor_and_generator(codec):
    values = gaussian(3000)
    assert codec.encode(values, rng(1)) == codec.encode(values, rng(1))
    assert (codec.encode(values, rng(1)) != codec.encode(values, rng(2))) == codec.random
    # Its own generator starts from its seed and advances.
    one, other = copy.deepcopy(codec), copy.deepcopy(codec)
    first, second = one.encode(values), one.encode(values)
    assert first == other.encode(values)
    assert (first != second) == codec.random
    assert torch.equal(codec.decode(first), other.decode(first))


@EVERY
def test_decoding_needs_no_arguments(codec):
    if codec.self_describing:
        data = codec.encode(gaussian(500), rng())
        assert torch.equal(type(codec)().decode(data), codec.decode(data))


@EVERY
@sweep("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(codec, bad):
    values = gaussian(20)
    values[7] = bad
    with pytest.raises(ValueError, match=r"Element 7 is (nan|-?inf)"):
        codec.encode(values, rng())


@EVERY
def test_the_ends_of_float32(codec):
    values = torch.tensor([1e38, -1e38, 1e-45, -1e-45, 0.0, 1.0])
    try:
        back = cycle(codec, values)
    except ValueError:
        # What lengthens a vector may leave the range, and then says so.
        assert codec.error_bound(len(values)) > 1
        values[:2] /= 1e3
        back = cycle(codec, values)
    assert bool(torch.isfinite(back).all())


def relative_errors(codec, values, repeats):
    """||C(v) - v||^2 / ||v||^2 of some draws, or of the only one."""
    source = rng(11)
    draws = [cycle(codec, values, source).double() for _ in range(repeats if codec.random else 1)]
    return torch.stack([(d - values).square().sum() / values.square().sum() for d in draws])


@EVERY
@sweep("seed", range(3))
@sweep("shape", ["gaussian", "heavy", "one", "equal"])
def test_error_bound(codec, seed, shape):
    d = 400
    values = gaussian(d, seed).double()
    values = {
        "gaussian": values,
        "heavy": values**5,
        "one": values * (torch.arange(d) == 17),
        "equal": values.sign(),
    }[shape]
    values, bound = values.float().double(), codec.error_bound(d)
    errors = relative_errors(codec, values, 50)
    # 5 standard errors of a mean over draws.
    noise = 5 * float(errors.std()) / math.sqrt(len(errors)) if codec.random else 0.0
    assert float(errors.mean()) <= bound * (1 + 1e-6) + noise
    if codec.feedback:
        assert bound <= 1
        assert bool((errors <= 1 + 1e-6).all())


UNBIASED = {name: codec for name, codec in CASES.items() if codec.unbiased}


@pytest.mark.parametrize("codec", UNBIASED.values(), ids=UNBIASED)
def test_unbiased(codec):
    d, repeats = 60, 1000
    values = gaussian(d, 3)
    values[5] = 0
    source = rng(11)
    draws = torch.stack([cycle(codec, values, source) for _ in range(repeats)]).double()
    truth = values.double()
    standard_error = draws.std(0) / math.sqrt(repeats)
    # 5 standard errors: one in 30 000 seeds fails somewhere. What never varies must be right.
    assert bool(((draws.mean(0) - truth).abs() <= 5 * standard_error + 1e-6).all())
