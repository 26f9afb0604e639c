"""The rows of hospitals: tables, images, scans with masks, and what given models predict of them.

Scans and images become rows of numbers, so that all sums of a study are theirs, too. A model sees
a row, image or scan as ``medfed predict`` prepares it. What it says of a patient becomes a column
of its name: a probability, an outcome, a risk. Where each patient has scores, such as a Dice, a
column for each has a name that begins with the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.readers.samples import Samples
from medfed.datamodules.segmentation import ImageMasksDataModule, SegmentationDataModule
from medfed.datamodules.splits import SPLITS, Split
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.models.segmentation_meter import iou_and_dice, overlap_counts, surface_metrics
from medfed.standalone.columns import Columns
from medfed.standalone.errors import ConfigError, DataError, few
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
    """
    measured = plan is None or bool(plan.columns)
    splits = SPLITS if plan is None else plan.splits
    return {client: Cohort(data, client, splits).rows(measured) for client in data.plans}


@dataclass(eq=False)
class Cohort:
    """A hospital's patients of some splits.

    Attributes:
        data: The planned data.
        client: The hospital.
        splits: The splits.
    """

    data: Any
    client: str
    splits: Sequence[Split] = SPLITS

    def __post_init__(self) -> None:
        self.plan: ClientPlan = self.data.plans[self.client]
        self.patients = [name for split in self.splits for name in self.plan.patients[split]]
        if isinstance(self.data, SegmentationDataModule):
            self.cases = self.data.cases_among(self.patients)
            self.outlined = self.plan.annotated or self.data.class_names
        elif isinstance(self.data, TabularDataModule | ImageDataModule):
            of: Any = self.data
            made: Samples = of.samples if isinstance(of, TabularDataModule) else of.data.samples
            self.samples, self.of = made, of
            self.index, self.owners = self.samples.select(self.patients, None, 0)
        else:
            raise ConfigError("A study knows tables, images, and scans or pictures with masks.")

    def rows(self, measured: bool = True) -> Rows:
        """Returns the rows; with scans not `measured` they have no columns, and none is read."""
        if isinstance(self.data, SegmentationDataModule):
            lines = [self._measured(case) for case, _ in self.cases] if measured else []
            columns = {n: np.array([line[n] for line in lines]) for n in (lines or [{}])[0]}
            return Rows(columns, patients=np.array([patient for _, patient in self.cases]))
        columns, categories, survival = {}, dict[str, tuple[str, ...]](), None
        if isinstance(self.data, TabularDataModule):
            table = self.data.table
            columns |= zip(table.names, table.features[self.index].T, strict=True)
            categories |= table.categories
        else:
            channels = self._images().swapaxes(0, 1)
            for name, pixels in zip(self.data.channel_names, channels, strict=True):
                flat = pixels.reshape(len(self.index), -1)
                columns |= {
                    f"{name} mean": flat.mean(axis=1),
                    f"{name} deviation": flat.std(axis=1),
                }
        labels = self.samples.labels[self.index]
        if self.samples.survival:
            survival = labels
        elif labels.ndim == 2:  # findings
            columns |= zip(self.data.class_names, labels.T.astype(float), strict=True)
        else:
            columns[OUTCOME] = labels.astype(float)
            if not self.samples.continuous:
                categories[OUTCOME] = tuple(self.data.class_names)
        return Rows(columns, categories, survival, self.owners)

    def _images(self) -> NDArray[np.uint8]:
        images: NDArray[np.uint8] = self.data.data.images[self.index]
        return images

    def _measured(self, case: str) -> dict[str, float]:
        """Spacing, size, grey values other than 0, and volumes of regions of a scan."""
        data = self.data
        image, label, present = data.unprepared(case, self.plan)
        unit, factor, measured = "percent", 100 / label[0].numel(), dict[str, float]()
        if data.millimetres:
            spacing = data.scans.spacing(data.cases[case])
            measured |= {f"spacing {axis}": mm for axis, mm in zip("xyz", spacing, strict=True)}
            unit, factor = "ml", float(np.prod(spacing)) / 1000
        measured |= {f"size {axis}": n for axis, n in zip("xyz", label.shape[1:], strict=True)}
        for name, values, there in zip(data.channel_names, image, present.tolist(), strict=True):
            inside = values[values != 0].double().numpy()
            some = there and len(inside) > 0
            measured[f"{name} mean"] = float(inside.mean()) if some else np.nan
            measured[f"{name} deviation"] = float(inside.std()) if some else np.nan
        for name, mask in zip(data.class_names, label, strict=True):
            volume = float((mask > 0).sum()) * factor
            measured[f"{name} {unit}"] = volume if name in self.outlined else np.nan
        return measured

    def with_predictions(self, rows: Rows, models: Mapping[str, Predictor]) -> Rows:
        """Returns the rows with what models, by name, say of the patients.

        Raises:
            DataError: If a model does not fit the data.
        """
        columns = dict(rows.columns)
        for name, model in models.items():
            if name in columns:
                raise ConfigError(f"The model {name} has a column's name; choose another name.")
            kind = model.facts["input"]["kind"]
            if not isinstance(self.data, _TAKES.get(kind, ())):
                raise DataError(
                    f"The model {name} takes {kind}; the data of this study are others."
                )
            if isinstance(self.data, SegmentationDataModule):
                columns |= self._overlaps(name, model)
                continue
            is_table = isinstance(self.data, TabularDataModule)
            seen = (
                _inputs(rows, name, model) if is_table else pixels_of(self._images(), name, model)
            )
            answers = model.classify(seen, name)[:, : len(model.labels)].double().numpy()
            columns[name] = self._judged(rows, name, model, answers)
        return replace(rows, columns=columns)

    def _judged(self, rows: Rows, name: str, model: Predictor, answers: Floats) -> Floats:
        """What a study judges of answers (N, K): a probability, an outcome, or a risk."""
        task, labels, known = model.facts["task"], [*model.labels], [*self.data.class_names]
        wanted = "classes" if OUTCOME in rows.categories else "regression"
        wanted = wanted if rows.survival is None else "survival"
        if {"classification": "classes", "risk": "classes"}.get(task, task) != wanted:
            raise DataError(f"The model {name} is one of {task}, which these data cannot judge.")
        if wanted != "classes":
            return 1 - answers.mean(axis=1) if task == "survival" else answers[:, 0]
        if {*labels} != {*known} or len(labels) > 2:
            raise DataError(
                f"The model {name} tells {few(labels)} apart, and the data have {few(known)}; a "
                "study judges two classes of the same names."
            )
        return answers[:, labels.index(known[1])]

    def _overlaps(self, name: str, model: Predictor) -> dict[str, Floats]:
        """Dice and distances of each scan: of all outlined regions, and of each."""
        data, facts, regions = self.data, model.facts, [*self.data.class_names]
        there = [*data.channel_names, *regions]
        if lacking := [n for n in (*facts["present"], *model.labels) if n not in there]:
            raise DataError(f"The model {name} needs {lacking[0]}; the data have {few(there)}.")
        names, lines, reader = score_names(data, name), [], copy.copy(data.scans)
        pictures = isinstance(data, ImageMasksDataModule)  # which are read as at the training
        if pictures:
            vars(reader).update({key: facts["input"][key] for key in ("color", "scale")})
            vars(reader).update(normalization=facts["normalization"]["name"])
        outlined = np.array([n in model.labels and n in self.outlined for n in regions])
        for case, _ in self.cases:
            spacing, grid = data.scans.spacing(data.cases[case]), None
            if pictures:
                image, label = map(reader.read(data.cases[case]).get, ("image", "label"))
                body = torch.ones(image.shape[1:], dtype=torch.bool)
            else:
                voxels, label, present = data.unprepared(case, self.plan)
                given = [*compress(data.channel_names, present.tolist())]
                image, body, grid = prepare(voxels[present], given, facts, spacing)
            found = model.masks(model.regions(image, body, case, grid, tuple(label.shape[1:])))
            masks, truth = torch.zeros_like(label, dtype=torch.bool), label > 0
            masks[[regions.index(n) for n in model.labels]] = found
            dice = iou_and_dice(overlap_counts(masks[None], truth[None])[0])[1].numpy()
            line = [float(dice[outlined].mean()) if outlined.any() else np.nan]
            line.extend(np.where(outlined, dice, np.nan) if len(regions) > 1 else ())
            if data.millimetres:
                distances = surface_metrics(masks, truth, spacing)[0].numpy()
                line.extend(np.where(outlined, distances, np.nan))
            lines.append(line)
        return dict(zip(names, np.array(lines).reshape(-1, len(names)).T, strict=True))


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
