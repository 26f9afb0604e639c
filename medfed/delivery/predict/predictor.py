"""A bundle's model with what its metadata say of the input: from tensors to probabilities.

The network runs inside the task module that evaluated it after training, so that windows, slices
and activations are those of the evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfed.common.errors import CheckpointError, ConfigError, DataError, first_line
from medfed.datamodules import patches
from medfed.delivery.bundle.bundle import Bundle
from medfed.delivery.bundle.scripts.volumes import largest_part
from medfed.delivery.predict.backends import network_of
from medfed.delivery.predict.options import PredictOptions
from medfed.functional.grids import plane_of
from medfed.models.classification import ClassificationTask
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask
from medfed.models.task import TaskModule


@dataclass(frozen=True)
class Predictor:
    """A network in evaluation mode, and the facts that its training data left behind.

    Attributes:
        task: Segmentation, regression or classification; risk is a classification here.
        facts: The part of the metadata under ``medfed``.
        options: What is wanted.
        name: The bundle's folder.
    """

    task: TaskModule
    facts: Mapping[str, Any]
    options: PredictOptions
    name: str = ""

    @property
    def labels(self) -> list[str]:
        """Names of regions or classes, in the order of the outputs."""
        return [str(name) for name in self.facts["labels"]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that a table of results gains."""
        if self.facts["task"] == "regression":
            return ["prediction"]
        return [f"probability_{name}" for name in self.labels]

    @property
    def present(self) -> Tensor:
        """(C,) bool, the channels that the client has; the network has always seen 0 in others."""
        return torch.tensor([name in self.facts["present"] for name in self.facts["channels"]])

    def masks(self, probabilities: Tensor) -> Tensor:
        """Returns which voxels belong to which region, bool ``(R, H, W, D)``."""
        assert isinstance(self.task, SegmentationTask)
        masks = self.task.masks(probabilities[None])[0]
        for name in self.facts.get("largest_part") or ():
            place = self.labels.index(name)
            masks[place] = largest_part(masks[place])
        return masks

    def regions(
        self,
        image: Tensor,
        body: Tensor,
        source: object,
        grid: Tensor | None = None,
        size: tuple[int, ...] = (),
    ) -> Tensor:
        """Segments one volume.

        Args:
            image: ``(C, h, w, d)`` prepared, RAS.
            body: ``(h, w, d)`` bool; a 2-D model sees the axial slices that contain some of it,
                as in evaluation, and elsewhere the probabilities are 0.
            source: The scan, for error sentences.
            grid: (4, 4) from the scan's voxels to those of the image; None where they are the same.
            size: With a grid: the scan's voxels.

        Returns:
            ``(R, H, W, D)`` float32 probabilities, on the scan's own grid.

        Raises:
            DataError: If the network cannot take an image of this size.
        """
        size = tuple(image.shape[1:]) if grid is None else size
        image = patches.with_neighbours(image, self.facts["input"].get("adjacent_slices") or 1)
        if not self.facts.get("slices"):
            return self._predict(image[None], source, grid, size)[0]
        found = torch.zeros(len(self.labels), *size)
        below = 0 if grid is None else -int(grid[2, 3].round())  # slices that were cropped away
        plane = None if grid is None else plane_of(grid)
        for part in patches.brain_slices(body).split(self.options.batch_size):
            one = self._predict(patches.axial(image, part), source, plane, size[:2])
            found[..., part + below] = one.permute(1, 2, 3, 0)
        return found

    def classify(self, images: Tensor, source: object) -> Tensor:
        """Classifies samples, or predicts their outcome.

        Args:
            images: ``(N, C, *spatial)`` or ``(N, F)``, normalised.
            source: Where they are from, for error sentences.

        Returns:
            ``(N, K)`` float32 probabilities, or ``(N, 1)`` outcomes.

        Raises:
            DataError: If the network cannot take them.
        """
        parts = images.split(self.options.batch_size)
        return torch.cat([self._predict(part, source) for part in parts])

    def _predict(
        self,
        image: Tensor,
        source: object,
        grid: Tensor | None = None,
        size: Sequence[int] = (),
    ) -> Tensor:
        batch = {"image": image}
        if grid is not None:  # the answer is wanted on other voxels, as if there were a label
            batch["grid"] = grid.expand(len(image), *grid.shape)
            batch["label"] = torch.zeros(()).expand(len(image), 1, *size)
        try:
            found = self.task.predict(batch).cpu()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise DataError(
                f"{source}: the network cannot take images of shape {tuple(image.shape[2:])} "
                f"({first_line(error)}); give it scans of the size that it was trained on."
            ) from error
        if found.shape[1] != len(self.labels):
            raise CheckpointError(
                f"The network answers {found.shape[1]} outputs, but the metadata have "
                f"{len(self.labels)} labels; export the bundle anew."
            )
        if not found.isfinite().all():
            raise DataError(
                f"{source}: the network answers NaN or infinity; check the values in the input."
            )
        return found


def make_predictor(bundle: Bundle, options: PredictOptions) -> Predictor:
    """Builds the network of a bundle and the task around it.

    Args:
        bundle: Checked by `read_bundle`.
        options: What is wanted.

    Returns:
        The predictor.

    Raises:
        CheckpointError: If network and weights do not fit together.
        ConfigError: If the device or ONNX Runtime cannot be used.
    """
    facts = bundle.facts
    network = network_of(bundle, options)
    task: TaskModule
    if facts["task"] == "segmentation":
        activation = facts.get("activation", "sigmoid")
        if activation == "softmax" and options.threshold is not None:
            raise ConfigError(
                f"threshold={options.threshold} is for regions that may overlap; this model gives "
                "each voxel to its likeliest class: leave it out."
            )
        task = SegmentationTask(
            network,
            torch.optim.SGD,
            regions=facts["labels"],
            activation=activation,
            threshold=float(facts["threshold"] if options.threshold is None else options.threshold),
            patch_size=facts.get("patch_size"),
            overlap=float(facts.get("overlap", 0.25)),
            window_batch=options.batch_size,
        )
    elif facts["task"] == "regression":
        task = RegressionTask(network, torch.optim.SGD, scale=facts.get("outcome_scale"))
    else:
        task = ClassificationTask(network, torch.optim.SGD, num_classes=len(facts["labels"]))
    return Predictor(task, facts, options, str(bundle.folder))
