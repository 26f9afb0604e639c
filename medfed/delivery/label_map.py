"""One label per voxel of regions that lie within each other, as viewers show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def label_codes(regions: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """Chooses the label value of every region, where the regions nest.

    The zone of a region is what none of the regions within it takes. Where each zone was exactly
    one label value of the training masks, it keeps that value, so that prediction and truth
    compare; otherwise the zones are numbered from outside to inside.

    Args:
        regions: Label values of the training masks that make up every region.

    Returns:
        Value by region, the outermost first; None where two regions overlap without nesting, or
        are the same.

    Example:
        >>> label_codes({"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]})  # BraTS
        {'whole': 2, 'core': 1, 'enhancing': 4}
        >>> label_codes({"enhancing": [3], "whole": [1, 2, 3]})
        {'whole': 1, 'enhancing': 2}
        >>> label_codes({"a": [1, 2], "b": [2, 3]}) is None
        True
    """
    names = sorted(regions, key=lambda name: -len(set(regions[name])))
    values = [set(regions[name]) for name in names]
    inner = [*values[1:], set()]
    if any(not inside < outside for outside, inside in zip(values, inner, strict=True)):
        return None
    zones = [sorted(outside - inside) for outside, inside in zip(values, inner, strict=True)]
    if all(len(zone) == 1 for zone in zones):
        return {name: int(zone[0]) for name, zone in zip(names, zones, strict=True)}
    return {name: number for number, name in enumerate(names, start=1)}


def label_map(masks: Mapping[str, Tensor], codes: Mapping[str, int]) -> Tensor:
    """Writes regions over each other, the innermost last.

    A voxel that is predicted to lie in a region but not in the one around it gets the inner
    region's label; the outer region is then the union of both.

    Args:
        masks: ``(H, W, D)`` bool per region.
        codes: From :func:`label_codes`, the outermost region first.

    Returns:
        ``(H, W, D)`` uint8.

    Example:
        >>> masks = {"whole": torch.tensor([1, 1, 0]) > 0, "core": torch.tensor([0, 1, 0]) > 0}
        >>> label_map(masks, {"whole": 2, "core": 1})
        tensor([2, 1, 0], dtype=torch.uint8)
    """
    labels = torch.zeros(next(iter(masks.values())).shape, dtype=torch.uint8)
    for name, code in codes.items():
        labels[masks[name]] = code
    return labels
