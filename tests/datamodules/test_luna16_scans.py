"""Whole scans with boxes: places against SimpleITK, patches, flips, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import SimpleITK as sitk
import torch

from medfed.config.compose import build
from medfed.datamodules.augmentation import Augmentation
from medfed.datamodules.luna16_scans import ScanPatches, boxes_within
from medfed.datamodules.patches import BoxedVolume
from medfed.datamodules.readers.luna16 import Luna16ScanReader, read_with_nodules
from medfed.standalone.ct import ScanSpec, places, read_scan, world_of
from medfed.standalone.errors import ConfigError, DataError
from medfed.standalone.volumes import read_geometry
from tests.contract.names import load
from tests.datamodules.luna_files import FLIPS, ORIGIN, image_of, noise, stored, write_csv

NODULES = "seriesuid,coordX,coordY,coordZ,diameter_mm"
SPEC = ScanSpec(spacing=(1.5, 1.2, 2.0))


def a_scan():
    """Noise with a bright ball around a known place, stored along the patient's axes."""
    image = image_of(noise())
    place = image.TransformContinuousIndexToPhysicalPoint([20.3, 15.2, 7.1])
    return image, place


def write(folder, scans, rows):
    for series, image in scans.items():
        sitk.WriteImage(image, str(folder / f"{series}.mhd"))
    write_csv(folder / "annotations.csv", rows, NODULES)


def by_sitk(image, spec):
    """SimpleITK's linear resampling on a grid that begins at the scan's first corner."""
    clipped = sitk.Cast(sitk.Clamp(image, lowerBound=-1000, upperBound=400), sitk.sitkFloat64)
    old, spacing = np.array(image.GetSpacing()), np.array(spec.spacing)[[1, 0, 2]]
    size = np.rint(np.array(image.GetSize()) * old / spacing).astype(int)
    grid = sitk.Image(size.tolist(), sitk.sitkFloat64)
    grid.SetSpacing(spacing.tolist())
    grid.SetOrigin((np.array(ORIGIN) - old / 2 + spacing / 2).tolist())
    # A margin, as SimpleITK has no value beyond the middle of the last voxel.
    padded = sitk.ZeroFluxNeumannPad(clipped, [1] * 3, [1] * 3)
    return sitk.GetArrayFromImage(sitk.Resample(padded, grid, sitk.Transform(), sitk.sitkLinear))


@pytest.mark.parametrize("flips", [FLIPS[0], FLIPS[3], FLIPS[6]])
def test_scan_and_box_lie_where_simpleitk_finds_them(tmp_path, flips):
    image, place = a_scan()
    write(tmp_path, {"1.2.3": stored(image, flips)}, [("1.2.3", *place, 6.0)])
    reader = Luna16ScanReader(tmp_path)
    read = read_with_nodules(tmp_path / "1.2.3.mhd", reader.nodules_of("1.2.3"), SPEC)
    expected = by_sitk(image, SPEC).transpose(1, 2, 0) + 1000
    assert read["image"].shape == expected.shape
    assert np.abs(read["image"].astype(float) - expected).max() <= 0.51
    # h, w, d of a point that is 20.3 voxels of 0.7 mm (and a half) from the scan's corner.
    middle = np.array([15.7 * 0.9 / 1.5, 20.8 * 0.7 / 1.2, 7.6 * 2.5 / 2.0])
    half = 3.0 / np.array(SPEC.spacing)
    (box,) = read["boxes"]
    np.testing.assert_allclose(box, np.r_[middle - half, middle + half], rtol=1e-5)
    grid = read_geometry(tmp_path / "1.2.3.mhd", "LPS")
    there = places(grid, np.array([place]), SPEC.spacing)
    np.testing.assert_allclose(world_of(grid, there, SPEC.spacing)[0], place, rtol=1e-9)


def test_values_are_those_of_the_window(tmp_path):
    write(tmp_path, {"1": image_of(noise())}, [("1", *a_scan()[1], 6.0)])
    codes = read_scan(tmp_path / "1.mhd", SPEC)
    unit = SPEC.values.take(codes)
    assert (unit.min(), unit.max()) == (0.0, 1.0)
    np.testing.assert_allclose(unit, codes / 1400, rtol=1e-6)


def volumes(*shapes):
    """Volumes whose voxel values are their own place, and boxes in them."""
    made = []
    for shape in shapes:
        codes = np.arange(np.prod(shape), dtype=np.uint16).reshape(1, *shape)
        values = np.arange(1 << 16, dtype=np.float32)[None]
        made.append(
            BoxedVolume(codes, values, np.zeros((0, *shape), np.uint8), (0,) * 3, shape, ())
        )
    return made


def test_patches_hold_a_nodule_or_lie_anywhere_and_labels_move_with_them():
    boxes = [np.array([[3, 3, 3, 7, 7, 7], [20, 20, 10, 26, 26, 16]], np.float32), np.zeros((0, 6))]
    cut = ScanPatches(volumes((30, 28, 20), (24, 24, 16)), boxes, 4, 0.25, (16, 16, 8))
    block = cut.block(3)
    label, every = block["label"], torch.arange(8)
    assert label.shape == (8, 2, 7)
    assert block["case"].tolist() == [0] * 4 + [1] * 4
    assert all((label[n, :, 6] == 1).any() for n in (1, 2, 3))  # a quarter lies anywhere
    assert not label[4:].any()
    images = block["image"].take(every)
    for n in range(4):
        at = np.unravel_index(int(images[n, 0, 0, 0, 0]), (30, 28, 20))
        expected = boxes_within(boxes[0].astype(np.float32), np.array(at), np.array([16, 16, 8]), 2)
        np.testing.assert_array_equal(label[n], expected)
    again, other = cut.block(3), cut.block(4)
    assert torch.equal(again["label"], label)
    assert not torch.equal(other["image"].take(every), images)
    assert cut.some([1]).block(3)["image"].shape == (4, 1, 16, 16, 8)


def test_flips_move_boxes_with_the_image():
    """A bright box stays inside its corners, whatever is flipped."""
    image, label = torch.zeros(16, 1, 12, 10, 8), torch.zeros(16, 2, 7)
    image[:, 0, 2:5, 6:9, 1:3] = 1
    label[:, 0] = torch.tensor([2.0, 6, 1, 5, 9, 3, 1])
    chain = Augmentation(flip_chance=0.5).build((12, 10, 8), (0, 1, 2))
    moved, boxes = chain(image, label, seed=1)
    assert len({tuple(b[0].tolist()) for b in boxes}) > 4
    assert not boxes[:, 1].any()
    for one, box in zip(moved, boxes[:, 0].int().tolist(), strict=True):
        inside = one[0, *map(slice, box[:3], box[3:6])]
        assert inside.shape == (3, 3, 2)
        assert inside.sum() == one.sum() == 18


def refused(tmp_path, rows, match, error=DataError):
    image, _ = a_scan()
    write(tmp_path, {"1.2.3": image}, rows)

    def read():
        reader = Luna16ScanReader(tmp_path)
        read_with_nodules(tmp_path / "1.2.3.mhd", reader.nodules_of("1.2.3"), SPEC)

    with pytest.raises(error, match=match):
        read()


def test_what_cannot_be_true_is_refused(tmp_path):
    place = a_scan()[1]
    refused(tmp_path, [("9.9", *place, 6)], "row 1: series 9.9 has no .mhd file")
    far = "row 2: .* mm lies outside scan"
    refused(tmp_path, [("1.2.3", *place, 6), ("1.2.3", 900, 0, 0, 6)], far)
    refused(tmp_path, [("1.2.3", *place, 0)], "row 1: diameter_mm is not above 0")
    with pytest.raises(ConfigError, match=r"three numbers from 0\.1 to 20 mm"):
        ScanSpec(spacing=(1.0, 1.0))
    with pytest.raises(ConfigError, match="multiples of 8"):
        build(load(["data=luna16_scans", "data.patch_size=[20,20,8]"]).data)
    data = build(load(["data=luna16_scans", "augment=light"]).data)
    assert (data.augment.affine_chance, data.augment.flip_chance) == (0.0, 0.5)
    assert "not turned" in data.data_remarks()[0]
