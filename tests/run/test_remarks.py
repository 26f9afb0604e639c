"""What stands below the table of a run."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from medfed.run.results import remarks

RUN: dict[str, Any] = {
    "selection": ["rmse", "min"],
    "clients": {"a": {"rmse": 156.0}},
    "federation": {"rmse": {"mean": 156.0}},
    "selected_round": 6,
    "rounds": 10,
    "steps": {"a": 20},
    "bytes": {"up": 1_000_000, "down": 0},
    "savings": {"up": 31.96, "down": 1.0},
}
LAST = ["Gradient steps per client: 20.", "Sent up 1.0 MB (32.0x less than fp32), down 0 B."]


def said(**more: Any) -> list[str]:
    """The sentences besides those that every run has."""
    lines = [*chain(*remarks({**RUN, **more}))]
    assert lines[-2:] == LAST
    return lines[:-2]


def test_a_run_without_doubts():
    assert said() == []


def test_classes_that_clients_lack():
    assert said(absent={"a": ["3"], "b": ["3"], "c": ["3", "4"]}) == [
        "The test data of a, b have no sample of 3, so their means over classes omit it.",
        "The test data of c have no sample of 3, 4, so their means over classes omit them.",
    ]
    (line,) = said(absent={str(n): [str(n)] for n in range(5)}, split="val")
    assert line.startswith("The val data of 5 clients lack classes, ")


def test_models_that_are_worse_than_a_constant():
    def constant(mean: float) -> dict[str, Any]:
        return {"constant": {"mean": {"federation": {"rmse": {"mean": mean}}}}}

    (line,) = said(**constant(77.0))
    assert line.startswith("The mean rmse (156.0000) is worse than that of a constant prediction")
    assert "(77.0000)" in line
    assert said(**constant(160.0)) == said(**constant(math.nan)) == []


def test_the_course_of_a_run():
    assert said(first_local=8) == [
        "Round 7 was selected, before fine-tuning began in round 9: the tested models are not "
        "fine-tuned."
    ]
    assert said(improving=True, first_local=None) == [
        "Validation rmse was still improving when the run ended: set rounds to more than 10."
    ]


def test_passes_and_memberships():
    recovery = {"round": 9, "leading": 2, "planted_groups": 2, "adjusted_rand": 0.5}
    found = {**recovery, "models": 4, "round": 7, "adjusted_rand": 1.0, "last": recovery}
    passes = {"gradient_passes": {"a": 25}, "forward_passes": {"a": 8}}
    assert remarks({**RUN, **passes, "memberships": found})[1] == [
        "Gradient passes per client: 25 for 20 steps; further forward passes: 8.",
        LAST[1],
        "Memberships of round 7: 2 of 4 models lead a client, adjusted Rand index 1.000 to 2 "
        "groups; after the last round, 9: 2 of 4 models lead a client, adjusted Rand index 0.500 "
        "to 2 groups.",
    ]
