import itertools

import pytest

from medfed.federation.lightning.strategy import assign

CLIENTS = [f"c{i}" for i in range(5)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_longest_rank_is_within_a_third_of_the_best_deal(ranks):
    for values in itertools.product((1, 3, 8), repeat=5):
        work = dict(zip(CLIENTS, values, strict=True))
        assigned = assign(work, ranks)
        deals = itertools.product(range(ranks), repeat=5)
        assert longest(work, assigned, ranks) * 3 <= 4 * min(
            longest(work, dict(zip(CLIENTS, d, strict=True)), ranks) for d in deals
        )


def longest(work, assigned, ranks):
    return max(sum(work[c] for c in work if assigned[c] == r) for r in range(ranks))


def test_clients_stay_where_they_are_unless_it_pays():
    work = {"a": 1.0, "b": 1.05, "c": 1.0, "d": 1.0}
    owners = {"a": 0, "b": 0, "c": 1, "d": 1}
    assert assign(work, 2, owners) == owners
    assert assign({**work, "b": 3.0}, 2, owners) == {"a": 1, "b": 0, "c": 1, "d": 1}
    half = {c: work[c] for c in ("a", "b")}
    assert assign(half, 2, owners) == {"a": 1, "b": 0}  # of a cohort that one rank has alone
