"""What clients claim of their data before training, so that the server trusts no single one."""

from __future__ import annotations

from collections.abc import Generator

from medfed.datamodules.extending import *
from medfed.standalone.columns import Array

_MOST = 1 << 48
Merging = Generator[bytes, Sequence[bytes], None]
"""The server's half of an agreement: receives all clients' messages, yields its answers."""


@dataclass
class Claims:
    """What clients say of themselves in their messages to the server."""

    names: Sequence[str] = ()  # the clients, in the order of their messages
    # The most training samples that the counts of each claim.
    samples: dict[str, int] = field(default_factory=dict)
    # Sentences about values far from those of most clients.
    remarks: list[str] = field(default_factory=list)

    def name(self, at: int) -> str:
        """The name of the client of a message."""
        return self.names[at] if at < len(self.names) else f"client {at + 1}"

    def counted(self, what: str, messages: Sequence[Sequence[float]]) -> Array:
        """Returns the counts in all messages."""
        for at, counts in enumerate(messages):
            if odd := [n for n in counts if not (0 <= n < _MOST and n == int(n))]:
                raise DataError(
                    f"{self.name(at)} claims {odd[0]:g} {what}, which is no count; check its data "
                    "and its version of medfed."
                )
            most = int(max(counts, default=0))
            self.samples[self.name(at)] = max(most, self.samples.get(self.name(at), 0))
        return np.array(messages, dtype=float)

    def refuse(self, wrong: NDArray[np.bool_], what: str) -> None:
        """Refuses messages whose numbers contradict each other."""
        for at in np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1)).tolist():
            raise DataError(f"{self.name(at)} sends {what}; check its data and version of medfed.")

    def remark(self, far: NDArray[np.bool_], times: float, columns: Sequence[str]) -> None:
        """Notes the clients and columns whose ends are (C, P) far from those of most."""
        for at, column in np.argwhere(far).tolist():
            what = f"{self.name(at)} has limits of {columns[column]} over {times} times as far out"
            why = "as those of most clients, so they move nothing; check its units"
            self.remarks.append(f"{what} {why}.")
