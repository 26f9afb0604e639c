import math

import pytest
import torch

from medfed.common.scores import Record
from medfed.federation.lightning.callbacks import History, PersonalEvaluation
from tests.sweeps import sweep


def evaluation(mode: str, *rounds: tuple[float, ...]) -> PersonalEvaluation:
    made = PersonalEvaluation("m", mode)
    made.history.extend(
        Record(n, f"c{i}", {"m": value})
        for n, row in enumerate(rounds)
        for i, value in enumerate(row)
    )
    return made


@sweep(
    ("mode", "rounds", "best"),
    [
        ("max", [(0.1, 0.3), (0.5, 0.5), (0.4, 0.2)], 1),
        ("min", [(0.1, 0.3), (0.5, 0.5), (0.1, 0.1)], 2),
        ("max", [(0.5, 0.5), (0.25, 0.75), (0.5, 0.5)], 0),  # the earliest of equals
        ("min", [(2.0,), (1.0,), (1.0,)], 1),
        # What the data leave undefined is out of every round, whatever is measured later.
        ("max", [(math.nan, 0.2), (0.9, 0.1)], 0),
        ("min", [(math.nan, 0.1), (math.nan, 0.2)], 0),
        ("max", [(math.nan,), (0.1,), (0.2,)], 2),
        # A failed model is worse than any other; of several such rounds, the earliest.
        ("max", [(0.1, 0.1), (0.9, math.nan), (0.9, -math.inf)], 0),
        ("min", [(0.9, 0.9), (0.1, math.inf), (0.1, math.nan)], 0),
        ("max", [(math.inf,), (0.1,), (math.nan,)], 1),
        ("min", [(0.1, math.inf), (math.inf, 0.1)], 0),
        ("max", [(math.nan,), (math.nan,)], 1),  # nothing to choose by: the last
        ("max", [], None),
    ],
)
def test_best_round(mode, rounds, best):
    assert evaluation(mode, *rounds).best_round() == best


def test_the_worst_of_a_bounded_metric_is_its_bound():
    """A round with a failed model may still beat one in which all others are as bad."""
    made = evaluation("max", (0.1, 0.1), (0.9, math.nan))
    made.wanted = "iou", "max"
    made.history = History(Record(r.round, r.client, {"iou": r.metrics["m"]}) for r in made.history)
    assert made.score(1) == pytest.approx(0.45)
    assert made.best_round() == 1


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


def test_of_rounds_with_equal_scores_that_of_the_smallest_loss_is_taken():
    made = PersonalEvaluation("auroc")
    losses = [(0.9, 0.7), (0.5, 0.6), (0.5, 0.6), (0.2, 0.1)]
    scores = [1.0, 1.0, 1.0, 0.9]
    for number, (pair, score) in enumerate(zip(losses, scores, strict=True)):
        made.history.extend(
            Record(number, client, {"loss": loss, "auroc": score})
            for client, loss in zip("ab", pair, strict=True)
        )
    assert made.best_round() == 1
