"""What each client has, in numbers: behind the start table, ``cohort.json`` and ``medfed look``.

`looked` counts after the data are read: patients, samples and labels of every client. `described`
reads more of its training patients: columns, grey values, spacings and what is missing. There, a
cell of fewer patients than `least` is None, and so is a cell that would follow from it and the
others: the second smallest of a division, and a share whose complement is too small. Statistics
have the floor of :mod:`medfed.common.floors`; all of them count patients, not samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, arange

from medfed.common.floors import Statistic
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import ClientData
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.samples import Index, is_survival
from medfed.datamodules.scanner import UNCHANGED, Scanner
from medfed.datamodules.splits import SPLITS, Split
from medfed.functional.survival import kaplan_meier
from medfed.standalone.preparation import PERCENTILES, percentiles_of

if TYPE_CHECKING:
    from medfed.datamodules.images import ImageDataModule
    from medfed.datamodules.segmentation import SegmentationDataModule
    from medfed.datamodules.tables.datamodule import TabularDataModule

Floats = NDArray[np.float64]
Cells = dict[str, float | None]
LABELS, MISSING, SPACING = "Labels", "Missing", "Spacing in mm"
MEANS, DEVIATIONS, GREY = "Means", "Standard deviations", "Grey values of "
_IMAGES = 1000  # of a hospital, whose grey values are read
_CODES = 3  # values of a column whose mean and deviation give their counts away


@dataclass(frozen=True)
class Look:
    """What one client has."""

    patients: int  # number of patients that it uses
    # Number of patients to choose from: those of the hospitals that its patients come from, or all
    # if a hospital is not known.
    of: int
    samples: int | None  # samples that it uses (rows, images, patches); None for volumes
    samples_of: int | None  # number of samples of its patients, if known before reading
    splits: dict[str, int]  # patients per split
    removed: list[str]  # channels that the data have but it lacks
    # Share of each class among the samples of the patients to choose from, in the order of the
    # data; empty without classes.
    before: list[float]
    # The same among the samples that it uses. For segmentations: share of each region among the
    # voxels of training patches. For findings: among the known. For outcomes: mean. For boxes:
    # lesions per scan.
    after: list[float]
    missing: dict[str, list[str]]  # classes without a sample, per split that has any sample
    notes: list[str]  # other differences from the original data
    # The labels that it annotates; None if every client annotates all.
    annotated: list[str] | None = None


def kind_of(client: ClientData) -> str:
    """What its labels are: classes, findings, regions, boxes, an outcome or survival."""
    label = client.train["label"]
    if len(label.shape) > 2:
        return "boxes" if len(label.shape) == 3 else "regions"
    return _kind(_array(label))


def names_of(data: FederatedDataModule, kind: str) -> Sequence[str]:
    """The names that the shares of patients are of."""
    return ("no event", "event") if kind == "survival" else data.class_names


def _kind(labels: NDArray[Any]) -> str:
    if labels.ndim == 2:
        return "survival" if is_survival(labels) else "findings"
    return "outcome" if labels.dtype.kind == "f" else "classes"


def _array(label: Any) -> NDArray[Any]:
    """Labels of a block, which are read if they are not in memory."""
    read: Tensor = label if isinstance(label, Tensor) else label.take(arange(label.shape[0]))
    return read.numpy()


def _by_class(labels: NDArray[Any], kind: str, classes: int) -> Floats:
    """(N, K) labels: 1, 0 or NaN where it is not known; the number itself of an outcome."""
    if kind == "findings":
        return labels.astype(np.float64)
    if kind == "outcome":
        return labels[:, None].astype(np.float64)
    one_hot: Floats = np.eye(classes)[(labels[:, 1] if kind == "survival" else labels).astype(int)]
    return one_hot


def sums(patients: Sequence[Patient], classes: int) -> Floats:
    """(1 + K) patients, and their samples of each class; NaN if a label is not known.

    Example:
        >>> sums([Patient("a", label=1), Patient("b", counts=(2, 1))], 2).tolist()
        [2.0, 2.0, 2.0]
    """
    if any(p.label is None and p.counts is None for p in patients):
        return np.array([len(patients), *[np.nan] * classes])
    counts = [p.class_counts(classes) for p in patients]
    return np.array([len(patients), *np.sum([[0] * classes, *counts], axis=0)], dtype=np.float64)


def shares(counts: Floats) -> list[float]:
    """Divides the counts of classes by their sum; nothing if there is none, or one is unknown."""
    total = counts.sum()
    return (counts / total).tolist() if total > 0 else []


def looked(data: FederatedDataModule, clients: Mapping[str, ClientData]) -> dict[str, Look]:
    """Counts what every client has; `clients` are all, also those that are kept out."""
    by_centre: dict[str | None, list[Patient]] = {}
    for patient in data.patients.values():
        by_centre.setdefault(patient.centre, []).append(patient)
    count = len(names_of(data, kind_of(next(iter(clients.values())))))
    pools = {centre: sums(of, count) for centre, of in by_centre.items()}
    return {name: _look(data, clients[name], plan, pools) for name, plan in data.plans.items()}


def _look(
    data: FederatedDataModule,
    client: ClientData,
    plan: ClientPlan,
    pools: Mapping[str | None, Floats],
) -> Look:
    """What one client has; ``pools`` are the `sums` of each centre."""
    kind = kind_of(client)
    names = names_of(data, kind)
    every = [data.patients[i] for ids in plan.patients.values() for i in ids]
    centres = {p.centre for p in every}
    pool = np.sum([pools[c] for c in (pools if None in centres else centres)], axis=0)
    chosen, outlined = sums(every, len(names)), plan.annotated or names
    counts = {s: _counts(client, s, kind, len(names)) for s in SPLITS}
    if plan.label_order is not None:  # back to the order of the data
        counts = {s: of[:, list(plan.label_order)] for s, of in counts.items()}
    have, known = counts["train"] if kind == "regions" else np.sum([*counts.values()], axis=0)
    whole = kind not in ("regions", "boxes")
    return Look(
        patients=len(every),
        of=int(pool[0]),
        samples=sum(len(_labels(client, s)) for s in SPLITS) if whole else None,
        samples_of=int(np.nan_to_num(chosen[1:].sum())) or None,
        splits={split: len(plan.patients[split]) for split in SPLITS},
        removed=[n for n, has in zip(data.plan_names, plan.channels, strict=True) if not has],
        before=shares(pool[1:]),
        after=(have / np.maximum(known, 1)).tolist()
        if kind != "boxes"
        else [float(chosen[1:].sum() / len(every))],
        missing={
            split: [n for n, c in zip(names, of[0], strict=True) if not c and n in outlined]
            for split, of in counts.items()
            if kind != "outcome" and of[0].any()
        },
        notes=list(_notes(data, client, plan, kind)),
        annotated=None if plan.annotated is None else list(plan.annotated),
    )


def _labels(client: ClientData, split: Split) -> NDArray[Any]:
    """All labels of a split, other than regions and boxes."""
    blocks = [client.train] if split == "train" else client.evaluation[split]
    first = _array(client.train["label"])[:0]
    return np.concatenate([first, *(_array(block["label"]) for block in blocks)])


def _counts(client: ClientData, split: Split, kind: str, classes: int) -> Floats:
    """(2, K) samples of each class, or voxels of each region, and of how many that are known."""
    counts = np.zeros((2, classes))
    if kind == "regions" and split == "train":
        counts[0], shape = client.label_counts[1:], client.train["label"].shape
        counts[1] = np.prod([shape[0], *shape[2:]])
    elif kind == "regions" and isinstance(read := client.evaluation[split], list):
        for block in read:  # blocks on demand would have to be read
            counts[0] += block["label"].bool().transpose(0, 1).flatten(1).sum(1).numpy()
    elif kind not in ("regions", "boxes"):
        labels = _by_class(_labels(client, split), kind, classes)
        counts[:] = np.nansum(labels, axis=0), (~np.isnan(labels)).sum(axis=0)
    return counts


def changes_text(scanner: Scanner | None) -> str:
    """Lists the settings of a scanner that change images.

    Example:
        >>> changes_text(Scanner("a", 0, gamma=1.3, noise=0.125)), changes_text(None)
        ('gamma 1.3, noise 0.12', '')
    """
    settings = {} if scanner is None else scanner.record()
    changes = {k: v for k, v in settings.items() if v != UNCHANGED.get(k, v)}
    return ", ".join(f"{name} {value:.2g}" for name, value in changes.items())


def _notes(
    data: FederatedDataModule, client: ClientData, plan: ClientPlan, kind: str
) -> Iterator[str]:
    if client.id in data.kept_out:
        yield "joins after training"
    if kind == "survival":
        time, event = np.concatenate([_labels(client, split) for split in SPLITS]).T
        times, _, curve = kaplan_meier(time, event, np.ones((1, len(time))), of_censoring=True)
        median = times[curve[0] <= 0.5]
        often = f"{median[0]:.4g}" if len(median) else f"above {time.max():.4g}"
        yield f"{int(event.sum())} events, median follow-up {often}"
    if len(plan.patients["train"]) == 1:
        yield "trains on one patient"
    if changes := changes_text(plan.scanner):
        yield f"scanner: {changes}"
    if plan.label_order is not None:
        yield "labels renamed"
    yield from (f"{name} in {has} of {of} cases" for name, (has, of) in plan.partial.items())


class Description(TypedDict):
    """A hospital's numbers; None stands for a number that is withheld."""

    hospital: str  # its name
    least: int  # the fewest patients behind a number; 0: nothing is withheld
    tables: dict[str, Cells]  # by title, then by name


def divided(counts: Mapping[str, int], least: int) -> dict[str, int | None]:
    """Withholds the counts of few patients, and a second one from which the only one follows.

    Example:
        >>> divided({"train": 60, "val": 3, "test": 20}, least=5)
        {'train': 60, 'val': None, 'test': None}
        >>> divided({"train": 60, "val": 0, "test": 20}, least=5)
        {'train': 60, 'val': 0, 'test': 20}
    """
    hidden = [name for name, count in counts.items() if 0 < count < least]
    if len(hidden) == 1:
        others = [name for name, count in counts.items() if count and name not in hidden]
        hidden += sorted(others, key=lambda name: counts[name])[:1]
    return {name: None if name in hidden else count for name, count in counts.items()}


def share(have: int, of: int, least: int) -> float | None:
    """Returns a share of patients; None if too few have it, or too few have it not.

    Example:
        >>> share(30, 40, least=5), share(38, 40, least=5), share(40, 40, least=5)
        (0.75, None, 1.0)
    """
    return None if 0 < have < least or 0 < of - have < least else have / max(of, 1)


def described(data: FederatedDataModule, client: str, least: int = 0) -> Description:
    """Describes one client's training patients.

    `least`: the fewest patients behind a number; 0: nothing is withheld.
    """
    # Imported here: the start table needs none of them.
    from medfed.datamodules.images import ImageDataModule
    from medfed.datamodules.segmentation import SegmentationDataModule
    from medfed.datamodules.tables.datamodule import TabularDataModule

    plan, tables = data.plans[client], dict[str, Cells]()
    tables["Patients"] = {**divided({s: len(p) for s, p in plan.patients.items()}, least)}
    patients = [data.patients[name] for name in plan.patients["train"]]
    if not 0 < len(patients) < least:
        if all(p.label is not None or p.counts is not None for p in patients):
            has = np.array([p.class_counts(data.num_classes) for p in patients]) > 0
            tables[LABELS] = _label_shares(has, data.class_names, least)
        if isinstance(data, TabularDataModule):
            tables |= _of_table(data, plan, least)
        elif isinstance(data, ImageDataModule):
            tables |= _of_images(data, plan, least)
        elif isinstance(data, SegmentationDataModule):
            tables |= _of_volumes(data, plan, least)
    return Description(hospital=client, least=least, tables={t: c for t, c in tables.items() if c})


def _rounded(values: Mapping[str, float], patients: int, least: int) -> Cells:
    """Numbers that follow from the same patients."""
    hide = least and Statistic("", "", "", len(values), patients).too_few(least)
    return {name: None if hide else float(f"{value:.4g}") for name, value in values.items()}


def _label_shares(has: NDArray[np.bool_], names: Sequence[str], least: int) -> Cells:
    """Shares of patients (N, K) with a label; of labels that exclude each other as a division."""
    counts = dict(zip(names, has.sum(axis=0).tolist(), strict=True))
    kept = divided(counts, least) if (has.sum(axis=1) <= 1).all() else dict(counts)
    return {n: None if kept[n] is None else share(c, len(has), least) for n, c in counts.items()}


def _by_patient(rows: NDArray[Any], patients: Index, to: Any) -> NDArray[Any]:
    """Joins the rows of each patient by `to`, such as ``np.any``."""
    return np.array([to(rows[patients == one], axis=0) for one in np.unique(patients)])


def _of_labels(labels: Any, patients: Index, names: Sequence[str], least: int) -> dict[str, Cells]:
    """Findings, each by itself and of the patients where it is known; or a continuous outcome."""
    if labels.ndim == 2:
        known = _by_patient(~np.isnan(labels), patients, np.any).sum(axis=0).tolist()
        has = _by_patient(labels == 1, patients, np.any).sum(axis=0).tolist()
        count, pairs = len(np.unique(patients)), list(zip(names, has, known, strict=True))
        return {
            LABELS: {name: share(n, of, least) for name, n, of in pairs},
            MISSING: {name: share(count - of, count, least) for name, _, of in pairs},
        }
    if labels.dtype.kind != "f":
        return {}
    moments = {"mean": float(labels.mean()), "deviation": float(labels.std())}
    return {"Outcome": _rounded(moments, len(np.unique(patients)), least)}


def _of_table(data: TabularDataModule, plan: ClientPlan, least: int) -> dict[str, Cells]:
    table, samples = data.table, data.samples
    index, patients = samples.select(plan.patients["train"], plan.shares, 0)
    labels = samples.labels[index].T[0] if samples.survival else samples.labels[index]
    tables = _of_labels(labels, patients, table.classes, least)
    tables |= {MISSING: {}, MEANS: {}, DEVIATIONS: {}}
    for name, column in zip(table.names, table.features[index].T, strict=True):
        gaps = np.isnan(column)
        without = int(_by_patient(gaps, patients, np.any).sum())
        tables[MISSING][name] = share(without, len(np.unique(patients)), least)
        cells, owners = column[~gaps], patients[~gaps]
        of = len(np.unique(owners))
        if texts := table.categories.get(name):
            behind = {t: len(np.unique(owners[cells == n])) for n, t in enumerate(texts)}
            kept = divided(behind, least).items()
            tables[f"Shares of {name}"] = {t: n if n is None else n / max(of, 1) for t, n in kept}
        elif of:
            values = np.unique(cells)
            few = [len(np.unique(owners[cells == v])) for v in values if len(values) <= _CODES]
            both = {MEANS: float(cells.mean()), DEVIATIONS: float(cells.std())}
            for title, value in _rounded(both, min([of, *few]), least).items():
                tables[title][name] = value
    return tables


def _grey(names: Sequence[str], percentiles: NDArray[Any], least: int) -> dict[str, Cells]:
    """Mean percentiles by channel, of (N, C, L) percentiles of patients; NaN where one lacks it."""
    tables = dict[str, Cells]()
    for name, of in zip(names, percentiles.transpose(1, 0, 2), strict=True):
        if len(known := of[~np.isnan(of).any(axis=1)]):
            values = dict(zip(map(str, PERCENTILES), known.mean(axis=0).tolist(), strict=True))
            tables[GREY + name] = _rounded(values, len(known), least)
    return tables


def _of_images(data: ImageDataModule, plan: ClientPlan, least: int) -> dict[str, Cells]:
    samples, images = data.data.samples, data.data.images
    index, patients = samples.select(plan.patients["train"], plan.shares, 0)
    tables = _of_labels(samples.labels[index], patients, data.class_names, least)
    taken = np.linspace(0, len(index) - 1, min(len(index), _IMAGES)).astype(int)
    pixels = images[index[taken]].reshape(len(taken), images.shape[1], -1)
    percentiles = np.percentile(pixels, PERCENTILES, axis=-1).transpose(1, 2, 0)
    means = _by_patient(percentiles, patients[taken], np.mean)
    return tables | _grey(data.channel_names, means, least)


def _of_volumes(data: SegmentationDataModule, plan: ClientPlan, least: int) -> dict[str, Cells]:
    """Reads the training cases one by one."""
    cases = data.cases_among(plan.patients["train"])
    patients = np.array([of for _, of in cases])
    percentiles, regions, there = [], [], []
    for case, _ in cases:
        image, label, present = data.unprepared(case, plan)
        percentiles.append(percentiles_of(image))
        regions.append(label.flatten(1).any(dim=1).numpy())
        there.append(present.numpy())
    count = len(np.unique(patients))
    lacks = (~_by_patient(np.array(there), patients, np.all)).sum(axis=0).tolist()
    has = _by_patient(np.array(regions), patients, np.any).sum(axis=0).tolist()
    outlined = plan.annotated or data.class_names
    spacings = [data.scans.spacing(data.cases[case]) for case, _ in cases]
    middle = dict(zip("xyz", np.median(spacings, axis=0).tolist(), strict=False))
    named, channels = zip(data.class_names, has, strict=True), data.channel_names
    return {
        LABELS: {name: share(n, count, least) for name, n in named if name in outlined},
        MISSING: {c: share(n, count, least) for c, n in zip(channels, lacks, strict=True)},
        SPACING: _rounded(middle, count, least) if np.isfinite(spacings).all() else {},
        **_grey(channels, _by_patient(np.array(percentiles), patients, np.mean), least),
    }
