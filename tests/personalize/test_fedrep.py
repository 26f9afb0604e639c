"""FedRep: how it divides its budget, and what it refuses."""

from __future__ import annotations

import pytest

from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.personalize.fedrep import FedRep
from medfed.standalone.errors import ConfigError
from tests.personalize.whole_runs import assert_one_sentence
from tests.sweeps import sweep
from tests.toys import toy_federation


@sweep("share", [0.01, 0.1, 0.3, 0.5, 0.9, 0.99])
@sweep("steps", [2, 3, 5, 10])
def test_head_and_body_share_the_budget(share, steps, monkeypatch):
    calls = []
    train = LocalClient.train

    def watched(self, start, **options):
        calls.append((options["update"], options["steps"]))
        return train(self, start, **options)

    monkeypatch.setattr(LocalClient, "train", watched)
    _, federation, _ = toy_federation(FedRep(head_share=share), steps=steps)
    run_reference(federation, 1)
    (first, head), (second, body) = calls[:2]
    assert (first, second) == ("personal", "shared")
    assert head + body == steps
    assert min(head, body) >= 1
    assert abs(head - share * steps) <= 1
    assert len(calls) == 2 * 3


def test_a_share_of_all_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.head_share") as caught:
        FedRep(head_share=1.0)
    assert_one_sentence(caught.value)
