"""A model and what its training data say of it: from prepared tensors to probabilities and masks.

What a network's outputs mean is read by :mod:`medfed.standalone.inference`, as by the task module
of the training, so that windows and activations are those of the evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import inference as kinds
from .detector import BoxInference
from .errors import CheckpointError, DataError, first_line
from .inference import Inference, RegionInference
from .itk import say_once
from .masks import Facts, largest_part, map_codes
from .voxels import axial, plane_of, with_neighbours

_IN_BOTH = "and masks have them in both: a Dice of a mask differs a little from that of cases.csv"


def channels_of(source: Path, count: int, facts: Facts) -> list[str]:
    """Says what the channels of a file are, by their number."""
    known = facts["input"].get("file_channels") or facts["channels"]
    # A file as in the training data, one of the network's channels, or of those the client has.
    for names in (known, facts["channels"], facts["present"]):
        if count == len(names):
            if names is not known:
                say_once(source, f"is taken as {', '.join(names)}, in this order")
            return list(names)
    wanted = f"the model needs {len(known)} ({', '.join(known)}) along the fourth axis"
    mend = f"give it these, or a folder with a file for each of {', '.join(facts['present'])}"
    raise DataError(f"{source} has {count} channel{'s' * (count > 1)}, but {wanted}; {mend}.")


@dataclass(frozen=True)
class Predictor:
    """A network in evaluation mode, and the facts that its training data left behind."""

    network: nn.Module  # from images or features to logits, in evaluation mode
    inference: Inference  # what the logits mean
    facts: Facts  # the part of the metadata under ``medfed``
    batch_size: int = 16  # samples or slices per forward pass
    name: str = ""  # the bundle's folder
    # Of two classes, the probability of the second one from which a case belongs to it.
    level: float | None = None

    @classmethod
    def of(
        cls,
        network: nn.Module,
        facts: Facts,
        threshold: float | None = None,
        batch_size: int | None = None,
        name: str = "",
    ) -> Predictor:
        """Reads off the facts what the network's outputs mean."""
        size = batch_size or facts.get("window_batch") or cls.batch_size
        level: Any = facts.get("threshold") if threshold is None else threshold
        inference: Inference = kinds.ClassInference(*(facts.get("calibration") or ()))
        window = tuple(facts["patch_size"]) if facts.get("patch_size") else None
        overlap = float(0.25 if facts.get("overlap") is None else facts["overlap"])
        if facts["task"] == "segmentation":
            if threshold is not None:  # the intervals of volumes are of other masks
                facts = {**facts, "coverage": None}
            exclusive = facts.get("activation") == "softmax"
            inference = RegionInference(exclusive, level, window, overlap, size)
        elif facts["task"] == "detection":
            assert window is not None  # as the metadata's rules have it
            anchors, most = facts["anchors"], facts["boxes"]
            inference = BoxInference(anchors, window, overlap, size, float(level or 0), most)
        elif facts["task"] == "findings":
            inference = kinds.FindingInference()
        elif facts["task"] == "survival":
            inference = kinds.SurvivalInference()
        elif facts["task"] == "regression":
            inference = kinds.OutcomeInference(*map(float, facts.get("outcome_scale") or (0, 1)))
        decides = facts["task"] in ("classification", "risk") and len(facts["labels"]) == 2
        return cls(network, inference, facts, size, name, level if decides else None)

    @property
    def labels(self) -> list[str]:
        """Names of regions or classes, in the order of the outputs."""
        return [str(name) for name in self.facts["labels"]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that a table of results gains."""
        level = self.level_of_bounds
        if self.facts["task"] == "regression":
            return ["prediction", *([f"low_{level}", f"high_{level}"] if self.bounds else [])]
        decision = [f"above_threshold_{self.labels[1]}"] * (self.level is not None)
        what = "survival" if self.facts["task"] == "survival" else "probability"
        inside = [f"in_{level}_set_{name}" for name in self.labels] if self.bounds else []
        return [f"{what}_{name}" for name in self.labels] + decision + inside

    @property
    def level_of_bounds(self) -> str:
        """Percent of cases whose truth sets and intervals are to hold."""
        return f"{100 * (self.facts.get('coverage') or {}).get('level', 0):g}"

    @property
    def bounds(self) -> Mapping[str, float]:
        """The quantiles of sets and intervals, by region of a segmentation, else of no name."""
        known: Mapping[str, float] = (self.facts.get("coverage") or {}).get("quantiles", {})
        return known

    @property
    def present(self) -> Tensor:
        """(C,) bool, the channels that the client has; the network has always seen 0 in others."""
        return torch.tensor([name in self.facts["present"] for name in self.facts["channels"]])

    @property
    def of_regions(self) -> RegionInference:
        """The inference of a segmentation."""
        assert isinstance(self.inference, RegionInference)
        return self.inference

    def masks(self, probabilities: Tensor) -> Tensor:
        """Returns bool ``(R, H, W, D)``; where regions nest, an outer one holds those within it."""
        masks = self.of_regions.masks(probabilities[None])[0]
        for name in self.facts.get("largest_part") or ():
            place = self.labels.index(name)
            masks[place] = largest_part(masks[place])
        if not self.of_regions.exclusive:
            outwards = [self.labels.index(name) for name in reversed(map_codes(self.facts) or {})]
            for inner, outer in pairwise(outwards):
                if (masks[inner] & ~masks[outer]).any():
                    beyond = f"predicts voxels of {self.labels[inner]} beyond {self.labels[outer]}"
                    say_once(Path(self.name), f"{beyond}, {_IN_BOTH}")
                masks[outer] |= masks[inner]
        return masks

    def regions(
        self,
        image: Tensor,
        body: Tensor,
        source: object,
        grid: Tensor | None = None,
        size: tuple[int, ...] = (),
    ) -> Tensor:
        """Segments a prepared volume: probabilities ``(R, H, W, D)`` on the scan's own grid.

        A 2-D model sees the axial slices that contain some of the body, as in evaluation; others
        are 0.
        """
        size = tuple(image.shape[1:]) if grid is None else size
        image = with_neighbours(image, self.facts["input"].get("adjacent_slices") or 1)
        if not self.facts.get("slices"):
            return self.answer(image[None], source, grid, size)[0]
        probabilities = torch.zeros(len(self.labels), *size)
        # The grid leads from the scan's voxels to the image's, so its offset is minus the number of
        # slices that were cropped away below; within a slice the plane undoes the rest.
        below = 0 if grid is None else -int(grid[2, 3].round())
        plane = None if grid is None else plane_of(grid)
        filled = body.flatten(0, 1).any(dim=0).nonzero().ravel()
        for part in filled.split(self.batch_size):
            one = self.answer(axial(image, part), source, plane, size[:2])
            probabilities[..., part + below] = one.permute(1, 2, 3, 0)
        return probabilities

    def classify(self, inputs: Tensor, source: object) -> Tensor:
        """Classifies samples ``(N, ...)``, or predicts their outcome.

        With a threshold also 1 or 0 for the second class; and for each class whether it is in the
        set, or the ends of the interval.
        """
        answers = torch.cat([self.answer(part, source) for part in inputs.split(self.batch_size)])
        parts = [answers]
        if self.level is not None:
            parts.append((answers[:, 1:2] >= self.level).to(answers))
        if (bound := self.bounds.get("")) is not None:
            if self.facts["task"] == "regression":
                parts += [answers - bound, answers + bound]
            else:
                likeliest = answers >= answers.amax(1, keepdim=True)
                parts.append((likeliest | (1 - answers <= bound)).to(answers))
        return torch.cat(parts, 1)

    def boxes(self, image: Tensor, source: object) -> tuple[Tensor, Tensor]:
        """Finds lesions in ``(1, C, h, w, d)``: corners ``(n, 6)`` and scores, best first."""
        assert isinstance(self.inference, BoxInference)
        logits = self._logits(image, source).cpu()
        count = len(self.inference.anchors)
        self._check(logits, 7 * count, f"{count} anchors", source)
        return self.inference.boxes_of(logits, image.shape[2:])[0]

    def answer(
        self, image: Tensor, source: object, grid: Tensor | None = None, size: Sequence[int] = ()
    ) -> Tensor:
        """Computes the probabilities of a batch, or its outcomes."""
        answer = self.inference.probabilities(self._logits(image, source, grid, size)).cpu()
        self._check(answer, len(self.labels), f"{len(self.labels)} labels", source)
        return answer

    @torch.no_grad()
    def _logits(
        self, image: Tensor, source: object, grid: Tensor | None = None, size: Sequence[int] = ()
    ) -> Tensor:
        like = next(self.network.parameters())
        grids = None if grid is None else grid.expand(len(image), *grid.shape).to(like.device)

        def network(part: Tensor) -> Tensor:
            logits: Tensor = self.network(part.to(like.dtype))
            return logits

        try:
            return self.inference.logits(network, image.to(like.device), grids, size).float()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise DataError(
                f"{source}: the network cannot take images of shape {tuple(image.shape[2:])} "
                f"({first_line(error)}); give it scans of the size that it was trained on."
            ) from error

    def _check(self, answer: Tensor, wanted: int, what: str, source: object) -> None:
        if answer.shape[1] != wanted:
            got = f"The network answers {answer.shape[1]} outputs, but the metadata have {what}"
            raise CheckpointError(f"{got}; export the bundle anew.")
        if not answer.isfinite().all():
            mend = "check the values in the input"
            raise DataError(f"{source}: the network answers NaN or infinity; {mend}.")
