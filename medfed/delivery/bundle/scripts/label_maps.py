"""Masks as one map of label values, and which values these are; bundles carry this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def label_codes(regions: Mapping[str, Sequence[int]]) -> dict[str, int] | None:
    """Chooses the label value of every region, where the regions nest or are exclusive.

    The zone of a region is what none of the regions within it takes. Where each zone was exactly
    one label value of the training masks, it keeps that value, so that prediction and truth
    compare; otherwise the zones are numbered, from outside to inside where they nest.

    Args:
        regions: Label values of the training masks that make up every region.

    Returns:
        Value by region, an outer one before those within it; None where two regions overlap
        without nesting, or are the same.

    Example:
        >>> label_codes({"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]})  # BraTS
        {'whole': 2, 'core': 1, 'enhancing': 4}
        >>> label_codes({"enhancing": [3], "whole": [1, 2, 3]})
        {'whole': 1, 'enhancing': 2}
        >>> label_codes({"liver": [1], "tumour": [2]}), label_codes({"a": [1], "b": [2, 3]})
        ({'liver': 1, 'tumour': 2}, {'a': 1, 'b': 2})
        >>> label_codes({"a": [1, 2], "b": [2, 3]}) is None
        True
    """
    values = {name: set(codes) for name, codes in regions.items()}
    exclusive = sum(map(len, values.values())) == len(set().union(*values.values()))
    names = list(regions)
    if not exclusive:
        names.sort(key=lambda name: -len(values[name]))
    inner = [set() if exclusive else values[name] for name in names[1:]] + [set()]
    if any(not within < values[name] for name, within in zip(names, inner, strict=True)):
        return None
    zones = {n: sorted(values[n] - within) for n, within in zip(names, inner, strict=True)}
    if all(len(zone) == 1 for zone in zones.values()):
        return {name: int(zone[0]) for name, zone in zones.items()}
    return {name: number for number, name in enumerate(names, start=1)}


def map_codes(facts: Mapping[str, Any]) -> dict[str, int] | None:
    """Chooses the label values of the one map that a segmentation is written as.

    Regions that were decided one by one, and do not nest, may lie in each other where the training
    masks never did; that would be lost in one map.

    Args:
        facts: The part ``medfed`` of the metadata.

    Returns:
        See :func:`label_codes`; None where every region needs a mask of its own.

    Example:
        >>> regions = {"liver": [1], "tumour": [2]}
        >>> facts = {"labels": list(regions), "input": {"regions": regions}}
        >>> map_codes({**facts, "activation": "softmax"}), map_codes(facts)
        ({'liver': 1, 'tumour': 2}, None)
    """
    given = facts["input"].get("regions") or {}
    regions = {name: given.get(name, [1]) for name in facts["labels"]}
    codes = label_codes(regions)
    if facts.get("activation") == "softmax":
        return codes or {name: number for number, name in enumerate(regions, start=1)}
    shared = sum(map(len, regions.values())) > len(set().union(*regions.values()))
    return codes if shared or len(regions) == 1 else None


def label_map(masks: Mapping[str, Tensor], codes: Mapping[str, int]) -> Tensor:
    """Writes regions into one map, the innermost last: one label per voxel, as viewers show it.

    A voxel that is predicted to lie in a region but not in the one around it gets the inner
    region's label; the outer region is then the union of both.

    Args:
        masks: ``(H, W, D)`` bool per region.
        codes: From :func:`label_codes`, an outer region before those within it.

    Returns:
        ``(H, W, D)`` uint8, or int32 where a value needs it.

    Example:
        >>> masks = {"whole": torch.tensor([1, 1, 0]) > 0, "core": torch.tensor([0, 1, 0]) > 0}
        >>> label_map(masks, {"whole": 2, "core": 1})
        tensor([2, 1, 0], dtype=torch.uint8)
    """
    small = all(0 <= code < 256 for code in codes.values())
    dtype = torch.uint8 if small else torch.int32
    labels = torch.zeros(next(iter(masks.values())).shape, dtype=dtype)
    for name, code in codes.items():
        labels[masks[name]] = code
    return labels


def largest_part(mask: Tensor) -> Tensor:
    """Returns the largest connected part of a mask (H, W, D), of equal ones the first."""
    from scipy.ndimage import label  # few bundles need the package

    parts, count = label(mask.numpy(), structure=np.ones((3,) * mask.ndim))
    if count < 2:
        return mask
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0
    return torch.from_numpy(parts == sizes.argmax())
