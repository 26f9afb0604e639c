"""Pictures as others save them: endings, bits, masks beside them, and axes of arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import SimpleITK
from PIL import Image

from medfed.datamodules.readers.image_folder import pictures_in, read_image_folder
from medfed.standalone import itk, pictures
from medfed.standalone.errors import DataError

SIZE = (12, 16)


def grey(seed=0, top=256):
    return np.random.default_rng(seed).integers(0, top, SIZE)


def classes(folder, save, count=3):
    for kind in ("ill", "well"):
        (folder / kind).mkdir(parents=True)
        for n in range(count):
            save(folder / kind / f"{n}", n)
    return folder


FORMATS = {"png": "PNG", "bmp": "BMP", "tif": "TIFF", "webp": "WEBP", "gif": "GIF"}
FORMATS |= dict.fromkeys(("jpg", "jpeg", "jfif"), "JPEG")


@pytest.mark.parametrize("ending", [*FORMATS, "PNG", "Jfif"])
def test_every_ending_is_read_as_pillow_reads_it(ending, tmp_path):
    def save(path, n):
        how = {"lossless": True} if ending == "webp" else {}
        image = Image.fromarray(grey(n).astype(np.uint8))
        image.save(path.with_suffix(f".{ending}"), FORMATS[ending.lower()], **how)

    found = read_image_folder(classes(tmp_path, save), SIZE)
    for image, file in zip(found.images, found.samples.files, strict=True):
        with Image.open(file) as there:
            assert (image[0] == np.asarray(there.convert("L"))).all()


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 15, 16])
@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_scaled_by_those_that_are_used(bits, ending, tmp_path, caplog):
    def save(path, n):
        values = grey(n, 1 << bits).astype(np.uint16)
        values[0, 0] = (1 << bits) - 1
        Image.fromarray(values).save(path.with_suffix(f".{ending}"))

    found = read_image_folder(classes(tmp_path, save), SIZE)
    for image, file in zip(found.images, found.samples.files, strict=True):
        with Image.open(file) as there:
            values = np.asarray(there).astype(np.float64)
        assert np.abs(image[0] - values * 255 / ((1 << bits) - 1)).max() <= 0.5 + 1e-9
        again = pictures.read_image(file, SIZE, "grey", found.white)
        assert (again == image).all()
    assert found.white == (1 << bits) - 1
    said = [r.getMessage() for r in caplog.records if "16 bits" in r.getMessage()]
    assert len(said) == (bits < 16)
    assert all(f"use {bits} bits; 0 to {(1 << bits) - 1} become 0 to 255" in text for text in said)


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_colours_of_sixteen_bits_are_read_by_their_higher_half_and_that_is_said(
    bits, ending, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(itk, "_WARNED", {})

    def save(path, n):
        values = np.stack([grey(n + k, 1 << bits) for k in range(3)], axis=-1)
        image = SimpleITK.GetImageFromArray(
            values.astype(np.uint8 if bits == 8 else np.uint16), isVector=True
        )
        SimpleITK.WriteImage(image, str(path.with_suffix(f".{ending}")))

    found = read_image_folder(classes(tmp_path, save), SIZE)
    assert found.images.max() <= (15 if bits == 12 else 255)
    said = [r.getMessage() for r in caplog.records if "nearly black" in r.getMessage()]
    assert bool(said) == (bits > 8)
    assert all(Path(text.split(" has ")[0]).suffix == f".{ending}" for text in said)


MASKS = {
    "BUSI": ("benign (1)", ["benign (1)_mask", "benign (1)_mask_1"], ["benign (2)", "mask"]),
    "ISIC": ("ISIC_0001", ["ISIC_0001_segmentation", "ISIC_0001_superpixels"], ["ISIC_0002"]),
    "gt": ("p1", ["p1_gt", "p1-Label"], ["p2_gt", "p1_left", "target"]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_beside_pictures_are_no_pictures(name, tmp_path):
    picture, masks, others = MASKS[name]
    for stem in (picture, *masks, *others):
        Image.fromarray(grey().astype(np.uint8)).save(tmp_path / f"{stem}.png")
    found = pictures_in(tmp_path)
    assert [sorted(f.stem for f in files) for files in found] == [
        sorted([picture, *others]),
        sorted(masks),
    ]


AXES = {
    "grey": ((5, 8, 9), (5, 1, 8, 9)),
    "one channel last": ((5, 8, 9, 1), (5, 1, 8, 9)),
    "one channel first": ((5, 1, 8, 9), (5, 1, 8, 9)),
    "colours last": ((5, 8, 9, 3), (5, 3, 8, 9)),
    "colours first": ((5, 3, 8, 9), (5, 3, 8, 9)),
    "volumes": ((5, 28, 28, 28), (5, 1, 28, 28, 28)),
}


@pytest.mark.parametrize("name", AXES)
def test_the_axis_of_channels_is_found(name):
    shape, wanted = AXES[name]
    array = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    found = pictures.channels_first(Path("a.npz"), "train", array)
    assert found.shape == wanted
    assert (np.sort(found, None) == np.sort(array, None)).all()
    if name == "colours last":
        assert (found == array.transpose(0, 3, 1, 2)).all()


@pytest.mark.parametrize("shape", [(5, 8, 9, 4), (5, 4, 8, 9), (5, 8, 9, 2), (5, 8)])
def test_other_numbers_of_channels_are_one_sentence(shape):
    with pytest.raises(DataError, match=r"a\.npz, train_images"):
        pictures.channels_first(Path("a.npz"), "train", np.zeros(shape, np.uint8))
