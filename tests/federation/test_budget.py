"""How far an optimizer goes along a constant gradient, and which ones have no such number."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import SGD, Adagrad, Adam

from medfed.federation.optimizers import effective_step_length
from medfed.standalone.errors import ConfigError
from tests.sweeps import sweep


@sweep("momentum", [0.0, 0.5, 0.9])
@sweep("steps", [1, 2, 7])
def test_the_closed_form_of_momentum(momentum, steps):
    """eta sum over k = 1..K of (1 - beta^k) / (1 - beta); weight decay does not count."""
    made = partial(SGD, lr=3.0, momentum=momentum, weight_decay=0.1)
    expected = 0.2 * sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))
    assert effective_step_length(made, 0.2, steps) == pytest.approx(expected, rel=1e-13)


def test_nesterov_goes_farther():
    plain, ahead = (partial(SGD, lr=1.0, momentum=0.5, nesterov=n) for n in (False, True))
    assert effective_step_length(ahead, 0.1, 3) > effective_step_length(plain, 0.1, 3) > 0.3


@pytest.mark.parametrize("kind", [Adam, Adagrad])
def test_adaptive_steps_are_refused(kind):
    with pytest.raises(ConfigError, match=r"in proportion to the gradient; choose optimizer=sgd\."):
        effective_step_length(partial(kind, lr=0.1), 0.1, 2)


def test_momentum_of_earlier_rounds_is_refused():
    assert effective_step_length(partial(SGD, lr=1.0), 0.1, 2, fresh=False) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"choose local\.optimizer_state=fresh\."):
        effective_step_length(partial(SGD, lr=1.0, momentum=0.9), 0.1, 2, fresh=False)
