"""What each hospital's training patients are like, as numbers by title and name: ``medfed look``.

A cell of fewer patients than `least` is None, and so is a cell that would follow from it and the
others: the second smallest of a division, and a share whose complement is too small. Statistics
have the floor of :mod:`medfed.common.floors`; all count patients, not samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from medfed.common.floors import Statistic
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.samples import Index
from medfed.datamodules.segmentation import SegmentationDataModule
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.standalone.preparation import PERCENTILES, percentiles_of

Cells = dict[str, float | None]
LABELS, MISSING, SPACING = "Labels", "Missing", "Spacing in mm"
MEANS, DEVIATIONS, GREY = "Means", "Standard deviations", "Grey values of "
_IMAGES = 1000  # of a hospital, whose grey values are read
_CODES = 3  # values of a column whose mean and deviation give their counts away


class Description(TypedDict):
    """A hospital's numbers; None stands for a number that is withheld.

    Attributes:
        hospital: Its name.
        least: The fewest patients behind a number; 0: nothing is withheld.
        tables: By title, then by name.
    """

    hospital: str
    least: int
    tables: dict[str, Cells]


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
    """Describes one client's training patients."""
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
