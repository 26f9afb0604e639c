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

from medfed.datamodules import patches
from medfed.delivery.bundle import Bundle
from medfed.delivery.onnx_runtime import load_onnx
from medfed.delivery.outputs import probability_columns
from medfed.errors import CheckpointError, ConfigError, DataError
from medfed.models.classification import ClassificationTask
from medfed.models.regression import RegressionTask
from medfed.models.segmentation import SegmentationTask
from medfed.models.task import TaskModule

_KINDS: Mapping[str, type] = {
    "channels": list,
    "present": list,
    "labels": list,
    "input": dict,
}


@dataclass(frozen=True)
class Predictor:
    """A network in evaluation mode, and the facts that its training data left behind.

    Attributes:
        task: Segmentation, regression or classification; risk is a classification here.
        facts: The part of the metadata under ``medfed``.
        batch_size: Slices, patches or rows per forward pass.
    """

    task: TaskModule
    facts: Mapping[str, Any]
    batch_size: int = 16

    @property
    def kind(self) -> str:
        """Kind of input: ``volumes``, ``ct_patches``, ``images`` or ``table``."""
        return str(self.facts["input"].get("kind"))

    @property
    def labels(self) -> list[str]:
        """Names of regions or classes, in the order of the outputs."""
        return [str(name) for name in self.facts["labels"]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that a table of results gains."""
        if self.facts["task"] == "regression":
            return ["prediction"]
        return probability_columns(self.labels)

    @property
    def channels(self) -> list[str]:
        """Names of all channels or features, in the order of the network's input."""
        return [str(name) for name in self.facts["channels"]]

    @property
    def present(self) -> Tensor:
        """(C,) bool, the channels that the client has; the network has always seen 0 in others."""
        return torch.tensor([name in self.facts["present"] for name in self.facts["channels"]])

    def regions(self, image: Tensor, brain: Tensor, source: object) -> Tensor:
        """Segments one volume.

        Args:
            image: ``(C, H, W, D)`` normalised, RAS.
            brain: ``(H, W, D)`` bool; a 2-D model sees the axial slices that contain some of it,
                as in evaluation, and elsewhere the probabilities are 0.
            source: The scan, for error sentences.

        Returns:
            ``(R, H, W, D)`` float32 probabilities.

        Raises:
            DataError: If the network cannot take an image of this size.
        """
        if not self.facts.get("slices"):
            return self._predict(image[None], source)[0]
        found = torch.zeros(len(self.labels), *image.shape[1:])
        for part in patches.brain_slices(brain).split(self.batch_size):
            probabilities = self._predict(patches.axial(image, part), source)
            found[..., part] = probabilities.permute(1, 2, 3, 0)
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
        parts = [self._predict(part, source) for part in images.split(self.batch_size)]
        return torch.cat(parts) if parts else torch.empty(0, len(self.labels))

    def _predict(self, image: Tensor, source: object) -> Tensor:
        try:
            return self.task.predict({"image": image}).cpu()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            first = str(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"{source}: the network cannot take images of shape {tuple(image.shape[2:])} "
                f"({first}); give it scans of the size that it was trained on."
            ) from error


def make_predictor(
    bundle: Bundle,
    threshold: float | None = None,
    batch_size: int = 16,
    device: str | None = None,
    runtime: str = "torch",
) -> Predictor:
    """Builds the network of a bundle and the task around it.

    Args:
        bundle: Checked by `read_bundle`.
        threshold: Probability above which a voxel belongs to a region; None takes the bundle's.
        batch_size: Slices, windows, patches or rows per forward pass.
        device: ``"cpu"``, ``"cuda"`` or the like; None takes a GPU where there is one.
        runtime: ``"torch"``, or ``"onnx"`` for ONNX Runtime on the bundle's ONNX file.

    Returns:
        The predictor.

    Raises:
        CheckpointError: If the metadata lack what a prediction needs.
        ConfigError: If device, threshold or batch size cannot be used.
    """
    facts = bundle.facts
    for key, kind in _KINDS.items():
        if not isinstance(facts.get(key), kind):
            raise CheckpointError(
                f"{bundle.folder}/configs/metadata.json says nothing of {key}; export the bundle "
                "anew."
            )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be 1 or more.")
    if threshold is not None and not 0 <= threshold < 1:
        raise ConfigError(f"threshold={threshold} must lie in [0, 1).")
    network: torch.nn.Module
    if runtime == "onnx":
        network = load_onnx(bundle, device)
    else:
        network = bundle.network().to(_device(device))
    if facts["task"] != "segmentation":
        return Predictor(_task_of_samples(network, facts), facts, batch_size)
    task = SegmentationTask(
        network,
        torch.optim.SGD,
        regions=facts["labels"],
        patch_size=_sizes(facts.get("patch_size")),
        overlap=float(facts.get("overlap", 0.25)),
        window_batch=batch_size,
        threshold=float(facts.get("threshold", 0.5) if threshold is None else threshold),
    )
    return Predictor(task, facts, batch_size)


def _task_of_samples(network: torch.nn.Module, facts: Mapping[str, Any]) -> TaskModule:
    if facts["task"] == "regression":
        return RegressionTask(network, torch.optim.SGD)
    return ClassificationTask(network, torch.optim.SGD, num_classes=len(facts["labels"]))


def _sizes(patch_size: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if patch_size is None else tuple(int(s) for s in patch_size)


def _device(name: str | None) -> torch.device:
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name or usual)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device={name} cannot be used on this machine; leave it out, or choose cpu."
        ) from error
    return device
