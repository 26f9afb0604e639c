"""The byte ledger: what travelled, by round, phase, client, direction and part."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from medfed.common.files import csv_text

Direction = Literal["up", "down"]


class Entry(NamedTuple):
    """One part of one message.

    Attributes:
        round: The round's number.
        phase: The phase of the round.
        client: The client that sent or received it.
        direction: ``up`` or ``down``.
        part: The part's name, or ``scalars``.
        bytes: The length of what travelled.
        dense: What the length would have been with every element in fp32, header included.
    """

    round: int
    phase: str
    client: str
    direction: str
    part: str
    bytes: int
    dense: int


class Ledger:
    """All entries of a run, in the order of round, phase and client whatever the number of ranks.

    Example:
        >>> ledger = Ledger()
        >>> ledger.add(Entry(0, "fit", "a", "up", "shared", 20, 80))
        >>> ledger.total(direction="up"), ledger.total(client="b"), ledger.savings(direction="up")
        (20, 0, 4.0)
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = list(entries)

    def add(self, entry: Entry) -> None:
        """Appends one entry."""
        self.entries.append(entry)

    def total(self, **where: object) -> int:
        """Returns the bytes of the entries whose fields equal the given ones."""
        return sum(e.bytes for e in self._where(where))

    def savings(self, **where: object) -> float:
        """Returns how many times fewer bytes travelled than with fp32; 1 where nothing did.

        Args:
            where: Fields and the values that they must have.
        """
        dense, sent = sum(e.dense for e in self._where(where)), self.total(**where)
        return dense / sent if sent else 1.0

    def _where(self, fields: Mapping[str, object]) -> Iterator[Entry]:
        return (e for e in self.entries if all(getattr(e, k) == v for k, v in fields.items()))

    def totals(self, *fields: str) -> dict[tuple[object, ...], int]:
        """Returns bytes grouped by the given fields.

        Example:
            >>> ways = ("down", "up", "up")
            >>> Ledger(Entry(0, "fit", "a", d, "shared", 4, 4) for d in ways).totals("direction")
            {('down',): 4, ('up',): 8}
        """
        sums: Counter[tuple[object, ...]] = Counter()
        for entry in self.entries:
            sums[tuple(getattr(entry, f) for f in fields)] += entry.bytes
        return dict(sums)

    def to_csv(self) -> str:
        """Returns the ledger as CSV text with a header line."""
        return csv_text(Entry._fields, self.entries)

    @classmethod
    def from_csv(cls, text: str) -> Ledger:
        """Reads what :meth:`to_csv` wrote.

        Example:
            >>> ledger = Ledger([Entry(0, "fit", "a", "up", "shared", 20, 80)])
            >>> Ledger.from_csv(ledger.to_csv()).entries == ledger.entries
            True
        """
        rows = csv.DictReader(io.StringIO(text, newline=""))
        whole = ("round", "bytes", "dense")
        return cls(Entry(**{k: int(v) if k in whole else v for k, v in r.items()}) for r in rows)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the entries by column, loadable with ``weights_only=True``."""
        return {f: [getattr(e, f) for e in self.entries] for f in Entry._fields}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Replaces the entries by those of :meth:`state_dict`."""
        rows = zip(*(state[f] for f in Entry._fields), strict=True)
        self.entries = [Entry(*row) for row in rows]
