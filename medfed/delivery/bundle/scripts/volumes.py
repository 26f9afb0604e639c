"""Volumes of any format for MONAI: NIfTI by nibabel, the others by SimpleITK if it is there."""

import fnmatch
import importlib
import os
from collections.abc import Sequence
from typing import Any

import nibabel as nib
import numpy as np
from monai.data import NibabelReader
from monai.transforms import LoadImaged

NIFTI = (".nii.gz", ".nii")
SUFFIXES = (*NIFTI, ".nrrd", ".nhdr", ".mha", ".mhd")


class VolumeReader(NibabelReader):
    """MONAI's reader of NIfTI, to which NRRD, MetaImage and folders of DICOM series are NIfTI."""

    def read(self, data: Any, **kwargs: Any) -> Any:
        """Returns one image, or several for as many channels."""
        names = [str(data)] if isinstance(data, str | os.PathLike) else [str(name) for name in data]
        if all(name.lower().endswith(NIFTI) for name in names):
            return super().read(names, **kwargs)
        self.filenames = names
        images = [nib.load(n) if n.lower().endswith(NIFTI) else by_simpleitk(n) for n in names]
        return images if len(images) > 1 else images[0]


class LoadVolumesd(LoadImaged):
    """MONAI's step with this reader alone: another one might read what it refuses."""

    def __init__(self, keys: str) -> None:
        super().__init__(keys, reader=VolumeReader())
        self._loader.readers = self._loader.readers[-1:]


def find_scans(folder: str, output: str) -> list[dict[str, str]]:
    """Finds volumes; a/image.nii.gz is named a_image, so that b/image.nii.gz is another.

    A folder of DICOM files is one volume.
    """
    paths, left_out = [], os.path.realpath(output)
    if os.path.realpath(folder) == left_out:
        raise ValueError(f"{output} is the folder of the input; choose another output_dir.")
    for place, inside, names in os.walk(folder):
        if os.path.join(os.path.realpath(place), "").startswith(os.path.join(left_out, "")):
            continue
        if is_series(place):
            inside.clear()
            paths.append(place)
            continue
        files = [name for name in names if suffix_of(name) and not name.startswith(".")]
        paths += [os.path.join(place, name) for name in files]
    if not paths:
        raise ValueError(f"{folder} has no volumes ({', '.join(SUFFIXES)}, DICOM folders).")
    scans = []
    for path in sorted(paths):
        name = (
            os.path.relpath(path, folder)
            if path != folder
            else os.path.basename(os.path.abspath(folder))
        )
        stem = name[: len(name) - len(suffix_of(name))]
        scans.append({"image": path, "name": stem.replace(os.sep, "_")})
    return _told_apart(folder, scans)


def find_cases(folder: str, patterns: Sequence[Sequence[str]], output: str) -> list[dict[str, Any]]:
    """Finds a volume per channel in each folder of a case: of its patterns, the first that fits."""
    cases: list[dict[str, Any]] = []
    for case in sorted(os.listdir(folder)):
        path = os.path.join(folder, case)
        is_output = os.path.realpath(path) == os.path.realpath(output)
        if case.startswith(".") or is_output or not os.path.isdir(path):
            continue
        files = [name for name in sorted(os.listdir(path)) if not name.startswith(".")]
        image = []
        for names in patterns:
            fitting = [[f for f in files if fnmatch.fnmatch(f, name)] for name in names]
            chosen = next((f for f in fitting if f), [])
            if len(chosen) != 1:
                what = " or ".join(names)
                raise ValueError(f"{path}: {len(chosen)} files match {what}, but one must.")
            image.append(os.path.join(path, chosen[0]))
        cases.append({"image": image, "name": case})
    if not cases:
        raise ValueError(f"{folder} has no folders of cases.")
    return _told_apart(folder, cases)


def _told_apart(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [case["name"] for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{folder} has two scans of the name {name}; rename one.")
    return cases


def is_series(folder: str) -> bool:
    """Says whether a folder holds DICOM files, by their names or first bytes."""
    return os.path.isdir(folder) and any(map(_is_dicom, _paths_in(folder)))


def suffix_of(name: str) -> str:
    """Returns the suffix of a volume's file, or an empty string for other files."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def by_simpleitk(path: str) -> nib.Nifti1Image:
    """Reads a volume as if it were NIfTI: mm towards right, front and head."""
    try:
        sitk = importlib.import_module("SimpleITK")
    except ImportError as error:
        raise ValueError(f"{path} needs SimpleITK: pip install SimpleITK.") from error
    image = _series(sitk, path) if os.path.isdir(path) else sitk.ReadImage(path)
    if image.GetDimension() != 3:
        raise ValueError(f"{path} has {image.GetDimension()} axes; a volume has three.")
    axes = np.array(image.GetDirection()).reshape(3, 3)
    if np.abs(axes.T @ axes - np.eye(3)).max() > 0.01:
        raise ValueError(f"{path} is sheared; resample it to an upright grid.")
    affine = np.eye(4)
    affine[:3, :3] = axes * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    voxels = sitk.GetArrayFromImage(image)
    order = (2, 1, 0, *range(3, voxels.ndim))  # SimpleITK's arrays begin with the last axis
    return nib.Nifti1Image(
        voxels.transpose(order).astype(np.float32), np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine
    )


def _series(sitk: Any, folder: str) -> Any:
    series: Sequence[str] = sitk.ImageSeriesReader.GetGDCMSeriesIDs(folder)
    if len(series) != 1:
        raise ValueError(f"{folder} has {len(series)} DICOM series; give each a folder.")
    names = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(folder, series[0])
    image = sitk.ReadImage(names)
    if image.HasMetaDataKey("ITK_non_uniform_sampling_deviation"):
        raise ValueError(f"{folder} lacks a slice, or its slices are not evenly apart.")
    return image


def _is_dicom(path: str) -> bool:
    if path.lower().endswith((".dcm", ".ima")):
        return True
    with open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM"


def _paths_in(folder: str) -> list[str]:
    paths = (os.path.join(folder, n) for n in sorted(os.listdir(folder)) if not n.startswith("."))
    return [path for path in paths if os.path.isfile(path)]
