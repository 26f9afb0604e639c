import json
import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

from medfed.datamodules.readers.base import Patient, with_hospitals
from medfed.datamodules.readers.case_folders import FolderReader
from medfed.datamodules.readers.datalist import MSDReader
from medfed.standalone.errors import ConfigError, DataError

MODALITIES = {"FLAIR": "*_flair.nii.gz", "T1": "*_t1.nii.gz"}


@pytest.fixture
def cases(tmp_path):
    """Two case folders in the layout of BraTS 2018; returns their parent."""
    rng = np.random.default_rng(0)
    for case in ("b", "a"):
        folder = tmp_path / case
        folder.mkdir()
        for name in ("flair", "t1"):
            write(folder / f"{case}_{name}.nii.gz", rng.normal(100, 9, (6, 5, 4)))
        write(folder / f"{case}_seg.nii.gz", rng.choice([0, 1, 2, 4], (6, 5, 4)))
    return tmp_path


def write(path, data, spacing=1.0):
    affine = np.diag([-spacing, -spacing, spacing, 1])
    nib.save(nib.Nifti1Image(np.asarray(data, dtype=np.float32), affine), path)


def folder_reader(path, **settings):
    defaults = {"label": "*_seg.nii.gz", "regions": {"whole": [1, 2, 4], "enhancing": [4]}}
    return FolderReader(path, MODALITIES, **{**defaults, **settings})


def test_folder_reader_reorients_normalises_and_maps_regions(cases):
    reader = folder_reader(cases)
    patients = reader.patients()
    assert [p.id for p in patients] == ["a", "b"]
    sample = reader.read(patients[0])
    raw = nib.as_closest_canonical(nib.load(cases / "a" / "a_t1.nii.gz")).get_fdata()
    expected = (raw - raw.mean()) / raw.std()
    assert np.allclose(sample["image"][1].numpy(), expected, atol=1e-4)
    mask = nib.as_closest_canonical(nib.load(cases / "a" / "a_seg.nii.gz")).get_fdata()
    assert np.array_equal(sample["label"][1].numpy(), mask == 4)
    assert sample["image"].dtype == torch.float32
    assert type(sample["image"]) is torch.Tensor


def test_zero_voxels_stay_zero_and_do_not_count(cases):
    data = np.zeros((6, 5, 4))
    data[2:4] = np.random.default_rng(1).normal(50, 3, (2, 5, 4))
    write(cases / "a" / "a_t1.nii.gz", data)
    reader = folder_reader(cases, channels=["T1"])
    image = reader.read(reader.patients()[0])["image"]
    brain = image[image != 0]
    assert len(brain) == 40
    assert float(brain.mean()) == pytest.approx(0, abs=1e-4)
    assert float(brain.std(correction=0)) == pytest.approx(1, abs=1e-3)


def test_channels_are_selected_in_the_order_asked_for(cohort):
    both = MSDReader(cohort, channels=("t2w", "FLAIR"))
    every = MSDReader(cohort)
    patient = both.patients()[0]
    image = every.read(patient)["image"]
    assert torch.equal(both.read(patient)["image"], image[[3, 0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": ["FLAIRE"]}, r"Unknown channel FLAIRE; known: FLAIR, T1w, T1gd, T2w"),
        ({"regions": ["hole"]}, r"Unknown region hole; known: whole, core.*did you mean whole"),
        ({"channels": ["FLAIR", "flair"]}, "named once"),
    ],
)
def test_unknown_names_list_the_known_ones(cohort, settings, message):
    with pytest.raises(ConfigError, match=message):
        MSDReader(cohort, **settings)


def damage_truncate(folder):
    path = folder / "a_t1.nii.gz"
    path.write_bytes(path.read_bytes()[:-40])


def damage_remove_modality(folder):
    (folder / "a_t1.nii.gz").unlink()


def damage_remove_mask(folder):
    (folder / "a_seg.nii.gz").unlink()


def damage_shape(folder):
    write(folder / "a_t1.nii.gz", np.ones((6, 5, 3)))


def damage_affine(folder):
    write(folder / "a_seg.nii.gz", np.ones((6, 5, 4)), spacing=2.0)


def damage_nan(folder):
    data = np.ones((6, 5, 4))
    data[0, 0, 0] = np.nan
    write(folder / "a_t1.nii.gz", data)


def damage_label(folder):
    write(folder / "a_seg.nii.gz", np.full((6, 5, 4), 3))


def damage_fraction(folder):
    write(folder / "a_seg.nii.gz", np.full((6, 5, 4), 0.5))


def damage_garbage(folder):
    (folder / "a_t1.nii.gz").write_bytes(b"not an image")


def damage_flat(folder):
    write(folder / "a_t1.nii.gz", np.ones((6, 5)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"a_t1\.nii\.gz is truncated or corrupt"),
        (damage_garbage, r"a_t1\.nii\.gz is truncated or corrupt"),
        (damage_remove_modality, r"0 files match \*_t1\.nii\.gz \(modality T1\)"),
        (damage_remove_mask, r"0 files match \*_seg\.nii\.gz \(mask\)"),
        (damage_shape, r"a_t1\.nii\.gz has shape \(6, 5, 3\)"),
        (damage_flat, r"has shape \(6, 5\); a volume has three axes"),
        (damage_affine, r"a_seg\.nii\.gz has another affine"),
        (damage_nan, r"a_t1\.nii\.gz: channel T1 has NaN"),
        (damage_label, r"a_seg\.nii\.gz: unknown label value 3; known: 0, 1, 2, 4"),
        (damage_fraction, r"a_seg\.nii\.gz: unknown label value 0\.5"),
    ],
)
def test_bad_files_are_named(cases, damage, message):
    damage(cases / "a")
    reader = folder_reader(cases)
    with pytest.raises(DataError, match=message):
        reader.read(reader.patients()[0])


def test_msd_case_without_its_file(cohort, tmp_path):
    shutil.copytree(cohort, tmp_path / "msd")
    (tmp_path / "msd" / "labelsTr" / "BRATS_002.nii.gz").unlink()
    reader = MSDReader(tmp_path / "msd")
    with pytest.raises(DataError, match=r"labelsTr/BRATS_002\.nii\.gz is missing"):
        reader.read(reader.patients()[1])


def test_bad_folders_and_indices(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.json does not exist; set data\.path"):
        MSDReader(tmp_path)
    (tmp_path / "dataset.json").write_text("{torn")
    with pytest.raises(DataError, match="not readable JSON"):
        MSDReader(tmp_path)
    index = {"modality": {"0": "FLAIR"}, "training": []}
    (tmp_path / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="lists no training cases"):
        MSDReader(tmp_path, channels=["FLAIR"]).patients()
    with pytest.raises(DataError, match="no case folders"):
        folder_reader(tmp_path).patients()
    with pytest.raises(DataError, match="is not a folder"):
        folder_reader(tmp_path / "nowhere").patients()


def test_hospitals_are_contiguous_and_never_replace_known_centres():
    patients = [Patient(c) for c in "abcde"]
    names = [p.centre for p in with_hospitals(patients, 2)]
    assert names == ["hospital_0"] * 3 + ["hospital_1"] * 2
    known = [replace(p, centre="x") for p in patients]
    assert with_hospitals(known, 2) == known
    with pytest.raises(ConfigError, match="Cannot cut 5 patients into 6"):
        with_hospitals(patients, 6)
