"""Planning: from facts about training cases to spacing, patch, batch and network.

The rules are nnU-Net's, written anew: F. Isensee et al., "nnU-Net: a self-configuring method for
deep learning-based biomedical image segmentation", Nature Methods 2021; residual encoders: F.
Isensee et al., "nnU-Net Revisited", MICCAI 2024. The plans equal those of nnunetv2 2.8.1.

Axes are in the order (z, y, x). Every rule looks at one axis by itself, so it needs no cases, only
the values of each axis: hospitals can agree on them by histograms.

======================  ============================================================================
spacing                 median of each axis; for thick slices the finest tenth of that axis
patch                   as large as memory allows, with the shape of a median case
strides, kernel sizes   an axis is halved while it has 8 voxels, and is at most twice as coarse as
                        the finest one; kernels are flat while it is coarser
batch                   what memory allows, 2 or more, and of a network without residual encoder at
                        most 5 % of all voxels
======================  ============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from medfed.standalone.errors import ConfigError

Floats = NDArray[np.float64]
Ints = tuple[int, ...]
Configuration = Literal["2d", "3d_fullres", "3d_lowres"]
Residual = Literal["M", "L", "XL"]

ANISOTROPY = 3  # an axis that is so much coarser than the others has thick slices
EDGE = 4  # voxels that no axis falls below in the deepest stage
_WIDEST = {2: 512, 3: 320}  # features of a stage
_USUAL_BATCH = {2: 12, 3: 2}  # for which the feature maps below were counted
# Share of a median case in a patch; below it, there is a configuration of low resolution.
_ENOUGH = 0.25
_COARSER = 1.03  # step in the search for its spacing
_LEAST_BATCH = 2


@dataclass(frozen=True)
class _Preset:
    """Numbers in the feature maps of a sample that fit into `gb`; a batch's share of voxels."""

    gb: float
    maps: dict[int, float]
    covered: float = 1.0


_PRESETS: dict[Residual | None, _Preset] = {
    None: _Preset(8.0, {2: 85e6, 3: 560e6}, covered=0.05),
    "M": _Preset(8.0, {2: 135e6, 3: 680e6}),
    "L": _Preset(24.0, {2: 380e6, 3: 2100e6}),
    "XL": _Preset(40.0, {2: 560e6, 3: 3600e6}),
}
_RESIDUAL_BLOCKS = (1, 3, 4, 6)


@dataclass(frozen=True)
class Fingerprint:
    """What planning needs to know of N training cases; each axis by itself.

    Attributes:
        spacings: (N, 3) mm.
        shapes: (N, 3) voxels, after cropping to those that are not 0.
        extents: (N, 3) mm: their products, as long as rows are cases.
    """

    spacings: Floats
    shapes: Floats
    extents: Floats

    def spacing(self) -> Floats:
        """Returns (3,) mm to which cases are resampled."""
        target: Floats = np.percentile(self.spacings, 50, axis=0)
        size = np.percentile(self.shapes, 50, axis=0)
        worst = int(target.argmax())
        others = [axis for axis in range(3) if axis != worst]
        finest = target[others].max()
        coarse = target[worst] > ANISOTROPY * finest
        if coarse and size[worst] * ANISOTROPY < size[others].min():
            tenth = np.percentile(self.spacings[:, worst], 10)
            target[worst] = tenth if tenth >= finest else finest + 1e-5
        return target


@dataclass(frozen=True)
class Plan:
    """A plan; stages are ordered from the finest to the deepest.

    Attributes:
        configuration: nnU-Net's name of it.
        residual: The preset of a residual encoder; None: plain convolutions.
        spacing: mm.
        patch_size: Voxels.
        batch_size: Patches.
        strides: Into each stage, by axis.
        kernel_sizes: Of each stage, by axis.
        features: Of each stage.
        blocks: Convolutions of each stage of the encoder, or its residual blocks.
        decoder_blocks: Convolutions of each stage of the decoder.
    """

    configuration: Configuration
    residual: Residual | None
    spacing: tuple[float, ...]
    patch_size: Ints
    batch_size: int
    strides: tuple[Ints, ...]
    kernel_sizes: tuple[Ints, ...]
    features: Ints
    blocks: Ints
    decoder_blocks: Ints

    def along(self, axes: Sequence[int]) -> Plan:
        """Returns the plan for axes in another order: the n-th of it is ``axes[n]`` of this one."""
        stages = (self.strides, self.kernel_sizes)
        strides, kernels = (tuple(tuple(s[a] for a in axes) for s in each) for each in stages)
        mm, voxels = zip(*((self.spacing[a], self.patch_size[a]) for a in axes), strict=True)
        return replace(self, spacing=mm, patch_size=voxels, strides=strides, kernel_sizes=kernels)

    def mirrored(self) -> Plan:
        """Returns the plan for axes in the opposite order, (x, y, z)."""
        return self.along(range(len(self.spacing))[::-1])

    def record(self) -> dict[str, Any]:
        """Returns the plan as JSON has it."""
        return dict(msgspec.json.decode(msgspec.json.encode(self)))


@dataclass(frozen=True)
class Planner:
    """The settings of planning.

    Attributes:
        channels: Input channels C.
        labels: Labels, including the background.
        residual: The preset of a residual encoder; None: plain convolutions.
        memory_gb: Memory of a GPU that training may take; None: as the preset.
        features: Of the finest stage.
        axial: Whether slices are axial in any case; otherwise along the coarsest axis.
        spacing: mm that the user sets, by axis (of axial slices two); None: planned.
        patch_size: Voxels that the user sets; None: planned.
        batch_size: Patches that the user sets; None: planned.
    """

    channels: int
    labels: int
    residual: Residual | None = None
    memory_gb: float | None = None
    features: int = 32
    axial: bool = False
    spacing: Sequence[float] | None = None
    patch_size: Sequence[int] | None = None
    batch_size: int | None = None

    def plan(self, cases: Fingerprint, configuration: Configuration) -> Plan:
        """Returns the network, patch size and batch size that fit the cases and the memory.

        Args:
            cases: Facts about training cases.
            configuration: ``2d``, ``3d_fullres`` or ``3d_lowres``.
        """
        mm = cases.spacing()
        if self.spacing is not None:
            mm[-len(self.spacing) :] = self.spacing
        coarsest = 0 if self.axial else int(mm.argmax())
        order = [coarsest, *(axis for axis in range(3) if axis != coarsest)]
        spacing = mm[order]
        median: Floats = np.median(np.round(cases.extents[:, order] / spacing), axis=0)
        voxels = float(median.prod()) * len(cases.spacings)
        if configuration == "2d":
            order = [axis - (axis > coarsest) for axis in order[1:]]
            plan = self._fitting(spacing[1:], median[1:], voxels, configuration, order)
            return plan.along(np.argsort(order).tolist())
        if median[0] == 1:
            raise ConfigError("The cases are single slices, so only a plan in 2-D is possible.")
        plan = self._fitting(spacing, median, voxels, "3d_fullres", order)
        if configuration == "3d_lowres" and self.spacing is None:
            plan = self._coarser(plan, median, len(cases.spacings), order)
        return plan.along(np.argsort(order).tolist())

    def _coarser(self, plan: Plan, median: Floats, cases: int, order: Sequence[int]) -> Plan:
        """The plan whose patch holds a quarter of a median case, after resampling further."""
        fine = np.array(plan.spacing)
        spacing, voxels = fine.copy(), float(median.prod())
        coarser = None
        patch = float(math.prod(plan.patch_size))
        while patch / voxels < _ENOUGH:
            finer = spacing.max() / spacing > 2
            spacing[finer if finer.any() else slice(None)] *= _COARSER
            shape = fine / spacing * median
            voxels = float(shape.prod())
            rounded = np.array([round(n) for n in shape])
            coarser = self._fitting(spacing, rounded, voxels * cases, "3d_lowres", order)
            patch = float(math.prod(coarser.patch_size))
        if coarser is None or median.prod() / voxels < 2:
            raise ConfigError(
                "A patch at full resolution already holds much of a case, so there is no plan of "
                "low resolution; leave data.planning.lowres at false."
            )
        return coarser

    def _fitting(
        self,
        spacing: Floats,
        median: Floats,
        voxels: float,
        configuration: Configuration,
        order: Sequence[int],
    ) -> Plan:
        """The largest patch whose feature maps fit into memory, with its network and batch."""
        dims, preset = len(spacing), _PRESETS[self.residual]
        memory = preset.gb if self.memory_gb is None else self.memory_gb
        room = preset.maps[dims] * (memory / preset.gb)
        if self.patch_size is None:
            net = self._largest(spacing, median, room)
        else:
            sizes = tuple(self.patch_size[axis] for axis in order)
            net = _topology(spacing, sizes)
            if net.patch != sizes:
                raise ConfigError(
                    f"data.patch_size={list(self.patch_size)} must be a multiple of "
                    f"{[net.divisor[order.index(axis)] for axis in range(dims)]} for its network."
                )
        batch = self.batch_size
        if batch is None:
            covered = round(voxels * preset.covered / math.prod(net.patch))
            fits = round(room / self._maps(net) * _USUAL_BATCH[dims])
            batch = max(min(fits, covered), _LEAST_BATCH)
        stages = len(net.strides)
        more = self._features(stages, dims), *self._blocks(stages)
        of = net.patch, batch, net.strides, net.kernels, *more
        return Plan(configuration, self.residual, tuple(spacing.tolist()), *of)

    def _largest(self, spacing: Floats, median: Floats, room: float) -> _Topology:
        """The network of the largest patch that fits."""
        dims = len(spacing)
        # `room` is counted for the usual batch, which may be larger than the least.
        most = room if self.residual else room * _USUAL_BATCH[dims] / _LEAST_BATCH
        finest = 1 / spacing
        start = finest * (_LARGEST[dims] ** dims / finest.prod()) ** (1 / dims)
        first = [min(round(n), m) for n, m in zip(start, median, strict=True)]
        net = _topology(spacing, first)
        while self._maps(net) > most:
            # The axis that is largest relative to a median case gets shorter by one step.
            patch = net.patch
            axis = max(range(dims), key=lambda a: (patch[a] / median[a], a))
            shorter = list(patch)
            shorter[axis] -= net.divisor[axis]
            if min(shorter) < EDGE:
                raise ConfigError(
                    f"data.planning.memory_gb={self.memory_gb} is too small for any patch of these "
                    "cases; set more."
                )
            shorter[axis] = patch[axis] - _topology(spacing, shorter).divisor[axis]
            net = _topology(spacing, shorter)
        return net

    def _features(self, stages: int, dims: int) -> Ints:
        return tuple(min(_WIDEST[dims], self.features * 2**stage) for stage in range(stages))

    def _blocks(self, stages: int) -> tuple[Ints, Ints]:
        if self.residual is None:
            return (2,) * stages, (2,) * (stages - 1)
        last = _RESIDUAL_BLOCKS[-1]
        return (*_RESIDUAL_BLOCKS, *[last] * stages)[:stages], (1,) * (stages - 1)

    def _maps(self, net: _Topology) -> float:
        """The numbers in all feature maps of a sample."""
        stages, whole = len(net.strides), math.prod(net.patch)
        blocks, decoder_blocks = self._blocks(stages)
        maps = np.array(blocks, dtype=float)
        if self.residual:
            maps = 2 * maps + (np.arange(stages) > 0)  # two per block, one past the first
        maps[:-1] += np.array(decoder_blocks) + 1  # and the transposed convolution
        features = np.array(self._features(stages, len(net.patch)))
        voxels = (net.patch // np.cumprod(net.strides, axis=0)).prod(axis=1)
        stem = int(features[0]) if self.residual else 0
        return float((self.labels + stem) * whole + maps @ (features * voxels))


_LARGEST = {2: 2048, 3: 256}  # sides of a patch from which the search begins


class _Topology(NamedTuple):
    """What each stage of a network does, by axis."""

    strides: tuple[Ints, ...]
    kernels: tuple[Ints, ...]
    patch: Ints  # voxels, a multiple of
    divisor: Ints


def _topology(spacing: Sequence[float] | Floats, size: Sequence[float]) -> _Topology:
    """Decides which axes each stage halves.

    Example:
        >>> strides, kernels, patch, divisor = _topology([4.0, 1.0, 1.0], [7, 15, 16])
        >>> strides, kernels
        (((1, 1, 1), (1, 2, 2), (1, 2, 2)), ((1, 3, 3), (1, 3, 3), (3, 3, 3)))
        >>> patch, divisor
        ((7, 16, 16), (1, 4, 4))
    """
    dims = len(size)
    mm, left = [float(x) for x in spacing], [float(n) for n in size]
    kernel = (1,) * dims
    strides: list[Ints] = [kernel]
    kernels: list[Ints] = []
    while wide := [axis for axis in range(dims) if left[axis] >= 2 * EDGE]:
        finest = min(mm[axis] for axis in wide)
        halved = [axis for axis in wide if mm[axis] / finest < 2]
        if len(halved) == 1 and left[halved[0]] < 3 * EDGE:
            break
        near = [mm[axis] / min(mm) < 2 for axis in range(dims)]
        kernel = tuple(3 if near[axis] else kernel[axis] for axis in range(dims))
        stride = tuple(2 if axis in halved else 1 for axis in range(dims))
        mm = [x * by for x, by in zip(mm, stride, strict=True)]
        left = [float(math.ceil(n / by)) for n, by in zip(left, stride, strict=True)]
        strides.append(stride)
        kernels.append(kernel)
    kernels.append((3,) * dims)
    divisor = tuple(math.prod(stride[axis] for stride in strides) for axis in range(dims))
    whole = tuple(math.ceil(n / by) * by for n, by in zip(size, divisor, strict=True))
    return _Topology(tuple(strides), tuple(kernels), whole, divisor)
