"""The plain loop: the oracle that every other runtime must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

from medfed.federation.federation import Federation


def run_reference(
    federation: Federation,
    rounds: int,
    after_round: Callable[[int], None] | None = None,
    start: int = 0,
) -> Federation:
    """Runs rounds one client after the other, in one process, without Lightning.

    Args:
        federation: The federation; it is advanced in place.
        rounds: The number of rounds of the whole run.
        after_round: Called with the round's number when it is closed.
        start: The first round to run.

    Returns:
        The same federation.
    """
    for number in range(start, rounds):
        current = federation.open(number)
        while current.exchange({c: current.fit(c) for c in current.recipients}):
            pass
        if after_round:
            after_round(number)
    return federation
