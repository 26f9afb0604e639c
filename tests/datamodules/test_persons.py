"""Patients by the names of cases and pictures: one person never lies in two splits."""

from __future__ import annotations

import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medfed.datamodules.readers.case_folders import BratsChallengeReader, FolderReader
from medfed.datamodules.readers.image_folder import read_image_folder
from medfed.datamodules.readers.persons import persons_of

SAME = {
    "BraTS 2023": ("BraTS-GLI-00012-000", "BraTS-GLI-00012-001"),
    "BraTS 2023 metastases": ("BraTS-MET-00012-000", "BraTS-MET-00012-010"),
    "BraTS radiotherapy": ("BraTS-MEN-RT-0012-1", "BraTS-MEN-RT-0012-2"),
    "LIDC": ("LIDC-IDRI-0012", "LIDC-IDRI-0012_2"),
    "OASIS 1": ("OAS1_0012_MR1", "OAS1_0012_MR2"),
    "OASIS 3": ("OAS30012_MR_d0129", "OAS30012_MR_d2129"),
    "OASIS 3 in BIDS": ("sub-OAS30012_ses-d0129", "sub-OAS30012_ses-d2129"),
    "BIDS": ("sub-01_ses-1_T1w", "sub-01_ses-2_T1w"),
    "ADNI": ("002_S_0295_2006", "002_S_0295_2008"),
    "TCGA": ("TCGA-02-0006-01Z", "TCGA-02-0006-02Z"),
    "ISBI": ("training01_01", "training01_02"),
    "sides": ("0012_left.png", "0012_right.png"),
    "eyes": ("P12-OD.jpg", "P12-OS.jpg"),
    "CHASE": ("Image_12L.jpg", "Image_12R.jpg"),
    "breasts in two folders": ("benign/12_L.png", "malignant/12_R.png"),
}
OTHERS = [
    ("BraTS-GLI-00012-000", "BraTS-GLI-00013-000"),
    ("BraTS2021_00012", "BraTS2021_00013"),
    ("BraTS20_Training_001", "BraTS20_Training_002"),
    ("LIDC-IDRI-0012", "LIDC-IDRI-0013"),
    ("OAS1_0012_MR1", "OAS2_0012_MR1"),
    ("left.png", "right.png"),  # no name beside the side
    ("skull.png", "skurl.png"),
    ("1_left.png", "2_right.png"),
    ("case_1", "case_2"),
]


@pytest.mark.parametrize("kind", SAME)
def test_names_of_one_person_are_joined_and_that_is_said(kind, caplog):
    first, second = SAME[kind]
    other = first.replace("12", "77").replace("sub-01", "sub-77").replace("0295", "7777")
    other = other.replace("0006", "7777").replace("training01", "training77")
    a, b, c = persons_of([first, second, other], None, Path("data"))
    assert a == b != c
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "3 names are those of 2 patients" in said[0]
    assert first in said[0]
    assert second in said[0]
    caplog.clear()
    assert len(set(persons_of([first, second], "(.*)", Path("data")))) == 2
    assert not caplog.records


@pytest.mark.parametrize("names", OTHERS, ids=lambda names: names[0])
def test_names_of_two_people_stay_apart(names, caplog):
    assert len(set(persons_of(names, None, Path("data")))) == 2
    assert not caplog.records


ALIKE = {
    "years": ([f"P{n:02d}_{year}" for n in range(4) for year in (2019, 2021)], "P00"),
    "slices": ([f"scan-{n}-{k}.png" for n in range(5) for k in range(3)], "scan-0"),
    "chest radiographs": (
        [f"ill/person{n}_virus_{k}.jpeg" for n in range(9) for k in range(2)],
        "person0",
    ),
}
SINGLE = {
    "numbers": [f"case_{n:03d}" for n in range(9)],
    "copies": [f"ISIC_{n:07d}_small.jpg" for n in range(9)],
    "hospitals": [f"site{n % 2}_{n:03d}" for n in range(40)],
    "words": [f"left_lung_{n}.png" for n in range(9)],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_names_that_begin_alike_are_pointed_out_and_the_pattern_joins_them(kind, caplog):
    names, first = ALIKE[kind]
    assert len(set(persons_of(names, None, Path("data")))) == len(names)
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"each of {len(names)} names counts as a patient" in line
    assert f"of one patient, {first}, set" in line
    pattern = re.search(r'data\.reader\.patient_pattern="(.*)"\'\.', line)[1]
    joined = persons_of(names, pattern, Path("data"))
    assert {re.split(r"[_-](?:virus_)?\d+(?:\.|$)", n.rpartition("/")[2])[0] for n in names} == {
        *joined
    }


@pytest.mark.parametrize("kind", SINGLE)
def test_names_of_single_cases_are_not(kind, caplog):
    assert persons_of(SINGLE[kind], None, Path("data")) == SINGLE[kind]
    assert not caplog.records


def test_equal_names_in_two_folders_are_no_pair():
    names = ["a/1_left.png", "a/1_right.png", "b/1_left.png", "b/1_right.png"]
    assert persons_of(names, None, Path("data")) == ["a/1", "a/1", "b/1", "b/1"]


def volume(path, label=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(0).integers(0, 2 if label else 900, (6, 5, 4)).astype(np.int16)
    nib.save(nib.Nifti1Image(array, np.eye(4)), path)


@pytest.mark.parametrize("layout", ["challenge", "folder"])
def test_time_points_are_cases_of_one_patient(layout, tmp_path):
    for person in range(3):
        for time in range(2):
            name = f"BraTS-GLI-{person:05d}-{time:03d}"
            for part in ("t1n", "seg"):
                volume(tmp_path / name / f"{name}-{part}.nii.gz", part == "seg")
    if layout == "challenge":
        reader = BratsChallengeReader(tmp_path, ["T1w"], enhancing=3, hospitals=2)
    else:
        reader = FolderReader(tmp_path, {"T1": "*-t1n.nii.gz"}, "*-seg.nii.gz", None, hospitals=2)
    patients = reader.patients()
    assert [p.id for p in patients] == [f"BraTS-GLI-{n:05d}" for n in range(3)]
    assert [[c.id[-3:] for c in reader.cases_of(p)] for p in patients] == [["000", "001"]] * 3
    assert len({p.centre for p in patients}) == 2


def test_sides_of_pictures_in_class_folders_are_one_patient(tmp_path):
    for n in range(6):
        for side in ("left", "right"):
            path = tmp_path / ("ill" if n % 2 else "well") / f"{n}_{side}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.full((4, 4), n * 20, np.uint8)).save(path)
    samples = read_image_folder(tmp_path, (4, 4)).samples
    assert sorted(map(len, samples.rows.values())) == [2] * 6
