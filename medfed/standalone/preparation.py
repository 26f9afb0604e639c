"""How a volume is prepared for a network: the same in training and prediction.

A volume is cropped to the foreground, normalised channel by channel, and resampled to a spacing, in
this order. Masks keep the grid of their file, so metrics are computed on the original annotation;
if the network uses another grid, a matrix maps one to the other (:func:`on_grid`, by MONAI's
``SpatialResample``, which interpolates linearly or takes the nearest voxel).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import check_known
from .errors import ConfigError
from .itk import say_once

CT_WINDOW = (-175.0, 250.0)  # HU: soft tissue, as in MONAI's models of abdominal organs
_PLAIN = ("zscore_nonzero", "zscore", "none")
_RANGES = ("window", "percentiles")
"""Of the grey values of a channel, which describe it."""


@dataclass(frozen=True)
class Rule:
    """How the grey values of a channel are normalised."""

    # ``zscore_nonzero`` (mean 0 and deviation 1 over voxels that are not 0, which stay 0),
    # ``zscore`` (over all voxels), ``window`` (values from `low` to `high`, cut off there, scaled
    # to 0..1), ``percentiles`` (the same between two percentiles of the scan), ``clip_zscore``
    # (values from `low` to `high`, cut off there, less a mean, over a deviation), or ``none``.
    name: str
    low: float = 0.0  # lower end, if there is one
    high: float = 0.0  # upper end
    scale: tuple[float, ...] = ()  # mean and deviation of ``clip_zscore``

    def __post_init__(self) -> None:
        check_known("data.normalize", self.name, (*_PLAIN, *_RANGES, "clip_zscore"))
        finite = all(map(math.isfinite, (self.low, self.high, *self.scale)))
        least, most = (0, 100) if self.name == "percentiles" else (-math.inf, math.inf)
        if self.name == "clip_zscore":
            usable = finite and len(self.scale) == 2 and self.scale[1] > 0
            if not usable or self.low > self.high:
                raise ConfigError("clip_zscore needs two ends, a mean and a positive deviation.")
        elif self.name in _RANGES and not (finite and least <= self.low < self.high <= most):
            raise ConfigError(
                f"data.normalize={{{self.name}: [{self.low:g}, {self.high:g}]}} must be two "
                f"ascending numbers{' from 0 to 100' * (self.name == 'percentiles')}."
            )

    @property
    def is_scaled(self) -> bool:
        """Whether the results are in 0..1, with 0 for air or background."""
        return self.name in _RANGES

    def apply(self, channel: Tensor) -> Tensor:
        """Normalises one channel (1, *spatial), perhaps in place.

        Example:
            >>> hounsfield = torch.tensor([[-1000.0, 37.5, 900.0]])
            >>> Rule("window", -175.0, 250.0).apply(hounsfield)
            tensor([[0.0000, 0.5000, 1.0000]])
        """
        if self.name == "zscore_nonzero":
            return zscore(channel)
        if self.name == "none":
            return channel
        if self.name == "clip_zscore":
            mean, sd = self.scale
            return channel.clamp_(self.low, self.high).sub_(mean).div_(sd)
        if channel.min() == channel.max():
            return torch.zeros_like(channel)
        from monai import transforms as monai  # takes seconds to import

        unit = {"b_min": 0.0, "b_max": 1.0, "clip": True}
        transform: Any = monai.NormalizeIntensity()
        if self.name == "window":
            transform = monai.ScaleIntensityRange(self.low, self.high, **unit)
        elif self.name == "percentiles":
            transform = monai.ScaleIntensityRangePercentiles(self.low, self.high, **unit)
        return torch.as_tensor(transform(channel)).as_subclass(Tensor)

    def record(self) -> dict[str, Any]:
        """Returns the rule as JSON, for bundles and predictions.

        Example:
            >>> Rule("window", -175.0, 250.0).record()
            {'name': 'window', 'hu': [-175.0, 250.0], 'to': [0, 1]}
        """
        if self.name == "none":
            return {"name": "none"}
        if self.name in _PLAIN:
            nonzero = self.name == "zscore_nonzero"
            return {"name": "zscore", "nonzero": nonzero, "channel_wise": True}
        ends = {"percentiles" if self.name == "percentiles" else "hu": [self.low, self.high]}
        more = {"scale": list(self.scale)} if self.scale else {"to": [0, 1]}
        return {"name": self.name, **ends, **more}


def _record_of(rules: Sequence[Rule]) -> dict[str, Any]:
    """Returns the rules of all channels as JSON: one record where they are the same.

    Example:
        >>> _record_of([Rule("zscore"), Rule("zscore")])
        {'name': 'zscore', 'nonzero': False, 'channel_wise': True}
        >>> rules = (Rule("window", -175.0, 250.0), Rule("zscore_nonzero"))
        >>> rules_from(_record_of(rules), 2) == rules
        True
    """
    if len(set(rules)) == 1:
        return rules[0].record()
    return {"name": "by_channel", "channels": [rule.record() for rule in rules]}


def rules_from(record: Mapping[str, Any], channels: int) -> tuple[Rule, ...]:
    """Returns the rules that `_record_of` recorded."""
    if record.get("name") == "by_channel":
        return tuple(rules_from(each, 1)[0] for each in record["channels"])
    name = str(record.get("name"))
    if name == "zscore":
        name = "zscore_nonzero" if record.get("nonzero", True) else "zscore"
    low, high = map(float, record.get("hu") or record.get("percentiles") or (0.0, 0.0))
    return (Rule(name, low, high, tuple(map(float, record.get("scale", ())))),) * channels


def rules_of(setting: object, channels: Sequence[str]) -> tuple[Rule, ...]:
    """Reads ``data.normalize``."""
    if setting is None:
        usual = Rule("zscore_nonzero")
        return tuple(Rule("window", *CT_WINDOW) if is_ct(name) else usual for name in channels)
    if isinstance(setting, str) and setting in _PLAIN:
        return (Rule(setting),) * len(channels)
    if isinstance(setting, Mapping) and len(setting) == 1:
        name, ends = next(iter(setting.items()))
        numbers = isinstance(ends, Sequence) and not isinstance(ends, str) and len(ends) == 2
        if name in _RANGES and numbers and all(type(end) in (int, float) for end in ends):
            return (Rule(str(name), float(ends[0]), float(ends[1])),) * len(channels)
    what = f"data.normalize={setting} must be {', '.join(_PLAIN)}, {{window: [LOW, HIGH]}}"
    raise ConfigError(f"{what}, {{percentiles: [LOW, HIGH]}}, or null for the default.")


def is_ct(channel: str) -> bool:
    """Says whether a channel is computed tomography, by its name.

    Example:
        >>> is_ct("CT"), is_ct("ct "), is_ct("flair_ct1")
        (True, True, False)
    """
    return channel.strip().lower() in ("ct", "cect", "ncct", "computed tomography")


def zscore(image: Tensor) -> Tensor:
    """Normalises each channel over its voxels that are not 0, in place; MONAI is slower.

    Example:
        >>> zscore(torch.tensor([[0.0, 1.0, 3.0]]))
        tensor([[ 0., -1.,  1.]])
    """
    for channel in image:
        inside = channel != 0
        voxels = channel[inside]
        if len(voxels):
            mean, std = voxels.mean().item(), voxels.std(correction=0).item()
            channel[inside] = (voxels - mean) / (std or 1.0)
    return image


def among(image: Tensor, there: Sequence[bool]) -> Tensor:
    """Puts the channels of a normalised image in their places; the others are zero.

    Example:
        >>> among(torch.tensor([[5.0], [7.0]]), [True, False, True]).tolist()
        [[5.0], [0.0], [7.0]]
    """
    if all(there):
        return image
    whole = torch.zeros(len(there), *image.shape[1:])
    whole[torch.tensor(there)] = image
    return whole


BLANK = (
    "is 0 in every voxel for the network: its grey values are all alike, or outside the window of "
    "data.normalize; check that it is a scan, no mask, in the units of the others"
)
_UNITS = (
    "has no value below 0, so these may be no Hounsfield units, in which air is -1000: subtract "
    "what was added, or train with data.normalize=zscore"
)
_LEAST = 0.01  # mm between voxels; below it a volume does not fit in memory


class Prepared(NamedTuple):
    """A volume prepared for a network."""

    image: Tensor  # (C, h, w, d) float32
    grid: Tensor  # (4, 4) float64 from voxels of the scan to voxels of `image`


@dataclass(frozen=True)
class Preparation:
    """The preparation of every volume of a data set."""

    rules: tuple[Rule, ...]  # how each channel is normalised
    # mm between voxels to which all volumes are resampled; None does not resample. Two numbers
    # apply within axial slices, whose distance then does not change.
    spacing: tuple[float, ...] | None = None
    # Whether to crop to the foreground: voxels that are not 0 in some channel; for CT in a window,
    # those above its lower end.
    crop: bool = False

    def __post_init__(self) -> None:
        mm = self.spacing
        if mm is None:
            return
        numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in mm)
        if len(mm) not in (2, 3) or not numbers or min(mm) < _LEAST:
            what = f"data.spacing={list(mm)} must be null, or millimetres along three axes"
            raise ConfigError(f"{what}, such as [1.5, 1.5, 2.0] (of slices two: [1.5, 1.5]).")

    def of(self, there: Sequence[bool]) -> Preparation:
        """Returns the preparation of some of the channels: each keeps its rule."""
        kept = zip(self.rules, there, strict=True)
        return replace(self, rules=tuple(rule for rule, has in kept if has))

    @property
    def keeps_grid(self) -> bool:
        """Whether image and mask have the same voxels."""
        return self.spacing is None and not self.crop

    def doubt(self, voxels: Tensor, path: Path) -> None:
        """Says where voxels (C, H, W, D) seem to be in other units than a window of CT."""
        below = [n for n, rule in enumerate(self.rules) if rule.name == "window" and rule.low < 0]
        if below and voxels[below].min() >= 0:
            say_once(path, _UNITS)

    def apply(self, voxels: Tensor, spacing: Sequence[float]) -> Prepared:
        """Prepares one volume (C, H, W, D) in RAS, perhaps in place."""
        affine = np.diag([*spacing, 1.0])
        start = np.eye(4)
        if self.crop:
            box = self._box(voxels)
            voxels = voxels[:, *box].clone()
            start[:3, 3] = [side.start or 0 for side in box]
        # Before resampling: interpolation would blur the zeros that the z-score excludes.
        channels = [rule.apply(voxels[n : n + 1]) for n, rule in enumerate(self.rules)]
        image = torch.cat(channels) if len(channels) > 1 else channels[0]
        grid = np.linalg.inv(start)
        if self.spacing is not None:
            from monai.data import MetaTensor  # takes seconds to import
            from monai.transforms import Spacing

            wanted = (*self.spacing, spacing[2])[:3]
            # "border": zeros beyond the volume would darken its outermost slices.
            resample = Spacing(wanted, mode="bilinear", padding_mode="border")
            resampled = resample(MetaTensor(image, affine=torch.from_numpy(affine)))
            grid = np.linalg.inv(resampled.affine.numpy()) @ affine @ grid
            image = resampled.as_tensor().float().contiguous()
        return Prepared(image, torch.from_numpy(grid))

    def _box(self, voxels: Tensor) -> tuple[slice, ...]:
        lower = [rule.low if rule.name == "window" else 0.0 for rule in self.rules]
        window = [rule.name == "window" for rule in self.rules]
        ends = torch.tensor(lower).reshape(-1, 1, 1, 1)
        above = torch.tensor(window).reshape(-1, 1, 1, 1)
        inside = torch.where(above, voxels > ends, voxels != 0)
        return bounding_box(inside.any(0).numpy()) if inside.any() else (slice(None),) * 3

    def record(self) -> dict[str, Any]:
        """Returns the preparation as JSON; :meth:`from_record` reads it.

        Example:
            >>> kept = Preparation((Rule("window", -175.0, 250.0),), (1.5, 1.5), crop=True)
            >>> Preparation.from_record(kept.record(), channels=1) == kept
            True
        """
        mm, rules = self.spacing and list(self.spacing), _record_of(self.rules)
        return {"normalization": rules, "resampled_to": mm, "crop_foreground": self.crop}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], channels: int) -> Preparation:
        """Returns the preparation in a record; older records hold only the normalisation."""
        mm = record.get("resampled_to")
        rules = rules_from(record["normalization"], channels)
        crop = bool(record.get("crop_foreground", False))
        return cls(rules, None if mm is None else tuple(map(float, mm)), crop)


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread, on whose number sums depend, and restores it afterwards.

    Example:
        >>> import torch
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def millimetres(spacing: Sequence[float]) -> str:
    """Returns a size as a person writes it.

    Example:
        >>> millimetres([1.0, 1.0, 2.5])
        '1 × 1 × 2.5'
    """
    return " × ".join(f"{mm:.3g}" for mm in spacing)


def on_grid(
    values: Tensor,
    grid: Tensor,
    size: Sequence[int],
    *,
    nearest: bool = False,
    outside: Tensor | None = None,
) -> Tensor:
    """Looks (K, *spatial) values up on another grid; beyond, `outside` (K,) or the border."""
    from monai.data import MetaTensor  # takes seconds to import
    from monai.transforms import SpatialResample

    dims = len(size)
    resample = SpatialResample(
        mode="nearest" if nearest else "bilinear", padding_mode="border", dtype=torch.float32
    )
    image = MetaTensor(values.float(), affine=torch.eye(dims + 1, dtype=torch.float64))
    resampled = resample(image, dst_affine=grid.double().cpu(), spatial_size=list(size)).as_tensor()
    if outside is not None:
        outer = torch.zeros(tuple(size), dtype=torch.bool, device=values.device)
        scale, shift = grid.double().diagonal()[:dims].tolist(), grid.double()[:dims, dims].tolist()
        for axis, (n, have) in enumerate(zip(size, values.shape[1:], strict=True)):
            place = scale[axis] * torch.arange(n, device=values.device) + shift[axis]
            beyond = (place < -0.5) | (place > have - 0.5)
            outer |= beyond.reshape([-1 if a == axis else 1 for a in range(dims)])
        resampled[:, outer] = outside.to(resampled)[:, None]
    moved: Tensor = resampled.to(values.dtype)
    return moved


def plane_of(grid: Tensor) -> Tensor:
    """Returns the matrix (3, 3) of the axial slices of a grid (4, 4) that leaves slices in place.

    Example:
        >>> plane_of(torch.diag(torch.tensor([2.0, 3.0, 1.0, 1.0]))).tolist()
        [[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0]]
    """
    kept = [0, 1, 3]
    return grid[kept][:, kept]


def with_neighbours(volume: Tensor, count: int) -> Tensor:
    """Gives every axial slice of (C, H, W, D) its neighbours as channels; 0 beyond the ends.

    Example:
        >>> with_neighbours(torch.tensor([[[[1.0, 2.0, 3.0]]]]), 3)[:, 0, 0].tolist()
        [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 0.0]]
    """
    if count == 1:
        return volume
    depth = volume.shape[3]
    padded = torch.nn.functional.pad(volume, [count // 2, count // 2])
    shifted = [padded[..., n : n + depth] for n in range(count)]
    return torch.stack(shifted, dim=1).flatten(0, 1)


def axial(volume: Tensor, slices: Tensor) -> Tensor:
    """Stacks axial slices of (C, H, W, D): (S, C, H, W), contiguous."""
    # By NumPy: PyTorch takes nine times as long to bring the last axis to the front.
    taken = volume.numpy()[..., slices.numpy()].transpose(3, 0, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(taken))


def brain_slices(brain: Tensor, every: int = 1) -> Tensor:
    """Chooses axial slices of a brain (H, W, D) by a rule that does not use the label."""
    slices = brain.flatten(0, 1).any(dim=0).nonzero().ravel()
    return slices[min(every // 2, max(len(slices) - 1, 0)) :: every]


def bounding_box(mask: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Finds the smallest box around a mask's voxels; one voxel at the origin if it is empty."""
    axes = range(mask.ndim)
    occupied = [np.flatnonzero(mask.any(axis=tuple({*axes} - {axis}))).tolist() for axis in axes]
    return tuple(slice(at[0], at[-1] + 1) if at else slice(0, 1) for at in occupied)
