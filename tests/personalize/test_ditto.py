"""Ditto: its limits, and values it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from medfed.personalize.ditto import Ditto
from medfed.personalize.local import Local
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence, gap, models, run


def test_without_strength_it_is_local_training_on_its_share():
    """Of 5 steps the personal model has 3."""
    rows = models(run(Ditto(strength=0.0), steps=5))
    assert np.array_equal(rows, models(run(Local(), steps=3)))
    assert np.abs(rows - models(run(Ditto(strength=1.0), steps=5))).max() > 1e-3


def test_nothing_shared_is_nothing_to_be_tied_to():
    assert gap(run(Ditto(personal="all")), run(Local(), steps=2)) < 1e-14


def test_it_draws_to_the_global_model():
    """The distance of the personal models from w falls as lambda grows."""
    spread = [np.ptp(models(run(Ditto(strength=s))), axis=0).max() for s in (0.0, 1.0, 5.0)]
    assert spread[0] > 1.05 * spread[1] > 1.1 * spread[2]


def test_a_negative_strength_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.strength") as caught:
        Ditto(strength=-1.0)
    assert_one_sentence(caught.value)
