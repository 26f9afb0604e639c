"""The byte ledger: all messages, by round, phase, client, direction and part."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec

from medfed.common.schemas import Count, packed, unpacked
from medfed.standalone.checks import check_known
from medfed.standalone.errors import CodecError, first_line
from medfed.standalone.files import csv_text, original

Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
Sizes = Mapping[str, tuple[int, int]]
"""The bytes of each part of a message, and its bytes in fp32."""


class Entry(NamedTuple):
    """One part of one message.

    Attributes:
        round: The round's number.
        phase: The phase of the round.
        client: The client that sent or received it.
        direction: ``up`` or ``down``.
        part: The part's name, or ``scalars``.
        bytes: Its length in bytes.
        dense: Its length with every element in fp32, header included.
    """

    round: Annotated[int, msgspec.Meta(ge=-1)]
    phase: str
    client: str
    direction: Direction
    part: str
    bytes: Count
    dense: Count


class Traffic(NamedTuple):
    """Actual bytes, and bytes in fp32."""

    bytes: int = 0
    dense: int = 0

    @property
    def savings(self) -> float:
        """How many times fewer bytes travelled; 1 if none did."""
        return self.dense / self.bytes if self.bytes else 1.0


class Ledger:
    """All entries of a run, in the order of round, phase and client, for any number of ranks.

    Example:
        >>> ledger = Ledger()
        >>> ledger.add(Entry(0, "fit", "a", "up", "shared", 20, 80))
        >>> ledger.total(direction="up"), ledger.total(client="b"), ledger.savings(direction="up")
        (20, 0, 4.0)
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = []
        # By round and direction, so that queries of every round need not read all entries.
        self._sums: dict[tuple[int, Direction], Traffic] = {}
        self.add(*entries)

    def add(self, *entries: Entry) -> None:
        """Appends entries, and adds them to the sums of their rounds."""
        self.entries += entries
        for entry in entries:
            size, dense = self._sums.get(key := (entry.round, entry.direction), (0, 0))
            self._sums[key] = Traffic(size + entry.bytes, dense + entry.dense)

    def count(self, sizes: Sizes, round: int, phase: str, client: str, way: Direction) -> None:
        """Appends the parts of a message; `sizes`: see :meth:`.packet.Packet.sizes`."""
        self.add(*(Entry(round, phase, client, way, p, *both) for p, both in sizes.items()))

    def traffic(self, direction: Direction, round: int | None = None) -> Traffic:
        """Returns the bytes in a direction, in one round or in all, without reading all entries.

        Example:
            >>> ledger = Ledger(Entry(n, "fit", "a", "up", "shared", 20, 80) for n in range(3))
            >>> ledger.traffic("up"), ledger.traffic("up", round=1).savings
            (Traffic(bytes=60, dense=240), 4.0)
        """
        sums = [s for (n, way), s in self._sums.items() if way == direction and round in (None, n)]
        return Traffic(sum(s.bytes for s in sums), sum(s.dense for s in sums))

    def total(self, **where: object) -> int:
        """Returns the bytes of the entries whose fields equal the given ones."""
        return self._of(where).bytes

    def savings(self, **where: object) -> float:
        """Returns how many times fewer bytes travelled than with fp32; 1 if none did.

        Args:
            where: Fields and the values that they must have.
        """
        return self._of(where).savings

    def _of(self, where: Mapping[str, object]) -> Traffic:
        check_known("direction", where.get("direction", "up"), DIRECTIONS)
        chosen = [e for e in self.entries if all(getattr(e, k) == v for k, v in where.items())]
        return Traffic(sum(e.bytes for e in chosen), sum(e.dense for e in chosen))

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
        """Reads the text of :meth:`to_csv`.

        Raises:
            CodecError: If it is another table, or a cell holds an invalid number or direction.

        Example:
            >>> ledger = Ledger([Entry(0, "fit", "a", "up", "shared", 20, 80)])
            >>> Ledger.from_csv(ledger.to_csv()).entries == ledger.entries
            True
        """
        rows = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            if next(rows, []) != list(Entry._fields):
                raise ValueError("these are other columns")
            cells = ([original(cell) for cell in row] for row in rows)
            return cls(msgspec.convert(row, Entry, strict=False) for row in cells)
        except (ValueError, csv.Error) as error:
            line = text.split("\n")[max(0, rows.line_num - 1)]
            raise CodecError(
                f"Line {rows.line_num} of a ledger is none, {line:.80} ({first_line(error)}); its "
                f"columns are {', '.join(Entry._fields)}."
            ) from error

    def state_dict(self) -> bytes:
        """Returns the entries, loadable with ``weights_only=True``."""
        return packed(self.entries)

    def load_state_dict(self, state: bytes) -> None:
        """Replaces the entries by those of :meth:`state_dict`."""
        self.entries, self._sums = [], {}
        self.add(*unpacked(state, Entry))
