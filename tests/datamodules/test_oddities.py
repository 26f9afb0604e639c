"""Volumes and lists as others write them: read right, or refused by a sentence that is true."""

from __future__ import annotations

import gzip
import json

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image

from medfed.datamodules.readers.datalist import DatalistReader, NnunetReader
from medfed.standalone.errors import DataError
from medfed.standalone.volumes import read_geometry, read_volume

SPACING = (0.5, 0.75, 2.0)


def noise(shape=(6, 5, 4), seed=0):
    return np.random.default_rng(seed).integers(1, 900, shape).astype(np.int16)


@pytest.mark.parametrize(
    ("unit", "per_mm"), [("meter", 1e-3), ("micron", 1e3), ("mm", 1.0), (0, 1.0)]
)
def test_lengths_of_nifti_are_in_the_unit_of_its_header(unit, per_mm, tmp_path):
    image = nib.Nifti1Image(noise(), np.diag([*(np.array(SPACING) * per_mm), 1]))
    image.header.set_xyzt_units(unit)
    nib.save(image, tmp_path / "a.nii")
    assert nib.load(tmp_path / "a.nii").header.get_zooms() == pytest.approx(
        np.array(SPACING) * per_mm
    )
    assert read_geometry(tmp_path / "a.nii").spacing == pytest.approx(SPACING)


@pytest.mark.parametrize(
    ("unit", "per_mm"), [("mm", 1.0), ("cm", 0.1), ("m", 1e-3), ("um", 1e3), ("µm", 1e3), ("", 1.0)]
)
def test_lengths_of_nrrd_are_in_the_unit_of_its_space(unit, per_mm, tmp_path):
    image = sitk.GetImageFromArray(noise())
    image.SetSpacing((np.array(SPACING) * per_mm).tolist())
    path = tmp_path / "a.nrrd"
    sitk.WriteImage(image, str(path))
    text = path.read_bytes()
    kinds = b"kinds:"
    assert kinds in text
    units = " ".join([f'"{unit}"'] * 3).encode()
    path.write_bytes(text.replace(kinds, b"space units: " + units + b"\n" + kinds, 1))
    assert sitk.ReadImage(str(path)).GetSpacing() == pytest.approx(np.array(SPACING) * per_mm)
    assert read_geometry(path).spacing == pytest.approx(SPACING)


def test_unknown_units_of_a_space_are_named(tmp_path):
    path = tmp_path / "a.nrrd"
    sitk.WriteImage(sitk.GetImageFromArray(noise()), str(path))
    text = path.read_bytes().replace(b"kinds:", b'space units: "in" "in" "in"\nkinds:', 1)
    path.write_bytes(text)
    with pytest.raises(DataError, match='space units "in" "in" "in"'):
        read_geometry(path)


@pytest.mark.parametrize("ending", [".nii.gz", ".NII.GZ"])
def test_a_checksum_is_checked_whatever_the_ending(ending, tmp_path):
    image = nib.Nifti1Image(noise(), np.eye(4))
    packed = bytearray(gzip.compress(image.to_bytes()))
    path = tmp_path / f"a{ending}"
    path.write_bytes(packed)
    assert (np.unique(read_volume(path).voxels) == np.unique(noise())).all()
    packed[-6] ^= 1  # of the checksum
    path.write_bytes(packed)
    with pytest.raises(DataError, match="truncated or corrupt"):
        read_volume(path)


def png(path):
    Image.new("L", (4, 4)).save(path, format="png")


def nrrd(path):
    sitk.WriteImage(sitk.GetImageFromArray(noise()), str(path.parent / "b.nrrd"))
    (path.parent / "b.nrrd").rename(path)


def nifti(path):
    path.write_bytes(nib.Nifti1Image(noise(), np.eye(4)).to_bytes())


def text(content):
    return lambda path: path.write_bytes(content)


OTHERS = {
    "png.nii.gz": (png, "a PNG picture"),
    "png.nrrd": (png, "a PNG picture"),
    "nrrd.mha": (nrrd, "a NRRD file"),
    "nrrd.nii": (nrrd, "a NRRD file"),
    "plain.nii.gz": (nifti, "a NIfTI file that is not packed"),
    "page.nii.gz": (text(b"<!DOCTYPE html><html>Log in</html>"), "a web page"),
    "lfs.nii.gz": (text(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), "Git LFS"),
    "zip.mha": (text(b"PK\x03\x04" + bytes(30)), "an Excel or zip file"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_format_is_called_by_its_name(name, tmp_path):
    make, message = OTHERS[name]
    make(tmp_path / name)
    with pytest.raises(DataError, match=message) as caught:
        read_volume(tmp_path / name)
    assert "corrupt" not in str(caught.value)


def a_list(folder, shape=(6, 5, 4), path="{}", name="dataset.json", mark="", **more):
    for n in range(3):
        for kind in ("images", "labels"):
            (folder / kind).mkdir(exist_ok=True)
            array = noise(shape, n) if kind == "images" else (noise((6, 5, 4), n) > 450) * 1
            image = nib.Nifti1Image(array.astype(np.int16), np.eye(4))
            nib.save(image, folder / kind / f"c{n}.nii.gz")
    entries = [
        {key: path.format(f"{key}s/c{n}.nii.gz") for key in ("image", "label")} for n in range(3)
    ]
    if "\\" in path:
        entries = [{k: v.replace("/", "\\") for k, v in e.items()} for e in entries]
    content = {"modality": {"0": "MRI"}, "labels": {"0": "background", "1": "t"}, **more}
    (folder / name).write_text(mark + json.dumps({**content, "training": entries}), "utf-8")
    return DatalistReader(folder / name)


@pytest.mark.parametrize("how", [{"mark": "\ufeff"}, {"path": ".\\{}"}, {"path": "./{}"}], ids=repr)
def test_lists_from_windows_are_read(how, tmp_path):
    reader = a_list(tmp_path, **how)
    patients = reader.patients()
    assert [p.id for p in patients] == ["c0", "c1", "c2"]
    found = reader.raw(patients[1])["image"].numpy()
    assert (np.sort(found, None) == np.sort(noise((6, 5, 4), 1), None)).all()


def test_more_volumes_than_channels_are_refused_by_name(tmp_path):
    reader = a_list(tmp_path, (6, 5, 4, 3))
    with pytest.raises(DataError, match=r"c0\.nii\.gz holds 3 volumes .* but 1 is named"):
        reader.raw(reader.patients()[0])


def test_a_fourth_axis_of_one_is_no_channel(tmp_path):
    reader = a_list(tmp_path, (6, 5, 4, 1))
    assert reader.raw(reader.patients()[0])["image"].shape == (1, 6, 5, 4)


def test_some_of_the_named_channels_are_read(tmp_path):
    a_list(tmp_path, (6, 5, 4, 3), modality={"0": "a", "1": "b", "2": "c"})
    reader = DatalistReader(tmp_path / "dataset.json", channels=["c"])
    found = reader.raw(reader.patients()[0])["image"].numpy()
    assert (found == noise((6, 5, 4, 3), 0)[..., 2]).all()


@pytest.mark.parametrize("count", [3, 5])
def test_images_of_nnunet_without_mask_and_a_wrong_count_are_said(count, tmp_path, caplog):
    for n in range(5):
        number = "" if n == 4 else "_0000"  # forgotten
        for part, name in (("imagesTr", f"c{n}{number}"), ("labelsTr", f"c{n}")):
            if part == "imagesTr" or n < 3:
                (tmp_path / part).mkdir(exist_ok=True)
                image = nib.Nifti1Image(noise(), np.eye(4))
                nib.save(image, tmp_path / part / f"{name}.nii.gz")
    content = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "t": 1}}
    (tmp_path / "dataset.json").write_text(json.dumps({**content, "numTraining": count}))
    assert [p.id for p in NnunetReader(tmp_path).patients()] == ["c0", "c1", "c2"]
    assert "2 cases have no mask in labelsTr and are left out: c3, c4." in caplog.text
    assert ("says numTraining 5, but labelsTr has 3 masks" in caplog.text) == (count == 5)


def test_pictures_in_the_layout_of_nnunet_are_named(tmp_path):
    content = {"channel_names": {"0": "x"}, "labels": {"background": 0, "t": 1}}
    text = json.dumps({**content, "file_ending": ".png"})
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"names the ending \.png.*data=image_masks"):
        NnunetReader(tmp_path)
