"""Scans and arrays that are torn, flipped or lie about themselves: one sentence each, no cache."""

from __future__ import annotations

import gzip
import io
import pickle
import shutil
import zipfile
import zlib

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image

from medfed.config.compose import described
from medfed.datamodules.readers.medmnist import read_medmnist
from medfed.run.prepare import prepare
from medfed.standalone.ct import Candidates, PatchSpec, extract, locate
from medfed.standalone.errors import DataError, MedfedError
from medfed.standalone.itk import LPS
from medfed.standalone.pictures import load_picture
from medfed.standalone.volumes import read_geometry, read_volume
from tests.datamodules.luna_files import image_of, noise
from tests.datamodules.volume_files import affine, write_series, write_volume
from tests.datamodules.volume_files import noise as volume_noise
from tests.integration.test_bad_data import WRITE, arrays, settings
from tests.sweeps import sweep

VOXELS = noise((6, 12, 10))
BYTES = VOXELS.astype("<i2").tobytes()


def header(old, new):
    """A damage: another text in the header."""

    def damage(path):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return damage


def field(line):
    return header("ElementDataFile", f"{line}\nElementDataFile")


def data(change):
    """A damage: other bytes in the file of the voxels."""

    def damage(path):
        raw = next(p for p in path.parent.iterdir() if p.suffix in (".raw", ".zraw"))
        raw.write_bytes(change(raw.read_bytes()))

    return damage


def flip(share):
    def change(old):
        new = bytearray(old)
        new[int(share * (len(new) - 1))] ^= 16
        return bytes(new)

    return change


def remove(path):
    next(p for p in path.parent.iterdir() if p.suffix in (".raw", ".zraw")).unlink()


DIMS = "DimSize = 10 12 6"
MATRIX = "TransformMatrix = 1 0 0"
FILE = "ElementDataFile = s.raw"
TORN = "s.zraw is truncated or corrupt"
# Compressed or not, the damage, and what the sentence says.
SCANS = {
    "cut": (True, data(lambda b: b[: len(b) // 2]), TORN),
    "cut by a byte": (True, data(lambda b: b[:-1]), TORN),
    "empty": (True, data(lambda b: b""), "s.zraw has 0 bytes, but s.mhd says 1440"),
    "flip at a tenth": (True, data(flip(0.1)), TORN),
    "flip in the middle": (True, data(flip(0.5)), TORN),
    "flip at nine tenths": (True, data(flip(0.9)), TORN),
    "flip in the checksum": (True, data(flip(1.0)), TORN),
    "more behind": (True, data(lambda b: b + b"xx"), "something follows the packed data"),
    "fewer packed": (True, data(lambda b: zlib.compress(BYTES[:-100])), "unpacks to fewer"),
    "more packed": (True, data(lambda b: zlib.compress(BYTES + b"00")), "unpacks to more"),
    "bomb": (True, data(lambda b: zlib.compress(bytes(10**7))), "unpacks to more"),
    "raw called compressed": (
        False,
        header("CompressedData = False", "CompressedData = True"),
        "s.raw is truncated or corrupt",
    ),
    "compressed called raw": (
        True,
        header("CompressedData = True", "CompressedData = False"),
        "bytes, but s.mhd says 1440",
    ),
    "list": (False, header(FILE, "ElementDataFile = LIST"), "several files (LIST)"),
    "list of files": (False, header(FILE, "ElementDataFile = LIST 2\na"), "several files"),
    "pattern": (False, header(FILE, "ElementDataFile = s%09d.raw 1 6 1"), "several files"),
    "type unknown": (False, header("MET_SHORT", "MET_FOO"), "Unknown PixelType"),
    "type of 8 bytes": (False, header("MET_SHORT", "MET_DOUBLE"), "s.mhd says 5760"),
    "type of 1 byte": (False, header("MET_SHORT", "MET_UCHAR"), "s.mhd says 720"),
    "type unsigned": (False, header("MET_SHORT", "MET_USHORT"), "outside of -4096 to 4096 HU"),
    "byte order": (False, header("MSB = False", "MSB = True"), "the byte order is wrong"),
    "size text": (False, header(DIMS, "DimSize = ten 12 6"), "DimSize = 'ten 12 6'"),
    "size negative": (False, header(DIMS, "DimSize = -10 12 -6"), "whole numbers of at least 1"),
    "size zero": (False, header(DIMS, "DimSize = 0 12 6"), "whole numbers of at least 1"),
    "size half": (False, header(DIMS, "DimSize = 10.5 12 6"), "whole numbers of at least 1"),
    "size of two": (False, header(DIMS, "DimSize = 10 12"), "must be 3 whole numbers"),
    "size of four": (False, header(DIMS, "DimSize = 10 12 3 2"), "must be 3 whole numbers"),
    "size lacking": (False, header(f"{DIMS}\n", ""), "DimSize = ''"),
    "size huge": (False, header(DIMS, "DimSize = 999999 999999 9"), "bytes, but s.mhd says"),
    "size beyond": (False, header(DIMS, f"DimSize = {'9' * 30} 1 1"), "must be 3 whole numbers"),
    "size huge, packed": (True, header(DIMS, "DimSize = 99999 99999 9"), "bytes, but s.mhd says"),
    "two axes": (False, header("NDims = 3", "NDims = 2"), "NDims = '2', which must be 3"),
    "four axes": (False, header("NDims = 3", "NDims = 4"), "NDims = '4', which must be 3"),
    "negative axes": (False, header("NDims = 3", "NDims = -1"), "NDims = '-1', which must be 3"),
    "many axes": (False, header("NDims = 3", "NDims = 2000000000"), "NDims = '2000000000'"),
    "axes text": (False, header("NDims = 3", "NDims = three"), "NDims = 'three'"),
    "two channels": (False, field("ElementNumberOfChannels = 2"), "s.mhd says 2880"),
    "field twice": (False, field("NDims = -1"), "has the field NDims twice"),
    "header size": (False, field("HeaderSize = 10"), "s.raw has 1430 bytes"),
    "header size text": (False, field("HeaderSize = x"), "HeaderSize = 'x'"),
    "header size negative": (False, field("HeaderSize = -7"), "HeaderSize = '-7'"),
    "spacing 0": (False, header("Spacing = 0.5", "Spacing = 0"), "has no valid affine"),
    "spacing negative": (False, header("Spacing = 0.5", "Spacing = -0.5"), "ElementSpacing = '-0"),
    "spacing NaN": (False, header("Spacing = 0.5", "Spacing = nan"), "ElementSpacing = 'nan"),
    "flat": (False, header(MATRIX, "TransformMatrix = 0 0 0"), "has no valid affine"),
    "matrix NaN": (False, header(MATRIX, "TransformMatrix = nan 0 0"), "must be 9 numbers"),
    "place infinite": (False, header("Offset = -1", "Offset = inf 1"), "Offset = 'inf"),
    "text voxels": (False, header("BinaryData = True", "BinaryData = False"), "written as text"),
    "missing": (False, remove, "s.raw is missing, but s.mhd names it"),
    "missing, packed": (True, remove, "s.zraw is missing, but s.mhd names it"),
    "longer": (False, data(lambda b: b + b"00"), "s.raw has 1442 bytes"),
    "shorter": (False, data(lambda b: b[:-3]), "s.raw has 1437 bytes"),
    "upwards": (
        False,
        header(FILE, "ElementDataFile = ../../../../etc/passwd"),
        "outside of its folder",
    ),
    "absolute": (False, header(FILE, "ElementDataFile = /etc/passwd"), "outside of its folder"),
    "NUL in a name": (False, header(FILE, "ElementDataFile = s\0.raw"), "outside of its folder"),
    "folder": (False, header(FILE, "ElementDataFile = ."), "is missing, but s.mhd names it"),
    "constant": (False, data(lambda b: bytes(len(b))), "has the value 0 in every voxel"),
    "constant, packed": (
        True,
        data(lambda b: zlib.compress(bytes(len(BYTES)))),
        TORN,  # the header says, too, how many bytes are packed
    ),
    "no HU": (False, data(lambda b: b"\x20\x4e" * 700 + bytes(40)), "outside of -4096 to 4096 HU"),
    "empty header": (False, lambda path: path.write_text(""), "is no MetaImage header"),
    "NUL header": (False, lambda path: path.write_bytes(bytes(5000)), "is no MetaImage header"),
}


def one(sentence: str) -> bool:
    return "\n" not in sentence and sentence.endswith(".") and len(sentence) < 400


def scan(folder, packed):
    path = folder / "s.mhd"
    sitk.WriteImage(image_of(VOXELS, spacing=(0.5, 0.5, 2.5)), str(path), packed)
    return path


def whole(path):
    """All voxels, in one patch for each slice."""
    found = read_geometry(path, "LPS")
    w, h, d = found.shape
    corner = LPS @ found.affine @ (w // 2, h // 2, d // 2, 1)
    points = Candidates(corner[None, :3], np.zeros(1, np.int64), np.ones(1, np.int64))
    spec = PatchSpec((h, w, d), window=(-32767, 32767))
    return extract(path, points, spec)[0, 0].transpose(2, 0, 1)


@sweep("name", SCANS)
def test_a_damaged_scan_is_one_sentence(name, tmp_path):
    packed, damage, message = SCANS[name]
    path = scan(tmp_path, packed)
    damage(path)
    with pytest.raises(DataError) as caught:
        whole(path)
    assert message in str(caught.value)
    assert one(str(caught.value))


@pytest.mark.parametrize("packed", [False, True])
def test_a_scan_without_damage_is_what_simpleitk_reads(packed, tmp_path):
    path = scan(tmp_path, packed)
    assert np.array_equal(whole(path), VOXELS)
    known, found = sitk.ReadImage(str(path)), read_geometry(path, "LPS")
    assert (LPS @ found.affine)[:3, 3].tolist() == list(known.GetOrigin())
    assert found.spacing == known.GetSpacing()


def test_an_oblique_geometry_is_that_of_simpleitk(tmp_path):
    image = image_of(VOXELS)
    turn = sitk.Euler3DTransform((0, 0, 0), 0.1, -0.2, 0.3).GetMatrix()
    image.SetDirection(turn)
    sitk.WriteImage(image, str(tmp_path / "s.mhd"))
    point = image.TransformIndexToPhysicalPoint((3, 5, 2))
    assert locate(read_geometry(tmp_path / "s.mhd", "LPS"), np.array([point])) == pytest.approx(
        np.array([[3, 5, 2]]), abs=1e-6
    )


@pytest.mark.parametrize("name", ["flip in the middle", "raw called compressed", "constant"])
def test_nothing_enters_the_cache(name, tmp_path):
    folder = tmp_path / "data"
    WRITE["luna16"](folder)
    packed, damage, _ = SCANS[name]
    path = sorted(folder.rglob("*.mhd"))[0]
    voxels = sitk.GetArrayFromImage(sitk.ReadImage(str(path)))
    path.with_suffix(".raw").unlink()
    sitk.WriteImage(image_of(voxels), str(path), packed)
    damage(path)
    with pytest.raises(DataError) as caught:
        prepare(described([*settings("luna16", folder, tmp_path), "show=false"], "prepare"))
    assert path.stem in str(caught.value)
    assert not list((tmp_path / "root").rglob("00000*.npy"))
    assert not list((tmp_path / "root").rglob("manifest.json"))


# NIfTI


def nifti(folder, suffix=".nii.gz"):
    path = folder / f"t1{suffix}"
    array = np.random.default_rng(0).normal(100, 9, (6, 5, 4)).astype(np.float32)
    nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    return path


def unpacked(change):
    """A damage of what is packed in a file, with a checksum that fits."""

    def damage(path):
        old = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        new = change(bytearray(old))
        path.write_bytes(gzip.compress(new) if path.suffix == ".gz" else new)

    return damage


def dims(*sizes):
    def change(old):
        old[40 : 40 + 2 * len(sizes)] = np.array(sizes, "<i2").tobytes()
        return bytes(old)

    return unpacked(change)


def packed(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def code(value):
    def change(old):
        old[70:72] = np.array([value], "<i2").tobytes()
        return bytes(old)

    return unpacked(change)


HUGE = dims(3, 32767, 32767, 32767)
NIFTI = {
    "cut": (".nii.gz", packed(lambda b: b[: len(b) // 2]), "is truncated or corrupt"),
    "cut checksum": (".nii.gz", packed(lambda b: b[:-4]), "is truncated or corrupt"),
    "flip": (".nii.gz", packed(flip(0.6)), "is truncated or corrupt"),
    "flip at the end": (".nii.gz", packed(flip(0.97)), "is truncated or corrupt"),
    "flip in the checksum": (".nii.gz", packed(lambda b: b[:-8] + b"1234" + b[-4:]), "corrupt"),
    "no gzip": (".nii.gz", packed(lambda b: b"\0" * 500), "is truncated or corrupt"),
    "empty": (".nii.gz", packed(lambda b: b""), "is truncated or corrupt"),
    "plain cut": (".nii", packed(lambda b: b[:-40]), "is truncated or corrupt"),
    "plain header alone": (".nii", packed(lambda b: b[:352]), "is truncated or corrupt"),
    "huge": (".nii", HUGE, "is truncated or corrupt"),
    "huge, packed": (".nii.gz", HUGE, "is truncated or corrupt"),
    "larger, packed": (".nii.gz", dims(3, 6, 5, 5), "bytes are packed in it; its header says"),
    "smaller, packed": (".nii.gz", dims(3, 6, 5, 3), "bytes are packed in it; its header says"),
    "negative": (".nii", dims(3, -6, 5, 4), "t1.nii"),
    "no size": (".nii.gz", dims(3, 0, 5, 4), "t1.nii.gz"),
    "nine axes": (".nii", dims(9, 6, 5, 4), "t1.nii"),
    "five axes": (".nii", dims(5, 6, 5, 2, 2, 1), "a volume has three axes, or four"),
    "colours": (".nii", code(128), "voxels of type"),
    "type unknown": (".nii", code(9999), "has a bad header (data code 9999"),
}


@sweep("name", NIFTI)
def test_a_damaged_volume_is_one_sentence(name, tmp_path):
    suffix, damage, message = NIFTI[name]
    path = nifti(tmp_path, suffix)
    damage(path)
    with pytest.raises(DataError) as caught:
        read_volume(path)
    assert message in str(caught.value)
    assert path.name in str(caught.value)
    assert one(str(caught.value))


def test_padding_behind_the_voxels_is_read_over(tmp_path):
    path = nifti(tmp_path)
    before = read_volume(path).voxels
    unpacked(lambda old: bytes(old) + bytes(64))(path)
    assert read_volume(path).voxels.equal(before)


# NRRD and DICOM


def series(folder, **settings):
    write_series(folder / "s", volume_noise(), affine(), **settings)
    return folder / "s"


def without(*numbers):
    return lambda path: [(path / f"{n:03d}.dcm").unlink() for n in numbers]


def slice_of(change):
    """A damage: other bytes in one of the slices."""
    return lambda path: packed(change)(path / "003.dcm")


def another_series(path):
    write_series(path.parent / "t", volume_noise(), affine(), uid="1.2.9")
    (path.parent / "t" / "001.dcm").rename(path / "t.dcm")


def twice(path):
    shutil.copy(path / "003.dcm", path / "x.dcm")


SERIES = {
    "missing": ({}, without(3), "a slice is missing between 004.dcm and 002.dcm (5 mm apart"),
    "two missing": ({}, without(2, 4), "a slice is missing between"),
    "sheared": ({"tilt": 0.3}, lambda path: None, "a gantry tilted by 16.7 degrees"),
    "two series": ({}, another_series, "holds 2 DICOM series"),
    "twice": ({}, twice, "keep each slice once"),
    "cut": ({}, slice_of(lambda b: b[:-100]), "003.dcm is truncated or corrupt"),
    "cut in half": ({}, slice_of(lambda b: b[: len(b) // 2]), "003.dcm is truncated or corrupt"),
    "cut header": ({}, slice_of(lambda b: b[:150]), "003.dcm is truncated or corrupt"),
    "empty": ({}, slice_of(lambda b: b""), "003.dcm is truncated or corrupt"),
    "no DICOM": ({}, slice_of(lambda b: b"x" * 500), "003.dcm is truncated or corrupt"),
    "one slice": ({}, without(1, 2, 3, 4, 5), "holds a single slice"),
    "none": ({}, without(*range(1, 7)), "holds no DICOM files"),
}


@sweep("name", SERIES)
def test_a_damaged_series_is_one_sentence(name, tmp_path):
    settings, damage, message = SERIES[name]
    path = series(tmp_path, **settings)
    damage(path)
    with pytest.raises(DataError) as caught:
        read_volume(path)
    assert message in str(caught.value)
    assert one(str(caught.value))


def flat(path):
    sitk.WriteImage(sitk.Image(5, 4, sitk.sitkInt16), str(path))


def lines(old, new):
    return packed(lambda b: b.replace(old, new, 1))


NRRD = {
    "cut": (".nrrd", packed(lambda b: b[:-300]), "is truncated or corrupt"),
    "flip": (".nrrd", packed(flip(0.9)), "is truncated or corrupt"),
    "empty": (".nrrd", packed(lambda b: b""), "is truncated or corrupt"),
    "no NRRD": (".nrrd", packed(lambda b: b"x" * 500), "is truncated or corrupt"),
    "huge": (
        ".nrrd",
        lines(b"sizes: 10 12 6", b"sizes: 9999 9999 9999"),
        "a.nrrd says 1999400059998",
    ),
    "endless": (".nrrd", lines(b"sizes: 10 12 6", b"sizes: " + b"1" * 4000), "4007 characters"),
    "flat": (".nrrd", flat, "a volume needs three dimensions"),
    "sheared": (".nrrd", lines(b",0,0) (0,", b",0.3,0) (0,"), "a.nrrd"),
    "upwards": (
        ".nrrd",
        lines(b"sizes:", b"data file: ../../etc/passwd\nsizes:"),
        "in other files",
    ),
    "several": (".nrrd", lines(b"sizes:", b"datafile: LIST\nsizes:"), "in other files"),
}


@sweep("name", NRRD)
def test_a_damaged_nrrd_file_is_one_sentence(name, tmp_path):
    suffix, damage, message = NRRD[name]
    path = tmp_path / f"a{suffix}"
    write_volume(path, volume_noise(), affine())
    damage(path)
    with pytest.raises(DataError) as caught:
        read_volume(path)
    assert message in str(caught.value)
    assert one(str(caught.value))


@pytest.mark.parametrize("size", [(30_000, 30_000), (10_000, 9_000)])
def test_a_picture_that_claims_to_be_huge_takes_no_memory(size, tmp_path):
    """A few hundred bytes; without a check of its length they were read as gigabytes."""
    path = tmp_path / "a.tiff"
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    for tag, value in zip((256, 257), size, strict=True):
        place = data.index(tag.to_bytes(2, "little") + b"\4\0\1\0\0\0")
        data[place + 8 : place + 12] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.tiff can.*(pixels of its header|decompression bomb)"):
        load_picture(path, "grey", 1.0, "unit")


def test_a_sheared_nifti_file_is_one_sentence(tmp_path):
    to_mm = affine()
    to_mm[0, 1] = 0.3
    write_volume(tmp_path / "a.nii.gz", volume_noise(), to_mm)
    with pytest.raises(DataError, match="is sheared") as caught:
        read_volume(tmp_path / "a.nii.gz")
    assert one(str(caught.value))


# Arrays in the MedMNIST convention


def npy(shape, dtype="|u1", content=b""):
    """An array's file whose header claims what it likes."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return out.getvalue() + content


class Danger:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def replaced(name, content):
    def damage(path):
        kept = {f"{key}.npy": value for key, value in arrays().items() if key != name}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for key, value in kept.items():
                with archive.open(key, "w") as file:
                    np.lib.format.write_array(file, value)
            given = content(path) if callable(content) else content
            archive.writestr(f"{name}.npy", given)

    return damage


def pickled(path):
    return npy((1,), "|O", pickle.dumps(np.array([Danger(path.with_name("danger"))], object)))


def with_arrays(**changed):
    return lambda path: np.savez(path, **{**arrays(), **changed})


CLAIM = npy((100_000, 1000, 1000))
NPZ = {
    "93 GiB": (replaced("train_images", CLAIM), "d.npz cannot be read as .npz"),
    "labels of 93 GiB": (replaced("val_labels", CLAIM), "d.npz cannot be read as .npz"),
    "negative": (replaced("train_images", npy((-1, 12, 12))), "d.npz"),
    "too few bytes": (replaced("train_images", npy((8, 12, 12))), "d.npz cannot be read as .npz"),
    "no array": (replaced("train_images", b"hello"), "d.npz cannot be read as .npz"),
    "torn header": (replaced("train_images", CLAIM[:30]), "d.npz cannot be read as .npz"),
    "code as header": (
        replaced("train_images", CLAIM.replace(b"(100000, 1000, 1000)", b"(__import__('os'), 9)")),
        "d.npz cannot be read as .npz",
    ),
    "pickle": (replaced("train_images", pickled), "d.npz cannot be read as .npz"),
    "pickled labels": (replaced("test_labels", pickled), "d.npz cannot be read as .npz"),
    "four axes": (with_arrays(train_images=np.zeros((8, 1, 2, 2, 2), np.uint8)), "must be uint8"),
    "floats": (with_arrays(train_images=np.zeros((8, 12, 12))), "train_images: float64"),
    "NaN": (with_arrays(val_images=np.full((4, 12, 12), np.nan)), "val_images: float64"),
    "other length": (with_arrays(val_images=np.zeros((3, 12, 12), np.uint8)), "3 val_images, but"),
    "other size": (with_arrays(val_images=np.zeros((4, 9, 9), np.uint8)), "must have one size"),
    "text labels": (with_arrays(val_labels=np.array(list("abcd"))), "must be integers"),
    "negative label": (with_arrays(val_labels=np.array([0, 1, -1, 0])), "is negative"),
    "label 2^31": (with_arrays(val_labels=np.array([0, 1, 2**31, 0])), "labels up to 2147483648"),
    "several labels": (with_arrays(val_labels=np.zeros((4, 14), int)), "labels per image"),
    "one class": (
        with_arrays(
            **{
                f"{s}_labels": np.zeros((n, 1), int)
                for s, n in (("train", 8), ("val", 4), ("test", 4))
            }
        ),
        "has only the class 0",
    ),
    "flip": (lambda path: (with_arrays()(path), packed(flip(0.2))(path)), "d.npz"),
    "no zip": (lambda path: path.write_bytes(b"PK" + bytes(99)), "is no whole .npz file"),
}


@sweep("name", NPZ)
def test_a_damaged_npz_is_one_sentence(name, tmp_path):
    damage, message = NPZ[name]
    path = tmp_path / "d.npz"
    damage(path)
    with pytest.raises(MedfedError) as caught:
        read_medmnist(path)
    assert message in str(caught.value)
    assert one(str(caught.value))
    assert not (tmp_path / "danger").exists()
