"""Pictures and masks in files: every kind that Pillow writes, and resampling."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from medfed.common.seeding import numpy_rng
from medfed.standalone import pictures
from medfed.standalone.errors import DataError

RNG = numpy_rng("pictures")
GREY = RNG.integers(0, 256, (5, 7)).astype(np.uint8)
COLOURS = RNG.integers(0, 256, (5, 7, 3)).astype(np.uint8)
DEEP = RNG.integers(0, 65536, (5, 7)).astype(np.uint16)
MASK = np.zeros((5, 7), np.uint8)
MASK[1:3, 2:6] = 1


def saved(folder, array, name="a.png", **settings):
    (array if isinstance(array, Image.Image) else Image.fromarray(array)).save(
        folder / name, **settings
    )
    return folder / name


def luminance(rgb):
    """ITU-R 601, by hand."""
    return rgb @ np.array([0.299, 0.587, 0.114])


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.bmp"])
def test_every_value_is_read_as_it_was_written(tmp_path, name):
    grey, white = pictures.read_picture(saved(tmp_path, GREY, name), "grey")
    assert np.array_equal(grey, GREY[None])
    assert white == 255
    rgb, _ = pictures.read_picture(saved(tmp_path, COLOURS, name), "rgb")
    assert np.array_equal(rgb, COLOURS.transpose(2, 0, 1))
    both = pictures.read_picture(saved(tmp_path, GREY, name), "rgb")[0]
    assert np.array_equal(both, np.stack([GREY] * 3))
    one = pictures.read_picture(saved(tmp_path, COLOURS, name), "grey")[0]
    assert np.abs(one[0] - luminance(COLOURS)).max() <= 1


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_are_not_clipped(tmp_path, name):
    file = saved(tmp_path, DEEP, name)
    deep, white = pictures.read_picture(file, "grey")
    assert np.array_equal(deep, DEEP[None])
    assert white == 65535
    unit = pictures.load_picture(file, "rgb", 1.0, "unit")
    assert np.allclose(unit, np.rot90(DEEP / 65535, -1), atol=1e-6)
    assert pictures.picture_header(file) == (7, 5, "grey")


def test_palettes_and_opaque_alpha_are_what_they_show(tmp_path):
    palette = Image.fromarray(COLOURS).quantize(8)
    file = saved(tmp_path, palette)
    shown = np.asarray(palette.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(pictures.read_picture(file, "rgb")[0], shown)
    assert pictures.picture_header(file)[2] == "rgb"
    alpha = Image.fromarray(COLOURS).convert("RGBA")
    rgb = pictures.read_picture(saved(tmp_path, alpha), "rgb")[0]
    assert np.array_equal(rgb, COLOURS.transpose(2, 0, 1))
    alpha.putpixel((3, 2), (0, 0, 0, 0))
    with pytest.raises(DataError, match=r"a\.png is transparent in places; save it without"):
        pictures.read_picture(saved(tmp_path, alpha), "rgb")


def test_a_camera_may_have_been_turned(tmp_path):
    note = Image.Exif()
    note[0x0112] = 6  # the camera lay on its side: to be turned clockwise
    file = saved(tmp_path, COLOURS, "a.jpg", exif=note, quality=100, subsampling=0)
    assert pictures.picture_header(file) == (5, 7, "rgb")
    found = pictures.read_picture(file, "rgb")[0]
    assert np.abs(found - np.rot90(COLOURS, -1).transpose(2, 0, 1)).mean() < 20


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_a_tiff_that_its_tag_turns_is_right_or_refused(tmp_path, compression):
    shown = [GREY, GREY[:, ::-1], GREY[::-1, ::-1], GREY[::-1]]
    for orientation in range(1, 9):
        note = Image.Exif()
        note[0x0112] = orientation
        file = saved(tmp_path, GREY, "a.tif", exif=note, compression=compression)
        if orientation <= 4:
            found = pictures.read_picture(file, "grey")[0]
            assert np.array_equal(found[0], shown[orientation - 1])
        else:
            for read in (pictures.picture_header, pictures.read_mask):
                with pytest.raises(DataError, match=r"a\.tif is a TIFF that .* turns; save it"):
                    read(file)


@pytest.mark.parametrize("value", [1, 255])
def test_masks_of_every_mode_have_their_values(tmp_path, value):
    mask = Image.fromarray(MASK * value)
    for mode in ("L", "RGB", "RGBA", "LA", "I;16"):
        found = pictures.read_mask(saved(tmp_path, mask.convert(mode)))
        assert np.array_equal(found, MASK * value), mode
    assert np.array_equal(pictures.read_mask(saved(tmp_path, MASK > 0)), MASK)


def test_palettes_of_masks(tmp_path):
    """Of greys, the grey; of colours, as annotation tools write them, the number."""
    mask = Image.fromarray(MASK, mode="L").convert("P")
    mask.putpalette([255, 255, 255, 0, 0, 0])  # 0 is shown white, and so not background
    assert np.array_equal(pictures.read_mask(saved(tmp_path, mask)), 255 - 255 * MASK)
    mask.putpalette([0, 0, 0, 128, 0, 0])
    assert np.array_equal(pictures.read_mask(saved(tmp_path, mask)), MASK)


def test_what_is_no_picture_or_mask_is_named(tmp_path):
    pages = [Image.fromarray(GREY)] * 2
    cases = [
        (saved(tmp_path, pages[0], "p.tif", save_all=True, append_images=pages[1:]), "2 pages"),
        (tmp_path / "none.png", "not exist"),
        (saved(tmp_path, GREY * 0 + 9, "flat.png"), "same value in every pixel"),
        (saved(tmp_path, GREY / np.float32(np.nan), "n.tif"), "NaN or infinite"),
    ]
    (tmp_path / "torn.png").write_bytes(saved(tmp_path, COLOURS, "b.png").read_bytes()[:60])
    cases.append((tmp_path / "torn.png", "be read as an image"))
    for file, message in cases:
        with pytest.raises(DataError, match=rf"{file.name}.* {message}"):
            pictures.read_picture(file, "grey")
    with pytest.raises(DataError, match=r"c\.png is a picture with colours; a mask has"):
        pictures.read_mask(saved(tmp_path, COLOURS, "c.png"))
    with pytest.raises(DataError, match="no whole numbers"):
        pictures.read_mask(saved(tmp_path, MASK / np.float32(2), "f.tif"))
    file = saved(tmp_path, GREY.astype(np.float32), "float.tif")
    with pytest.raises(DataError, match=r"32 bits per value, so the value of white is unknown"):
        pictures.load_picture(file, "grey", 1.0, "unit")


def triangle(count, scale):
    """Weights (n, count) of an antialiased bilinear resampling, by its definition."""
    size = round(count * scale)
    step = count / size
    centre = (np.arange(size)[:, None] + 0.5) * step
    weights = np.clip(1 - np.abs(np.arange(count) + 0.5 - centre) / max(step, 1), 0, None)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("scale", [0.5, 0.37, 0.9])
def test_resampling_against_its_definition(scale):
    image = RNG.random((3, 24, 30)).astype(np.float32)
    rows, columns = triangle(24, scale), triangle(30, scale)
    assert np.allclose(pictures.shrink(image, scale), rows @ image @ columns.T, atol=1e-5)
    mask = RNG.integers(0, 3, (24, 30))
    shares = np.stack([rows @ (mask == value) @ columns.T for value in range(3)])
    found = pictures.shrink_mask(mask, scale)
    taken = np.take_along_axis(shares, found[None], 0)[0]
    assert (taken >= shares.max(0) - 1e-4).all()


def test_resampling_against_pytorch():
    image = RNG.random((3, 33, 47)).astype(np.float32)
    options = {"mode": "bilinear", "antialias": True, "align_corners": False}
    peer = interpolate(torch.from_numpy(image)[None], size=(17, 24), **options)[0]
    assert np.allclose(pictures.resized(image, (17, 24)), peer, atol=1e-5)


def test_the_scale_of_one_changes_nothing_and_ties_are_no_background():
    assert np.array_equal(pictures.shrink(GREY[None].astype(np.float32), 1.0), GREY[None])
    assert np.array_equal(pictures.shrink_mask(MASK, 1.0), MASK)
    line = np.zeros((8, 8), np.int64)
    line[:, 2:4] = 7  # covers one column of the smaller mask
    assert pictures.shrink_mask(line, 0.5).tolist() == [[0, 7, 0, 0]] * 4


def test_values_are_normalised_by_the_picture_alone(tmp_path):
    file = saved(tmp_path, COLOURS)
    image = pictures.load_picture(file, "rgb", 1.0, "zscore")
    wide = COLOURS.astype(float)
    peer = (wide - wide.mean((0, 1))) / wide.std((0, 1))
    assert np.allclose(image, np.rot90(peer, -1).transpose(2, 0, 1), atol=1e-5)
    assert np.allclose(pictures.rows_from_top(image), peer.transpose(2, 0, 1), atol=1e-5)
    assert np.array_equal(pictures.upright(GREY)[0], GREY[::-1, 0])  # from the bottom upwards
