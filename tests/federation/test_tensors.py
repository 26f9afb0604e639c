"""Flat tensor algebra against float64 arithmetic written out."""

import math

import pytest
import torch

from medfed.common import tensors as T


def some(seed: int, dtype: torch.dtype = torch.float32) -> T.Tensors:
    g = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 2), "b": (2,), "s": ()}
    return {n: torch.randn(s, generator=g, dtype=dtype) for n, s in shapes.items()}


def test_add_and_subtract_follow_the_names_of_the_first() -> None:
    a, b = some(0), some(1)
    shuffled = dict(reversed(b.items()))
    for n in a:
        assert torch.equal(T.subtract(a, shuffled)[n], a[n] - b[n])
        assert torch.allclose(T.add(a, shuffled, -0.5)[n], a[n] - 0.5 * b[n])
    assert T.add({}, b) == T.subtract({}, b) == {}


def test_arithmetic_leaves_its_arguments_alone() -> None:
    items = [some(i) for i in range(3)]
    before = [T.digest(t) for t in items]
    T.add(items[0], items[1])
    T.subtract(items[0], items[1])
    T.weighted_mean(items, [1, 2, 3])
    assert [T.digest(t) for t in items] == before


def test_weighted_mean_equals_float64() -> None:
    items, weights = [some(i, torch.float64) for i in range(4)], [3.0, 0.0, 1.0, 8.0]
    mean = T.weighted_mean(items, weights)
    for n in mean:
        expected = sum(w * t[n] for w, t in zip(weights, items, strict=True)) / 12
        torch.testing.assert_close(mean[n], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("count", "weights"), [(0, []), (2, [0.0, 0.0])])
def test_weighted_mean_needs_weight(count: int, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive weight"):
        T.weighted_mean([some(i) for i in range(count)], weights)


def test_flatten_and_cut_are_inverse_and_keep_dtypes() -> None:
    mixed = {**some(0), "half": torch.ones(3, dtype=torch.float16)}
    back = T.cut(T.flatten(mixed), T.layout_of(mixed))
    assert list(back) == list(mixed)
    for n, t in mixed.items():
        assert back[n].dtype == t.dtype
        assert torch.equal(back[n], t)
    assert T.flatten({}).numel() == 0
    assert T.cut(torch.zeros(0), ()) == {}


@pytest.mark.parametrize("length", [8, 10])
def test_cut_refuses_another_length(length: int) -> None:
    with pytest.raises(ValueError, match="cannot fill 9 places"):
        T.cut(torch.zeros(length), T.layout_of(some(0)))


SIZES = {"none": [], "few": [3, 9000], "many small": [5] * 40, "both": [7] * 30 + [9000, 20_000]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_length_is_that_of_all_numbers_and_shows_one_that_is_not_finite(sizes, dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {str(i): torch.randn(n, generator=rng, dtype=dtype) for i, n in enumerate(sizes)}
    exact = math.fsum(x * x for t in tensors.values() for x in t.tolist()) ** 0.5
    assert T.length(tensors) == pytest.approx(exact, rel=1e-5 if dtype == torch.float32 else 1e-12)
    for bad in (math.nan, -math.inf):
        assert not math.isfinite(T.length({**tensors, "bad": torch.tensor([0.0, bad])}))


def test_first_non_finite_names_the_tensor() -> None:
    bad = some(0)
    assert T.first_non_finite(bad) is None
    bad["b"] = torch.tensor([0.0, float("-inf")])
    assert T.first_non_finite(bad) == "b"


def test_digest_sees_name_shape_dtype_and_sign_of_zero() -> None:
    zero = torch.zeros(2)
    variants = [
        {"a": zero},
        {"b": zero},
        {"a": zero.reshape(1, 2)},
        {"a": zero.to(torch.int32)},
        {"a": -zero},
    ]
    assert len({T.digest(v) for v in variants}) == len(variants)
    two = {"a": zero, "b": zero + 1}
    assert T.digest(two) == T.digest(dict(reversed(two.items())))
