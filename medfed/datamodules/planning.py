"""Clients agree on one plan: spacing, patch, batch, normalisation and network of a segmentation.

Each client reads facts about its own training cases; the server sums them and plans
(:mod:`medfed.functional.planning`); all clients use its plan. Clients that plan alone get other
networks, which cannot be averaged. A client sends:

======================  ============================================================================
by default              two histograms per axis, of spacings and of extents (mm) without the air
                        around the body, whose bins are 2.3 % wide
``exact``               the spacing and size of every case: they give the plan of pooled data to the
                        last digit, but each is one patient's, so sites refuse them
always                  how many cases lose a quarter of their voxels with the air
of CT                   of the grey values of regions the mean, the mean square and a histogram,
                        summed over cases, which weigh alike
======================  ============================================================================

The smallest and the largest grey value are single voxels; nothing needs them, and they never leave.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from medfed.common.floors import Statistic
from medfed.common.schemas import Count, Number
from medfed.datamodules.extending import *
from medfed.datamodules.tables.agreement import packed
from medfed.functional.planning import Configuration, Fingerprint, Floats, Plan, Planner, Residual
from medfed.standalone.normalization import Rule, is_ct
from medfed.standalone.preparation import bounding_box

_PER_DECADE, _FINEST, _BINS = 100, -1, 451  # from 0.1 to 3,162 mm
_HU = np.linspace(-1024, 3072, 257)  # ends of bins
_AIR = 0.75  # share of a scan inside the air below which z-scores leave the air out
_TAILS = (0.5, 99.5)  # percentiles between which grey values of CT stay


class CaseFacts(NamedTuple):
    """Facts about one case, which stay with its client."""

    spacing: Sequence[float]  # (3,) mm
    shape: Sequence[int]  # (3,) voxels without air
    kept: float  # the share of its voxels that are left without air
    # (K, 2) mean and mean square in regions, of the K channels of CT; NaN without regions.
    grey: Floats
    shares: Floats  # (K, 256) of the voxels in regions, by bins of HU


def facts_of(
    image: Tensor, label: Tensor, present: Tensor, spacing: Sequence[float], channels: Sequence[str]
) -> CaseFacts:
    """Measures a case from its files' grey values (C, h, w, d) and its label (R, h, w, d)."""
    shape = [side.stop - side.start for side in bounding_box((image[present] != 0).any(0).numpy())]
    inside = (label != 0).any(0)
    ct = [at for at, name in enumerate(channels) if is_ct(name)]
    grey, shares = np.full((len(ct), 2), np.nan), np.zeros((len(ct), len(_HU) - 1))
    for row, at in enumerate(ct):
        if present[at] and inside.any():
            values = image[at][inside].numpy().astype(float)
            grey[row] = values.mean(), np.square(values).mean()
            counts, _ = np.histogram(values.clip(_HU[0], _HU[-1]), _HU)
            shares[row] = counts / len(values)
    return CaseFacts(spacing, shape, math.prod(shape) / inside.numel(), grey, shares)


@dataclass(frozen=True)
class _Message:
    """The message of a client; attributes as the table above says."""

    spacings: list[list[Number]]
    extents: list[list[Number]]
    cases: Count
    smaller: Count
    known: list[Count]
    grey: list[list[Number]]
    shares: list[list[Number]]


@dataclass(frozen=True)
class Agreed:
    """The agreed plan, for axes in the order (x, y, z)."""

    plan: Plan
    foreground: bool  # whether z-scores leave out the air
    # By channel of CT the lowest and highest grey value, mean and deviation; None for other
    # channels.
    grey: tuple[tuple[Number, Number, Number, Number] | None, ...]

    @classmethod
    def read(cls, answer: bytes) -> Agreed:
        """Reads the server's answer."""
        try:
            return parse_json(answer, cls)
        except ValueError as error:
            raise DataError(f"The plan of the server is malformed: {error}.") from error

    def rules(self) -> tuple[Rule, ...]:
        """Returns how each channel is normalised."""
        usual = Rule("zscore_nonzero" if self.foreground else "zscore")
        known = (of and Rule("clip_zscore", *of[:2], of[2:]) for of in self.grey)
        return tuple(rule or usual for rule in known)


@dataclass(frozen=True)
class Planning:
    """How to plan; ``data.planning``."""

    # ``M``, ``L`` or ``XL``: nnU-Net's presets of a residual encoder; None: plain convolutions.
    residual: Residual | None = None
    # GPU memory that training may take; None: 8, 24 for ``L``, 40 for ``XL``. Less makes smaller
    # patches.
    memory_gb: Annotated[float | None, within("(0, inf)")] = None
    lowres: bool = False  # plan for volumes of low resolution
    features: Annotated[int, check_count] = 32  # of the finest stage
    exact: bool = False  # tell the spacing and size of every case, instead of histograms

    def __post_init__(self) -> None:
        check_fields("data.planning", self)

    def client_message(self, cases: Iterable[CaseFacts]) -> bytes:
        """Returns a client's message about its training cases."""
        every = list(cases)
        spacings = np.array([case.spacing for case in every])
        extents = spacings * np.array([case.shape for case in every])
        grey = np.array([case.grey for case in every])
        facts = _Message(
            (spacings if self.exact else _histograms(spacings)).tolist(),
            (extents if self.exact else _histograms(extents)).tolist(),
            len(every),
            sum(case.kept < _AIR for case in every),
            (~np.isnan(grey[..., 0])).sum(axis=0).tolist(),
            np.nansum(grey, axis=0).tolist(),
            np.sum([case.shares for case in every], axis=0).round(6).tolist(),
        )
        return packed(asdict(facts))

    def server_answer(
        self,
        messages: Sequence[bytes],
        channels: Sequence[str],
        labels: int,
        dims: int,
        **facts: Any,
    ) -> bytes:
        """Returns the server's answer to all clients: the plan."""
        every = [self._read(content, sum(map(is_ct, channels))) for content in messages]
        parts = ([getattr(message, n) for message in every] for n in ("spacings", "extents"))
        tables = [np.concatenate(p) if self.exact else _values(np.sum(p, axis=0)) for p in parts]
        spacings, extents = (table[:, ::-1] for table in tables)  # planned as (z, y, x)
        sizes = extents / (spacings if self.exact else np.median(spacings, axis=0))
        facts = {n: v[::-1] if isinstance(v, Sequence) else v for n, v in facts.items()}
        settings = self.residual, self.memory_gb, self.features
        planner = Planner(len(channels), labels, *settings, axial=dims == 2, **facts)
        name: Configuration = "2d" if dims == 2 else "3d_lowres" if self.lowres else "3d_fullres"
        plan = planner.plan(Fingerprint(spacings, sizes, extents), name)
        smaller = sum(2 * message.smaller - message.cases for message in every)
        ct = [name for name in channels if is_ct(name)]
        grey = tuple(_grey(every, ct.index(n)) if n in ct else None for n in channels)
        return packed(asdict(Agreed(plan.mirrored(), smaller > 0, grey)))

    def _read(self, content: bytes, ct: int) -> _Message:
        """Reads a message about `ct` channels of CT."""
        try:
            message = parse_json(content, _Message)
            counts = np.array([*message.spacings, *message.extents])  # fails if lengths differ
            wanted = (2 * message.cases, 3) if self.exact else (6, _BINS)
            if counts.shape != wanted or message.smaller > message.cases:
                raise ValueError("its tables have another size")
            if self.exact and counts.min(initial=1) <= 0:
                raise ValueError("its lengths are not positive")
            if not self.exact and (counts.min() < 0 or (counts.sum(axis=1) != message.cases).any()):
                raise ValueError("its histograms do not count its cases")
            tables = np.array([*message.grey]), np.array([*message.shares])
            sizes = (len(message.known), *(table.shape for table in tables))
            if ct and sizes != (ct, (ct, 2), (ct, len(_HU) - 1)):
                raise ValueError("its grey values are of other channels")
        except ValueError as error:
            raise DataError(f"A message about training cases is malformed: {error}.") from error
        return message

    def statistic(self, client: str, patients: int, channels: Sequence[str]) -> Statistic:
        """Returns what a client's message tells, with the patients behind it."""
        if self.exact:
            return Statistic(client, "each case's spacing and size", "data.planning.exact", 1, 1)
        what = "the histograms of spacings and sizes"
        size = 6 + 3 * sum(map(is_ct, channels))  # two moments and a histogram of CT
        return Statistic(client, what, "data.planning", size, patients)


def _histograms(values: Floats) -> Floats:
    """Counts of (N, 3) mm by axis and bin, (3, bins) whole numbers."""
    at = np.round(_PER_DECADE * (np.log10(values) - _FINEST)).clip(0, _BINS - 1).astype(int)
    return np.stack([np.bincount(axis, minlength=_BINS) for axis in at.T])


def _values(counts: Floats) -> Floats:
    """The (N, 3) values that such counts stand for, each axis sorted."""
    middle = 10 ** (np.arange(_BINS) / _PER_DECADE + _FINEST)
    return np.stack([np.repeat(middle, axis.astype(int)) for axis in counts], axis=1)


def _grey(every: Sequence[_Message], at: int) -> tuple[float, float, float, float] | None:
    """Ends, mean and deviation of a channel of CT; None where no case has a region."""
    known = sum(message.known[at] for message in every)
    if not known:
        return None
    mean, square = np.sum([message.grey[at] for message in every], axis=0) / known
    shares = np.sum([message.shares[at] for message in every], axis=0)
    below = np.concatenate([[0.0], shares.cumsum()])
    low, high = np.interp(np.array(_TAILS) / 100 * below[-1], below, _HU)
    return float(low), float(high), float(mean), math.sqrt(max(0.0, square - mean**2)) or 1.0
