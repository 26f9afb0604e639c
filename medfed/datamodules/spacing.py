"""The distances between the voxels of a client's scans, which a prediction is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from medfed.datamodules.readers.volumes import read_header


def ras_spacing(path: Path) -> tuple[float, float, float]:
    """Reads the spacing of a NIfTI file from its header alone.

    Args:
        path: A NIfTI file of any orientation.

    Returns:
        mm along the axes to the right, to the front and to the head, as `readers.volumes.load_ras`
        turns them.

    Raises:
        DataError: If the header cannot be read.
    """
    affine = read_header(path)[1]
    sizes = voxel_sizes(affine)
    towards = nib.io_orientation(affine)[:, 0].astype(int).tolist()
    x, y, z = (float(sizes[towards.index(axis)]) for axis in range(3))
    return x, y, z


def spacing_summary(spacings: Iterable[tuple[float, ...]]) -> dict[str, Any]:
    """Returns the median spacing, and the least and greatest one per axis.

    Args:
        spacings: mm along the three axes, of every scan.

    Example:
        >>> spacing_summary([(1.0, 1.0, 2.0), (1.0, 1.0, 5.0), (0.5, 0.5, 2.5)])
        {'spacing': [1.0, 1.0, 2.5], 'spacing_range': [[0.5, 0.5, 2.0], [1.0, 1.0, 5.0]]}
    """
    found = np.array(list(spacings))
    return {
        "spacing": np.median(found, axis=0).tolist(),
        "spacing_range": [found.min(axis=0).tolist(), found.max(axis=0).tolist()],
    }
