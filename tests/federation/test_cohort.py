import pytest

from medfed.federation.algorithm import Cohort
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep

KNOWN = [f"c{i}" for i in range(10)]


def test_all_in_order():
    assert Cohort().of(KNOWN, seed=0, round=0) == tuple(KNOWN)


@sweep(("fraction", "size"), [(0.5, 5), (0.25, 3), (0.01, 1), (0.99, 10)])
def test_a_fraction_is_rounded_and_never_empty(fraction, size):
    for number in range(5):
        chosen = Cohort(fraction).of(KNOWN, seed=0, round=number)
        assert len(chosen) == size
        assert list(chosen) == [c for c in KNOWN if c in chosen]


def test_drawn_from_seed_and_round_alone():
    draw = [Cohort(0.5).of(KNOWN, seed=3, round=n) for n in range(20)]
    assert draw == [Cohort(0.5).of(KNOWN, seed=3, round=n) for n in range(20)]
    assert draw != [Cohort(0.5).of(KNOWN, seed=4, round=n) for n in range(20)]
    assert len(set(draw)) > 10
    assert {c for chosen in draw for c in chosen} == set(KNOWN)


def test_a_fixed_list_and_a_fraction_of_it():
    listed = ["c7", "c2", "c4", "c9"]
    assert Cohort(clients=listed).of(KNOWN, seed=0, round=1) == ("c2", "c4", "c7", "c9")
    for number in range(5):
        chosen = Cohort(0.5, listed).of(KNOWN, seed=0, round=number)
        assert len(chosen) == 2
        assert set(chosen) <= set(listed)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5])
def test_fractions_out_of_range(fraction):
    with pytest.raises(ConfigError, match=r"cohort\.fraction must be in \(0, 1\]"):
        Cohort(fraction)


def test_unknown_and_no_clients():
    with pytest.raises(ConfigError, match=r"cohort.clients='c10' is unknown \(did you mean c1, c0"):
        Cohort(clients=["c1", "c10"]).of(KNOWN, seed=0, round=0)
    with pytest.raises(ConfigError, match="empty list"):
        Cohort(clients=[])
