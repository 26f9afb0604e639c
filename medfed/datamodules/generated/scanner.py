"""From compartment maps to four correlated contrasts as one hospital's scanner shows them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from medfed.datamodules.generated.anatomy import Head, Rng, smooth_noise
from medfed.datamodules.generated.hospital import Hospital

CHANNELS = ("FLAIR", "T1w", "T1gd", "T2w")

# Rows as CHANNELS; columns: csf, grey, white, oedema, necrosis, rim, spot, scar, vessel.
INTENSITIES = np.array(
    [
        [0.15, 0.55, 0.47, 0.86, 0.50, 0.72, 0.80, 0.72, 0.45],
        [0.22, 0.60, 0.80, 0.60, 0.42, 0.55, 0.70, 0.45, 0.60],
        [0.24, 0.62, 0.80, 0.60, 0.42, 1.20, 0.70, 0.47, 1.25],
        [1.00, 0.60, 0.44, 0.84, 0.98, 0.66, 0.70, 0.90, 0.35],
    ],
    dtype=np.float32,
)
# Added in full at protocol = 1: fluid less well suppressed, flatter tissue contrast.
PROTOCOL = np.array(
    [
        [0.30, 0.02, 0.06, -0.10, 0.12, -0.06, -0.06, 0.00, 0.05],
        [0.05, 0.06, -0.06, 0.00, 0.04, 0.00, 0.00, 0.05, 0.00],
        [0.05, 0.06, -0.06, 0.00, 0.04, -0.20, 0.00, 0.05, -0.15],
        [-0.15, 0.05, 0.05, -0.06, -0.14, 0.04, -0.02, -0.10, 0.05],
    ],
    dtype=np.float32,
)
WHITE, TUMOUR = 2, slice(3, 6)


def acquire(rng: Rng, head: Head, hospital: Hospital) -> NDArray[np.int16]:
    """Scans one head.

    Args:
        rng: Source of randomness, this patient's own.
        head: The anatomy.
        hospital: The scanner.

    Returns:
        (H, W, D, 4) int16, 0 outside the brain and at least 1 inside.
    """
    table = INTENSITIES + hospital.protocol * PROTOCOL
    visible = np.clip(hospital.strength * rng.uniform(0.6, 1.3), 0.35, 1.1)
    table[:, TUMOUR] = table[:, [WHITE]] + visible * (table[:, TUMOUR] - table[:, [WHITE]])
    table *= rng.normal(1, 0.06, size=table.shape)  # no two patients are alike
    images = np.tensordot(table.astype(np.float32), head.weights, axes=1)
    texture = smooth_noise(rng, head.brain.shape, 1.5)
    scanned = [_channel(rng, x, texture, n, hospital) for n, x in enumerate(images)]
    out = np.stack(scanned, axis=-1) * 600 * rng.uniform(0.8, 1.25, size=len(CHANNELS))
    return (np.clip(out, 1, 4000) * head.brain[..., None]).astype(np.int16)


def _channel(
    rng: Rng, image: NDArray[np.float32], texture: NDArray[np.float32], n: int, hospital: Hospital
) -> NDArray[np.float32]:
    """Texture, blur, grey scale, shading, an occasional ghost, and Rician noise."""
    shape = image.shape
    image = image * (1 + 0.04 * texture)
    image = gaussian_filter(image, (hospital.blur, hospital.blur, 0))
    exponent = np.exp(hospital.gamma * (-1) ** n + rng.normal(0, 0.1))
    image = np.power(np.maximum(image, 0), exponent, dtype=np.float32)
    image = image * np.exp(hospital.bias * _shading(rng, shape))
    if rng.random() < 0.25:  # motion: a shifted, faint copy of this channel alone
        image = image + 0.10 * np.roll(image, int(rng.integers(8, 16)), axis=int(rng.integers(2)))
    real, imaginary = hospital.noise * rng.standard_normal((2, *shape), dtype=np.float32)
    return np.asarray(np.hypot(image + real, imaginary), dtype=np.float32)


def _shading(rng: Rng, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A slow field in [-1, 1]: a slope and a bend along every axis."""
    axes = np.meshgrid(
        *(np.linspace(-1, 1, n, dtype=np.float32) for n in shape), sparse=True, indexing="ij"
    )
    field = sum(rng.uniform(-1, 1) * x + rng.uniform(-0.5, 0.5) * x**2 for x in axes)
    return np.asarray(field / np.abs(field).max(), dtype=np.float32)
