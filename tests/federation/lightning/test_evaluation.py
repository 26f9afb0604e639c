import math

import pytest
import torch

from medfed.common.scores import Record
from medfed.federation.lightning.callbacks import PersonalEvaluation


def evaluation(mode: str, *rounds: tuple[float, ...]) -> PersonalEvaluation:
    made = PersonalEvaluation("m", mode)
    made.history = [
        Record(n, f"c{i}", {"m": value})
        for n, row in enumerate(rounds)
        for i, value in enumerate(row)
    ]
    return made


@pytest.mark.parametrize(
    ("mode", "rounds", "best"),
    [
        ("max", [(0.1, 0.3), (0.5, 0.5), (0.4, 0.2)], 1),
        ("min", [(0.1, 0.3), (0.5, 0.5), (0.1, 0.1)], 2),
        ("max", [(0.5, 0.5), (0.25, 0.75), (0.5, 0.5)], 0),  # the earliest of equals
        ("min", [(2.0,), (1.0,), (1.0,)], 1),
        ("max", [(math.nan, 0.2), (0.3, math.nan)], 1),  # the mean of those that are defined
        ("max", [(math.nan,), (0.1,), (math.inf,)], 1),
        ("max", [(math.nan,), (math.nan,)], 1),  # nothing to choose by: the last
        ("max", [], None),
    ],
)
def test_best_round(mode, rounds, best):
    assert evaluation(mode, *rounds).best_round() == best


def test_scores_are_larger_the_better():
    assert evaluation("max", (0.5, 0.7)).score(0) == pytest.approx(0.6)
    assert evaluation("min", (0.5, 0.7)).score(0) == pytest.approx(-0.6)
    assert math.isnan(evaluation("max", (math.nan,)).score(0))


def test_the_record_survives_a_checkpoint(tmp_path):
    made = evaluation("max", (0.5, math.nan), (0.1, 0.2))
    torch.save(made.state_dict(), tmp_path / "state.pt")
    restored = PersonalEvaluation("m")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [r[:2] for r in restored.history] == [r[:2] for r in made.history]
    assert restored.best_round() == made.best_round()
