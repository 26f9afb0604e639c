"""The rows of hospitals: tables, images, scans with masks, and what given models predict of them.

Scans and images become rows of numbers, so that all sums of a study are theirs, too. A model sees
a row, image or scan as ``medfed predict`` prepares it. What it says of a patient becomes a column
of its name: a probability, an outcome, a risk. Where each patient has scores, such as a Dice, a
column for each has a name that begins with the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from medfed.common.errors import ConfigError, DataError, few
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.segmentation import ImageMasksDataModule, SegmentationDataModule
from medfed.datamodules.splits import SPLITS, Split
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.models.segmentation_meter import iou_and_dice, overlap_counts, surface_metrics
from medfed.standalone.columns import Columns
from medfed.standalone.predictor import Predictor
from medfed.standalone.samples import inputs_of, pixels_of
from medfed.standalone.scans import prepare
from medfed.studies.plan import Plan
from medfed.studies.rows import OF, OUTCOME, Floats, Rows

Opener = Callable[[Path], Predictor]
_TAKES = {
    "table": TabularDataModule,
    "images": ImageDataModule,
    "volumes": SegmentationDataModule,
    "pictures": ImageMasksDataModule,
}


def hospital_rows(data: FederatedDataModule, plan: Plan | None = None) -> dict[str, Rows]:
    """Returns the rows of every hospital of planned data.

    Args:
        data: The data.
        plan: What is asked, which says of whom; ``None``: all columns of all patients.

    Raises:
        ConfigError: If data of this kind cannot be counted.
    """
    splits = SPLITS if plan is None else plan.splits
    each = data.plans.items()
    if isinstance(data, SegmentationDataModule):
        measured = plan is None or bool(plan.columns)
        return {client: _of_scans(data, of, splits, measured) for client, of in each}
    if not isinstance(data, TabularDataModule | ImageDataModule):
        raise ConfigError("A study knows tables, images, and scans or pictures with masks.")
    return {client: _of_samples(data, of, splits) for client, of in each}


def _chosen(
    data: TabularDataModule | ImageDataModule, plan: ClientPlan, splits: Sequence[Split]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    samples = data.samples if isinstance(data, TabularDataModule) else data.data.samples
    return samples.select([p for s in splits for p in plan.patients[s]], None, 0)


def _of_samples(
    data: TabularDataModule | ImageDataModule, plan: ClientPlan, splits: Sequence[Split]
) -> Rows:
    index, patients = _chosen(data, plan, splits)
    columns, categories = dict[str, Floats](), dict[str, tuple[str, ...]]()
    if isinstance(data, TabularDataModule):
        samples, table = data.samples, data.table
        columns |= zip(table.names, table.features[index].T, strict=True)
        categories |= table.categories
    else:
        samples = data.data.samples
        for name, pixels in zip(data.channel_names, data.data.images.swapaxes(0, 1), strict=True):
            flat = pixels[index].reshape(len(index), -1)
            columns |= {f"{name} mean": flat.mean(axis=1), f"{name} deviation": flat.std(axis=1)}
    labels, survival = samples.labels[index], None
    if samples.survival:
        survival = labels
    elif labels.ndim == 2:  # findings
        columns |= zip(data.class_names, labels.T.astype(float), strict=True)
    else:
        columns[OUTCOME] = labels.astype(float)
        if not samples.continuous:
            categories[OUTCOME] = tuple(data.class_names)
    return Rows(columns, categories, survival, patients)


def _of_scans(
    data: SegmentationDataModule, plan: ClientPlan, splits: Sequence[Split], measured: bool
) -> Rows:
    """A row for each scan: spacing, size, grey values other than 0, and volumes of regions."""
    cases = data.cases_among([p for s in splits for p in plan.patients[s]])
    lines: list[dict[str, float]] = []
    for case, _ in cases if measured else ():
        image, label, present = data.unprepared(case, plan)
        line: dict[str, float] = {}
        unit, factor = "percent", 100 / label[0].numel()
        if data.millimetres:
            spacing = data.scans.spacing(data.cases[case])
            line |= {f"spacing {axis}": mm for axis, mm in zip("xyz", spacing, strict=True)}
            unit, factor = "ml", float(np.prod(spacing)) / 1000
        line |= {f"size {axis}": float(n) for axis, n in zip("xyz", label.shape[1:], strict=True)}
        for name, values, there in zip(data.channel_names, image, present.tolist(), strict=True):
            inside = values[values != 0].double().numpy() if there else np.zeros(0)
            some = len(inside) > 0
            line[f"{name} mean"] = float(inside.mean()) if some else np.nan
            line[f"{name} deviation"] = float(inside.std()) if some else np.nan
        for name, mask in zip(data.class_names, label, strict=True):
            known = plan.annotated is None or name in plan.annotated
            line[f"{name} {unit}"] = float((mask > 0).sum()) * factor if known else np.nan
        lines.append(line)
    columns = {name: np.array([line[name] for line in lines]) for name in (lines or [{}])[0]}
    return Rows(columns, patients=np.array([patient for _, patient in cases], np.int64))


def with_predictions(
    data: FederatedDataModule, client: str, rows: Rows, models: Mapping[str, Predictor], plan: Plan
) -> Rows:
    """Adds what models say of a hospital's patients.

    Args:
        data: The planned data.
        client: The hospital.
        rows: Its rows, from :func:`hospital_rows`.
        models: By name.
        plan: Of whom the rows are.

    Raises:
        DataError: If a model does not fit the data.
    """
    columns = dict(rows.columns)
    for name, model in models.items():
        kind, of = model.facts["input"]["kind"], data.plans[client]
        if name in columns:
            raise ConfigError(f"The model {name} has the name of a column; choose another name.")
        if not isinstance(data, _TAKES.get(kind, ())):
            raise DataError(f"The model {name} takes {kind}; the data of this study are others.")
        if isinstance(data, SegmentationDataModule):
            columns |= _overlaps(data, of, name, model, plan.splits)
            continue
        if isinstance(data, ImageDataModule):
            index, _ = _chosen(data, of, plan.splits)
            seen = pixels_of(data.data.images[index], name, model)
        else:
            seen = _inputs(rows, name, model)
        answers = model.classify(seen, name)[:, : len(model.labels)].double().numpy()
        columns[name] = _answers(data, rows, name, model, answers)
    return replace(rows, columns=columns)


def _inputs(rows: Rows, name: str, model: Predictor) -> torch.Tensor:
    columns, cells = Columns.from_facts(model.facts["input"]), []
    for feature in columns.names:
        categories = columns.categories.get(feature)
        if categories is None and feature in rows.categories:
            raise DataError(f"The model {name} takes numbers of {feature}; it holds categories.")
        column = rows.column(feature)
        cells.append(column if categories is None else rows.coded(feature, categories))
    seen = inputs_of(np.stack(cells, axis=1), columns, model.facts)
    return torch.from_numpy(seen) * model.present


def _answers(
    data: FederatedDataModule, rows: Rows, name: str, model: Predictor, answers: Floats
) -> Floats:
    """What a study judges of answers (N, K): a probability, an outcome, or a risk."""
    task, labels = model.facts["task"], [*model.labels]
    outcome = "classes" if OUTCOME in rows.categories else "a number"
    known = {"regression": "a number", "classification": "classes", "risk": "classes"}
    if (known.get(task) if rows.survival is None else "survival") != (
        outcome if rows.survival is None else task
    ):
        raise DataError(f"The model {name} is one of {task}, which these data cannot judge.")
    if task == "survival":
        return 1 - answers.mean(axis=1)
    if task == "regression":
        return answers[:, 0]
    if {*labels} != {*data.class_names} or len(labels) > 2:
        raise DataError(
            f"The model {name} tells {few(labels)} apart, and the data have "
            f"{few([*data.class_names])}; a study judges two classes of the same names."
        )
    return answers[:, labels.index(data.class_names[1])]


def _overlaps(
    data: SegmentationDataModule,
    plan: ClientPlan,
    name: str,
    model: Predictor,
    splits: Sequence[Split],
) -> dict[str, Floats]:
    """Dice and distances of each scan: of all regions that the hospital outlines, and of each."""
    facts, regions = model.facts, list(data.class_names)
    for what, of, known in (
        *(("the channel", n, data.channel_names) for n in facts["present"]),
        *(("the region", n, regions) for n in model.labels),
    ):
        if of not in known:
            raise DataError(f"The model {name} needs {what} {of}; the data have {few([*known])}.")
    names, lines, reader = score_names(data, name), [], copy.copy(data.scans)
    if isinstance(data, ImageMasksDataModule):  # pictures are read as at the training
        vars(reader).update({key: facts["input"][key] for key in ("color", "scale")})
        vars(reader).update(normalization=facts["normalization"]["name"])
    outlined = np.array([plan.annotated is None or n in plan.annotated for n in regions])
    outlined &= np.array([n in model.labels for n in regions])
    for case, _ in data.cases_among([p for s in splits for p in plan.patients[s]]):
        spacing, grid = data.scans.spacing(data.cases[case]), None
        if isinstance(data, ImageMasksDataModule):
            sample = reader.read(data.cases[case])
            image, label = sample["image"], sample["label"]
            body = torch.ones(image.shape[1:], dtype=torch.bool)
        else:
            voxels, label, there = data.unprepared(case, plan)
            given = [n for n, has in zip(data.channel_names, there.tolist(), strict=True) if has]
            image, body, grid = prepare(voxels[there], given, facts, spacing)
        found = model.masks(model.regions(image, body, case, grid, tuple(label.shape[1:])))
        masks, truth = torch.zeros_like(label, dtype=torch.bool), label > 0
        masks[[regions.index(n) for n in model.labels]] = found
        _, dice = iou_and_dice(overlap_counts(masks[None], truth[None])[0])
        dice = np.where(outlined, dice.numpy(), np.nan)
        mean = float(dice[outlined].mean()) if outlined.any() else np.nan
        line = [mean, *(dice if len(regions) > 1 else ())]
        if data.millimetres:
            distances, _ = surface_metrics(masks, truth, spacing)
            line.extend(np.where(outlined, distances.numpy(), np.nan))
        lines.append(line)
    return dict(zip_longest(names, np.array(lines).T, fillvalue=np.zeros(0)))


def score_names(data: FederatedDataModule, model: str) -> list[str]:
    """Returns the columns of each scan's scores; none where one column holds predictions."""
    if not isinstance(data, SegmentationDataModule):
        return []
    names = ["Dice", *(f"Dice of {name}" for name in data.class_names if data.num_classes > 1)]
    if data.millimetres:
        names += [f"HD95 of {name} in mm" for name in data.class_names]
    return [f"{model}{OF}{name}" for name in names]


def with_examples(data: FederatedDataModule, rows: Rows, models: Sequence[str]) -> Rows:
    """Adds made-up predictions, as many as models would give, to count what would leave."""
    columns = [column for name in models for column in score_names(data, name) or [name]]
    made = np.where(np.arange(len(rows.patients)) % 3, 0.25, 0.75)
    return replace(rows, columns={**rows.columns, **dict.fromkeys(columns, made)})
