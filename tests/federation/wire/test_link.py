"""One direction: each mode against its formula in NumPy, both ends from bytes alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from medfed.common.tensors import layout_of
from medfed.federation.wire.channel import CER, Channel, Link, MessageContext
from medfed.federation.wire.codecs.dense import Dense
from medfed.federation.wire.codecs.qsgd import QSGD
from medfed.federation.wire.codecs.sparse import RandomK, TopK
from medfed.federation.wire.codecs.stc import STC
from medfed.federation.wire.packet import Message
from medfed.functional.prox import fused_lasso
from medfed.standalone.errors import CodecError, ConfigError
from tests.sweeps import sweep

CPU = torch.device("cpu")
D = 40
LAYOUT = layout_of({"a": torch.zeros(5, 4), "b": torch.zeros(20)})


def vectors(count: int = 4, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=D)
    return [(start + 0.3 * i * rng.normal(size=D)).astype(np.float32) for i in range(count)]


def top(v: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(v)
    chosen = np.argsort(-np.abs(v))[:k]
    kept[chosen] = v[chosen]
    return kept


def exchange(link: Link, kind: str, sent: list[np.ndarray]) -> tuple[list[np.ndarray], list[bytes]]:
    """Both ends with their own memory; the receiver sees nothing but bytes."""
    here, there, received, data = None, None, [], []
    for i, vector in enumerate(sent):
        rng = np.random.default_rng(i)
        coded, known, here = link.encode(torch.from_numpy(vector), LAYOUT, kind, here, rng)
        values, there = link.decode(coded, LAYOUT, kind, there, CPU)
        if known is not None:
            assert torch.equal(known.values, values)
            assert known.memory is there or torch.equal(known.memory, there)
        received.append(values.numpy())
        data.append(coded)
    return received, data


def test_residual() -> None:
    residual = np.zeros(D, np.float32)
    received, _ = exchange(Link(TopK(0.1), feedback=True), "update", vectors())
    for vector, got in zip(vectors(), received, strict=True):
        total = residual + vector
        np.testing.assert_allclose(got, top(total, 4), rtol=1e-6)
        residual = total - top(total, 4)
    assert np.abs(residual).max() > 0.5


def test_no_residual() -> None:
    received, _ = exchange(Link(TopK(0.1), feedback=False), "update", vectors())
    np.testing.assert_array_equal(received, [top(v, 4) for v in vectors()])


def test_weights_go_dense_first_and_then_as_differences() -> None:
    received, data = exchange(Link(TopK(0.1), feedback=True), "state", vectors())
    reference = vectors()[0]
    np.testing.assert_array_equal(received[0], reference)
    assert len(data[0]) == 12 + 4 * D > 3 * len(data[1])
    for vector, got in zip(vectors()[1:], received[1:], strict=True):
        reference = reference + top(vector - reference, 4)
        np.testing.assert_allclose(got, reference, rtol=1e-6)


def test_weights_that_stand_still_arrive() -> None:
    """A residual beside the reference would send what is missing twice, and overshoot."""
    first, second = vectors(2)
    received, _ = exchange(Link(TopK(0.25)), "state", [first, *[second] * 4])
    gaps = [np.linalg.norm(second - got) for got in received]
    assert all(b < a for a, b in pairwise(gaps))
    np.testing.assert_allclose(received[-1], second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("step", [0.25, 1.0])
def test_shift(step: float) -> None:
    shift = np.zeros(D, np.float32)
    received, _ = exchange(Link(TopK(0.1), shift=step), "update", vectors())
    for vector, got in zip(vectors(), received, strict=True):
        sent = top(vector - shift, 4)
        np.testing.assert_allclose(got, shift + sent, rtol=1e-5, atol=1e-6)
        shift = shift + np.float32(step) * sent


def test_automatic_shift_moves_as_close_as_it_can() -> None:
    codec, shift = RandomK(0.25), np.zeros(D, np.float32)
    received, _ = exchange(Link(codec, shift="auto"), "update", vectors())
    for i, (vector, got) in enumerate(zip(vectors(), received, strict=True)):
        v = torch.from_numpy(vector - shift)
        sent = codec.decode(codec.encode(v, np.random.default_rng(i))).numpy()
        np.testing.assert_allclose(got, shift + sent, rtol=1e-5, atol=1e-5)
        # 10 of 40 are sent, times 4: their own values are a quarter of that.
        shift = shift + sent / 4


def test_unbiased_codecs_are_scaled_where_errors_come_back() -> None:
    """The factor travels in 4 bytes, and no transfer ends farther away than it began."""
    first, second = vectors(2)
    alone = len(RandomK(0.1).encode(torch.from_numpy(second)))
    received, data = exchange(Link(RandomK(0.1)), "state", [first, *[second] * 6])
    assert {len(d) for d in data[1:]} == {4 + alone}
    gaps = [np.linalg.norm(second - got) for got in received]
    assert all(b <= a for a, b in pairwise(gaps))
    plain, data = exchange(Link(RandomK(0.1)), "update", [second])
    assert len(data[0]) == alone
    assert np.linalg.norm(plain[0]) > 2 * np.linalg.norm(second)


def test_cer_comes_after_the_residual_and_before_the_codec() -> None:
    cer, codec = CER(gamma=0.2), STC(0.2)
    residual = torch.zeros(D)
    received, _ = exchange(Link(codec, cer=cer), "update", vectors())
    for vector, got in zip(vectors(), received, strict=True):
        total = residual + torch.from_numpy(vector)
        gamma = 0.2 * float(total.double().abs().mean())
        expected = codec.decode(codec.encode(fused_lasso(total, gamma)))
        np.testing.assert_array_equal(got, expected.numpy())
        residual = total - expected


def test_cer_changes_over_the_rounds_by_equal_factors() -> None:
    """Of g = (5, 1), mean 3, while w_1 stays above w_2: w_1 = 5 - 3 gamma, and w_2 = 1."""
    link = Link(Dense("float64"), cer=CER(1.0, end=0.01, rounds=5), feedback=False)
    vector = {"w": torch.tensor([5.0, 1.0], dtype=torch.float64)}
    message = Message("fit", {"shared": vector}, kinds={"shared": "update"})
    found = []
    for number in range(7):
        packet, _ = Channel(up=link).encode(message, "up", MessageContext("c", number))
        found.append(Channel(up=link).decode(packet, "up")[0].parts["shared"]["w"].tolist())
    gammas = [*np.geomspace(1.0, 0.01, 5), 0.01, 0.01]
    assert np.allclose(found, [[5 - 3 * g, 1.0] for g in gammas], rtol=0, atol=1e-12)


@pytest.mark.parametrize("values", [{"gamma": 0.0, "end": 1.0}, {"gamma": 1.0, "end": 0.0}])
def test_a_change_of_cer_from_or_to_nothing_is_refused(values) -> None:
    with pytest.raises(ConfigError, match="by equal factors, so both must be more than 0"):
        CER(**values)


def test_cer_alone_makes_a_lossy_link() -> None:
    dense = Link(Dense(), cer=CER(gamma=0.1))
    assert (dense.mode("state"), dense.mode("update")) == ("reference", "plain")
    assert Link(Dense(), cer=CER(gamma=0.0)).mode("state") == "plain"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_casts_remember_nothing(dtype: str) -> None:
    link = Link(Dense(dtype))
    assert (link.mode("state"), link.mode("update")) == ("plain", "plain")
    received, _ = exchange(link, "state", vectors())
    np.testing.assert_allclose(received, vectors(), rtol=1e-2)


def test_feedback_is_as_the_codec_wishes() -> None:
    assert Link(STC()).mode("update") == "residual"
    assert Link(QSGD()).mode("update") == "plain"
    assert Link(STC(), shift=1.0).mode("update") == "shift"
    assert Link(Dense(), feedback=True).mode("update") == "plain"  # there is nothing to carry over


def test_double_precision_is_kept_at_both_ends() -> None:
    layout = (("w", (D,), "float64"),)
    values = torch.from_numpy(vectors(1)[0]).double() / 3
    link = Link(TopK(0.5), shift=1.0)
    here, there = None, None
    for _ in range(6):
        data, _, here = link.encode(values, layout, "update", here)
        got, there = link.decode(data, layout, "update", there, CPU)
    assert got.dtype == torch.float64
    assert (got - values).abs().max() < 1e-9


@sweep("kind", ["state", "update"])
@sweep("cut", [0, 3, 10, -1])
def test_torn_bytes_are_refused(kind: str, cut: int) -> None:
    link, vector = Link(RandomK(0.2), feedback=True), torch.from_numpy(vectors(1)[0])
    data, _, memory = link.encode(vector, LAYOUT, kind)
    data, _, _ = link.encode(vector, LAYOUT, kind, memory)
    with pytest.raises(CodecError):
        link.decode(data[:cut], LAYOUT, kind, memory, CPU)
    with pytest.raises(CodecError):  # dense bytes where a difference is due
        link.decode(Dense().encode(vector), LAYOUT, "update", memory, CPU)


def test_nothing_is_coded_as_nothing() -> None:
    for link in (Link(STC()), Link(QSGD(), shift="auto"), Link(STC(), cer=CER(0.1))):
        for kind in ("state", "update"):
            here, there = None, None
            for _ in range(3):
                data, _, here = link.encode(torch.zeros(0), (), kind, here)
                values, there = link.decode(data, (), kind, there, CPU)
                assert values.shape == (0,)


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"channel\.shift must be auto, a step in \(0, 1\]"):
        Link(STC(), shift="half")
    with pytest.raises(ConfigError, match=r"cer\.gamma must be 0 or more, not nan"):
        CER(gamma=float("nan"))
