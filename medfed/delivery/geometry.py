"""Volumes in the geometry of the file that they came from; spacings that contradict a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform
from numpy.typing import NDArray

from medfed.errors import DataError

SUFFIXES = (".nii.gz", ".nii")


def save_like(array: NDArray[Any], source: Path, target: Path, note: str = "") -> None:
    """Writes an array in RAS as NIfTI with a scan's own axes, affine and header.

    Args:
        array: ``(H, W, D)`` or ``(H, W, D, n)``, as `readers.volumes.load_ras` turns the scan.
        source: The scan, ``.nii`` or ``.nii.gz``.
        target: The file to write; whole, or not at all.
        note: The header's description, 79 characters at most.

    Raises:
        DataError: If the file cannot be written.
    """
    scan = nib.load(source)
    turn = ornt_transform(axcodes2ornt("RAS"), io_orientation(scan.affine))
    turned = np.ascontiguousarray(apply_orientation(array, turn))
    header = scan.header.copy()
    header.set_data_dtype(turned.dtype)
    header["descrip"] = note.encode("ascii", "replace")[:79]
    header["cal_min"] = header["cal_max"] = 0  # a viewer's window for the scan, not for a mask
    image = type(scan)(turned, scan.affine, header)
    suffix = suffix_of(target)
    partial = target.with_name(f".{target.name.removesuffix(suffix)}.partial{suffix}")
    try:
        nib.save(image, partial)
        os.replace(partial, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written ({error}); choose another output.") from error
    finally:
        partial.unlink(missing_ok=True)


def suffix_of(path: Path) -> str:
    """Returns ``.nii.gz`` or ``.nii``, or an empty string for other files.

    Example:
        >>> suffix_of(Path("a.b.nii.gz")), suffix_of(Path("a.mhd"))
        ('.nii.gz', '')
    """
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")


def check_spacing(
    spacing: Sequence[float],
    facts: Mapping[str, Any],
    tolerance: float | None,
    source: object,
    axes: Sequence[int] = (0, 1, 2),
) -> None:
    """Refuses a scan whose voxels are of another size than those that the model was trained on.

    Args:
        spacing: (3,) mm along the patient's axes.
        facts: ``spacing_range``, least and greatest of the training scans, or ``spacing`` alone;
            without both, anything goes.
        tolerance: How far beyond the range a spacing may be, as a fraction; None checks nothing.
        source: The scan, for the sentence.
        axes: The axes that count.

    Raises:
        DataError: If a spacing lies outside.

    Example:
        >>> facts = {"spacing_range": [[1.0, 1.0, 2.0], [1.0, 1.0, 3.0]]}
        >>> check_spacing((1.0, 1.05, 3.2), facts, 0.1, "scan.nii.gz")
        >>> check_spacing((1.0, 1.0, 5.0), facts, 0.1, "scan.nii.gz")
        Traceback (most recent call last):
        ...
        medfed.errors.DataError: scan.nii.gz has voxels of 1 × 1 × 5 mm, but the model was trained \
on 1 × 1 × 2 to 1 × 1 × 3 mm; resample the scan, or set spacing_tolerance.
    """
    found = facts.get("spacing_range") or [facts.get("spacing")] * 2
    if tolerance is None or found[0] is None:
        return
    low, high = (np.asarray(end, dtype=float)[list(axes)] for end in found)
    own = np.asarray(spacing, dtype=float)[list(axes)]
    if (own >= low * (1 - tolerance) - 1e-6).all() and (own <= high * (1 + tolerance) + 1e-6).all():
        return
    least, greatest = _millimetres(found[0]), _millimetres(found[1])
    wanted = least if least == greatest else f"{least} to {greatest}"
    raise DataError(
        f"{source} has voxels of {_millimetres(spacing)} mm, but the model was trained on {wanted} "
        "mm; resample the scan, or set spacing_tolerance."
    )


def _millimetres(spacing: Sequence[float]) -> str:
    return " × ".join(f"{mm:.3g}" for mm in spacing)
