"""What a reader took of the files, rows or cells that it saw, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medfed.common.errors import few


@dataclass(frozen=True)
class Account:
    """What was seen, taken and left out.

    Attributes:
        where: The file or folder.
        what: What is counted: files, rows, cells.
        taken: How many were taken.
        left_out: By reason, how many were left out, and the first of them.
    """

    where: str
    what: str
    taken: int
    left_out: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """How many there were."""
        return self.taken + sum(count for count, _ in self.left_out.values())

    def sentence(self) -> str:
        """Returns the account as a sentence.

        Example:
            >>> Account("t.csv", "rows", 40, {"no label": (2, "data row 3")}).sentence()
            't.csv: 40 of 42 rows are taken; left out: 2 no label (data row 3).'
        """
        if not self.left_out:
            return f"{self.where}: all {self.taken} {self.what} are taken."
        whys = [
            f"{count} {why}" + f" ({first})" * bool(first)
            for why, (count, first) in self.left_out.items()
        ]
        listed = few(whys, 6)
        return (
            f"{self.where}: {self.taken} of {self.seen} {self.what} are taken; left out: {listed}."
        )

    def record(self) -> dict[str, Any]:
        """Returns the account as JSON."""
        left_out = {why: {"count": n, "first": x} for why, (n, x) in self.left_out.items()}
        return {
            "where": self.where,
            "what": self.what,
            "seen": self.seen,
            "taken": self.taken,
            "left_out": left_out,
        }
