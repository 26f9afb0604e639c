"""Robust aggregation against SciPy, NumPy and a Krum by its definition, and under attacks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
import torch

from medfed.common.tensors import digest, weighted_mean
from medfed.config.compose import described
from medfed.federation.aggregation import (
    FAR,
    Aggregation,
    Clip,
    Krum,
    Median,
    Norms,
    PhaseReplies,
    Trimmed,
    find_outliers,
)
from medfed.federation.reference import run_reference
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.packet import Message
from medfed.personalize.fedavg import FedAvg
from medfed.run.federating import method_of
from medfed.standalone.errors import ConfigError, NonFiniteError
from tests.contract.harness import NAMES, federation
from tests.sweeps import sweep
from tests.toys import toy_data

ROBUST = (Clip(), Trimmed(1), Median(), Krum(1))
SHAPES = {"w": (3, 2), "b": (4,), "s": ()}


def items(count: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Displacements of clients, and their weights."""
    rng = np.random.default_rng(seed)
    made = [
        {n: torch.tensor(rng.normal(size=s), dtype=dtype) for n, s in SHAPES.items()}
        for _ in range(count)
    ]
    return made, rng.integers(1, 50, count).tolist()


def rows(made) -> np.ndarray:
    return np.array([np.concatenate([t.numpy().ravel() for t in one.values()]) for one in made])


def assert_equal(found, expected: np.ndarray) -> None:
    np.testing.assert_allclose(rows([found])[0], expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("count", [3, 6, 7])
def test_the_trimmed_mean_of_equal_weights_is_scipys(count):
    made, _ = items(count)
    found = Trimmed(faulty=1).combine(made, [2.0] * count)
    assert_equal(found, scipy.stats.trim_mean(rows(made), 1 / count + 1e-9, axis=0))


def test_the_trimmed_mean_keeps_the_weights_of_what_remains():
    made, weights = items()
    expected = []
    for column in rows(made).T:
        order = np.argsort(column)[2:-2]
        expected.append(np.average(column[order], weights=np.array(weights)[order]))
    assert_equal(Trimmed(faulty=2).combine(made, weights), np.array(expected))


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_median_is_numpys_whatever_the_weights(count):
    made, weights = items(count)
    assert_equal(Median().combine(made, weights), np.median(rows(made), axis=0))


@pytest.mark.parametrize("keep", [1, 3, None])
def test_krum_is_that_of_its_definition(keep):
    """Every set of n - f - 2 others is tried: the score is the smallest sum."""
    count, faulty = 7, 2
    for seed in range(5):
        made, weights = items(count, seed)
        points = rows(made)
        scores = []
        for i in range(count):
            others = [((points[i] - points[j]) ** 2).sum() for j in range(count) if j != i]
            scores.append(min(map(sum, combinations(others, count - faulty - 2))))
        chosen = np.argsort(scores)[: count - faulty if keep is None else keep]
        expected = np.average(points[chosen], axis=0, weights=np.array(weights)[chosen])
        assert_equal(Krum(faulty, keep).combine(made, weights), expected)


def test_clipping_shortens_to_a_multiple_of_the_median_norm():
    made, weights = items()
    points = rows(made)
    norms = np.linalg.norm(points, axis=1)
    scale = np.minimum(1, 0.9 * np.median(norms) / norms)
    expected = np.average(points * scale[:, None], axis=0, weights=weights)
    assert_equal(Clip(times=0.9).combine(made, weights), expected)
    start = {n: torch.ones(s, dtype=torch.float64) for n, s in SHAPES.items()}
    models = [{n: t + start[n] for n, t in one.items()} for one in made]
    assert_equal(Clip(times=0.9).combine(models, weights, start), expected + 1)


def test_limits_are_the_mean_to_the_bit():
    made, weights = items(dtype=torch.float32)
    mean = digest(weighted_mean(made, weights))
    for limit in (Aggregation(), Clip(times=math.inf), Trimmed(faulty=0), Krum(1, keep=7)):
        assert digest(limit.combine(made, weights)) == mean, limit
    for robust in ROBUST:
        assert digest(robust.combine(made, weights)) != mean, robust


@pytest.mark.parametrize("robust", ROBUST, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("attack", [-20.0, 1e30, 3e38], ids=lambda x: f"{x:g}")
def test_one_client_of_five_moves_nothing_far(robust, attack):
    made, weights = items(5, dtype=torch.float32)
    made[2] = {n: torch.full_like(t, attack) for n, t in made[2].items()}
    for sizes in (weights, [1, 1, 10**6, 1, 1]):
        found = robust.combine(made, sizes)
        honest = np.abs(rows(made[:2] + made[3:])).max()
        assert np.abs(rows([found])).max() <= 2 * honest


class Attacking(Channel):
    """One client multiplies what the method says to average."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = parts

    def encode(self, message, direction, place, memory):
        if direction == "up" and place.client == "c1":
            parts = {
                p: {n: -1e6 * t for n, t in named.items()} if p in self.parts else named
                for p, named in message.parts.items()
            }
            message = replace(message, parts=parts)
        return super().encode(message, direction, place, memory)


@sweep("name", NAMES)
def test_methods_hold_where_they_take_means_and_refuse_the_key_elsewhere(name):
    def attacked(robust):
        _, fed, _ = federation(name, data=toy_data(5, batch=4))
        fed.algorithm = fed.algorithm.aggregating(robust, 5)
        fed.channel = Attacking(fed.algorithm.parts_averaged)
        fed.channel.buffers = fed.trainer.split.buffers
        try:
            run_reference(fed, 1)
        except NonFiniteError:
            return math.inf
        return max(
            float(t.abs().max())
            for group, named in fed.server.items()
            if group != "num_samples"
            for t in named.values()
            if t.numel() and t.is_floating_point()
        )

    _, fed, _ = federation(name)
    assert set(fed.algorithm.parts_averaged) <= set(fed.algorithm.parts_sent)
    if not fed.algorithm.parts_averaged:
        with pytest.raises(ConfigError, match="aggregation=median is for methods whose server"):
            fed.algorithm.aggregating(Median(), 5)
        return
    assert attacked(Median()) < 1e3
    assert attacked(Trimmed(1)) < 1e3
    assert attacked(Aggregation()) > 1e4


def test_too_few_clients_are_refused_before_and_within_a_run():
    with pytest.raises(ConfigError, match=r"aggregation=krum .* needs at least 5 clients, and th"):
        FedAvg().aggregating(Krum(), 4)
    with pytest.raises(ConfigError, match="aggregation=trimmed needs at least 3 clients in a rou"):
        Trimmed().combine(items(2)[0], [1, 1])
    with pytest.raises(ConfigError, match="averages each weight over other clients"):
        FedAvg(mask_aware=True).aggregating(Median(), 4)


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("mean", Aggregation),
        ("clip", Clip),
        ("trimmed", Trimmed),
        ("median", Median),
        ("krum", Krum),
    ],
)
def test_the_options_of_the_group(option, kind):
    config = described(["algorithm=fedavg", f"aggregation={option}", "data=digits", "folder=x"])
    assert type(method_of(config, 9).aggregation) is kind


def test_far_parts_are_found_among_three_or_more():
    def norms(*sizes: float) -> Norms:
        replies = PhaseReplies({}, ())
        for i, size in enumerate(sizes):
            message = Message("fit", {"shared": {"w": torch.tensor([size])}, "empty": {}})
            parts = Channel().encode(message, "up")[0].parts
            replies.add(f"c{i}", message, parts)
        return replies.norms

    assert not find_outliers(norms(1.0, 100.0), 0, "fit")
    assert not find_outliers(norms(1.0, 1.0, FAR), 0, "fit")
    (far,) = find_outliers(norms(1.0, 1.0, -1e30), 4, "fit")
    assert "Round 5: the part shared of c2 is at least 1e19 times" in str(far)
    assert json.loads(json.dumps(far._asdict()))["client"] == "c2"
