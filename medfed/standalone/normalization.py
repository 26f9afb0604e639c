"""How the grey values of a channel become what a network sees: rules, and their records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import check_known
from .errors import ConfigError
from .voxels import zscore

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
    """Returns the rules that `record_of` recorded."""
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
