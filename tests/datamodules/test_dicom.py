"""DICOM in a folder: what is read is what pydicom reads, and the rest is one sentence."""

from __future__ import annotations

import json

import nibabel
import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    RLELossless,
)

from medfed.datamodules.readers.datalist import DatalistReader
from medfed.standalone import dicom
from medfed.standalone.errors import DataError
from medfed.standalone.volumes import read_geometry, read_volume

CT, ENHANCED, SEG = (UID(f"1.2.840.10008.5.1.4.1.1.{n}") for n in ("2", "4.1", "66.4"))
SHAPE = (5, 8, 6)  # slices, rows, columns
ROOT = "1.2.826.0.1.3680043.10.99"


def noise(shape=SHAPE):
    return np.random.default_rng(0).integers(0, 900, shape).astype(np.uint16)


def base(kind, pixels, syntax=ExplicitVRLittleEndian, series="1"):
    one = Dataset()
    one.file_meta = FileMetaDataset()
    one.file_meta.TransferSyntaxUID = syntax
    one.file_meta.MediaStorageSOPClassUID = one.SOPClassUID = kind
    one.SOPInstanceUID = one.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    one.SeriesInstanceUID, one.StudyInstanceUID = f"{ROOT}.{series}", ROOT
    one.Modality, one.SamplesPerPixel = "CT", 1
    one.PhotometricInterpretation = "MONOCHROME2"
    one.Rows, one.Columns = pixels.shape[-2:]
    one.BitsAllocated = one.BitsStored = 16
    one.HighBit, one.PixelRepresentation = 15, 0
    one.PixelData = pixels.tobytes()
    return one


def save(one, path, bare=False, syntax=ExplicitVRLittleEndian):
    path.parent.mkdir(parents=True, exist_ok=True)
    if bare:
        implicit = syntax == ImplicitVRLittleEndian
        del one.file_meta
        pydicom.dcmwrite(path, one, implicit_vr=implicit, little_endian=True)
    else:
        one.save_as(path, enforce_file_format=True)


def plain(pixels, k, height, **settings):
    one = base(CT, pixels[k], **settings)
    one.ImagePositionPatient = [0, 0, height]
    one.ImageOrientationPatient, one.PixelSpacing = [1, 0, 0, 0, 1, 0], [0.8, 0.7]
    one.RescaleSlope, one.RescaleIntercept, one.SliceThickness = 1, -1024, 2
    one.InstanceNumber = k + 1
    return one


def series(folder, heights=None, ending=".dcm", bare=(), **settings):
    pixels = noise((len(heights or range(SHAPE[0])), *SHAPE[1:]))
    for k, height in enumerate(heights or np.arange(SHAPE[0]) * 2.0):
        syntax = settings.get("syntax", ExplicitVRLittleEndian)
        save(plain(pixels, k, height, **settings), folder / f"{k}{ending}", k in bare, syntax)
    return pixels


def frames(path, heights=None, slopes=None, shared=True, kind=ENHANCED, series="1"):
    heights = np.arange(SHAPE[0]) * 2.0 if heights is None else heights
    pixels = noise((len(heights), *SHAPE[1:]))
    one = base(kind, pixels, series=series)
    one.NumberOfFrames, one.Modality = len(heights), "MR"

    def group(**values):
        item = Dataset()
        for name, value in values.items():
            setattr(item, name, value)
        return [item]

    every = Dataset()
    every.PixelMeasuresSequence = group(PixelSpacing=[0.8, 0.7], SliceThickness=2)
    every.PlaneOrientationSequence = group(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])
    if slopes is None:
        scale = {"RescaleSlope": 2, "RescaleIntercept": -5, "RescaleType": "US"}
        every.PixelValueTransformationSequence = group(**scale)
    one.SharedFunctionalGroupsSequence = [every]
    each = []
    for k, height in enumerate(heights):
        frame = Dataset()
        if height is not None:
            frame.PlanePositionSequence = group(ImagePositionPatient=[3, 4, height])
        if slopes is not None:
            scale = {"RescaleSlope": slopes[k], "RescaleIntercept": 0, "RescaleType": "US"}
            frame.PixelValueTransformationSequence = group(**scale)
        each.append(frame)
    if shared:
        one.PerFrameFunctionalGroupsSequence = each
    save(one, path)
    return pixels


def two_series(folder):
    """Two series in one folder: the second is shorter, and brighter."""
    for uid, title, heights, more in (
        ("1", "T1 sag", [0, 2, 4, 6], 0),
        ("9", "T2  AX", [0, 2, 4], 50),
    ):
        pixels = noise((len(heights), *SHAPE[1:])) + more
        for k, height in enumerate(heights):
            one = plain(pixels.astype(np.uint16), k, height, series=uid)
            one.SeriesDescription = title
            save(one, folder / f"{uid}_{k}.dcm")
    return folder


@pytest.mark.parametrize(
    ("wanted", "uid"),
    [("T1 sag", "1"), ("t2 ax", "9"), (f"{ROOT}.9", "9"), (("CT", "T2 AX"), "9")],
    ids=["description", "other spelling", "UID", "several"],
)
def test_one_of_two_series_is_chosen(wanted, uid, tmp_path):
    files = sorted(two_series(tmp_path).glob(f"{uid}_*"))
    chosen = (wanted,) if isinstance(wanted, str) else wanted
    volume = read_volume(tmp_path, series=chosen)
    stored = np.stack([pydicom.dcmread(file).pixel_array for file in files])
    assert (volume.voxels[0].numpy() == stored.transpose(2, 1, 0)[::-1, ::-1] - 1024.0).all()
    assert read_geometry(tmp_path, series=chosen).shape == volume.geometry.shape


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ((), "holds 2 DICOM series: T1 sag (4 files), T2 AX (3 files). "),
        (("FLAIR",), "holds 2 DICOM series, of which 0 are named FLAIR: T1 sag (4 files)"),
        (("T1 sag", "T2 ax"), "of which 2 are named T1 sag or T2 ax"),
    ],
    ids=["none", "unknown", "both"],
)
def test_the_sentence_about_series_names_the_key(wanted, words, tmp_path):
    with pytest.raises(DataError) as error:
        read_volume(two_series(tmp_path), series=wanted)
    assert words in str(error.value)
    assert str(error.value).endswith("""'data.reader.series="T1 sag"'.""")


def test_a_list_reads_the_series_that_its_key_names(tmp_path):
    two_series(tmp_path / "scan")
    mask = np.zeros((6, 8, 3), np.uint8)
    mask[2:4, 2:4, 1] = 1
    grid = read_geometry(tmp_path / "scan", series=["T2 AX"]).stored
    nibabel.save(nibabel.Nifti1Image(mask, grid), tmp_path / "mask.nii.gz")
    entry = {"image": "scan", "label": "mask.nii.gz"}
    content = {"labels": {"0": "background", "1": "lesion"}, "training": [entry]}
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"data\.reader\.series="):
        DatalistReader(tmp_path)
    reader = DatalistReader(tmp_path, series="T2 AX")
    (patient,) = reader.patients()
    assert reader.read(patient)["image"].shape == (1, 6, 8, 3)
    assert reader.record()["series"] == ["T2 AX"]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_frames_of_one_file_lie_where_each_says(order, tmp_path):
    pixels = frames(tmp_path / "scan.dcm", [2.0 * n for n in order])
    stored = pydicom.dcmread(tmp_path / "scan.dcm").pixel_array
    assert (stored == pixels).all()
    volume = read_volume(tmp_path)
    ordered = stored[np.argsort(order)].transpose(2, 1, 0) * 2.0 - 5  # columns, rows, slices
    # RAS: columns run to the left and rows to the back.
    assert (volume.voxels[0].numpy() == ordered[::-1, ::-1]).all()
    assert np.allclose(volume.geometry.spacing, (0.7, 0.8, 2.0))
    first = (volume.geometry.affine @ [SHAPE[2] - 1, SHAPE[1] - 1, 0, 1])[:3]
    assert np.allclose(first, (-3, -4, 0))
    assert dicom.in_order(tmp_path) == [tmp_path / "scan.dcm"]


def beside(path):
    frames(path / "a.dcm")
    frames(path / "b.dcm")


def with_a_slice(path):
    frames(path / "a.dcm")
    save(plain(noise(), 0, 0.0), path / "b.dcm")


UNREAD = {
    "a frame is missing": (
        lambda p: frames(p / "a.dcm", [0, 2, 4, 8, 10]),
        "a slice is missing between frame 3 and frame 4",
    ),
    "uneven frames": (
        lambda p: frames(p / "a.dcm", [0, 2, 4, 6.6, 8.6]),
        "the distance is uneven between frame 3 and frame 4",
    ),
    "two phases": (
        lambda p: frames(p / "a.dcm", [0, 2, 4, 6, 0, 2, 4, 6]),
        "8 slices at 4 places, as of several phases",
    ),
    "slopes": (lambda p: frames(p / "a.dcm", slopes=[1, 2, 3, 4, 5]), "5 different slopes"),
    "no places": (
        lambda p: frames(p / "a.dcm", [0, 2, None, 6, 8]),
        "frame 3, has no usable ImagePositionPatient",
    ),
    "no groups": (lambda p: frames(p / "a.dcm", shared=False), "5 frames and says of 0"),
    "two files": (beside, "keep one volume per folder"),
    "beside a slice": (with_a_slice, "keep one volume per folder"),
    "only a mask": (lambda p: frames(p / "a.dcm", kind=SEG), "no DICOM images but Segmentation"),
    "two spacings": (
        lambda p: series(p, [0, 1, 2, 3, 4, 9, 14, 19, 24]),
        "two spacings: the slices are 1 mm apart up to 4.dcm, and 5 mm from there on",
    ),
    "phases": (lambda p: series(p, [0, 2, 4, 6, 0, 2, 4, 6]), "8 slices at 4 places"),
    "one place": (lambda p: series(p, [1, 1, 1]), "all slices are at the same place"),
    "no decoder": (
        lambda p: (series(p), _compressed(p)),
        "is compressed as High-Throughput JPEG 2000",
    ),
}


def _compressed(folder):
    one = pydicom.dcmread(folder / "1.dcm")
    one.file_meta.TransferSyntaxUID = UID("1.2.840.10008.1.2.4.201")
    one.PixelData = pydicom.encaps.encapsulate([b"12"])
    one["PixelData"].is_undefined_length = True
    save(one, folder / "1.dcm")


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_no_even_volume_is_one_sentence(name, tmp_path):
    make, message = UNREAD[name]
    make(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        read_volume(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian], ids=["e", "i"])
def test_slices_without_preamble_and_ending_are_slices(syntax, tmp_path):
    pixels = series(tmp_path, ending="", bare=(1, 4), syntax=syntax)
    assert (tmp_path / "0").read_bytes()[128:132] == b"DICM"
    assert (tmp_path / "1").read_bytes()[128:132] != b"DICM"
    volume = read_volume(tmp_path)
    assert (volume.voxels[0].numpy() == pixels.transpose(2, 1, 0)[::-1, ::-1] - 1024.0).all()


@pytest.mark.parametrize(
    "syntax", [RLELossless, DeflatedExplicitVRLittleEndian], ids=["rle", "zip"]
)
def test_compressed_slices_are_read(syntax, tmp_path):
    pixels = noise((3, 32, 30))
    for k in range(3):
        one = plain(pixels, k, 2.0 * k)
        if syntax == RLELossless:
            one.compress(syntax)
        one.file_meta.TransferSyntaxUID = syntax
        save(one, tmp_path / f"{k}.dcm")
        assert (pydicom.dcmread(tmp_path / f"{k}.dcm").pixel_array == pixels[k]).all()
    assert (pixels == read_volume(tmp_path).voxels[0].numpy()[::-1, ::-1].T + 1024).all()


def test_objects_beside_the_images_are_left_out_and_named(tmp_path):
    pixels = series(tmp_path)
    frames(tmp_path / "seg.dcm", kind=SEG, series="2")
    for name, kind in (("rs", "481.3"), ("sr", "88.33")):
        one = base(UID(f"1.2.840.10008.5.1.4.1.1.{kind}"), noise(), series="3")
        for tag in ("PixelData", "Rows", "Columns"):
            delattr(one, tag)
        save(one, tmp_path / f"{name}.dcm")
    (tmp_path / "DICOMDIR").write_bytes(b"x" * 128 + b"DICM")
    (tmp_path / "notes.txt").write_text("none")
    assert read_geometry(tmp_path).shape == SHAPE[::-1]
    assert (pixels == read_volume(tmp_path).voxels[0].numpy()[::-1, ::-1].T + 1024).all()
    assert {path.name: kind for path, kind in dicom.others(tmp_path).items()} == {
        "seg.dcm": "Segmentation",
        "rs.dcm": "RT Structure Set",
        "sr.dcm": "Comprehensive SR",
    }


def test_voxels_that_begin_as_a_header_are_no_slices(tmp_path):
    begin = (tmp_path / "scan.raw", tmp_path / "1.2.840")
    for path in begin:
        path.write_bytes(b"\x08\x00\x05\x00\x0a\x00\x00\x00" + bytes(400))
    assert dicom.is_series(tmp_path)
    begin[1].unlink()
    assert not dicom.is_series(tmp_path)


def test_inverted_values_are_turned_round_and_said(tmp_path, caplog):
    pixels = series(tmp_path)
    for file in tmp_path.iterdir():
        one = pydicom.dcmread(file)
        one.PhotometricInterpretation = "MONOCHROME1"
        save(one, file)
    volume = read_volume(tmp_path).voxels[0].numpy()[::-1, ::-1].T
    assert (volume == 65535 - pixels.astype(float) - 1024).all()
    assert "5 of 5 images store white as 0 (MONOCHROME1)" in caplog.text
