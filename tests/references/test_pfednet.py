"""pFedNet against Algorithm 5 in NumPy with a convex solver for the personal step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from medfed.federation.reference import run_reference
from medfed.personalize.pfednet import PFedNet
from medfed.personalize.similarity import SimilarityGraph
from tests.references.linear_net import HEAD
from tests.references.pairing import assert_same, run_both_ways
from tests.references.pfednet_loop import pfednet, to_head

RING = [(0, 1), (1, 2), (2, 3), (0, 3)]
COMPLETE = [(i, j) for i in range(4) for j in range(i + 1, 4)]
STAR = [(0, 1), (0, 2), (0, 3)]
GIVEN = [["c2", "c0"], ["c0", "c3"], ["c1"]]
GRAPHS = {
    "ring": (SimilarityGraph(kind="ring"), RING),
    "complete": (SimilarityGraph(kind="complete"), COMPLETE),
    "star": (SimilarityGraph(kind="star"), STAR),
    "edges": (SimilarityGraph(kind="edges", edges=GIVEN), [(0, 2), (0, 3)]),
}
# I, J, E, and the local steps of each x-round and z-round that they stand for, of 6 in all.
SCHEDULES = {
    "divided": (1, 1, None, ([3], [3])),
    "literal-E": (1, 1, 1, ([1], [1])),
    "I2": (2, 1, None, ([2, 2], [2])),
    "J2": (1, 2, None, ([2], [2, 2])),
    "I2-J2-uneven": (2, 2, None, ([1, 2], [1, 2])),
    "z-only": (0, 2, 2, ([], [2, 2])),
    "x-only": (2, 0, None, ([3, 3], [])),
}
CASES = [
    # p, graph, schedule, options of the algorithm, options of the run
    *[(p, "ring", "divided", {}, {}) for p in (1.0, 2.0, math.inf)],
    *[(2.0, g, "divided", {}, {}) for g in ("complete", "star", "edges")],
    *[(2.0, "ring", s, {}, {}) for s in SCHEDULES if s != "divided"],
    *[(p, "complete", "I2", {"z_step": "literal"}, {}) for p in (1.0, 2.0, math.inf)],
    (1.0, "ring", "divided", {}, {"momentum": 0.9, "lr": 0.02}),
    (2.0, "ring", "J2", {}, {"momentum": 0.9, "lr": 0.02, "kept": True}),
    (2.0, "ring", "divided", {"weighting": "samples"}, {}),
    *[(p, "complete", "J2", {}, {"fraction": 0.5, "rounds": 7}) for p in (1.0, 2.0, math.inf)],
    (2.0, "ring", "divided", {"z_step": "literal"}, {"fraction": 0.5}),
    (2.0, "ring", "J2", {}, {"batch": 4}),
    (2.0, "ring", "divided", {}, {"batch": 4, "momentum": 0.9, "lr": 0.02, "fraction": 0.5}),
]


def name(case):
    options = {**case[3], **case[4]}
    return "-".join([f"p{case[0]:g}", *case[1:3], *(f"{k}={v}" for k, v in options.items())])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_algorithm_5(case):
    p, graph, schedule, options, run = case
    build, edges = GRAPHS[graph]
    shared, personal, local_steps, steps = SCHEDULES[schedule]
    options = {"strength": 0.05, "weighting": "uniform", **options}
    algorithm = PFedNet(
        p=p,
        shared_rounds=shared,
        personal_rounds=personal,
        local_steps=local_steps,
        graph=build,
        tolerance=1e-12,
        max_iter=20000,
        **options,
    )
    federation, problem = run_both_ways(algorithm, steps=6, **{"rounds": 3, "lr": 0.05, **run})
    x, z, moved = pfednet(
        problem, edges, options["strength"], p, steps, options.get("z_step") != "literal"
    )
    assert_same(federation.server["shared"], x, 1e-9)
    rows = {n: np.stack([to_head(row)[n] for row in z]) for n in HEAD}
    assert_same(federation.server["personal"], rows, 1e-9)
    for client, row in zip(federation.ids, z, strict=True):
        assert_same(federation.personal_model(client), {**x, **to_head(row)}, 1e-9)
    if personal:
        # The coupling acted, and left something to tell the clients apart.
        assert min(moved) > 1e-3
        assert np.ptp(z, axis=0).max() > 1e-3


def test_the_cases_lead_to_different_models():
    """Else an option that is ignored on both sides would pass above."""
    ends = []
    for options in (
        {"p": 1.0},
        {"p": 2.0},
        {"p": math.inf},
        {"z_step": "literal"},
        {"graph": GRAPHS["ring"][0]},
        {"shared_rounds": 2},
        {"personal_rounds": 2},
        {"local_steps": 1},
        {"weighting": "samples"},
    ):
        algorithm = PFedNet(**{"strength": 0.15, "graph": GRAPHS["complete"][0], **options})
        federation, _ = run_both_ways(algorithm, rounds=2, steps=6)
        ends.append(federation.personal_model("c1")["head.weight"].numpy())
    gaps = [np.abs(a - b).max() for i, a in enumerate(ends) for b in ends[:i]]
    assert min(gaps) > 1e-4


def test_warm_start_does_not_change_the_solution():
    """Every Z step from zero duals gives what the warm-started one gives."""
    algorithm = PFedNet(strength=0.15, graph=GRAPHS["ring"][0], tolerance=1e-12, max_iter=20000)
    warm, _ = run_both_ways(algorithm, rounds=3)
    cold, _ = run_both_ways(algorithm, rounds=1)
    for number in (1, 2):
        assert cold.server["admm"]
        cold.server = {**cold.server, "admm": {}}
        run_reference(cold, number + 1, start=number)
    assert_same(warm.server["personal"], cold.server["personal"], 1e-9)
