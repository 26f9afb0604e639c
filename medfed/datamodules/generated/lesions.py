"""Nodules, and what a detector takes for nodules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medfed.datamodules.generated.canvas import Array, Point
from medfed.datamodules.generated.chest import Chest, Rng
from medfed.datamodules.generated.ct_hospital import CtHospital

DIAMETERS = (4.0, 20.0)  # mm


@dataclass(frozen=True)
class Nodule:
    """One nodule.

    Attributes:
        centre: (3,) mm from the middle of the volume.
        diameter: mm.
    """

    centre: Point
    diameter: float


def add_nodules(rng: Rng, chest: Chest, hospital: CtHospital) -> list[Nodule]:
    """Paints the nodules of one patient, at least one.

    Args:
        rng: Source of randomness, this patient's own.
        chest: The lung, changed in place.
        hospital: Number, size and kind of nodules.

    Returns:
        The nodules, none of which touches another or the end of the volume.
    """
    found: list[Nodule] = []
    for _ in range(max(int(rng.poisson(hospital.nodules)), 1)):
        diameter = float(np.clip(rng.lognormal(np.log(hospital.diameter), 0.38), *DIAMETERS))
        pleural = rng.random() < hospital.pleural
        centre = _free_place(rng, chest, found, diameter, (0.88, 0.97) if pleural else (0, 0.85))
        if centre is not None:
            found.append(Nodule(centre, diameter))
            _paint_nodule(rng, chest, found[-1], rng.random() < hospital.subsolid)
    return found


def add_lookalikes(
    rng: Rng, chest: Chest, hospital: CtHospital, nodules: list[Nodule], count: int
) -> list[Point]:
    """Finds, and partly paints, what is no nodule.

    Args:
        rng: Source of randomness, this patient's own.
        chest: The lung, changed in place.
        hospital: Share of scars and plaques.
        nodules: The nodules, from which these places keep away.
        count: How many to look for.

    Returns:
        Their places: vessels and their forks, airways, scars, plaques, bumps of the pleura.
    """
    places: list[Point] = []
    for _ in range(count):
        kind = rng.random()
        if kind < hospital.scars:
            place = _scar(rng, chest, nodules) if rng.random() < 0.6 else _bump(rng, chest, nodules)
        elif kind < hospital.scars + 0.12 and chest.airways:
            place = chest.airways[int(rng.integers(len(chest.airways)))]
        elif kind < hospital.scars + 0.22:
            place = _free_place(rng, chest, nodules, 2.0, (0.9, 1.0))
        else:
            place = _vessel(rng, chest)
        if place is not None and _is_free(chest, place, nodules, 3.0):
            places.append(place)
    return places


def _is_free(chest: Chest, place: Point, nodules: list[Nodule], radius: float) -> bool:
    """Whether a ball lies inside the volume and apart from all nodules."""
    if (np.abs(place) + radius > chest.canvas.half).any():
        return False
    gaps = [np.linalg.norm(place - n.centre) - n.diameter / 2 - radius for n in nodules]
    return not gaps or float(min(gaps)) > 2.0


def _free_place(
    rng: Rng, chest: Chest, nodules: list[Nodule], diameter: float, depth: tuple[float, float]
) -> Point | None:
    """A place in the lung at a given depth, where a ball of this diameter has room."""
    for _ in range(400):
        place = rng.uniform(-0.95, 0.95, size=3) * chest.canvas.half
        low, high = depth
        if low <= chest.depth_at(place) <= high and _is_free(chest, place, nodules, diameter / 2):
            return np.asarray(place)
    return None


def _paint_nodule(rng: Rng, chest: Chest, nodule: Nodule, subsolid: bool) -> None:
    """Solid, ground glass or both; round to lobulated, sometimes with spicules."""
    canvas, radius = chest.canvas, nodule.diameter / 2
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


def _vessel(rng: Rng, chest: Chest) -> Point | None:
    """A place on a vessel of the calibre of a nodule; forks and bends are where pieces meet."""
    wide = [end for _, end, radius in chest.vessels if radius > 0.9]
    return wide[int(rng.integers(len(wide)))] if wide else None


def _scar(rng: Rng, chest: Chest, nodules: list[Nodule]) -> Point | None:
    """A band of scar tissue: thin in one direction, long in another."""
    place = _free_place(rng, chest, nodules, 8.0, (0.3, 0.95))
    if place is None:
        return None
    way = rng.standard_normal(3) * [1, 1, 0.5]
    way *= rng.uniform(5, 11) / np.linalg.norm(way)
    bend = place + rng.normal(0, 1.5, size=3)
    radius, value = rng.uniform(1.0, 2.2), rng.uniform(-150, 40)
    for start, end in ((place - way, bend), (bend, place + way)):
        chest.canvas.tube(start, end, radius, value)
    return bend


def _bump(rng: Rng, chest: Chest, nodules: list[Nodule]) -> Point | None:
    """A plaque: a flat thickening of the pleura."""
    place = _free_place(rng, chest, nodules, 6.0, (0.95, 1.0))
    if place is None:
        return None
    inwards = -place * [1, 1, 0]
    inwards /= max(float(np.linalg.norm(inwards)), 1e-6)
    along = np.array([-inwards[1], inwards[0], 0.3 * rng.standard_normal()])
    along *= rng.uniform(4, 9)
    chest.canvas.tube(place - along, place + along, rng.uniform(1.3, 2.6), rng.uniform(-20, 60))
    return place
