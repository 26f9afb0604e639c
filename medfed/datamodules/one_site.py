"""The data of one site of a real federation, planned and read as in a simulation of all sites.

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
from typing import TYPE_CHECKING

from medfed.datamodules.extending import *
from medfed.datamodules.partitions.base import Ids, Partition, Wrapped

if TYPE_CHECKING:
    from medfed.datamodules.base import FederatedDataModule


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
            whole = "where every site holds the whole data set, set cut: true in the file of each"
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


def setup_alone(data: FederatedDataModule, site: str) -> Generator[bytes, bytes, None]:
    """Does `FederatedDataModule.setup` for one client, without reading others' patients."""
    data.plan()
    if site not in data.plans:
        what = f"{site} is no client of these data{did_you_mean(site, data.plans)}"
        raise ConfigError(f"{what}; the clients are {few(list(data.plans))}.")
    data.plans = {site: data.plans[site]}
    yield from data.agreeing()
    data.build()
