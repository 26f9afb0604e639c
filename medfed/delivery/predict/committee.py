"""The models of one or several bundles, whose answers are averaged.

PyTorch or ONNX Runtime computes a network.

Every bundle prepares a scan in its own way, as its hospital did in training; what is averaged are
the probabilities of the same classes on the scan's own voxels, or of the same row or image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from medfed.common.errors import ConfigError, DataError
from medfed.delivery.bundle.bundle import Bundle
from medfed.delivery.bundle.onnx_file import ONNX, OnnxNetwork
from medfed.delivery.bundle.scripts.masks import map_codes
from medfed.delivery.bundle.scripts.predictor import Answer, Predictor
from medfed.delivery.predict.options import PredictOptions
from medfed.functional.mixing import entropies, mean_and_spread, mean_dice

_log = logging.getLogger(__name__)


def network_of(bundle: Bundle, options: PredictOptions) -> nn.Module:
    """Builds what computes the logits of a bundle.

    Args:
        bundle: Checked by `read_bundle`.
        options: ``backend`` and ``device``.

    Returns:
        From images ``(B, C, *spatial)`` or features ``(B, F)`` to logits.

    Raises:
        ConfigError: If the device or ONNX Runtime cannot be used.
        CheckpointError: If network and weights do not fit together.
    """
    name = options.device
    if options.backend == "onnx":
        if name not in (None, "cpu"):
            raise ConfigError(f"backend=onnx runs on the CPU, not on device={name}; leave one out.")
        if ONNX not in bundle.hashes:
            raise ConfigError(
                f"{bundle.folder} holds no {ONNX}; export it with onnx=true, or choose "
                "backend=torch."
            )
        return OnnxNetwork(bundle.folder / ONNX, torch.get_num_threads())
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device={name} cannot be used on this machine; leave it out, or choose cpu."
        ) from error
    return bundle.network(options.accepted).to(device)


def make_predictor(bundle: Bundle, options: PredictOptions) -> Predictor:
    """Builds the network of a bundle, and what its logits mean.

    Args:
        bundle: Checked by `read_bundle`.
        options: What is wanted.

    Returns:
        The predictor.

    Raises:
        CheckpointError: If network and weights do not fit together.
        ConfigError: If the device or ONNX Runtime cannot be used.
    """
    if bundle.facts.get("activation") == "softmax" and options.threshold is not None:
        raise ConfigError(
            f"threshold={options.threshold} is for regions that may overlap; this model gives "
            "each voxel to its likeliest class: leave it out."
        )
    return Predictor.of(
        network_of(bundle, options),
        bundle.facts,
        options.threshold,
        options.batch_size,
        str(bundle.folder),
    )


@dataclass(frozen=True)
class Committee:
    """The models of one or several bundles, whose classes are the same.

    Attributes:
        members: The first one's order of classes and label values are those of all results.
        weights: As many, which sum to 1.
        options: What is wanted.
    """

    members: tuple[Predictor, ...]
    weights: tuple[float, ...]
    options: PredictOptions

    @property
    def first(self) -> Predictor:
        """The first member, which says what the results are called."""
        return self.members[0]

    @property
    def several(self) -> bool:
        """Whether there is anything to differ."""
        return len(self.members) > 1

    @property
    def columns(self) -> list[str]:
        """Names of the columns that a table of results gains."""
        if not self.several:
            return self.first.columns
        if self.first.facts["task"] == "regression":
            return [*self.first.columns, "standard_deviation"]
        return [*self.first.columns, "largest_difference", "entropy_bits", "disagreement_bits"]

    def ask(self, question: Callable[[Predictor], Answer]) -> list[Answer]:
        """Asks every member.

        Raises:
            DataError: If one of them cannot answer; of several the bundle is named.
        """
        answers = []
        for member in self.members:
            try:
                answers.append(question(member))
            except DataError as error:
                if not self.several:
                    raise
                raise DataError(f"{str(error).rstrip('.')} (bundle {member.name}).") from error
        return answers

    def in_order(self, member: Predictor, values: Tensor, dim: int) -> Tensor:
        """Puts a member's classes into the order of the first one's."""
        place = [member.labels.index(name) for name in self.first.labels]
        return values.index_select(dim, torch.tensor(place))

    def classify(self, images: Callable[[Predictor], Tensor], source: object) -> Tensor:
        """Classifies samples, or predicts their outcome.

        Args:
            images: What a member sees, ``(N, C, *spatial)`` or ``(N, F)``.
            source: Where they are from, for error sentences.

        Returns:
            ``(N, columns)``: the mean probabilities or outcome. Of several members also the largest
            difference of two members' probabilities of any class, the entropy of the mean and its
            part that comes from their differing; of an outcome the standard deviation.

        Raises:
            DataError: If a member cannot take them.
        """
        answers = self.ask(lambda member: member.classify(images, source))
        if not self.several:
            return answers[0]
        if self.first.facts["task"] == "regression":
            return torch.cat(mean_and_spread(answers, self.weights), 1)
        pairs = zip(self.members, answers, strict=True)
        parts = [self.in_order(m, p[:, : len(m.labels)], 1) for m, p in pairs]
        together = torch.stack(parts)
        most = (together.amax(0) - together.amin(0)).amax(1)
        mean = self.first.decided(mean_and_spread(parts, self.weights)[0])
        return torch.cat([mean, torch.stack([most, *entropies(parts, self.weights)], 1)], 1)


def make_committee(bundles: Sequence[Bundle], options: PredictOptions) -> Committee:
    """Builds the models of bundles that are to answer together.

    Args:
        bundles: Checked by `read_bundle`.
        options: What is wanted.

    Raises:
        ConfigError: If their classes, tasks or kinds of input differ, or the device cannot be used.
        CheckpointError: If network and weights of one do not fit together.
    """
    for bundle in bundles[1:]:
        _check_alike(bundles[0], bundle, options)
    given = options.weights or [1.0] * len(bundles)
    weights = tuple(float(w) / sum(given) for w in given)
    members = [make_predictor(bundle, options) for bundle in bundles]
    if len(members) > 1 and options.threshold is None:  # theirs are not for mean probabilities
        members = [replace(member, level=None) for member in members]
    return Committee(tuple(members), weights, options)


def _check_alike(first: Bundle, other: Bundle, options: PredictOptions) -> None:
    """Refuses bundles whose answers do not mean the same."""
    for this, that in zip(_kinds(first.facts), _kinds(other.facts), strict=True):
        if this != that:
            raise ConfigError(
                f"{other.folder} is {that}, but {first.folder} is {this}; only bundles of one "
                "task and kind of input can be averaged."
            )
    if (task := first.facts["task"]) in ("findings", "survival"):
        raise ConfigError(f"Bundles of {task} answer one at a time; name one bundle.")
    names, others = (list(map(str, b.facts["labels"])) for b in (first, other))
    if set(names) != set(others):
        raise ConfigError(
            f"{other.folder} answers {', '.join(others)}, but {first.folder} {', '.join(names)}; "
            "only bundles of the same classes can be averaged."
        )
    if first.facts["task"] != "segmentation":
        return
    kinds = [b.facts.get("activation") or "sigmoid" for b in (first, other)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"The regions of {first.folder} are {_WORDS[kinds[0]]}, those of {other.folder} "
            f"{_WORDS[kinds[1]]}; their probabilities cannot be averaged."
        )
    levels = [b.facts["threshold"] for b in (first, other)]
    if kinds[0] == "sigmoid" and options.threshold is None and levels[0] != levels[1]:
        raise ConfigError(
            f"{first.folder} decides at a probability of {levels[0]:g}, {other.folder} at "
            f"{levels[1]:g}; set threshold for all."
        )
    if first.facts.get("largest_part") != other.facts.get("largest_part"):
        _log.warning("Largest parts of masks are kept as %s says alone.", first.folder)
    if map_codes(first.facts) != map_codes(other.facts):
        _log.warning(
            "%s writes other label values than %s; the masks have those of the latter.",
            other.folder,
            first.folder,
        )


_WORDS = {"sigmoid": "decided one by one", "softmax": "exclusive"}


def _kinds(facts: Mapping[str, Any]) -> tuple[str, str]:
    """What a model's task and inputs are called."""
    task = "classification" if facts["task"] == "risk" else facts["task"]
    return f"a model of {task}", f"a model of {facts['input']['kind'].replace('_', ' ')}"


@dataclass(frozen=True)
class SegmentedCase:
    """Regions of one case.

    Attributes:
        labels: The R regions.
        probabilities: ``(R, *spatial)``, the mean over the members.
        masks: ``(R, *spatial)`` bool, decided on the mean.
        spread: ``(R, *spatial)``, the standard deviation between members; None of a single one.
        members: A member's own masks each.
    """

    labels: Sequence[str]
    probabilities: Tensor
    masks: Tensor
    spread: Tensor | None
    members: Sequence[Tensor]

    def sizes(self, unit: str, factor: float) -> dict[str, float]:
        """Returns the measures of every region.

        Args:
            unit: Of its size, for the names.
            factor: From voxels to the unit.

        Returns:
            By column: ``<region>_<unit>``; ``_highest_probability`` of any voxel. Of several
            members also ``_dice``, the Dice overlap of two members' own masks, averaged
            over all pairs (1 where both are empty), and ``_spread``, the standard deviation
            between members, averaged over the voxels that any of them gives the region.
        """
        sizes: dict[str, float] = {}
        for n, name in enumerate(self.labels):
            sizes[f"{name}_{unit}"] = int(self.masks[n].sum()) * factor
            sizes[f"{name}_highest_probability"] = float(self.probabilities[n].max())
            if self.spread is None:
                continue
            each = [masks[n] for masks in self.members]
            anywhere = torch.stack(each).any(0)
            sizes[f"{name}_dice"] = mean_dice(each)
            sizes[f"{name}_spread"] = (
                float(self.spread[n][anywhere].mean()) if anywhere.any() else 0.0
            )
        return sizes


def segmented(committee: Committee, parts: Sequence[Tensor]) -> SegmentedCase:
    """Averages the members' probabilities, and decides.

    Args:
        committee: Who they are.
        parts: ``(R, *spatial)`` of each, in the first one's order of regions.
    """
    first = committee.first
    if not committee.several:
        return SegmentedCase(first.labels, parts[0], first.masks(parts[0]), None, ())
    mean, spread = mean_and_spread(parts, committee.weights)
    members = [first.masks(part) for part in parts]
    return SegmentedCase(first.labels, mean, first.masks(mean), spread, members)
