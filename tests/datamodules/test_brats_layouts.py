"""The same patient in every layout, convention and orientation is read as the same."""

import itertools
from functools import partial

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch

from medfed.common.seeding import torch_rng
from medfed.datamodules import patches
from medfed.datamodules.readers.case_folders import BratsChallengeReader, FolderReader
from medfed.datamodules.readers.datalist import MSDReader
from medfed.standalone.errors import ConfigError
from medfed.standalone.volumes import read_volume
from medfed.standalone.voxels import zscore
from tests.datamodules.brats_layouts import (
    ENHANCING,
    NECROTIC,
    OEDEMA,
    label_values,
    make_head,
    save,
    write_challenge,
    write_msd,
)
from tests.sweeps import sweep

REGIONS = ("whole", "core", "enhancing")
CASE = "Brats18_CBICA_ABO_1"


def challenge(path, **settings):
    return BratsChallengeReader(path, **{"regions": REGIONS, **settings})


def read_one(reader):
    (patient,) = reader.patients()
    return reader.read(patient)


def write_msd_layout(folder, head):
    write_msd(folder, {CASE: head})
    return MSDReader(folder, regions=REGIONS)


def write_challenge_layout(folder, head):
    write_challenge(folder, {CASE: head})
    return challenge(folder)


def write_graded_unpacked(folder, head):
    write_challenge(folder / "HGG", {CASE: head}, ending=".nii")
    (folder / ".git").mkdir()
    shadow = folder / "HGG" / CASE / f"._{CASE}_t1.nii"  # as archives made on a Mac have
    shadow.touch()
    return challenge(folder)


def write_2023(folder, head):
    write_challenge(folder, {CASE: head}, convention="2023")
    return challenge(folder, enhancing=3)


def write_own_folders(folder, head):
    write_challenge(folder, {CASE: head})
    patterns = {"FLAIR": "*_flair.nii.gz", "T1": "*_t1.nii.gz", "T1c": "*_t1ce.nii.gz"}
    regions = {"whole": [1, 2, 4], "core": [1, 4], "enhancing": [4]}
    return FolderReader(folder, {**patterns, "T2": "*_t2.nii.gz"}, "*_seg.nii.gz", regions)


LAYOUTS = [
    write_msd_layout,
    write_challenge_layout,
    write_graded_unpacked,
    write_2023,
    write_own_folders,
]


@sweep("write", LAYOUTS)
def test_every_layout_gives_the_same_images_and_regions(write, tmp_path):
    head = make_head()
    sample = read_one(write(tmp_path, head))
    tissue = head.tissue[::-1, ::-1]  # left and posterior run backwards in the file
    expected = [
        tissue > 0,
        (tissue == NECROTIC) | (tissue == ENHANCING),
        tissue == ENHANCING,
    ]
    assert np.array_equal(sample["label"].numpy(), np.stack(expected))
    assert (tissue == OEDEMA).any()
    for channel, raw in zip(sample["image"].numpy(), head.images[:, ::-1, ::-1], strict=True):
        inside = raw != 0
        by_hand = (raw - raw[inside].mean()) / raw[inside].std() * inside
        assert np.allclose(channel, by_hand, atol=1e-5)


def oblique(permutation, signs, angle=0.3):
    """An affine of unequal spacing whose axes are permuted, flipped and turned about two axes."""
    axes = np.eye(3)[:, permutation] * signs * np.array([0.9, 1.1, 2.5])
    cos, sin = np.cos(angle), np.sin(angle)
    about_z = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    about_x = np.array([[1, 0, 0], [0, cos, sin], [0, -sin, cos]])
    affine = np.eye(4)
    affine[:3, :3] = about_x @ about_z @ axes
    affine[:3, 3] = [30, -20, 7]
    return affine


ORIENTATIONS = list(
    itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3))
)


@sweep(("permutation", "signs"), ORIENTATIONS)
def test_axes_run_right_anterior_superior_whatever_the_file_has(permutation, signs, tmp_path):
    shape, affine = (5, 4, 3), oblique(list(permutation), signs)
    numbers = np.arange(1, 61, dtype=np.int16).reshape(shape)  # each voxel has a name
    save(tmp_path / "a.nii", numbers, affine)
    volume = read_volume(tmp_path / "a.nii").voxels[0].numpy().astype(int)
    assert sorted(volume.ravel()) == list(range(1, 61))
    index = np.argwhere(numbers > 0)  # in the order of the names
    world = (affine[:3, :3] @ index.T).T + affine[:3, 3]
    places = world[volume.ravel() - 1].reshape(*volume.shape, 3)
    for axis in range(3):
        step = np.diff(places, axis=axis).reshape(-1, 3)
        assert np.allclose(step, step[0])  # neighbours in the file are neighbours here
        assert step[0].argmax() == abs(step[0]).argmax() == axis


def by_simpleitk(path):
    """A volume in RAS, read by another library, whose own world has left and posterior first."""
    turned = sitk.DICOMOrient(sitk.ReadImage(path), "LPS")
    return sitk.GetArrayFromImage(turned).T[::-1, ::-1].astype(float)


@pytest.mark.parametrize(("permutation", "signs"), ORIENTATIONS[::11])
@pytest.mark.parametrize("size", [(6, 4), (6, 4, 2)])
def test_patches_equal_those_cut_from_what_another_library_reads(
    permutation, signs, size, tmp_path, make_brats
):
    affine = oblique(list(permutation), signs)
    write_challenge(tmp_path, {name: make_head(n, affine=affine) for n, name in enumerate("abc")})
    data = make_brats(
        partial(BratsChallengeReader, regions=REGIONS, hospitals=1),
        path=str(tmp_path),
        spatial_dims=len(size),
        patch_size=size,
    )
    data.setup()
    client = data.clients["hospital_0"]
    (case,) = client.patients["train"]
    folder = tmp_path / case
    raw = [by_simpleitk(folder / f"{case}{s}.nii.gz") for s in ("_flair", "_t1", "_t1ce", "_t2")]
    volume = np.stack([np.where(c, (c - c[c != 0].mean()) / c[c != 0].std(), 0) for c in raw])
    values = by_simpleitk(folder / f"{case}_seg.nii.gz")
    centres = patches.sample_centres(
        torch.from_numpy(values > 0),
        torch.from_numpy((volume != 0).any(axis=0)),
        count=8,
        background_share=0.25,
        size=(*size, 1)[:3],
        generator=torch_rng(data.seed, "patches", case),
    ).tolist()
    for n, centre in enumerate(centres):
        lengths = zip(centre, (*size, 1)[:3], strict=True)
        window = tuple(slice(c - s // 2, c - s // 2 + s) for c, s in lengths)
        image, label = volume[:, *window], values[window] == 4
        shape = (4, *size)
        assert np.allclose(client.train["image"][n].numpy(), image.reshape(shape), atol=1e-4)
        assert np.array_equal(client.train["label"][n, 2].numpy(), label.reshape(size))
    assert client.train["label"][:, 2].any()


def test_one_patient_in_all_orientations_is_one_patient(tmp_path):
    ras = make_head(affine=np.eye(4))
    write_challenge(tmp_path / "ras", {CASE: ras})
    expected = read_one(challenge(tmp_path / "ras"))
    for number, orientation in enumerate(["LPS", "PIR", "SAL"]):
        to = nib.orientations.axcodes2ornt(orientation)
        for path in sorted((tmp_path / "ras" / CASE).iterdir()):
            turned = nib.load(path).as_reoriented(
                nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), to)
            )
            target = tmp_path / str(number) / CASE / path.name
            save(target, np.asanyarray(turned.dataobj), turned.affine)
        sample = read_one(challenge(tmp_path / str(number)))
        assert torch.equal(sample["label"], expected["label"])
        assert torch.equal(sample["image"], expected["image"])


def test_channels_are_those_asked_for_in_that_order(tmp_path):
    write_challenge(tmp_path, {CASE: make_head()})
    every, two = challenge(tmp_path), challenge(tmp_path, channels=["t2w", "T1gd"])
    assert two.channels == ("T2w", "T1gd")
    assert torch.equal(read_one(two)["image"], read_one(every)["image"][[3, 2]])


def test_slope_and_intercept_of_the_file_count(tmp_path):
    image = nib.Nifti1Image(np.arange(8, dtype=np.int16).reshape(2, 2, 2), np.eye(4))
    image.header.set_slope_inter(0.5, 3)
    nib.save(image, tmp_path / "a.nii.gz")
    assert (
        read_volume(tmp_path / "a.nii.gz").voxels.ravel().tolist()
        == nib.load(tmp_path / "a.nii.gz").get_fdata().ravel().tolist()
    )


def test_a_channel_without_contrast_becomes_zero():
    image = torch.tensor([[0.0, 7.0, 7.0], [0.0, 0.0, 0.0]])
    assert zscore(image).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_region_without_oedema_still_knows_its_value(tmp_path):
    write_challenge(tmp_path, {CASE: make_head()})
    core = read_one(challenge(tmp_path, regions=["core"]))["label"]
    assert torch.equal(core, read_one(challenge(tmp_path))["label"][1:2])


def test_the_enhancing_value_is_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.reader\.enhancing=2 must be 4"):
        challenge(tmp_path, enhancing=2)


def test_values_are_those_of_the_convention():
    tissue = np.array([0, NECROTIC, OEDEMA, ENHANCING], dtype=np.uint8)
    assert label_values(tissue, "msd").tolist() == [0, 2, 1, 3]
    assert label_values(tissue, "2018").tolist() == [0, 1, 2, 4]
