"""The one reader of volumes: every format gives the same voxels, as nibabel and SimpleITK do."""

from __future__ import annotations

import sys
from itertools import pairwise

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medfed.standalone.errors import DataError
from medfed.standalone.volume_files import files_of, is_volume, stem_of
from medfed.standalone.volumes import as_stored, read_geometry, read_together, read_volume
from tests.datamodules.volume_files import affine, image_of, noise, write_series, write_volume
from tests.sweeps import sweep

NAMES = ("a.nii.gz", "a.nii", "a.nrrd", "a.mha", "a.mhd", "series")
TURNED = affine() @ np.diag([-1, 1, -1, 1])[:, [1, 2, 0, 3]]  # other axes, two of them reversed


@sweep("name", NAMES)
@sweep("to_mm", [affine(), affine(angle=0.2), TURNED])
def test_every_format_gives_the_same_voxels(name, to_mm, tmp_path):
    if name == "series" and to_mm is TURNED:
        pytest.skip("the slices of a series are written upwards")
    array = noise()
    write_volume(tmp_path / name, array, to_mm)
    known = nib.as_closest_canonical(nib.Nifti1Image(array, to_mm))
    voxels, geometry = read_volume(tmp_path / name)
    assert np.array_equal(voxels[0].numpy(), known.get_fdata())
    assert geometry.shape == known.shape == read_geometry(tmp_path / name).shape
    assert geometry.affine == pytest.approx(known.affine, abs=1e-4)
    assert geometry.spacing == pytest.approx(nib.affines.voxel_sizes(known.affine), abs=1e-5)
    back = as_stored(voxels[0].numpy(), geometry)
    again = nib.as_closest_canonical(nib.Nifti1Image(back, geometry.stored))
    assert np.array_equal(again.get_fdata(), voxels[0].numpy())
    assert again.affine == pytest.approx(geometry.affine, abs=1e-4)
    assert is_volume(tmp_path / name)
    assert stem_of(tmp_path / name) in ("a", "series")
    assert all(file.is_file() for file in files_of(tmp_path / name))


def test_the_files_of_a_mask_and_of_its_scan_may_differ_in_format(tmp_path):
    """A DICOM series, and a mask on its grid whose axes are stored in another order."""
    write_volume(tmp_path / "scan", noise(), affine())
    write_volume(tmp_path / "mask.nrrd", noise().transpose(2, 0, 1), affine()[:, [2, 0, 1, 3]])
    both = read_together([tmp_path / "scan", tmp_path / "mask.nrrd"])
    scan, mask = (volume.voxels for volume in both)
    assert scan.equal(mask)
    write_volume(tmp_path / "other.mha", noise(), affine(origin=(-100.0, -90, 30.5)))
    with pytest.raises(DataError, match=r"other\.mha has another affine than .*scan; resample"):
        read_together([tmp_path / "scan", tmp_path / "other.mha"])


def test_values_per_voxel_are_channels(tmp_path):
    array = np.stack([noise(), noise(seed=1)], axis=-1)
    image = sitk.GetImageFromArray(array.transpose(2, 1, 0, 3), isVector=True)
    image.CopyInformation(image_of(array[..., 0], affine()))
    sitk.WriteImage(image, str(tmp_path / "a.nrrd"))
    nib.save(nib.Nifti1Image(array, affine()), tmp_path / "a.nii.gz")
    for name in ("a.nrrd", "a.nii.gz"):
        assert read_geometry(tmp_path / name).channels == 2
        found = read_volume(tmp_path / name, channels=[1, 0]).voxels.numpy()
        assert np.array_equal(found, array.transpose(3, 0, 1, 2)[::-1])
    with pytest.raises(DataError, match="has 2 channels, but 3 are needed"):
        read_volume(tmp_path / "a.nrrd", channels=[2])


def test_slices_may_have_any_name_and_something_beside_them(tmp_path):
    write_series(tmp_path / "s", noise(), affine())
    for path in sorted((tmp_path / "s").iterdir()):
        path.rename(path.with_name(f"IM{path.stem}"))
    (tmp_path / "s" / "notes.txt").write_text("not a slice")
    assert np.array_equal(read_volume(tmp_path / "s").voxels[0].numpy(), noise())
    assert len(files_of(tmp_path / "s")) == 6


def test_the_files_of_a_case_are_read_together_however_many_there_are(tmp_path):
    """Each module on the way is entered as often for five files as for one."""
    files = [tmp_path / f"{n}.nii.gz" for n in range(5)]
    for file in files:
        write_volume(file, noise(), affine())

    def entered(paths):
        places = list[str]()

        def watch(frame, event, _):
            file = frame.f_code.co_filename
            if event == "call" and "medfed/standalone" in file:
                places.append(file)

        sys.setprofile(watch)
        try:
            read_together(paths)
        finally:
            sys.setprofile(None)
        return [one for one, other in pairwise([*places, ""]) if one != other]

    assert len(entered(files)) == len(entered(files[:1])) > 0
