"""Which clients take part in a round: all, a fraction drawn anew, or a fixed list."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from medfed.common.errors import ConfigError, did_you_mean
from medfed.common.seeding import derive_seed


@dataclass(frozen=True)
class Cohort:
    """Draws the cohort of a round from the seed and the round's number alone.

    Attributes:
        fraction: Share of the clients that take part, rounded, at least one.
        clients: A fixed list; ``None`` to draw from all clients.
        absent: Round to clients that are left out of it although they are drawn, as hospitals that
            did not answer were; ``absences.json`` of a run across sites has it.
        memory_gb: Gigabytes that may lie in memory of what all clients of a process keep between
            rounds; beyond, it lies on disk (:mod:`medfed.federation.shelf`). ``None``: any.

    Raises:
        ConfigError: If the fraction is not in (0, 1], the list is empty, or the room negative.

    Example:
        >>> Cohort().of(["a", "b"], seed=0, round=3)
        ('a', 'b')
        >>> len(Cohort(fraction=0.5).of(["a", "b", "c", "d"], seed=0, round=3))
        2
    """

    fraction: float = 1.0
    clients: Sequence[str] | None = None
    absent: Mapping[int, Sequence[str]] = field(default_factory=dict)
    memory_gb: float | None = 4.0

    def __post_init__(self) -> None:
        if not isinstance(self.absent, Mapping):  # a command line sets no number as a key
            pairs = self.absent
            if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
                raise ConfigError(f"cohort.absent={pairs} must be pairs such as [[3,[CLIENT]]].")
            object.__setattr__(self, "absent", dict(pairs))
        if self.memory_gb is not None and not self.memory_gb >= 0:
            raise ConfigError(f"cohort.memory_gb must be 0 or more, not {self.memory_gb}.")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"cohort.fraction must be in (0, 1], not {self.fraction}.")
        if any(type(n) is not int or n < 0 for n in self.absent) or any(
            isinstance(names, str) for names in self.absent.values()
        ):
            raise ConfigError(
                "cohort.absent must list clients by the number of a round from 0, such as "
                "cohort.absent=[[3,[CLIENT]]]."
            )
        if self.clients is not None and not self.clients:
            raise ConfigError("cohort.clients is an empty list; name a client or set it to null.")

    def of(self, known: Sequence[str], seed: int, round: int) -> tuple[str, ...]:
        """Returns the cohort in the order of ``known``.

        Args:
            known: All clients of the federation.
            seed: Seed of the run.
            round: The round's number.

        Raises:
            ConfigError: If a listed client does not exist.
        """
        everyone, listed = set(known), None if self.clients is None else set(self.clients)
        named = {"clients": self.clients or (), "absent": set().union(*self.absent.values())}
        for key, name in ((key, name) for key, names in named.items() for name in names):
            if name not in everyone:
                raise ConfigError(
                    f"cohort.{key} names {name!r}, which is no client"
                    f"{did_you_mean(name, known)}; the clients are {', '.join(known)}."
                )
        pool = [c for c in known if listed is None or c in listed]
        count = max(1, int(self.fraction * len(pool) + 0.5))  # halves up
        drawn = set(pool)
        if count < len(pool):
            drawn = set(random.Random(derive_seed(seed, round, "cohort")).sample(pool, count))
        here = drawn.difference(self.absent.get(round, ()))
        found = tuple(c for c in pool if c in here)
        if not found:
            raise ConfigError(f"cohort.absent leaves nobody in round {round}; take a client out.")
        return found
