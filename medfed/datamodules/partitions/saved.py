"""A saved partition: the clients of an earlier run, or of a file written by hand."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

from medfed.datamodules.extending import *
from medfed.datamodules.partitions.base import Ids, Order, Partition, Shares, Traits
from medfed.datamodules.scanner import Scanner


class _Content(TypedDict):
    clients: Annotated[dict[str, list[str] | dict[Split, list[str]]], Meta(min_length=1)]
    partition: NotRequired[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Saved(Partition):
    """Takes everything from a JSON file, without random choices or a seed.

    The file is a run's ``splits.json`` or has the same form. ``clients`` holds the patients of each
    client, by split, or as a plain list, which the run's seed splits. The optional ``partition``
    holds ``channels``, ``class_shares``, ``site`` and ``label_order`` of each client. Other keys
    are ignored.
    """

    traits = Traits(frozenset({"file"}), keeps_all=False, seeded=False)

    file: str  # the JSON file

    def assign(self, patients: Sequence[Patient], seed: int) -> dict[str, list[str]]:
        """See `Partition.assign`."""
        known = {p.id for p in patients}
        assigned = {}
        for client, of in self._content["clients"].items():
            ids = [i for part in of.values() for i in part] if isinstance(of, dict) else of
            if unknown := [i for i in ids if i not in known]:
                what = f"{self.file}: client {client} has patient {unknown[0]}, which is not among"
                others = f"(nor are {len(unknown) - 1} others of this client)"
                mend = "use the file with the data that it was written for"
                raise DataError(f"{what} the {len(known)} patients of these data {others}; {mend}.")
            assigned[client] = sorted(ids)
        return assigned

    def availability(self, clients: Ids, channels: Ids, seed: int) -> dict[str, Tensor]:
        """See `Partition.availability`; a client without a record has all channels."""
        present = super().availability(clients, channels, seed)
        for client, names in self._recorded(clients, "channels").items():
            has = check_names("channel", names, channels)
            present[client] = torch.tensor([channel in has for channel in channels])
        return present

    def class_shares(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Shares]:
        """See `Partition.class_shares`."""
        recorded = self._recorded(clients, "class_shares")
        return {client: tuple(map(float, shares)) for client, shares in recorded.items()}

    def scanners_of(self, clients: Ids, seed: int) -> dict[str, Scanner]:
        """See `Partition.scanners_of`; fields and noise are those of the earlier run."""
        recorded = self._recorded(clients, "site")
        try:
            return {client: Scanner(**settings) for client, settings in recorded.items()}
        except TypeError as error:
            raise DataError(f"{self.file}: a scanner cannot be used: {error}.") from error

    def label_orders(self, clients: Ids, num_classes: int, seed: int) -> dict[str, Order]:
        """See `Partition.label_orders`."""
        recorded = self._recorded(clients, "label_order")
        for client, order in recorded.items():
            if sorted(order, key=repr) != sorted(range(num_classes), key=repr):
                what = f"the label_order of client {client} is no order of {num_classes} classes"
                raise DataError(f"{self.file}: {what}: {order}.")
        return {client: tuple(order) for client, order in recorded.items()}

    def splits(self, clients: Ids) -> dict[str, dict[Split, list[str]]]:
        """See `Partition.splits`."""
        of = ((c, parts) for c, parts in self._content["clients"].items() if c in clients)
        split = {c: parts for c, parts in of if isinstance(parts, dict)}
        return {c: {s: sorted(parts.get(s, [])) for s in SPLITS} for c, parts in split.items()}

    def _recorded(self, clients: Ids, key: str) -> dict[str, Any]:
        """The file's records of clients, if it has any."""
        records = self._content.get("partition", {})
        values = {client: records.get(client, {}).get(key) for client in clients}
        return {client: value for client, value in values.items() if value is not None}

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return read_partition(Path(self.file).expanduser())


def read_partition(path: Path) -> dict[str, Any]:
    """Reads the record of a partition and checks its form."""
    try:
        return dict(parse_json(path, _Content))
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror})"
        raise DataError(f"{what}; set partition.file to the splits.json of a run.") from error
    except ValueError as error:
        what = f"{path} does not list the patients of each client ({error})"
        raise DataError(f"{what}; take a run's splits.json.") from error
