"""Pictures and masks in files: PNG, JPEG, TIFF, BMP, WebP or GIF, read by Pillow, one at a time.

Unambiguous files are read; ambiguous ones (several pages, transparency, a coloured mask) are
refused. In the resulting image the first axis runs to the right and the second upwards, see
`upright`.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .files import reading, refuse_special
from .itk import say_once

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)
Color = Literal["grey", "rgb"]
Pixels = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".tif", ".tiff", ".bmp", ".webp", ".gif")
Normalization = Literal["zscore", "unit"]
_PHOTOMETRIC = 0x0106
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: width and height are exchanged
_HIGH_BYTES = (
    "has colours of 16 bits, of which the higher 8 are read; if it uses only 12, it is nearly "
    "black: save it with 8 bits"
)
_GREY = ("1", "L", "LA", "I", "F")


def picture_header(file: Path) -> tuple[int, int, Color]:
    """Reads the size of a picture or mask, and whether it has colours."""
    with opened(file) as picture:
        width, height = picture.size
        if picture.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
        return width, height, _color(picture)


def read_picture(file: Path, color: Color) -> tuple[Pixels, int | None]:
    """Reads a picture (C, height, width) with all its grey values, and that of white if known."""
    with opened(file) as picture:
        _check_opaque(picture, file)
        white = 65535 if picture.mode.startswith("I;16") else None
        if white or picture.mode in ("I", "F"):  # Pillow's conversion to 8 bits would clip these
            grey = np.asarray(_windowed(picture)).astype(np.float32)
            pixels = np.stack([grey] * (1 if color == "grey" else 3))
        else:
            white = 255
            plain = np.asarray(_windowed(picture).convert("L" if color == "grey" else "RGB"))
            pixels = np.moveaxis(np.atleast_3d(plain), -1, 0).astype(np.float32)
    if not np.isfinite(pixels).all():
        raise DataError(f"{file} has NaN or infinite pixels; repair or remove it.")
    if (pixels == pixels[:, :1, :1]).all():
        raise DataError(f"{file} has the same value in every pixel; copy it again or leave it out.")
    return pixels, white


def load_picture(file: Path, color: Color, scale: float, normalization: str) -> Pixels:
    """Reads a picture for a network, (C, w, h): z-scored, or from black 0 to white 1."""
    pixels, white = read_picture(file, color)
    small = shrink(pixels, scale)
    if normalization == "zscore":
        return upright(zscore(small))
    if white is None:
        mend = "save it with 8 or 16 bits, or train with data.reader.normalization=zscore"
        what = f"{file} has 32 bits per value, so the value of white is unknown"
        raise DataError(f"{what}; {mend}.")
    return upright(small / np.float32(white))


def zscore(pixels: Pixels) -> Pixels:
    """Scales channels (C, height, width) to mean 0 and deviation 1; one of one value becomes 0.

    Example:
        >>> zscore(np.array([[[1, 3]], [[5, 5]]], np.float32)).tolist()
        [[[-1.0, 1.0]], [[0.0, 0.0]]]
    """
    mean = pixels.mean(axis=(1, 2), keepdims=True, dtype=np.float64)
    sd = pixels.std(axis=(1, 2), keepdims=True, dtype=np.float64)
    scores: Pixels = ((pixels - mean) / np.where(sd == 0, 1, sd)).astype(np.float32)
    return scores


def read_mask(file: Path) -> NDArray[np.int64]:
    """Reads a mask (height, width); of a palette of colours, the colours' numbers."""
    with opened(file) as picture:
        indexed = picture.mode == "P" and _color(picture) == "rgb"
        if not indexed:
            _check_opaque(picture, file)
        upright = _windowed(picture)
        if upright.mode in ("P", "PA", "LA") and not indexed:
            upright = upright.convert("L")
        values = np.asarray(upright)
    if values.ndim == 3:
        if (values[..., :3] != values[..., :1]).any():
            what = f"{file} is a picture with colours; a mask has one label value per pixel"
            raise DataError(f"{what}: save it as grey values, or with a palette.")
        values = values[..., 0]
    codes = values.astype(np.int64)
    if (codes != values).any():
        raise DataError(f"{file} has values that are no whole numbers; save label values.")
    return codes


_INFLATION = 1 << 14  # the most pixels per byte: an empty mask compresses very well


@contextmanager
def opened(file: Path) -> Iterator[Image.Image]:
    """Opens a picture of one page."""
    from PIL import Image

    if not file.is_file():
        refuse_special(file)
    try:
        with Image.open(file) as picture:
            _check_readable(file, picture)
            yield picture
    except Exception as error:
        with reading(file, "an image", "mend or remove it", usual="picture"):
            raise error


def _check_readable(file: Path, picture: Image.Image) -> None:
    """Refuses pictures that Pillow reads in part, wrongly, or into more memory than there is."""
    if (pages := getattr(picture, "n_frames", 1)) > 1:
        raise DataError(f"{file} has {pages} pages; save each as a separate picture.")
    if picture.width * picture.height > _INFLATION * (length := file.stat().st_size):
        raise DataError(
            f"{file} cannot hold in {length} bytes the {picture.width} x {picture.height} "
            "pixels of its header; copy it again or remove it."
        )
    tags = getattr(picture, "tag_v2", {})
    if tags.get(_ORIENTATION) in _TURNED:  # of which Pillow mixes up the rows
        raise DataError(f"{file} is a TIFF that its orientation tag turns; save it upright.")
    if tags.get(_PHOTOMETRIC) == 0 and picture.mode[0] in "IF":  # Pillow turns 8 bits alone
        what = f"{file} stores white as 0 (WhiteIsZero), which is read of 8 bits alone"
        raise DataError(f"{what}; save it with black as 0.")
    if any(
        "RGB" in str(tile.args) and ";16" in str(tile.args) for tile in getattr(picture, "tile", ())
    ):
        say_once(file, _HIGH_BYTES)


def scaled(size: Sequence[int], scale: float) -> tuple[int, ...]:
    """Returns a picture's size after scaling, at least one pixel."""
    return tuple(max(1, round(n * scale)) for n in size)


def shrink(pixels: Pixels, scale: float) -> Pixels:
    """Resamples a picture to a smaller size, bilinearly and with antialiasing."""
    return pixels if scale == 1 else resized(pixels, scaled(pixels.shape[1:], scale))


def resized(pixels: Pixels, size: Sequence[int]) -> Pixels:
    """Resamples (C, height, width) to a size, bilinearly, with antialiasing if it gets smaller."""
    from PIL import Image

    wanted = (size[1], size[0])
    parts = (Image.fromarray(np.ascontiguousarray(p, dtype=np.float32)) for p in pixels)
    return np.stack([np.asarray(p.resize(wanted, Image.Resampling.BILINEAR)) for p in parts])


def shrink_mask(values: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    """Resamples a mask: every pixel gets the value of most weight, of equal ones the greatest."""
    if scale == 1:
        return values
    known = np.unique(values)
    shares = shrink(np.stack([values == value for value in known]).astype(np.float32), scale)
    # argmax takes the first maximum; rounded, as equal sums may differ in their last bit.
    last = len(known) - 1 - shares[::-1].round(5).argmax(axis=0)
    shrunk: NDArray[np.int64] = known[last]
    return shrunk


def upright(pixels: NDArray[Any]) -> NDArray[Any]:
    """Turns rows from the top (..., height, width) into (..., x to the right, y upwards).

    Example:
        >>> rows = np.arange(6).reshape(2, 3)
        >>> upright(rows).tolist(), bool((rows_from_top(upright(rows)) == rows).all())
        ([[3, 0], [4, 1], [5, 2]], True)
    """
    return np.ascontiguousarray(np.rot90(pixels, -1, axes=(-2, -1)))


def rows_from_top(image: NDArray[Any]) -> NDArray[Any]:
    """Undoes `upright`."""
    return np.ascontiguousarray(np.rot90(image, 1, axes=(-2, -1)))


def _windowed(picture: Image.Image) -> Image.Image:
    """The picture, rotated by its EXIF orientation."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture)


def _color(picture: Image.Image) -> Color:
    if picture.mode == "P":
        palette = np.array(picture.getpalette("RGB")).reshape(-1, 3)
        used = palette[[n for n in np.unique(np.asarray(picture)) if n < len(palette)]]
        return "grey" if (used == used[:, :1]).all() else "rgb"
    return "grey" if picture.mode in _GREY or picture.mode.startswith("I;") else "rgb"


def _check_opaque(picture: Image.Image, file: Path) -> None:
    """Refuses pictures with transparent parts, whose values are undefined."""
    if picture.mode not in ("LA", "PA", "RGBA") and "transparency" not in picture.info:
        return
    if picture.convert("RGBA").getchannel("A").getextrema()[0] != 255:
        raise DataError(f"{file} is transparent in places; save it without an alpha channel.")


def white_of(files: Iterable[Path]) -> int:
    """Returns the white of pictures of 16 bits, of the least bits that hold their values."""
    largest = 0
    for file in files:
        with opened(file) as picture:
            if picture.mode.startswith("I;16"):
                largest = max(largest, int(np.asarray(picture).max()))
    return (1 << max(8, largest.bit_length())) - 1 if largest else 65535


def read_image(file: Path, size: Sequence[int], color: str, white: int = 65535) -> Bytes:
    """Reads one image, (C, height, width)."""
    from PIL import Image

    with opened(file) as picture:
        _check_opaque(picture, file)
        plain = _eight_bits(_windowed(picture), white).convert("L" if color == "grey" else "RGB")
    height, width = size
    if plain.size != (width, height):
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain, dtype=np.uint8)
    return pixels[None] if color == "grey" else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))


def has_colours(file: Path) -> bool:
    """Says whether a picture shows colours, and is no grey one saved with three equal channels."""
    if picture_header(file)[2] == "grey":
        return False
    with opened(file) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return bool((pixels != pixels[..., :1]).any())


def say_other_color(file: Path, color: Color) -> None:
    """Says where a picture has colours and the model none, or the reverse."""
    if color == "rgb" and picture_header(file)[2] == "grey":
        log.warning("%s is grey, but the model was trained on colours.", file)
    elif color == "grey" and has_colours(file):
        log.warning("%s has colours, but the model was trained on grey pictures.", file)


def _eight_bits(image: Image.Image, white: int = 65535) -> Image.Image:
    """Scales 16-bit grey values to 8 bits, which Pillow's own conversion would clip.

    Example:
        >>> from PIL import Image
        >>> image = Image.fromarray(np.array([[0, 257 * 100, 65535]], np.uint16))
        >>> np.asarray(_eight_bits(image)).tolist()
        [[0, 100, 255]]
    """
    from PIL import Image

    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.float64)
        return Image.fromarray(np.round(values.clip(0, white) * (255 / white)).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its values have 32 bits and no known range; save it with 8 or 16 bits")
    return image


def unit_range(images: Bytes, peak: int, present: NDArray[np.bool_], black: int = -1) -> Pixels:
    """Turns bytes (N, C, *spatial) into numbers from `black` to 1; absent channels are 0.

    Example:
        >>> unit_range(np.array([[[0, 16]]], np.uint8), 16, np.array([True])).tolist()
        [[[-1.0, 1.0]]]
    """
    unit = images.astype(np.float32)
    unit *= (1 - black) / peak
    unit += black
    # After scaling, as 0 is missing.
    unit[:, ~present] = 0
    return unit


def standardized(images: Pixels, mean: Sequence[float], sd: Sequence[float]) -> Pixels:
    """Subtracts a mean from each channel and divides by its deviation, which may be 0.

    Example:
        >>> standardized(np.array([[[1, 2]], [[3, 4]]], np.float32), [1], [2]).tolist()
        [[[0.0, 0.5]], [[1.0, 1.5]]]
    """
    shape = (len(mean), *[1] * (images.ndim - 2))
    centre, scale = (np.array(values, np.float32).reshape(shape) for values in (mean, sd))
    scale[scale == 0] = 1
    return (images - centre) / scale


@contextmanager
def arrays_of(path: Path) -> Iterator[Mapping[str, Bytes]]:
    """Opens an ``.npz`` file for as long as its arrays are read, without pickle."""
    with reading(path, ".npz", "write it again", "name a .npz file"):
        if path.exists() and not zipfile.is_zipfile(path):
            raise DataError(f"{path} is no whole .npz file; download or write it again.")
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays


def channels_first(path: Path, split: str, images: Bytes) -> Bytes:
    """Moves or adds the channel axis of (n, h, w[, 3]) or (n, d, h, w), as a view."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        wanted = "uint8 (n, h, w), (n, h, w, 3) or (n, d, h, w)"
        got = f"{images.dtype} {images.shape}"
        raise DataError(f"{path}, {split}_images: {got} must be {wanted}.")
    first, last = images.shape[1], images.shape[-1]
    if images.ndim == 4 and last in (1, 3):
        return np.moveaxis(images, -1, 1)
    if images.ndim == 4 and first in (1, 3):
        return images
    if images.ndim == 4 and {first, last} & {2, 4}:
        what = f"{images.shape} has neither one channel nor three, and no volume is so thin"
        mend = "save grey values, or red, green and blue"
        raise DataError(f"{path}, {split}_images: {what}; {mend}.")
    return images[:, None]
