"""Tubes, blobs and nodules painted into a CT volume, in mm; partial volume blurs their edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rng = np.random.Generator
Array = NDArray[np.float32]
Point = NDArray[np.float64]  # (3,) mm x y z
Spacing = tuple[float, float, float]  # mm along x, y, z
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Canvas:
    """A volume and its scale. Points are mm x y z, counted from the volume's middle.

    Attributes:
        hu: (z, y, x) float32, changed in place.
        spacing: (3,) mm along x, y, z.
    """

    hu: Array
    spacing: Spacing

    @property
    def half(self) -> Point:
        """(3,) mm from the middle to the outermost voxels."""
        size = np.array(self.hu.shape[::-1])
        return np.asarray((size - 1) / 2 * np.array(self.spacing))

    def axes(self) -> tuple[Array, Array, Array]:
        """Positions x (1, 1, W), y (1, H, 1) and z (D, 1, 1) of the voxels, in mm."""
        x, y, z = (
            np.linspace(-h, h, n, dtype=np.float32)
            for h, n in zip(self.half, self.hu.shape[::-1], strict=True)
        )
        return x[None, None], y[None, :, None], z[:, None, None]

    def window(self, low: Point, high: Point) -> tuple[Box, list[Array]]:
        """The voxels of a box, as slices (z, y, x), and their positions x, y, z in mm."""
        half, step = self.half, np.array(self.spacing)
        size = np.array(self.hu.shape[::-1])
        first = np.clip(np.ceil((low + half) / step), 0, size).astype(int)
        last = np.clip(np.floor((high + half) / step) + 1, first, size).astype(int)
        slices = tuple(slice(a, b) for a, b in zip(first, last, strict=True))[::-1]
        x, y, z = (
            (np.arange(a, b) * s - h).astype(np.float32)
            for a, b, s, h in zip(first, last, step, half, strict=True)
        )
        return slices, [x[None, None], y[None, :, None], z[:, None, None]]

    def tube(
        self, start: Point, end: Point, radius: float, value: float, dark: bool = False
    ) -> None:
        """Paints a tube with round ends.

        Args:
            start: (3,) mm.
            end: (3,) mm.
            radius: mm.
            value: HU; where the volume is brighter already, it stays (darker if `dark`).
            dark: Whether the darker value wins.
        """
        reach = radius + self.spacing[0]
        box, position = self.window(np.minimum(start, end) - reach, np.maximum(start, end) + reach)
        along = (end - start).astype(np.float32)
        offset = [p - np.float32(s) for p, s in zip(position, start, strict=True)]
        length = max(float(along @ along), 1e-6)
        share = sum(o * a for o, a in zip(offset, along, strict=True)) / length
        share = np.clip(share, 0, 1)
        square = sum((o - share * a) ** 2 for o, a in zip(offset, along, strict=True))
        self._blend(box, np.sqrt(square) - np.float32(radius), value, self.spacing[0], dark)

    def blob(
        self,
        centre: Point,
        radius: float,
        value: float,
        *,
        stretch: Sequence[float] = (1.0, 1.0, 1.0),
        waves: Array | None = None,
        soft: float | None = None,
    ) -> None:
        """Paints an ellipsoid, whose surface may be lobulated.

        Args:
            centre: (3,) mm.
            radius: mm.
            value: HU; where the volume is brighter already, it stays.
            stretch: Half axes along x, y, z as multiples of the radius.
            waves: (n, 5) direction, phase and height of the waves on its surface.
            soft: Width of its edge in mm; by default one pixel.
        """
        soft = soft or self.spacing[0]
        reach = 1.5 * radius * max(stretch) + soft
        box, position = self.window(centre - reach, centre + reach)
        scaled = [
            (p - np.float32(c)) / np.float32(s)
            for p, c, s in zip(position, centre, stretch, strict=True)
        ]
        distance: Array = np.sqrt(sum(s**2 for s in scaled))
        surface = np.ones_like(distance)
        for *wave, phase, height in waves if waves is not None else ():
            angle = sum(w * s for w, s in zip(wave, scaled, strict=True))
            surface += height * np.sin(angle / np.maximum(distance, np.float32(1e-3)) + phase)
        self._blend(box, distance - np.float32(radius) * surface, value, soft, dark=False)

    def _blend(self, box: Box, distance: Array, value: float, soft: float, dark: bool) -> None:
        """Mixes a value in by the share of each voxel that lies within; `distance` is in mm."""
        share = np.clip(0.5 - distance / np.float32(soft), 0, 1)
        old = self.hu[box]
        mixed = old + share * (np.float32(value) - old)
        self.hu[box] = np.minimum(old, mixed) if dark else np.maximum(old, mixed)


@dataclass(frozen=True)
class Nodule:
    """One nodule.

    Attributes:
        centre: (3,) mm from the middle of the volume.
        diameter: mm.
    """

    centre: Point
    diameter: float


def paint_nodule(rng: Rng, canvas: Canvas, nodule: Nodule, subsolid: bool) -> None:
    """Solid, ground glass or both; round to lobulated, sometimes with spicules."""
    radius = nodule.diameter / 2
    stretch = rng.uniform(0.85, 1.15, size=3).tolist()
    waves = _waves(rng, rng.uniform(0.0, 0.13))
    value = rng.uniform(-620, -380) if subsolid else rng.uniform(-80, 80)
    soft = rng.uniform(1.5, 3.0) if subsolid else None
    canvas.blob(nodule.centre, radius, value, stretch=stretch, waves=waves, soft=soft)
    if subsolid and rng.random() < 0.5:
        off = nodule.centre + 0.25 * radius * rng.standard_normal(3)
        canvas.blob(off, 0.45 * radius, rng.uniform(-150, 30))
    if rng.random() < 0.25:
        for _ in range(int(rng.integers(4, 8))):
            way = rng.standard_normal(3)
            tip = nodule.centre + way / np.linalg.norm(way) * radius * rng.uniform(1.4, 2.0)
            canvas.tube(nodule.centre, tip, 0.5, -250)


def _waves(rng: Rng, height: float) -> Array:
    """(4, 5) waves of a lobulated surface."""
    directions = rng.normal(0, 2.2, size=(4, 3))
    phases = rng.uniform(0, 2 * np.pi, size=(4, 1))
    return np.hstack([directions, phases, np.full((4, 1), height)]).astype(np.float32)
