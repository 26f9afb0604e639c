"""The rows of hospitals: tables, images, scans with masks or lesions, and what models predict.

Scans and images become rows of numbers, so that all sums of a study are theirs, too. A model sees
a row, image or scan as ``medfed predict`` prepares it. What it says of a patient becomes a column
of its name: a probability, an outcome, a risk. Where it says several things, such as a probability
of each class or a Dice of each region, a column for each has a name that begins with the model's.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from medfed.datamodules import base, plans
from medfed.datamodules.images import ImageDataModule
from medfed.datamodules.luna16_scans import Luna16ScansDataModule
from medfed.datamodules.patient_columns import LACKING, patient_columns
from medfed.datamodules.readers.luna16 import read_with_nodules
from medfed.datamodules.readers.samples import Samples
from medfed.datamodules.segmentation import ImageMasksDataModule, SegmentationDataModule
from medfed.datamodules.splits import SPLITS, Split
from medfed.datamodules.tables.datamodule import TabularDataModule
from medfed.functional.detection import ALARM, HIT, match_lesions
from medfed.models.detection import in_mm
from medfed.models.segmentation_meter import iou_and_dice, overlap_counts, surface_metrics
from medfed.standalone import csv_files, ct
from medfed.standalone.columns import Columns
from medfed.standalone.errors import ConfigError, DataError, few
from medfed.standalone.predictor import Predictor
from medfed.standalone.samples import inputs_of, pixels_of
from medfed.standalone.scans import axes_of, check_spacing, prepare
from medfed.studies.plan import Plan
from medfed.studies.rows import ALARMS, DETECTED, LESIONS, OF, OUTCOME, Floats, Rows

Opener = Callable[[Path], Predictor]
Models = Mapping[str, Predictor]
Scores = dict[str, Floats]
_TAKES = {
    "table": TabularDataModule,
    "images": ImageDataModule,
    "volumes": SegmentationDataModule,
    "pictures": ImageMasksDataModule,
    "ct_scans": Luna16ScansDataModule,
}
COHORTS = tuple(_TAKES.values())
_TOLERANCE = 0.25
"""How far beyond the spacings of the training a scan's may be, as a fraction, before a line says
so; as in :class:`medfed.delivery.predict.options.PredictOptions`."""
_NO_COLUMN = f"The label is called {OUTCOME}; a column that a line names as left out is not there."
_log = logging.getLogger(__name__)


def hospital_rows(
    data: base.FederatedDataModule, plan: Plan | None = None, models: Models | None = None
) -> dict[str, Rows]:
    """Returns the rows of every hospital of planned data."""
    cohorts = {client: Cohort(data, client, plan) for client in data.plans}
    return {c: of.with_predictions(of.rows(), models or {}) for c, of in cohorts.items()}


@dataclass(eq=False)
class Cohort:
    """A hospital's patients of some splits."""

    data: Any
    client: str
    questions: Plan | None = None  # the plan; ``None``: all columns of all patients
    splits: Sequence[Split] | None = None  # of whom, if not as the plan says

    def __post_init__(self) -> None:
        self.plan: plans.ClientPlan = self.data.plans[self.client]
        splits = self.splits or (SPLITS if self.questions is None else self.questions.splits)
        self.patients = [name for split in splits for name in self.plan.patients[split]]
        if isinstance(self.data, SegmentationDataModule):
            self.cases = self.data.cases_among(self.patients)
            self.owners = np.array([patient for _, patient in self.cases], dtype=np.int64)
            self.outlined = self.plan.annotated or self.data.class_names
        elif isinstance(self.data, Luna16ScansDataModule):
            self.owners = np.arange(len(self.patients))
        elif isinstance(self.data, TabularDataModule | ImageDataModule):
            of: Any = self.data
            made: Samples = of.samples if isinstance(of, TabularDataModule) else of.data.samples
            self.samples, self.of = made, of
            self.index, self.owners = self.samples.select(self.patients, self.plan.shares, 0)
        else:
            raise ConfigError(
                "A study knows tables, images, scans or pictures with masks, and CT with lesions."
            )

    @cached_property
    def listed(self) -> dict[str, dict[str, str]]:
        """The columns of the cohort's table or list, where it has files."""
        return {} if isinstance(self.data, TabularDataModule) else patient_columns(self.data)

    def rows(self) -> Rows:
        """Returns the rows; scans are read only if the plan asks for what they hold."""
        columns: dict[str, Floats] = {}
        categories, survival = dict[str, tuple[str, ...]](), None
        if isinstance(self.data, SegmentationDataModule):
            listed = {*self.listed, OUTCOME}
            is_read = self.questions is None or not {*self.questions.columns} <= listed
            lines = [self._measured(case) for case, _ in self.cases] if is_read else []
            columns |= {n: np.array([line[n] for line in lines]) for n in (lines or [{}])[0]}
        elif isinstance(self.data, Luna16ScansDataModule):
            scans = self.data.scans
            counts = [len(scans.nodules_of(name)) for name in self.patients]
            columns[LESIONS] = np.array(counts, dtype=float)
            spacings = [scans.spacing(self.data.patients[name]) for name in self.patients]
            axes = np.array(spacings, dtype=float).reshape(-1, 3).T
            columns |= {f"spacing {axis}": mm for axis, mm in zip("xyz", axes, strict=True)}
        elif isinstance(self.data, TabularDataModule):
            table = self.data.table
            columns |= zip(table.names, table.features[self.index].T, strict=True)
            categories |= table.categories
        else:
            channels = self._images().swapaxes(0, 1)
            for name, pixels in zip(self.data.channel_names, channels, strict=True):
                flat = pixels.reshape(len(self.index), -1)
                columns[f"{name} mean"] = flat.mean(axis=1)
                columns[f"{name} deviation"] = flat.std(axis=1)
        if isinstance(self.data, TabularDataModule | ImageDataModule):
            labels = self.samples.labels[self.index]
            if self.samples.survival:
                survival = labels
            elif labels.ndim == 2:  # findings
                columns |= zip(self.data.class_names, labels.T.astype(float), strict=True)
            else:
                columns[OUTCOME] = labels.astype(float)
                if not self.samples.continuous:
                    categories[OUTCOME] = tuple(self.data.class_names)
        for name, texts in self.listed.items():
            if name not in columns:
                columns[name] = self._coded(texts, name, categories)
        hint = _NO_COLUMN if isinstance(self.data, TabularDataModule) else LACKING
        return Rows(columns, categories, survival, self.owners, hint)

    def _coded(
        self, texts: Mapping[str, str], name: str, categories: dict[str, tuple[str, ...]]
    ) -> Floats:
        """Numbers of a column of the cohort's table, or the places of its categories."""
        numbers = {text: csv_files.as_number(text) for text in texts.values()}
        if not all(map(np.isfinite, numbers.values())):
            categories[name] = tuple(sorted(numbers))
            numbers = {text: float(n) for n, text in enumerate(categories[name])}
        each = [texts.get(patient) for patient in self.patients]
        known = np.array([np.nan if text is None else numbers[text] for text in each], dtype=float)
        return known[self.owners]

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

    def with_predictions(self, rows: Rows, models: Models) -> Rows:
        """Returns the rows with what models, by name, say of the patients."""
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
            elif isinstance(self.data, Luna16ScansDataModule):
                columns |= self._detections(name, model)
            else:
                is_table = isinstance(self.data, TabularDataModule)
                inputs = _inputs(rows, name, model) if is_table else None
                inputs = pixels_of(self._images(), name, model) if inputs is None else inputs
                answers = model.classify(inputs, name)[:, : len(model.labels)].double().numpy()
                columns |= self._judged(rows, name, model, answers)
        return replace(rows, columns=columns)

    def _judged(self, rows: Rows, name: str, model: Predictor, answers: Floats) -> Scores:
        """What a study judges of answers (N, K): probabilities, an outcome, or a risk."""
        task, labels, known = model.facts["task"], [*model.labels], [*self.data.class_names]
        wanted = "classes" if OUTCOME in rows.categories else "regression"
        wanted = wanted if OUTCOME in rows.columns else "findings"
        wanted = wanted if rows.survival is None else "survival"
        if {"classification": "classes", "risk": "classes"}.get(task, task) != wanted:
            raise DataError(f"The model {name} is one of {task}, which these data cannot judge.")
        if wanted == "survival":
            return {name: 1 - answers.mean(axis=1)}
        if wanted == "regression":
            return {name: answers[:, 0]}
        if not {*known} <= {*labels} or (wanted == "classes" and len(labels) == 2 != len(known)):
            raise DataError(
                f"The model {name} tells {few(labels)} apart, and the data have {few(known)}; a "
                "study judges a model of the same names."
            )
        if names := self.score_names(name, labels):
            return dict(zip(names, answers.T, strict=True))
        return {name: answers[:, labels.index(known[1])]}

    def score_names(self, model: str, labels: Iterable[str]) -> list[str]:
        """Returns the columns of a model's scores; none where one column holds predictions."""
        data, labels = self.data, [*labels]
        if isinstance(data, SegmentationDataModule):
            names = [*(f"Dice of {name}" for name in data.class_names if data.num_classes > 1)]
            names = ["Dice", *names]
            if data.millimetres:
                names += [f"HD95 of {name} in mm" for name in data.class_names]
        elif isinstance(data, Luna16ScansDataModule):
            evaluation = None if self.questions is None else self.questions.evaluate
            levels = [] if evaluation is None else evaluation.thresholds
            names = [f"{what}{level:g}" for what in (DETECTED, ALARMS) for level in levels]
        else:
            samples = self.samples
            is_classes = samples.labels.ndim == 1 and not samples.continuous and len(labels) > 2
            is_findings = samples.labels.ndim == 2 and not samples.survival
            names = labels if is_classes or is_findings else []
        return [f"{model}{OF}{name}" for name in names]

    def with_examples(self, rows: Rows, models: Iterable[str]) -> Rows:
        """Adds made-up predictions, as many as models would give, to count what would leave."""
        known = self.data.class_names
        columns = [column for n in models for column in self.score_names(n, known) or [n]]
        made = np.where(np.arange(len(rows.patients)) % 3, 0.25, 0.75)
        return replace(rows, columns={**rows.columns, **dict.fromkeys(columns, made)})

    def _detections(self, name: str, model: Predictor) -> Scores:
        """The share of each scan's lesions that is found, and its false alarms, by threshold."""
        names, facts, lines = self.score_names(name, ()), model.facts, []
        if not names:
            raise ConfigError(
                f"The model {name} finds lesions; list the scores from which a box counts as "
                "thresholds, such as evaluate: {thresholds: [0.1, 0.3, 0.5]}."
            )
        levels = np.array(self.questions.evaluate.thresholds)[:, None]  # type: ignore[union-attr]
        spec = ct.ScanSpec(facts["input"]["spacing"], facts["normalization"]["hu"])
        spacing = torch.tensor(spec.spacing)
        for series in self.patients:
            header = self.data.patients[series].files["header"]
            read = read_with_nodules(header, self.data.scans.nodules_of(series), spec)
            image = torch.from_numpy(spec.values.take(read["image"]))
            boxes, scores = model.boxes(image[None, None], series)
            (centres, _), (lesions, sides) = (
                in_mm(of.float(), spacing) for of in (boxes.cpu(), torch.from_numpy(read["boxes"]))
            )
            score = scores.double().cpu().numpy()
            kinds = match_lesions(centres, score, lesions, sides.mean(1) / 2)
            counted = score >= levels
            hits = ((kinds == HIT) & counted).sum(axis=1)
            share = hits / len(lesions) if len(lesions) else np.full(len(levels), np.nan)
            lines.append([*share, *((kinds == ALARM) & counted).sum(axis=1)])
        return dict(zip(names, np.array(lines, float).reshape(-1, len(names)).T, strict=True))

    def _say_other_spacings(self, name: str, facts: Mapping[str, Any]) -> None:
        """Says before scans are evaluated how many are unlike those of the training."""
        others = []
        for case, _ in self.cases:
            spacing = self.data.scans.spacing(self.data.cases[case])
            try:
                check_spacing(spacing, facts, _TOLERANCE, case, axes_of(facts))
            except DataError as error:
                others.append(str(error).partition("; ")[0])
        if others:
            _log.warning(
                "%s: %d of %d scans are unlike those of the training of %s, and count all the "
                "same: %s.",
                *(self.client, len(others), len(self.cases), name, others[0]),
            )

    def _overlaps(self, name: str, model: Predictor) -> Scores:
        """Dice and distances of each scan: of all outlined regions, and of each."""
        data, facts, regions = self.data, model.facts, [*self.data.class_names]
        there = [*data.channel_names, *regions]
        if lacking := [n for n in (*facts["present"], *model.labels) if n not in there]:
            raise DataError(f"The model {name} needs {lacking[0]}; the data have {few(there)}.")
        names, lines, reader = self.score_names(name, model.labels), [], copy.copy(data.scans)
        pictures = isinstance(data, ImageMasksDataModule)  # which are read as at the training
        if pictures:
            vars(reader).update({key: facts["input"][key] for key in ("color", "scale")})
            vars(reader).update(normalization=facts["normalization"]["name"])
        else:
            self._say_other_spacings(name, facts)
        outlined = np.array([n in model.labels and n in self.outlined for n in regions])
        for case, _ in self.cases:
            spacing, grid = data.scans.spacing(data.cases[case]), None
            if pictures:
                image, label = map(reader.read(data.cases[case]).get, ("image", "label"))
                body = torch.ones(image.shape[1:], dtype=torch.bool)
            else:
                voxels, label, present = data.unprepared(case, self.plan)
                channels = [*compress(data.channel_names, present.tolist())]
                file = next(iter(data.cases[case].files.values()))
                image, body, grid = prepare(voxels[present], channels, facts, spacing, file)
            predicted = model.masks(model.regions(image, body, case, grid, tuple(label.shape[1:])))
            masks, truth = torch.zeros_like(label, dtype=torch.bool), label > 0
            masks[[regions.index(n) for n in model.labels]] = predicted
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
    inputs = inputs_of(np.stack(cells, axis=1), columns, model.facts)
    return torch.from_numpy(inputs) * model.present
