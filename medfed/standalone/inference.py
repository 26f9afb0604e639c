"""Inference: images by windows, probabilities and masks; no training code.

A task module holds one of these classes (``task.inference``), and prediction needs nothing else
from the task. So this module must not import Lightning, which takes seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from monai.inferers import sliding_window_inference
from torch import Tensor

from .preparation import on_grid

Network = Callable[[Tensor], Tensor]
_CERTAIN = 10.0  # logit of the cropped background
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)  # of which networks need the sides of an image


@dataclass(frozen=True)
class Inference(ABC):
    """From images to logits to probabilities."""

    def logits(
        self, network: Network, image: Tensor, grids: Tensor | None = None, size: Sequence[int] = ()
    ) -> Tensor:
        """Returns the logits of images; `grids`: from the output voxels to those of the image."""
        return network(image)

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Turns logits into probabilities, or into the outcome."""


@dataclass(frozen=True)
class ClassInference(Inference):
    """Exclusive classes, ``(B, K)``.

    Example:
        >>> ClassInference().probabilities(torch.zeros(1, 2)).tolist()
        [[0.5, 0.5]]
    """

    slope: float = 1.0  # of the calibration: the logarithms of probabilities are multiplied by it
    shift: float = 0.0  # of the calibration: what is then added to that of class 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the softmax over classes, calibrated."""
        if (self.slope, self.shift) == (1.0, 0.0):
            return logits.softmax(1)
        terms = self.slope * logits.log_softmax(1)
        terms[:, 1] += self.shift
        return terms.softmax(1)


@dataclass(frozen=True)
class FindingInference(Inference):
    """Findings that do not exclude each other, ``(B, K)``.

    Example:
        >>> FindingInference().probabilities(torch.zeros(1, 2)).tolist()
        [[0.5, 0.5]]
    """

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probability of each finding."""
        return logits.sigmoid()


@dataclass(frozen=True)
class SurvivalInference(Inference):
    """The survival until the ends of intervals, ``(B, J)``, of the logits of their hazards.

    Example:
        >>> SurvivalInference().probabilities(torch.zeros(1, 2)).tolist()
        [[0.5, 0.25]]
    """

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the survival."""
        return F.logsigmoid(-logits).cumsum(1).exp()


@dataclass(frozen=True)
class OutcomeInference(Inference):
    """A continuous outcome, which the network predicts in standard units.

    Example:
        >>> OutcomeInference(450.0, 60.0).probabilities(torch.tensor([[1.0]])).tolist()
        [[510.0]]
    """

    mean: float = 0.0  # the outcome's mean, in its unit
    deviation: float = 1.0  # the outcome's deviation, above 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the outcome in its unit."""
        return logits * self.deviation + self.mean


@dataclass(frozen=True)
class RegionInference(Inference):
    """Regions of images or volumes."""

    # Whether no voxel is in two regions (softmax, the first logit is the background's) or regions
    # may overlap (sigmoid).
    exclusive: bool = False
    # Probability above which a voxel belongs to a region that may overlap others; one for all
    # regions, or one for each.
    threshold: float | Sequence[float] = 0.5
    # Window; None passes whole images through the network, in a margin of zeros if the network
    # needs sides that are multiples of a power of two.
    patch_size: tuple[int, ...] | None = None
    overlap: float = 0.25  # fraction by which neighbouring windows overlap
    window_batch: int = 16  # windows per forward pass
    # Which multiple fits images of a size: otherwise each batch would try all of them again.
    _fits: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, compare=False)

    def logits(
        self, network: Network, image: Tensor, grids: Tensor | None = None, size: Sequence[int] = ()
    ) -> Tensor:
        """See the base class: blended from windows; voxels outside the image are background."""
        if self.patch_size is None:
            outputs = self._whole(network, image)
        elif tuple(image.shape[2:]) == self.patch_size:
            outputs = network(image)
        else:
            window = self.patch_size, self.window_batch, network, self.overlap
            outputs = blended(image, *window, mode="gaussian")
        if grids is None:
            return outputs
        outside = torch.full((outputs.shape[1],), -_CERTAIN, device=outputs.device)
        if self.exclusive:
            outside[0] = _CERTAIN
        parts = zip(outputs, grids, strict=True)
        return torch.stack([on_grid(one, grid, size, outside=outside) for one, grid in parts])

    def _whole(self, network: Network, image: Tensor) -> Tensor:
        """Passes whole images through the network, with the least margin that it accepts."""
        size = tuple(image.shape[2:])
        failures: list[Exception] = []
        multiples = (self._fits[size],) if size in self._fits else _MULTIPLES
        for multiple in multiples:
            if multiple > 1 and all(side % multiple == 0 for side in size):
                continue  # no other margin than before
            try:
                outputs = _with_margin(network, image, multiple)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                failures.append(error)
                continue
            if tuple(outputs.shape[2:]) == size:
                self._fits[size] = multiple
                return outputs
        if failures:
            raise failures[0]
        return network(image)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probability of each region ``(B, R, *spatial)``, without the background."""
        return logits.softmax(1)[:, 1:] if self.exclusive else logits.sigmoid()

    def masks(self, probabilities: Tensor) -> Tensor:
        """Returns which voxels belong to which region, bool ``(B, R, *spatial)``."""
        if self.exclusive:
            return _exclusive_masks(probabilities)
        return probabilities > self._levels(probabilities[0])

    def outlines(self, probabilities: Tensor) -> Tensor:
        """Returns the values whose contours are drawn, at 0.5, both ``(R, *spatial)``."""
        if self.exclusive:
            return margins(probabilities)
        return probabilities + 0.5 - self._levels(probabilities)

    def _levels(self, like: Tensor) -> Tensor:
        """The thresholds beside ``(R, *spatial)``."""
        return torch.tensor(self.threshold).to(like).view(-1, *[1] * (like.ndim - 1))


def _with_margin(network: Network, image: Tensor, multiple: int) -> Tensor:
    """Passes images through a network in a margin of zeros, and cuts the margin off the answer.

    Example:
        >>> sizes = []
        >>> _with_margin(lambda x: sizes.append(x.shape) or x, torch.ones(1, 1, 3, 4), 4)
        tensor([[[[1., 1., 1., 1.],
                  [1., 1., 1., 1.],
                  [1., 1., 1., 1.]]]])
        >>> sizes
        [torch.Size([1, 1, 4, 4])]
    """
    size = [side + -side % multiple for side in image.shape[2:]]
    if size == [*image.shape[2:]]:
        return network(image)
    return blended(image, size, len(image), network)


def blended(image: Tensor, *window: Any, **more: Any) -> Tensor:
    """MONAI's inference window by window, of a network that returns a tensor."""
    outputs = sliding_window_inference(image, *window, **more)
    assert isinstance(outputs, Tensor)
    return outputs


def _exclusive_masks(probabilities: Tensor) -> Tensor:
    """Assigns every voxel to its most probable class; the rest up to 1 is background.

    Example:
        >>> _exclusive_masks(torch.tensor([[[0.3, 0.4, 0.2], [0.1, 0.35, 0.45]]])).int().tolist()
        [[[0, 1, 0], [0, 0, 1]]]
    """
    background = 1 - probabilities.sum(1, keepdim=True)
    winner = torch.cat([background, probabilities], dim=1).argmax(1, keepdim=True)
    number = torch.arange(1, probabilities.shape[1] + 1, device=winner.device)
    return winner == number.view(1, -1, *[1] * (probabilities.ndim - 2))


def margins(probabilities: Tensor) -> Tensor:
    """Maps probabilities (R, *spatial) of exclusive regions so that 0.5 is where two are equal."""
    classes = torch.cat([1 - probabilities.sum(0, keepdim=True), probabilities])
    best, second = classes.topk(2, dim=0).values
    return (1 + probabilities - torch.where(probabilities == best, second, best)) / 2
