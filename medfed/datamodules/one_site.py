"""The data of one site of a real federation: planned and read alone, as in a simulation of all.

Whatever is drawn for a client is drawn from the seed, its name and its own patients, so that alone
it gets the splits, patches and batches that it has in a simulation with all others. What clients
learn of each other is one of three things:

=====================================  ============================================================
what                                   at real sites
=====================================  ============================================================
channels, classes, columns, kinds      must be the same: `facts` are compared before the first round
columns with gaps, categories, pooled  told to the server as counts, sums and names, and counted
scaling                                (`agreement`)
what the partition says of a client    asked of the agreed partition, for all sites in their order
its share of one data set              refused, unless the whole set is at every site (``cut``)
equal samples at two clients           not looked for: no site can see another's; within a site only
one patient at two clients             the same; the sites must see to it
``hospitals`` invented by a reader     refused: a site is one hospital
=====================================  ============================================================
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from medfed.common.errors import ConfigError, did_you_mean
from medfed.datamodules.partitions.base import Ids, Order, Partition, Shares, Wrapped
from medfed.datamodules.readers.base import Patient, few

if TYPE_CHECKING:
    from medfed.datamodules.base import FederatedDataModule
    from medfed.datamodules.scanner import Scanner

_T = TypeVar("_T")


@dataclass(frozen=True)
class OwnData(Wrapped):
    """All patients here are those of one site; all else is as the agreed partition says.

    Attributes:
        assignment: The partition that all sites have agreed on.
        site: This one.
        sites: All of them, in the order of the federation.
    """

    site: str
    sites: Sequence[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        innermost: Partition = self.assignment
        while isinstance(innermost, Wrapped):
            innermost = innermost.assignment
        if not innermost.traits.natural:
            raise ConfigError(
                f"The agreed partition {type(innermost).__name__} deals the patients of one data "
                "set out to invented clients, and sites have patients of their own; agree on "
                "partition=auto, or, where every site holds the whole data set, set cut: true in "
                "the file of each."
            )

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """Takes all patients, or those of the centre with the site's name where data name several.

        Raises:
            ConfigError: If there are several centres, and none has the site's name.

        Example:
            >>> from medfed.datamodules.partitions.by_centre import ByCentre
            >>> own = OwnData(ByCentre(), "x", ["x", "y"])
            >>> own.assign([Patient("a", centre="x"), Patient("b", centre="y")], seed=0)
            {'x': ['a']}
        """
        if any(p.invented for p in patients):
            raise ConfigError(
                "data.reader.hospitals cuts patients into invented hospitals, but a site is one; "
                "agree on data.reader.hospitals=null."
            )
        centres = sorted({p.centre for p in patients if p.centre is not None})
        if len(centres) > 1 and self.site not in centres:
            raise ConfigError(
                f"The data of site {self.site} are of {len(centres)} centres, {few(centres)}, none "
                f"of which has its name{did_you_mean(self.site, centres)}; name the site as its "
                "data do, or leave the column of centres out."
            )
        chosen = [p.id for p in patients if len(centres) < 2 or p.centre == self.site]
        return {self.site: chosen}

    def availability(self, clients: Ids, channels: Ids, seed: int) -> dict[str, Tensor]:
        """See `Partition.availability`; as among all sites."""
        return self._own(self.assignment.availability(self.sites, channels, seed))

    def class_shares(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Shares]:
        """See `Partition.class_shares`; as among all sites."""
        return self._own(self.assignment.class_shares(self.sites, num_classes, seed))

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """See `Partition.scanners_of`; as among all sites."""
        return self._own(self.assignment.scanners_of(self.sites, seed))

    def label_orders(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Order]:
        """See `Partition.label_orders`; as among all sites."""
        return self._own(self.assignment.label_orders(self.sites, num_classes, seed))

    def remark(self, patients: Sequence[Patient]) -> str:
        """Says whose patients are left out."""
        others = {str(p.centre) for p in patients if p.centre is not None} - {self.site}
        count = sum(p.centre in others for p in patients)
        if count < len(patients) and others:
            return (
                f"{count} of {len(patients)} patients are of other centres ({few(sorted(others))}) "
                f"and left out: this is site {self.site}."
            )
        return ""

    def _own(self, by_client: dict[str, _T]) -> dict[str, _T]:
        return {client: of for client, of in by_client.items() if client == self.site}


def setup_alone(data: FederatedDataModule, site: str) -> Generator[bytes, bytes, None]:
    """Does as `FederatedDataModule.setup` for one client; patients of others are not read.

    Args:
        data: A data module that is not set up.
        site: The client.

    Yields:
        What it tells the others by the server, which answers (`FederatedDataModule.merging`);
        nothing where nothing is needed.

    Raises:
        ConfigError: If the partition has no such client.
        DataError: See there.
    """
    data.plan()
    if site not in data.plans:
        raise ConfigError(
            f"{site} is no client of these data{did_you_mean(site, data.plans)}; the clients are "
            f"{few(list(data.plans))}."
        )
    data.plans = {site: data.plans[site]}
    yield from data.agreeing()
    data.build()
