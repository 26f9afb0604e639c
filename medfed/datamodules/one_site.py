"""The data of one site of a real federation, and what it claims of them before training.

All random choices for a client depend only on the seed, its name and its patients. So a site by
itself gets the same splits, patches and batches as in a simulation with all others. What clients
learn of each other:

=====================================  ============================================================
what                                   at real sites
=====================================  ============================================================
channels, classes, columns, kinds      must be equal: `facts` are compared before the first round
channels without a file                each site tells the server; refused if all sites name one
columns with gaps, categories, pooled  sent to the server as counts, sums and names, whose bytes
scaling                                count (`agreement`)
the partition's settings for a client  from the agreed partition, for all sites in their order
its share of one data set              refused, unless every site has the whole set (``cut``)
equal samples at two clients           checked only within a site: no site sees another's samples
one patient at two clients             not checked; the sites must prevent it
``hospitals`` invented by a reader     refused: a site is one hospital
=====================================  ============================================================
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, TypeVar

from medfed.datamodules.extending import *
from medfed.datamodules.partitions.base import Ids, Partition, Wrapped
from medfed.standalone.columns import Array

_MOST = 1 << 48
Merging = Generator[bytes, Sequence[bytes], None]
"""The server's half of an agreement: receives all clients' messages, yields its answers."""
Agreed = TypeVar("Agreed")
Half = Generator[bytes, bytes, Agreed]
"""A client's half: yields its messages, receives the answers, returns what is agreed."""
Exchanged = tuple[str, Literal["up", "down"], int]


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


@dataclass(frozen=True)
class OwnData(Wrapped):
    """All patients belong to one site; the agreed partition decides everything else."""

    site: str  # the name of this site
    sites: Sequence[str]  # all sites, in the order of the federation

    def __post_init__(self) -> None:
        super().__post_init__()
        innermost: Partition = self.assignment
        while isinstance(innermost, Wrapped):
            innermost = innermost.assignment
        if not innermost.traits.natural:
            what = f"The agreed partition {type(innermost).__name__} divides the patients of one"
            why = "among invented clients, but every site has other patients"
            whole = "where every site holds the whole data set, on cut=true"
            raise ConfigError(f"{what} data set {why}; agree on partition=auto, or, {whole}.")

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """Takes all patients, or those of the site's centre if the data name several."""
        if any(p.invented for p in patients):
            raise ConfigError(
                "data.reader.hospitals divides patients among invented hospitals, but a site is "
                "one hospital; agree on data.reader.hospitals=null."
            )
        centres = sorted({p.centre for p in patients if p.centre is not None})
        if len(centres) > 1 and self.site not in centres:
            what = f"The data of site {self.site} are of {len(centres)} centres, {few(centres)}"
            name = f"none of which has its name{did_you_mean(self.site, centres)}"
            mend = "name the site as its data do, or leave the column of centres out"
            raise ConfigError(f"{what}, {name}; {mend}.")
        return {self.site: [p.id for p in patients if len(centres) < 2 or p.centre == self.site]}

    def among(self, clients: Ids) -> Ids:
        """All sites, so that this one gets what it has among them."""
        return self.sites

    def remark(self, patients: Sequence[Patient]) -> str:
        """Says which centres' patients are left out."""
        others = {str(p.centre) for p in patients if p.centre is not None} - {self.site}
        count = sum(p.centre in others for p in patients)
        if count < len(patients) and others:
            what = f"{count} of {len(patients)} patients come from other centres"
            return f"{what} ({few(sorted(others))}) and are left out: this is site {self.site}."
        return ""
