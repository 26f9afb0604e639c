"""What every client has before training, and what is found twice, for the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfed.common.errors import DataError
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import Block, ClientData
from medfed.datamodules.duplicates import Duplicates, find_duplicates
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.splits import SPLITS, Split
from medfed.run.cohort_table import changes_of, changes_text, count_labels, label_of

FILE = "cohort.json"  # in the run folder
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Had:
    """What one client has.

    Attributes:
        patients: How many patients it uses.
        of: How many there are to choose from: those of the hospitals that its own come from, or
            all where a hospital is not known.
        samples: Samples that it uses (rows, images, patches); None of volumes.
        samples_of: How many its patients have, where that is known beforehand.
        splits: Patients per split.
        removed: Channels that it has not, though the data have.
        before: Share of each class among the samples of the patients to choose from, in the data's
            own order; empty where there are no classes.
        after: The same among the samples that it uses. Of segmentations: share of each region among
            the voxels of training patches. Of outcomes: their mean.
        missing: Classes without a sample, per split that has any sample.
        notes: What else differs from the data as they are.
    """

    patients: int
    of: int
    samples: int | None
    samples_of: int | None
    splits: dict[str, int]
    removed: list[str]
    before: list[float]
    after: list[float]
    missing: dict[str, list[str]]
    notes: list[str]


@dataclass(frozen=True)
class CohortRecord:
    """What all clients have, and what stands in two places.

    Attributes:
        clients: Per client, those that are kept out included.
        kind: What `Had.after` is of: ``classes``, ``regions`` or ``outcome``.
        names: Names of the classes or regions, or of the outcome.
        whole: Share of each class among all samples of the data; empty where that is not known.
        used: Patients that some client uses.
        patients: All patients.
        remarks: Sentences about how the clients came about.
        duplicates: Samples of equal content in two splits or at two clients.
    """

    clients: dict[str, Had]
    kind: str
    names: list[str]
    whole: list[float]
    used: int
    patients: int
    remarks: list[str]
    duplicates: Duplicates

    def record(self) -> dict[str, Any]:
        """Returns the content of ``cohort.json``."""
        return {
            "patients": {"used": self.used, "of": self.patients},
            "shares": {"of": self.kind, "names": self.names, "before": self.whole},
            "clients": {name: asdict(had) for name, had in self.clients.items()},
            "remarks": self.remarks,
            "duplicates": self.duplicates.record(),
        }


def cohort_record(data: FederatedDataModule) -> CohortRecord:
    """Counts what every client has, and looks for samples that are there twice.

    Args:
        data: A data module that is set up. Labels are counted and images hashed; of volumes, the
            files' hashes are compared.

    Raises:
        DataError: If there are duplicates and ``data.duplicates=error``.
    """
    clients = {**data.clients, **data.kept_out}
    kind = _kind(next(iter(clients.values())))
    of: dict[str | None, list[Patient]] = {}
    for patient in data.patients.values():
        of.setdefault(patient.centre, []).append(patient)
    had = {name: _had(data, clients[name], plan, kind, of) for name, plan in data.plans.items()}
    what, samples = data.contents()
    found = find_duplicates(what, {n: p.patients for n, p in data.plans.items()}, samples)
    if found.groups and getattr(data, "duplicates", "warn") == "error":
        raise DataError(f"{found.sentence()} This stops the run by data.duplicates=error.")
    return CohortRecord(
        clients=had,
        kind=kind,
        names=list(data.class_names),
        whole=_shares(_counted(list(data.patients.values()), data.num_classes)),
        used=sum(h.patients for h in had.values()),
        patients=len(data.patients),
        remarks=list(data.remarks),
        duplicates=found,
    )


def _kind(client: ClientData) -> str:
    if len(client.train["label"].shape) > 1:
        return "regions"
    return "outcome" if label_of(client.train).is_floating_point() else "classes"


def _had(
    data: FederatedDataModule,
    client: ClientData,
    plan: ClientPlan,
    kind: str,
    of: Mapping[str | None, Sequence[Patient]],
) -> Had:
    """What one client has; ``of`` are the patients of each centre."""
    own = [data.patients[i] for ids in plan.patients.values() for i in ids]
    centres = {p.centre for p in own}
    pool = (
        of[next(iter(centres))]
        if len(centres) == 1 and None not in centres
        else [p for p in data.patients.values() if None in centres or p.centre in centres]
    )
    blocks: dict[Split, Sequence[Block]] = {"train": [client.train], **client.evaluation}
    counts = {s: _label_counts(client, s, blocks[s], kind, data.num_classes) for s in SPLITS}
    if plan.label_order is not None:  # back to the order of the data
        counts = {s: found[list(plan.label_order)] for s, found in counts.items() if len(found)}
    if kind == "classes":
        after = _shares(np.sum(list(counts.values()), axis=0))
    elif kind == "regions":
        shape = client.train["label"].shape
        after = (counts["train"] / float(np.prod([shape[0], *shape[2:]]))).tolist()
    else:
        after = [float(np.mean([v for s in SPLITS for b in blocks[s] for v in label_of(b)]))]
    samples = (
        sum(b["image"].shape[0] for s in SPLITS for b in blocks[s]) if kind != "regions" else None
    )
    return Had(
        patients=len(own),
        of=len(pool),
        samples=samples,
        samples_of=int(sum(_counted(own, data.num_classes))) or None,
        splits={split: len(plan.patients[split]) for split in SPLITS},
        removed=[n for n, has in zip(data.plan_names, plan.channels, strict=True) if not has],
        before=_shares(_counted(pool, data.num_classes)),
        after=after,
        missing={
            split: [n for n, count in zip(data.class_names, found, strict=True) if not count]
            for split, found in counts.items()
            if kind != "outcome" and found.any()
        },
        notes=list(_notes(data, client, plan)),
    )


def _label_counts(
    client: ClientData, split: Split, blocks: Sequence[Block], kind: str, num_classes: int
) -> Floats:
    """(K,) samples per class, or voxels per region; empty where that would need volumes read."""
    if kind == "regions" and split == "train":
        return client.label_counts[1:].numpy().astype(np.float64)
    if kind == "regions" and not isinstance(blocks, list):
        return np.empty(0)
    found = [count_labels(block, num_classes)[0].numpy() for block in blocks]
    total: Floats = np.sum([np.zeros(num_classes), *found], axis=0)
    return total


def _counted(patients: Sequence[Patient], num_classes: int) -> Floats:
    """(K,) samples per class as the data have them; zeros where one is not known."""
    if any(p.label is None and p.counts is None for p in patients):
        return np.zeros(num_classes)
    total: Floats = np.sum([p.class_counts(num_classes) for p in patients], axis=0, dtype=float)
    return total


def _shares(counts: Floats) -> list[float]:
    total = counts.sum()
    return (counts / total).tolist() if total else []


def _notes(data: FederatedDataModule, client: ClientData, plan: ClientPlan) -> Iterator[str]:
    if client.id in data.kept_out:
        yield "joins after training"
    if len(plan.patients["train"]) == 1:
        yield "trains on one patient"
    if changes := changes_text(changes_of(plan.scanner)):
        yield f"scanner: {changes}"
    if plan.label_order is not None:
        yield "labels renamed"
