"""What every codec promises, for every shipped configuration and further arguments."""

import copy
import math
import struct

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from medfed.config import CONFIG_DIR, build
from medfed.federation.codecs import (
    QSGD,
    STC,
    Codec,
    Dense,
    RandomK,
    RunLength,
    SignSGD,
    TernGrad,
    TopK,
)
from medfed.federation.codecs.base import HEADER_BYTES
from medfed.federation.codecs.rounding import round_randomly
from medfed.federation.codecs.selection import random_positions

CASES: dict[str, Codec] = {
    path.stem: build(OmegaConf.create({"codec": OmegaConf.load(path)}).codec)
    for path in sorted((CONFIG_DIR / "codec").glob("*.yaml"))
}
CASES |= {
    "stc_half": STC(0.5),
    "stc_all": STC(1),
    "topk_half": TopK(0.3, "float16"),
    "randomk_biased": RandomK(0.3, scaled=False, values="float16"),
    "randomk_most": RandomK(0.4),
    "qsgd_max": QSGD(4, norm="inf", bucket=100, elias="gamma"),
    "qsgd_one": QSGD(1, norm=1, bucket=0, elias="omega"),
    "qsgd_many": QSGD(1000, norm=3.0, bucket=7, elias="delta"),
    "codebook_8": RunLength(codebook_bits=8),
    "codebook_1": RunLength(codebook_bits=1),
}
EVERY = pytest.mark.parametrize("codec", CASES.values(), ids=CASES)


def rng(seed=0):
    return np.random.default_rng(seed)


def gaussian(d, seed=0):
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def stairs(d, seed=0):
    return gaussian(-(-d // 25), seed).repeat_interleave(25)[:d]


def cycle(codec, values, seed=0):
    return codec.decode(codec.encode(values, rng(seed)), length=len(values))


def test_every_codec_is_covered():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    mine = {c for c in below(Codec) if c.__module__.startswith("medfed.")} - {Codec}
    assert mine == {type(codec) for codec in CASES.values()}


def test_numbers_of_codecs_are_their_own():
    numbers = {(type(c), getattr(c, "wire", "")): c.code for c in CASES.values()}
    assert len(set(numbers.values())) == len(numbers)


@EVERY
@pytest.mark.parametrize("d", [0, 1, 2, 63, 5000])
@pytest.mark.parametrize("make", [gaussian, stairs, torch.zeros])
def test_shape_and_type_come_back(codec, d, make):
    values = make(d)
    back = cycle(codec, values)
    assert back.shape == (d,)
    assert back.dtype == (torch.float64 if codec is CASES["fp64"] else torch.float32)
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
@pytest.mark.parametrize("make", [gaussian, stairs])
def test_lossless_means_bit_for_bit(codec, make):
    values = make(1000)
    values[:3] = torch.tensor([0.0, -0.0, 1e-45])
    back = cycle(codec, values).float()
    if codec.lossless:
        assert back.numpy().tobytes() == values.numpy().tobytes()
    elif not isinstance(codec, RunLength):
        # A codebook is without loss where there are few values.
        assert not torch.equal(back, values)


@EVERY
def test_bytes_are_a_function_of_tensor_and_generator(codec):
    values = gaussian(3000)
    assert codec.encode(values, rng(1)) == codec.encode(values, rng(1))
    random = codec.encode(values, rng(1)) != codec.encode(values, rng(2))
    assert random == (type(codec) in (RandomK, TernGrad, QSGD))
    # Its own generator starts from its seed and advances.
    one, other = copy.deepcopy(codec), copy.deepcopy(codec)
    first, second = one.encode(values), one.encode(values)
    assert first == other.encode(values)
    assert (first != second) == random
    assert torch.equal(codec.decode(first), other.decode(first))


@EVERY
def test_decoding_needs_no_arguments(codec):
    if not isinstance(codec, Dense):
        data = codec.encode(gaussian(500), rng())
        assert torch.equal(type(codec)().decode(data), codec.decode(data))


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(codec, bad):
    values = gaussian(20)
    values[7] = bad
    with pytest.raises(ValueError, match=r"Element 7 is (nan|-?inf)"):
        codec.encode(values, rng())


@EVERY
def test_the_ends_of_float32(codec):
    values = torch.tensor([1e38, -1e38, 1e-45, -1e-45, 0.0, 1.0])
    if isinstance(codec, (RandomK, QSGD)):
        # Scaling and norms may leave the range, and then say so.
        values[:2] /= 1e3
    back = cycle(codec, values)
    assert bool(torch.isfinite(back).all())


def test_a_result_beyond_float32_is_refused():
    values = torch.full((100,), 3e38)
    with pytest.raises(ValueError, match="scaled by d/k"):
        RandomK(0.5).encode(values)
    with pytest.raises(ValueError, match="2-norm of a bucket"):
        QSGD().encode(values)


CONTRACTIONS = {name: codec for name, codec in CASES.items() if codec.feedback}


@pytest.mark.parametrize("codec", CONTRACTIONS.values(), ids=CONTRACTIONS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", ["gaussian", "heavy", "one", "equal"])
def test_contraction_bound(codec, seed, shape):
    d = 400
    values = gaussian(d, seed).double()
    values = {
        "gaussian": values,
        "heavy": values**5,
        "one": values * (torch.arange(d) == 17),
        "equal": values.sign(),
    }[shape].float()
    lost = (cycle(codec, values, seed).double() - values.double()).square().sum()
    whole = values.double().square().sum()
    delta = 1 / d
    if isinstance(codec, TopK):
        delta = math.ceil(codec.fraction * d) / d * (1 - 2**-22)
    if isinstance(codec, RunLength):
        delta = float(values.double().mean() ** 2 * d / whole)
    if isinstance(codec, RandomK):
        delta = 0.0
    assert lost <= (1 - delta) * whole * (1 + 1e-6)


def test_delta_of_sign_and_of_unscaled_random_k():
    values = gaussian(100_000)
    lost = float((cycle(SignSGD(), values) - values).square().sum() / values.square().sum())
    assert lost == pytest.approx(1 - 2 / math.pi, abs=0.005)
    lost = float((cycle(RandomK(0.3, scaled=False), values) - values).square().sum())
    assert lost / float(values.square().sum()) == pytest.approx(0.7, abs=0.01)


UNBIASED = {name: codec for name, codec in CASES.items() if codec.unbiased}
assert {type(codec) for codec in UNBIASED.values()} == {RandomK, TernGrad, QSGD}


def expected_error(codec, values):
    """E||C(v) - v||^2 from the definitions, and omega from the docstrings."""
    v, d = np.abs(values.double().numpy()), values.numel()
    if isinstance(codec, RandomK):
        omega = d / math.ceil(codec.fraction * d) - 1
        return omega * (v**2).sum(), omega
    if isinstance(codec, TernGrad):
        return v.max() * v.sum() - (v**2).sum(), (math.sqrt(d) - 1) / 2
    n, s, q = min(codec.bucket or d, d), codec.levels, codec.norm
    total = 0.0
    for start in range(0, d, n):
        part = v[start : start + n]
        unit = np.linalg.norm(part, q) / s
        share = part / unit - np.floor(part / unit)
        total += (unit**2 * share * (1 - share)).sum()
    r = max(1.0, n ** (1 / q - 0.5))
    return total, min(n * r * r / (4 * s * s), math.sqrt(n) * r / s)


@pytest.mark.parametrize("codec", UNBIASED.values(), ids=UNBIASED)
def test_unbiased_with_the_stated_variance(codec):
    d, repeats = 60, 1000
    values = gaussian(d, 3)
    values[5] = 0
    source = rng(11)
    draws = torch.stack([codec.decode(codec.encode(values, source)) for _ in range(repeats)])
    draws, truth = draws.double(), values.double()
    standard_error = draws.std(0) / math.sqrt(repeats)
    # 5 standard errors: one in 30 000 seeds fails somewhere. What never varies must be right.
    assert bool(((draws.mean(0) - truth).abs() <= 5 * standard_error + 1e-6).all())
    errors = (draws - truth).square().sum(1)
    expected, omega = expected_error(codec, values)
    assert errors.mean() == pytest.approx(expected, rel=0.1, abs=1e-12)
    assert expected <= omega * float(truth.square().sum())


@pytest.mark.parametrize(("d", "bucket"), [(1, 1), (70_000, 9), (200_000, 200_000)])
def test_random_rounding_is_numpys(d, bucket):
    values = gaussian(d).numpy()
    units = rng(1).random(-(-d // bucket))
    exact = np.abs(values.astype(np.float64)) / np.repeat(units, bucket)[:d]
    # Uniform numbers of 53 bits: with 24, tiny magnitudes would come out too large.
    up = rng(2).random(d) < exact - np.floor(exact)
    np.testing.assert_array_equal(
        round_randomly(values, units, bucket, rng(2)), np.floor(exact) + up
    )


def splitmix(state):
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def test_random_positions_are_those_of_the_published_stream():
    # The first numbers of SplitMix64 for this seed, as its author's C program prints them.
    assert next(splitmix(1234567)) == 6457827717110365317
    stream, taken = splitmix(2**64 - 5), set()
    for last in range(700, 1000):
        at = int((next(stream) >> 11) / 2**53 * (last + 1))
        taken.add(last if at in taken else at)
    assert random_positions(1000, 300, 2**64 - 5).tolist() == sorted(taken)


def test_random_positions_are_uniform():
    counts = torch.zeros(50)
    source = rng(5)
    for _ in range(2000):
        counts += RandomK(0.2).decode(RandomK(0.2).encode(torch.ones(50), source)) > 0
    expected = 2000 * 0.2
    # Chi-squared with 49 degrees of freedom, corrected for draws without replacement.
    assert float(((counts - expected) ** 2 / (expected * 0.8)).sum()) < 49 + 4 * math.sqrt(98)


def test_small_messages_are_small():
    assert len(CASES["stc"].encode(gaussian(1))) <= 24
    assert len(SignSGD().encode(gaussian(800))) == HEADER_BYTES + 4 + 100
    assert len(RandomK(0.01).encode(gaussian(10_000))) == HEADER_BYTES + 17 + 400
    # Log2(3) bits would be needed if all three were equally frequent.
    assert len(TernGrad().encode(gaussian(100_000))) < 100_000 * math.log2(3) / 8
