"""Grey values as a network sees them: one rule per channel, chosen per data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfed.common.checks import check_known
from medfed.common.errors import ConfigError

CT_WINDOW = (-175.0, 250.0)  # HU: soft tissue, as MONAI's models of abdominal organs have it
_PLAIN = ("zscore_nonzero", "zscore", "none")
_RANGES = ("window", "percentiles")


@dataclass(frozen=True)
class Rule:
    """What becomes of the grey values of a channel.

    Attributes:
        name: ``zscore_nonzero`` (mean 0 and deviation 1 over voxels that are not 0, which stay 0),
            ``zscore`` (over all voxels), ``window`` (values from `low` to `high`, cut off there,
            scaled to 0..1), ``percentiles`` (the same between two percentiles of the scan), or
            ``none``.
        low: Lower end, where there is one.
        high: Upper end.

    Raises:
        ConfigError: If the name is unknown, or the ends are no range.
    """

    name: str
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        check_known("data.normalize", self.name, (*_PLAIN, *_RANGES))
        if self.name not in _RANGES:
            return
        ends = (self.low, self.high)
        limits = (0, 100) if self.name == "percentiles" else (-math.inf, math.inf)
        if not (all(map(math.isfinite, ends)) and limits[0] <= self.low < self.high <= limits[1]):
            raise ConfigError(
                f"data.normalize={{{self.name}: [{self.low:g}, {self.high:g}]}} must be two "
                f"ascending numbers{' from 0 to 100' * (self.name == 'percentiles')}."
            )

    @property
    def is_scaled(self) -> bool:
        """Whether values come to lie in 0..1, where 0 is air or background."""
        return self.name in _RANGES

    def apply(self, channel: Tensor) -> Tensor:
        """Normalises one channel.

        Args:
            channel: (1, *spatial) float32; may be changed in place.

        Returns:
            The same shape. A channel of one value becomes 0.

        Example:
            >>> hounsfield = torch.tensor([[-1000.0, 37.5, 900.0]])
            >>> Rule("window", -175.0, 250.0).apply(hounsfield)
            tensor([[0.0000, 0.5000, 1.0000]])
        """
        if self.name == "zscore_nonzero":
            return zscore(channel)
        if self.name == "none":
            return channel
        if channel.min() == channel.max():
            return torch.zeros_like(channel)
        from monai.transforms import (  # takes seconds to import
            NormalizeIntensity,
            ScaleIntensityRange,
            ScaleIntensityRangePercentiles,
        )

        unit = {"b_min": 0.0, "b_max": 1.0, "clip": True}
        if self.name == "window":
            transform: Any = ScaleIntensityRange(self.low, self.high, **unit)
        elif self.name == "percentiles":
            transform = ScaleIntensityRangePercentiles(self.low, self.high, **unit)
        else:
            transform = NormalizeIntensity()
        return torch.as_tensor(transform(channel)).as_subclass(Tensor)

    def record(self) -> dict[str, Any]:
        """Returns the rule as JSON, for bundles and predictions.

        Example:
            >>> Rule("window", -175.0, 250.0).record()
            {'name': 'window', 'hu': [-175.0, 250.0], 'to': [0, 1]}
        """
        if self.name == "window":
            return {"name": "window", "hu": [self.low, self.high], "to": [0, 1]}
        if self.name == "percentiles":
            return {"name": "percentiles", "percentiles": [self.low, self.high], "to": [0, 1]}
        if self.name == "none":
            return {"name": "none"}
        nonzero = self.name == "zscore_nonzero"
        return {"name": "zscore", "nonzero": nonzero, "channel_wise": True}


def record_of(rules: Sequence[Rule]) -> dict[str, Any]:
    """Returns the rules of all channels as JSON: one record where they are the same.

    Example:
        >>> record_of([Rule("zscore"), Rule("zscore")])
        {'name': 'zscore', 'nonzero': False, 'channel_wise': True}
        >>> rules = (Rule("window", -175.0, 250.0), Rule("zscore_nonzero"))
        >>> rules_from(record_of(rules), 2) == rules
        True
    """
    if len(set(rules)) == 1:
        return rules[0].record()
    return {"name": "by_channel", "channels": [rule.record() for rule in rules]}


def rules_from(record: Mapping[str, Any], channels: int) -> tuple[Rule, ...]:
    """Returns the rules that `record_of` recorded.

    Args:
        record: From `record_of`.
        channels: How many there are.

    Raises:
        ConfigError: If it is no such record.
    """
    if record.get("name") == "by_channel":
        return tuple(rules_from(each, 1)[0] for each in record["channels"])
    name = str(record.get("name"))
    if name == "zscore":
        name = "zscore_nonzero" if record.get("nonzero", True) else "zscore"
    ends = record.get("hu") or record.get("percentiles") or ()
    return (Rule(name, *map(float, ends)),) * channels


def rules_of(setting: object, channels: Sequence[str]) -> tuple[Rule, ...]:
    """Reads ``data.normalize``.

    Args:
        setting: A rule's name; ``{window: [low, high]}`` or ``{percentiles: [low, high]}``; or None
            for what is usual: a window of soft tissue for CT, `zscore_nonzero` for all else.
        channels: Names of the channels; CT is known by its name.

    Returns:
        A rule per channel.

    Raises:
        ConfigError: If it is none of these.

    Example:
        >>> [rule.name for rule in rules_of(None, ["CT", "PET"])]
        ['window', 'zscore_nonzero']
        >>> rules_of({"window": [-1000, 400]}, ["CT"])
        (Rule(name='window', low=-1000.0, high=400.0),)
    """
    if setting is None:
        usual = Rule("zscore_nonzero")
        return tuple(Rule("window", *CT_WINDOW) if is_ct(name) else usual for name in channels)
    if isinstance(setting, str) and setting in _PLAIN:
        return (Rule(setting),) * len(channels)
    if isinstance(setting, Mapping) and len(setting) == 1:
        name, ends = next(iter(setting.items()))
        numbers = isinstance(ends, Sequence) and not isinstance(ends, str) and len(ends) == 2
        if name in _RANGES and numbers and all(type(end) in (int, float) for end in ends):
            return (Rule(str(name), *map(float, ends)),) * len(channels)
    raise ConfigError(
        f"data.normalize={setting} must be {', '.join(_PLAIN)}, {{window: [LOW, HIGH]}}, "
        "{percentiles: [LOW, HIGH]}, or null for what is usual."
    )


def is_ct(channel: str) -> bool:
    """Says whether a channel is computed tomography, by its name.

    Example:
        >>> is_ct("CT"), is_ct("ct "), is_ct("flair_ct1")
        (True, True, False)
    """
    return channel.strip().lower() in ("ct", "cect", "ncct", "computed tomography")


def zscore(image: Tensor) -> Tensor:
    """Normalises each channel over its voxels that are not zero; zero stays zero.

    Not by MONAI, whose transforms spend half of their time on tensors that carry metadata along.

    Args:
        image: (C, *spatial) float32; changed in place.

    Returns:
        The same tensor. A channel of one value, or without any, becomes zero.

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
