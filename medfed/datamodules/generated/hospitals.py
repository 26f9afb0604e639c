"""How the hospitals of a cohort differ: whom they treat, how they scan, and how they outline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from medfed.common.seeding import numpy_rng

Range = tuple[float, float]


def trait(low: float, high: float) -> Any:
    """A field of a hospital that goes from `low` to `high` over the hospitals of a cohort."""
    return field(metadata={"range": (low, high)})


@dataclass(frozen=True)
class Hospital:
    """Base of the hospitals: each trait is spread evenly, in its random order.

    So any two hospitals differ in most traits.

    Attributes:
        name: Such as ``hospital_0``.
    """

    name: str

    @classmethod
    def traits(cls) -> dict[str, tuple[float, float]]:
        """Returns the lowest and the highest value of every trait."""
        return {f.name: f.metadata["range"] for f in fields(cls) if "range" in f.metadata}

    @classmethod
    def draw(cls, count: int, seed: int, ranges: Mapping[str, Range] | None = None) -> list[Self]:
        """Draws the hospitals of a cohort.

        Args:
            count: How many.
            seed: Seed of the order of every trait.
            ranges: The lowest and the highest value of traits with other ranges than the defaults.

        Returns:
            The hospitals, ``hospital_0`` first.

        Example:
            >>> sorted(round(h.bias, 3) for h in MriHospital.draw(3, seed=0))
            [0.05, 0.225, 0.4]
        """
        values: list[dict[str, float]] = [{} for _ in range(count)]
        for name, (low, high) in {**cls.traits(), **(ranges or {})}.items():
            order = numpy_rng(seed, "trait", name).permutation(count).tolist()
            for of_hospital, place in zip(values, order, strict=True):
                of_hospital[name] = low + (high - low) * (place / max(count - 1, 1))
        return [cls(f"hospital_{n}", **traits) for n, traits in enumerate(values)]


@dataclass(frozen=True)
class MriHospital(Hospital):
    """A hospital that scans heads.

    Attributes:
        tumour_size: Typical half axis, in half fields of view.
        position: Shift towards the front (positive) or the back.
        enhancing: Probability that a tumour has an enhancing rim.
        strength: How strongly tumours stand out.
        spots: Mean number of bright spots of old age.
        scars: Probability of an old scar.
        outline: How far outside the oedema's visible edge the outline runs, in radii.
        noise: Standard deviation of the noise; white matter on T1w has about 0.8.
        bias: Depth of the coil's slow shading.
        blur: In-plane blur in voxels.
        gamma: Bends the grey scale: exponent exp(gamma), with the opposite sign on every other
            channel.
        protocol: The scanner's position between two sets of sequence parameters.
    """

    tumour_size: float = trait(0.24, 0.44)
    position: float = trait(-0.3, 0.3)
    enhancing: float = trait(0.35, 1.0)
    strength: float = trait(0.6, 1.0)
    spots: float = trait(0.5, 7.0)
    scars: float = trait(0.0, 0.8)
    outline: float = trait(-0.08, 0.12)
    noise: float = trait(0.02, 0.075)
    bias: float = trait(0.05, 0.40)
    blur: float = trait(0.1, 0.9)
    gamma: float = trait(-0.30, 0.30)
    protocol: float = trait(0.0, 0.7)


@dataclass(frozen=True)
class CtHospital(Hospital):
    """A hospital that scans lungs.

    Attributes:
        nodules: Mean number of nodules per scan.
        diameter: Their median diameter, in mm.
        subsolid: Share of nodules that are ground glass or partly so.
        pleural: Share of nodules at the pleura.
        scars: Share of scars and pleural plaques among the candidates that are not nodules.
        emphysema: Depth of the dark patches in the lungs, as a share of the worst.
        agent: HU that the contrast agent adds to the vessels.
        noise: Standard deviation of the noise, in HU.
        blur: In-plane blur of the reconstruction kernel, in mm.
        thickness: Typical distance of the slices, in mm.
        offset: HU by which the calibration is wrong.
    """

    nodules: float = trait(3.5, 8.5)
    diameter: float = trait(5.5, 9.5)
    subsolid: float = trait(0.1, 0.6)
    pleural: float = trait(0.1, 0.5)
    scars: float = trait(0.05, 0.35)
    emphysema: float = trait(0.0, 1.0)
    agent: float = trait(0.0, 150.0)
    noise: float = trait(15.0, 60.0)
    blur: float = trait(0.4, 1.1)
    thickness: float = trait(1.1, 2.3)
    offset: float = trait(-40.0, 40.0)
