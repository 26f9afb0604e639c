"""How hospitals differ: whom they treat, how they scan, and how they outline."""

from __future__ import annotations

from dataclasses import dataclass

from medfed.datamodules.generated.cohort import spread_traits

# Range of every trait over the hospitals. Each trait is spread evenly, in an order of its own, so
# that any two hospitals differ in most of them.
TRAITS: dict[str, tuple[float, float]] = {
    "tumour_size": (0.24, 0.44),
    "position": (-0.3, 0.3),
    "enhancing": (0.35, 1.0),
    "strength": (0.6, 1.0),
    "spots": (0.5, 7.0),
    "scars": (0.0, 0.8),
    "outline": (-0.08, 0.12),
    "noise": (0.02, 0.075),
    "bias": (0.05, 0.40),
    "blur": (0.1, 0.9),
    "gamma": (-0.30, 0.30),
    "protocol": (0.0, 0.7),
}


@dataclass(frozen=True)
class Hospital:
    """The traits of one hospital.

    Attributes:
        name: Such as ``hospital_0``.
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
        protocol: Where between two sets of sequence parameters the scanner stands.
    """

    name: str
    tumour_size: float
    position: float
    enhancing: float
    strength: float
    spots: float
    scars: float
    outline: float
    noise: float
    bias: float
    blur: float
    gamma: float
    protocol: float


def make_hospitals(count: int, seed: int) -> list[Hospital]:
    """Draws the hospitals of a cohort.

    Args:
        count: How many.
        seed: Seed of the order of every trait.

    Returns:
        The hospitals, ``hospital_0`` first.

    Example:
        >>> sorted(round(h.bias, 3) for h in make_hospitals(3, seed=0))
        [0.05, 0.225, 0.4]
    """
    drawn = spread_traits(TRAITS, count, seed)
    return [Hospital(f"hospital_{n}", **traits) for n, traits in enumerate(drawn)]
