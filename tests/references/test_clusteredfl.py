"""Clustered FL against Algorithms 2 and 3 in NumPy, its cut by brute force, and planted groups."""

from __future__ import annotations

from itertools import combinations, islice

import numpy as np
import pytest
import torch

from medfed.federation.algorithm import Cohort
from medfed.federation.reference import onboarded_client, run_onboarding, run_reference
from medfed.functional.graph import bipartition, cosines, direction
from medfed.personalize.clusteredfl import ClusteredFL
from medfed.personalize.fedavg import FedAvg
from medfed.standalone.errors import ConfigError
from tests.personalize.planted import PlantedTask, planted
from tests.personalize.whole_runs import assert_one_sentence, gap, run
from tests.references.linear_net import ALL, gradient
from tests.references.one_layer import Quadratics, personal, two_groups, vector
from tests.references.pairing import Minibatches, assert_same, run_on_minibatches
from tests.toys import toy_federation

# Options of the method, options of the run.
CASES = {
    "splits": ({"epsilon_1": 0.9, "epsilon_2": 0.1}, {}),
    "uniform-momentum": (
        {"epsilon_1": 0.8, "epsilon_2": 0.2, "weighting": "uniform"}, {"momentum": 0.9, "lr": 0.01},
    ),
    "late": ({"epsilon_1": 0.4, "epsilon_2": 0.05}, {"rounds": 12}),
    "never": ({"epsilon_1": 0.9, "epsilon_2": 1.1}, {}),
}  # fmt: skip


def best_cut(rows: np.ndarray) -> set[frozenset[int]]:
    """All bipartitions, tried one by one."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    everyone, found, least = range(len(rows)), None, np.inf
    for size in range(1, len(rows)):
        for one in combinations(everyone, size):
            rest = [i for i in everyone if i not in one]
            across = (unit[list(one)] @ unit[rest].T).max()
            if across < least - 1e-12:
                found, least = {frozenset(one), frozenset(rest)}, across
    return found


def loop(p: Minibatches, m: ClusteredFL):
    """Clusters as (members, model), and the rounds of the splits."""
    clusters, unit, when = [(list(range(len(p.batches))), dict(p.initial))], None, []
    for number, _ in enumerate(p.cohorts):
        after, moved = [], {}
        for members, model in clusters:
            for n in members:
                w, velocity = dict(model), {k: np.zeros_like(model[k]) for k in ALL}
                for batch in islice(p.batches[n], p.steps):
                    g = gradient(w, *batch)
                    velocity = {k: p.momentum * velocity[k] + g[k] for k in ALL}
                    w = {k: w[k] - p.lr * velocity[k] for k in ALL}
                moved[n] = {k: w[k] - model[k] for k in ALL}
        flat = {n: np.concatenate([d[k].ravel() for k in ALL]) for n, d in moved.items()}
        unit = unit or max(np.linalg.norm(d) for d in flat.values())
        for members, model in clusters:
            share = p.shares[members] / p.shares[members].sum()
            mean = sum(s * flat[n] for s, n in zip(share, members, strict=True))
            model = {
                k: model[k] + sum(s * moved[n][k] for s, n in zip(share, members, strict=True))
                for k in ALL
            }
            far = max(np.linalg.norm(flat[n]) for n in members)
            if (
                len(members) > 1
                and np.linalg.norm(mean) < m.epsilon_1 * unit
                and far > m.epsilon_2 * unit
            ):
                when.append(number)
                for part in best_cut(np.stack([flat[n] for n in members])):
                    after.append(([members[i] for i in sorted(part)], model))
            else:
                after.append((members, model))
        clusters = after
    return clusters, when


@pytest.mark.parametrize("case", CASES)
def test_equals_the_papers_loop(case):
    options, changes = CASES[case]
    method = ClusteredFL(**options)
    federation, problem = run_on_minibatches(method, **changes)
    clusters, when = loop(problem, method)
    assert bool(when) == (case != "never")
    for members, model in clusters:
        numbers = {int(federation.server["of"][f"c{n}"]) for n in members}
        assert len(numbers) == 1
        for n in members:
            assert_same(federation.personal_model(f"c{n}"), model, 1e-10)
    assert len({int(k) for k in federation.server["of"].values()}) == len(clusters)


def test_the_cases_split_at_once_and_later_and_more_than_once():
    splits = {}
    for case, (options, changes) in CASES.items():
        _, problem = run_on_minibatches(ClusteredFL(**options), **changes)
        splits[case] = loop(problem, ClusteredFL(**options))[1]
    assert len(splits["splits"]) > 1
    assert splits["late"][0] > 0


def test_single_linkage_is_the_best_cut():
    """The largest similarity across is smallest, for random similarities of up to seven."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = rng.normal(size=(rng.integers(2, 8), 4))
        one, other = bipartition(cosines(torch.tensor(rows)))
        assert {frozenset(one), frozenset(other)} == best_cut(rows)
        assert 0 in one


def test_the_side_of_the_axis_is_the_part_whose_mean_direction_is_nearer():
    rng = np.random.default_rng(1)
    for _ in range(60):
        one, other, new = rng.normal(size=(3, 4)), rng.normal(size=(2, 4)), rng.normal(size=4)
        means = [(p / np.linalg.norm(p, axis=1, keepdims=True)).mean(0) for p in (one, other)]
        like = [new @ m / np.linalg.norm(m) / np.linalg.norm(new) for m in means]
        axis = direction(torch.tensor(one)) - direction(torch.tensor(other))
        assert bool(torch.tensor(new) @ axis >= 0) == (like[0] >= like[1])


def test_two_groups_are_told_apart_once_and_each_comes_to_its_optimum():
    q = two_groups()
    method = ClusteredFL(weighting="uniform")
    federation = q.run(method, 40)
    assert [int(federation.server["of"][c]) for c in federation.ids] == [0, 1, 0, 1, 0, 1]
    expected = np.stack([q.best([0, 2, 4]), q.best([1, 3, 5])])[[0, 1, 0, 1, 0, 1]]
    assert personal(federation) == pytest.approx(expected, abs=1e-10)
    assert len(federation.server["children"]) == 1
    figure = federation.pictures()["clusters"]
    names = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert names == ["c0 (1)", "c2 (1)", "c4 (1)", "c1 (2)", "c3 (2)", "c5 (2)"]


@pytest.mark.parametrize("groups", [2, 3])
def test_planted_groups_of_a_network_are_found_by_default(groups):
    """Labels are permuted by group; with epsilon_1 = 0.3 groups are cut in two."""
    task = PlantedTask(1, 0)
    _, federation, _ = toy_federation(
        ClusteredFL(), task, planted(0, groups), rounds=30, steps=5, lr=0.3
    )
    run_reference(federation, 30)
    of = [int(federation.server["of"][c]) for c in federation.ids]
    assert len(set(of)) == groups
    assert of == of[:groups] * 3


def test_who_comes_later_finds_its_cluster():
    q = two_groups()
    federation = q.run(ClusteredFL(weighting="uniform"), 30)
    for sign, member in ((1, "c0"), (-1, "c1")):
        new = Quadratics.drawn(sign * np.array([[2.2, -1.8, 0.9, 0.1]]))
        client = onboarded_client(federation, new.data[0])
        message, ledger = run_onboarding(federation, client)
        model = federation.algorithm.onboard(client, message)
        assert vector(model) == pytest.approx(vector(federation.personal_model(member)), abs=1e-12)
        assert ledger.total(direction="up") > 0


def test_without_a_split_it_is_fedavg():
    for options in ({"epsilon_1": 0.0}, {"epsilon_2": 10.0}):
        changes = {"momentum": 0.9, "lr": 0.01}
        assert gap(run(ClusteredFL(**options), **changes), run(FedAvg(), **changes)) == 0


def test_a_client_that_does_not_move_is_like_nobody():
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 0.0]])
    assert bipartition(cosines(rows)) == ([0, 1], [2])


@pytest.mark.parametrize("key", ["epsilon_1", "epsilon_2"])
def test_bad_values_are_named(key):
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} must not be negative") as caught:
        ClusteredFL(**{key: -1.0})
    assert_one_sentence(caught.value)


def test_a_partial_cohort_is_refused():
    with pytest.raises(ConfigError, match="needs all clients in every round") as caught:
        ClusteredFL().check_cohort(Cohort(fraction=0.5))
    assert_one_sentence(caught.value)
