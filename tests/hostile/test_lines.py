"""A few hostile command lines; ``benchmarks/trust/hostile_lines.py`` runs 500."""

from __future__ import annotations

import pytest

from benchmarks.trust.hostile_lines import SMALL, bad_lines, lines, outcome


def test_a_hostile_line_is_answered_by_a_sentence():
    ends, wrong = bad_lines(lines(10, seed=6), seconds=0)
    assert not wrong
    assert ends["sentence"] > 2


@pytest.mark.parametrize("key", ["rounds", "channel.down.cer.gamma", "model.selection"])
def test_a_value_that_is_not_utf_8(key):
    end, text = outcome(["train", *SMALL, f"{key}=\udcff"], 0)
    assert (end, text) == ("sentence", f"error: {key}=\\udcff is not in UTF-8; type it again.\n")
