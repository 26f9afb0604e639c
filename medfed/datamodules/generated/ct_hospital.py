"""How hospitals with CT scanners differ: whom they treat, and how they scan."""

from __future__ import annotations

from dataclasses import dataclass

from medfed.datamodules.generated.cohort import spread_traits

TRAITS: dict[str, tuple[float, float]] = {
    "nodules": (3.5, 8.5),
    "diameter": (5.5, 9.5),
    "subsolid": (0.1, 0.6),
    "pleural": (0.1, 0.5),
    "scars": (0.05, 0.35),
    "emphysema": (0.0, 1.0),
    "agent": (0.0, 150.0),
    "noise": (15.0, 60.0),
    "blur": (0.4, 1.1),
    "thickness": (1.1, 2.3),
    "offset": (-40.0, 40.0),
}


@dataclass(frozen=True)
class CtHospital:
    """The traits of one hospital.

    Attributes:
        name: Such as ``hospital_0``.
        nodules: Mean number of nodules per scan.
        diameter: Their median diameter, in mm.
        subsolid: Share of nodules that are ground glass or partly so.
        pleural: Share of nodules at the pleura.
        scars: Share of scars and pleural plaques among the candidates that are no nodules.
        emphysema: Depth of the dark patches in the lungs, as a share of the worst.
        agent: HU that the contrast agent adds to the vessels.
        noise: Standard deviation of the noise, in HU.
        blur: In-plane blur of the reconstruction kernel, in mm.
        thickness: Typical distance of the slices, in mm.
        offset: HU that the calibration is off.
    """

    name: str
    nodules: float
    diameter: float
    subsolid: float
    pleural: float
    scars: float
    emphysema: float
    agent: float
    noise: float
    blur: float
    thickness: float
    offset: float


def make_ct_hospitals(count: int, seed: int) -> list[CtHospital]:
    """Draws the hospitals of a cohort.

    Args:
        count: How many.
        seed: Seed of the order of every trait.

    Returns:
        The hospitals, ``hospital_0`` first.

    Example:
        >>> sorted(h.noise for h in make_ct_hospitals(2, seed=0))
        [15.0, 60.0]
    """
    drawn = spread_traits(TRAITS, count, seed)
    return [CtHospital(f"hospital_{n}", **traits) for n, traits in enumerate(drawn)]
