"""Every file of a case that cannot be used is named in one sentence."""

import gzip

import nibabel as nib
import numpy as np
import pytest

from medfed.datamodules.readers.case_folders import BratsChallengeReader
from medfed.datamodules.readers.datalist import MSDReader
from medfed.standalone.errors import DataError
from tests.datamodules.brats_layouts import make_head, save, write_challenge, write_msd
from tests.sweeps import sweep

CASE = "Brats18_CBICA_ABO_1"


def rewrite(suffix, change):
    """A damage: changes the array of one of the case's files."""

    def damage(folder):
        (path,) = (folder / CASE).glob(f"*{suffix}.nii.gz")
        image = nib.load(path)
        save(path, change(np.asanyarray(image.dataobj)), image.affine)

    return damage


def with_value(value):
    def change(array):
        changed = array.astype(np.float32)
        changed[3, 3, 3] = value
        return changed

    return change


def remove(suffix):
    def damage(folder):
        (folder / CASE / f"{CASE}{suffix}.nii.gz").unlink()

    return damage


def cut(folder):
    path = folder / CASE / f"{CASE}_t2.nii.gz"
    path.write_bytes(path.read_bytes()[:-9])


def flip_a_bit(folder):
    """The file unpacks to its full length; only its own checksum tells."""
    path = folder / CASE / f"{CASE}_t2.nii.gz"
    stored = gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0)
    middle = len(stored) // 2
    path.write_bytes(stored[:middle] + bytes([stored[middle] ^ 1]) + stored[middle + 1 :])


def cut_unpacked(folder):
    path = folder / CASE / f"{CASE}_t2.nii.gz"
    whole = gzip.decompress(path.read_bytes())
    path.with_suffix("").write_bytes(whole[:-9])
    path.unlink()


def forget_orientation(folder):
    path = folder / CASE / f"{CASE}_seg.nii.gz"
    image = nib.Nifti1Image(np.asanyarray(nib.load(path).dataobj), None)
    image.header.set_sform(np.diag([0.0, 1, 1, 1]), code=1)
    nib.Nifti1Image(image.dataobj, None, image.header).to_filename(path)


def empty_case(folder):
    (folder / "Brats18_X_1").mkdir()


def same_case_twice(folder):
    for grade in ("HGG", "LGG"):
        write_challenge(folder / grade, {"twin": make_head()})


@sweep(
    ("damage", "message"),
    [
        (remove("_t1ce"), r"0 files match \*_t1ce\.nii\.gz or .*\(modality T1gd\)"),
        (remove("_seg"), r"0 files match \*_seg\.nii\.gz or .*\(mask\)"),
        (empty_case, r"Brats18_X_1: 0 files match .*the folder has: nothing"),
        (same_case_twice, r"Case twin is in .*GG/twin and in .*GG/twin; remove one"),
        (cut, r"_t2\.nii\.gz is truncated or corrupt"),
        (flip_a_bit, r"_t2\.nii\.gz is truncated or corrupt \(CRC check failed"),
        (cut_unpacked, r"_t2\.nii is truncated or corrupt"),
        (rewrite("_t1", with_value(np.nan)), r"_t1\.nii\.gz: channel T1w has NaN or infinite"),
        (rewrite("_t1", with_value(-np.inf)), r"_t1\.nii\.gz: channel T1w has NaN or infinite"),
        (rewrite("_t1", lambda a: a[..., :-1]), r"_t1\.nii\.gz has shape \(14, 12, 8\)"),
        (
            rewrite("_t1", lambda a: np.stack([a, a], -1)),
            r"_t1\.nii\.gz holds 2 volumes \(channels or points in time\), but 1 is named",
        ),
        (rewrite("_seg", lambda a: np.stack([a, a], -1)), r"_seg\.nii\.gz holds 2 masks"),
        (rewrite("_seg", with_value(3)), r"unknown label value 3; known: 0, 1, 2, 4"),
        (rewrite("_seg", with_value(-1)), r"_seg\.nii\.gz: unknown label value -1;"),
        (rewrite("_seg", with_value(260)), r"_seg\.nii\.gz: unknown label value 260;"),
        (forget_orientation, r"_seg\.nii\.gz has no valid affine"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_sentence(damage, message, tmp_path):
    write_challenge(tmp_path, {CASE: make_head()})
    damage(tmp_path)
    reader = BratsChallengeReader(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        [reader.read(patient) for patient in reader.patients()]
    assert "\n" not in str(caught.value)


def test_an_image_of_too_few_channels_is_refused(tmp_path):
    head = make_head()
    write_msd(tmp_path, {"a": head})
    save(tmp_path / "imagesTr" / "a.nii.gz", head.images[:2].transpose(1, 2, 3, 0), head.affine)
    reader = MSDReader(tmp_path)
    with pytest.raises(DataError, match=r"a\.nii\.gz has 2 channels, but 4 are needed"):
        reader.read(reader.patients()[0])
    (tmp_path / "dataset.json").write_text('{"modality": {"0": "FLAIR"}, "training": ["a"]}')
    with pytest.raises(DataError, match=r"dataset\.json: the training case a is no pair"):
        MSDReader(tmp_path, channels=["FLAIR"]).patients()
