"""Large replies are decoded one by one: the same bits, and less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medfed.common.tensors import weighted_mean
from medfed.federation import federation
from tests.contract.harness import algorithm, lightning
from tests.contract.shapes import PARTS
from tests.sites.toy_sites import NAMES, ROUNDS, coordinated, fit, lossy, toy_sites


@pytest.mark.parametrize("name", [n for n in PARTS if not algorithm(n).trains_centrally])
def test_they_give_the_same_bits(name, tmp_path: Path, monkeypatch):
    """Also with codecs that remember, whose memory must advance once."""
    expected, _ = lightning(name, rounds=ROUNDS, **lossy())
    monkeypatch.setattr(federation, "LARGE", -1)
    module = coordinated(toy_sites(tmp_path, name, lossy), name, lossy)
    fit(module, tmp_path / "server")
    assert module.coordinator.digests(ROUNDS) == expected.federation.digests()
    assert not module.coordinator.progress.left_out
    assert {*module.coordinator.progress.spent} == {*NAMES}


def test_a_mean_holds_one_item_at_a_time():
    alive: list[int] = []

    class Counted(dict):
        def __init__(self) -> None:
            super().__init__(w=torch.ones(1))
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def items():
        for _ in range(5):
            yield Counted()
            assert len(alive) <= 2

    assert weighted_mean(items(), [1, 1, 1, 1, 4])["w"] == 1
