"""What models say of one segmented case together, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfed.delivery.predict.predictor import Committee
from medfed.functional.mixing import mean_and_spread, mean_dice


@dataclass(frozen=True)
class Verdict:
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

    def measured(self, unit: str, factor: float) -> dict[str, float]:
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
        found: dict[str, float] = {}
        for n, name in enumerate(self.labels):
            found[f"{name}_{unit}"] = int(self.masks[n].sum()) * factor
            found[f"{name}_highest_probability"] = float(self.probabilities[n].max())
            if self.spread is None:
                continue
            own = [masks[n] for masks in self.members]
            anywhere = torch.stack(own).any(0)
            found[f"{name}_dice"] = mean_dice(own)
            found[f"{name}_spread"] = (
                float(self.spread[n][anywhere].mean()) if anywhere.any() else 0.0
            )
        return found


def judged(committee: Committee, parts: Sequence[Tensor]) -> Verdict:
    """Averages the members' probabilities, and decides.

    Args:
        committee: Who they are.
        parts: ``(R, *spatial)`` of each, in the first one's order of regions.
    """
    first = committee.first
    if not committee.several:
        return Verdict(first.labels, parts[0], first.masks(parts[0]), None, ())
    mean, spread = mean_and_spread(parts, committee.weights)
    return Verdict(first.labels, mean, first.masks(mean), spread, [first.masks(p) for p in parts])
