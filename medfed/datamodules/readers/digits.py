"""Scikit-learn's handwritten digits: 1,797 images of 8×8 pixels, ten classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from medfed.datamodules.readers.image_set import ImageSet
from medfed.datamodules.samples import Samples
from medfed.errors import ConfigError


def read_digits(path: Path | None = None) -> ImageSet:
    """Reads the digits that come with scikit-learn; who wrote which one is not known.

    Args:
        path: Must be None.

    Returns:
        Images (1797, 1, 8, 8) with values from 0 to 16; each is a patient.

    Raises:
        ConfigError: If a path is given.

    Example:
        >>> digits = read_digits()
        >>> digits.images.shape, digits.peak, digits.samples.patients[-1]
        ((1797, 1, 8, 8), 16, 'digit_1796')
    """
    from sklearn.datasets import load_digits

    if path is not None:
        raise ConfigError(
            f"data.path={path} cannot be used: the digits come with scikit-learn; use "
            "data=image_folder or data=medmnist for images of your own."
        )
    data = load_digits()
    labels = np.asarray(data.target, dtype=np.int64)
    return ImageSet(
        images=np.asarray(data.images, dtype=np.uint8)[:, None],
        channels=("grey",),
        classes=tuple(str(name) for name in data.target_names),
        samples=Samples(labels, 10, [f"digit_{i}" for i in range(len(labels))]),
        source="scikit-learn's digits",
        peak=16,
    )
