"""What the cache keeps of a CT scan, and what a batch shows of it.

Apart from the data module, so that worker processes need not import Lightning.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.ct_patches import PatchSpec, extract, to_unit
from medfed.datamodules.readers.luna16 import Candidates


def read_patches(
    header: Path, candidates: Candidates, spec: PatchSpec
) -> dict[str, NDArray[np.int16] | NDArray[np.int64]]:
    """Reads what the cache keeps of one scan.

    Args:
        header: The scan's header.
        candidates: Its kept candidates, n of them.
        spec: Which patch to cut.

    Returns:
        ``image`` (n, C, h, w[, d]) int16 HU, ``label`` (n,) and ``row`` (n,) int64, the row in the
        candidates' CSV.
    """
    return {
        "image": extract(header, candidates, spec),
        "label": candidates.label,
        "row": candidates.row,
    }


def convert_patches(
    patches: NDArray[np.int16], window: tuple[int, int], present: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Turns cached patches into a batch's images.

    Args:
        patches: (n, C, h, w[, d]) HU.
        window: HU that become -1 and 1.
        present: (C,) the client's channels; the others become 0.

    Returns:
        (n, C, h, w[, d]) in [-1, 1].

    Example:
        >>> hu = np.array([[[[-1000, -300]], [[400, 400]]]], np.int16)
        >>> convert_patches(hu, (-1000, 400), np.array([True, False])).ravel().tolist()
        [-1.0, 0.0, 0.0, 0.0]
    """
    images = to_unit(patches, window)
    if not present.all():
        images[:, ~present] = 0
    return images


def channel_names(modality: str, slices: int) -> tuple[str, ...]:
    """Names the channels: one per adjacent slice.

    Args:
        modality: Name of the modality.
        slices: Slices that are stacked as channels, an odd number.

    Returns:
        The names, from foot to head.

    Example:
        >>> channel_names("CT", 1), channel_names("CT", 3)
        (('CT',), ('CT-1', 'CT+0', 'CT+1'))
    """
    if slices == 1:
        return (modality,)
    return tuple(f"{modality}{n - slices // 2:+d}" for n in range(slices))
