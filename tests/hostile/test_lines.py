"""A few hostile command lines; ``benchmarks/trust/hostile_lines.py`` runs 500."""

from __future__ import annotations

from benchmarks.trust.hostile_lines import bad_lines, lines


def test_a_hostile_line_is_answered_by_a_sentence():
    ends, wrong = bad_lines(lines(10, seed=6), seconds=0)
    assert not wrong
    assert ends["sentence"] > 2
