"""One volume of noise, written in every format that hospitals have."""

from __future__ import annotations

import locale
from contextlib import contextmanager

import nibabel as nib
import numpy as np
import SimpleITK as sitk

LPS = np.diag([-1.0, -1, 1, 1])


def noise(shape=(10, 12, 6), seed=0):
    """(i, j, k) int16."""
    return np.random.default_rng(seed).integers(-1000, 400, shape).astype(np.int16)


def affine(spacing=(0.7, 0.8, 2.5), origin=(-100.0, -90.0, 30.0), angle=0.0):
    """To mm in RAS; turned about the axis from foot to head by an angle in radians."""
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    found = turn @ np.diag([*spacing, 1.0])
    found[:3, 3] = origin
    return found


def image_of(array, to_mm):
    """The same as an image of SimpleITK's."""
    to_mm = LPS @ to_mm
    spacing = np.linalg.norm(to_mm[:3, :3], axis=0)
    image = sitk.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing(spacing.tolist())
    image.SetDirection((to_mm[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(to_mm[:3, 3].tolist())
    return image


def write_volume(path, array, to_mm, packed=True):
    """Writes NIfTI by nibabel, others by SimpleITK; a path without suffix is a DICOM series."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".nii" in path.name:
        nib.save(nib.Nifti1Image(array, to_mm), path)
    elif path.suffix:
        sitk.WriteImage(image_of(array, to_mm), str(path), packed)
    else:
        write_series(path, array, to_mm)


@contextmanager
def unchanged_locale():
    """GDCM leaves another one when it writes, in which other tests cannot write their letters."""
    letters = locale.setlocale(locale.LC_CTYPE)
    yield
    locale.setlocale(locale.LC_CTYPE, letters)


@unchanged_locale()
def write_series(folder, array, to_mm, uid="1.2.3.4", tilt=0.0):
    """One file per slice, the uppermost first; `tilt` shifts them by mm per mm."""
    folder.mkdir(parents=True, exist_ok=True)
    to_mm = LPS @ to_mm
    steps = np.linalg.norm(to_mm[:3, :3], axis=0)
    across = (to_mm[:3, :2] / steps[:2]).T.ravel()
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for k in range(array.shape[2]):
        image = sitk.GetImageFromArray(array[:, :, k : k + 1].transpose(2, 1, 0))
        image.SetSpacing(steps.tolist())
        place = to_mm[:3, 3] + k * to_mm[:3, 2] + [0, tilt * k * steps[2], 0]
        tags = {
            "0008|0060": "CT",
            "0008|0018": f"{uid}.{k + 1}",
            "0020|000d": "1.2.3",
            "0010|0020": "p1",
            "0020|000e": uid,
            "0020|0052": "1.2.3.9",
            "0020|0013": str(k + 1),
            "0020|0032": "\\".join(f"{x:.10g}" for x in place),
            "0020|0037": "\\".join(f"{x:.10g}" for x in across),
            "0028|1052": "-1024",
            "0028|1053": "1",
        }
        for key, value in tags.items():
            image.SetMetaData(key, value)
        writer.SetFileName(str(folder / f"{array.shape[2] - k:03d}.dcm"))
        writer.Execute(image)
