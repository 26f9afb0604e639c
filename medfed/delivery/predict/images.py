"""Probabilities of images, in files or in the arrays of training: a row each of a CSV file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from medfed.common.errors import DataError, MedfedError, first_line
from medfed.datamodules.readers.image_folder import read_image
from medfed.datamodules.readers.medmnist import channels_first, check_headers
from medfed.datamodules.readers.pictures import SUFFIXES
from medfed.datamodules.readers.samples import unit_range
from medfed.delivery.bundle.scripts.predictor import Predictor
from medfed.delivery.predict.committee import Committee
from medfed.delivery.predict.options import attempt
from medfed.delivery.predict.outputs import table_path, write_csv
from medfed.delivery.predict.scans import say_left_out, walk

_GREY = ("1", "L", "LA", "I", "I;16", "F")


def predict_images(committee: Committee) -> Path:
    """Classifies an image, or all images of a folder and its subfolders, into one CSV file.

    Args:
        committee: Models of images.

    Returns:
        The CSV file: ``image``, the path below the input (of an ``.npz`` file with the array's name
        and the image's number from 0), and a probability per class; see `Committee.classify` for
        what several models add. Labels of ``.npz`` files are copied into ``label``, and nothing is
        made of them.

    Raises:
        MedfedError: If nothing can be done, or some images could not be used.
    """
    output, source = table_path(committee.options), Path(committee.options.input)
    files = _images_in(source)
    root = source if source.is_dir() else source.parent
    rows: list[list[object]] = []

    def one(file: Path) -> None:
        name = file.relative_to(root).as_posix()
        if file.suffix.lower() != ".npz":
            chances = committee.classify(lambda member: read_pixels(file, member), file)
            rows.append([name, "", *chances[0].tolist()])
            return
        for key, images, labels in read_arrays(file):
            found = committee.classify(partial(_of_array, images, f"{file}, {key}"), file)
            told = labels if labels is not None else [""] * len(found)
            numbered = enumerate(zip(told, found.tolist(), strict=True))
            rows.extend([f"{name}/{key}/{n}", label, *found] for n, (label, found) in numbered)

    def save() -> None:
        labelled = any(row[1] != "" for row in rows)
        header = ["image", *["label"] * labelled, *committee.columns]
        if rows:
            write_csv(output, header, ([r[0], *r[1 : 1 + labelled], *r[2:]] for r in rows))

    attempt(files, one, lambda file: file.name, "images", save)
    return output


def read_pixels(file: Path, predictor: Predictor) -> Tensor:
    """Reads one image as in training.

    Args:
        file: An image, or a NumPy array ``(C, *spatial)`` of the values that training had.
        predictor: Whose metadata say what that is.

    Returns:
        ``(1, C, *spatial)`` float32 in [-1, 1]; channels that the client lacks are 0.

    Raises:
        DataError: If the image cannot be read, or is of another size, colour or range than those
            that the model was trained on. Images of a model that was trained on converted ones are
            converted, whatever their size and colour.
    """
    facts = predictor.facts["input"]
    size = list(facts["size"])
    if file.suffix.lower() == ".npy":
        pixels = _array(file, (len(predictor.present), *size))
    else:
        if len(size) == 3:
            raise DataError(f"{file} is flat, but the model takes volumes of {size}; give .npy.")
        if not facts.get("converted", False):
            _check_image(file, size, facts["color"])
        pixels = read_image(file, size, facts["color"])
    return _as_seen(pixels[None], file, predictor)


def read_arrays(file: Path) -> Iterator[tuple[str, NDArray[np.uint8], list[int] | None]]:
    """Reads the images of an ``.npz`` file: ``images``, or ``test_images`` and so on (MedMNIST).

    Args:
        file: The file; it is read without pickle.

    Yields:
        The name of an array, its images ``(n, C, *spatial)``, and of ``labels``, ``test_labels``
        and so on the n classes, or None where there are none.

    Raises:
        DataError: If it cannot be read or has no images.
    """
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file} is no whole .npz file; write it again.")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            check_headers(file)
            names = [n for n in arrays.files if n == "images" or n.endswith("_images")]
            if not names:
                raise DataError(
                    f"{file} has no array of the name images or *_images, but "
                    f"{', '.join(arrays.files)[:200] or 'none'}; name it so."
                )
            for name in names:
                images = channels_first(file, name.removesuffix("images").rstrip("_"), arrays[name])
                labels = name.removesuffix("images") + "labels"
                yield name, images, _labels(file, labels, arrays, len(images))
    except MedfedError:
        raise
    except Exception as error:  # whatever zipfile, zlib or NumPy raise on bad bytes
        raise DataError(
            f"{file} cannot be read as .npz ({first_line(error)}); write it again."
        ) from error


def _labels(file: Path, name: str, arrays: Mapping[str, Any], count: int) -> list[int] | None:
    if name not in arrays:
        return None
    found = np.asarray(arrays[name])
    if found.shape not in ((count,), (count, 1)) or found.dtype.kind not in "iu":
        raise DataError(
            f"{file}, {name}: {found.dtype} {found.shape} must be {count} whole numbers, one for "
            "each image; leave them out otherwise."
        )
    return [int(label) for label in found.ravel()]


def _of_array(images: NDArray[np.uint8], source: str, predictor: Predictor) -> Tensor:
    shape = (len(predictor.present), *predictor.facts["input"]["size"])
    if images.shape[1:] != shape:
        raise DataError(
            f"{source}: images of {images.shape[1:]}, but the model takes {shape} (channels first)."
        )
    return _as_seen(images, source, predictor)


def _as_seen(pixels: NDArray[np.uint8], source: object, predictor: Predictor) -> Tensor:
    """(n, C, *spatial) in [-1, 1]; channels that the client lacks are 0."""
    white = predictor.facts["normalization"]["range"][1]
    if len(pixels) and pixels.max() > white:
        raise DataError(
            f"{source} has values up to {pixels.max()}, but white was {white} in training; "
            "scale the image."
        )
    return torch.from_numpy(unit_range(pixels, white, predictor.present.numpy()))


def _images_in(path: Path) -> list[Path]:
    wanted = (*SUFFIXES, ".npy", ".npz")
    if path.is_dir():
        inside = [*walk(path)]
        files = [f for f in inside if f.suffix.lower() in wanted]
        if not files:
            raise DataError(f"{path} has no images ({', '.join(wanted)}); name their folder.")
        say_left_out(path, [f for f in inside if f not in set(files)], "images")
        return files
    if not path.exists():
        raise DataError(f"{path} does not exist; name an image, or a folder of images, in input.")
    return [path]


def _check_image(file: Path, size: list[int], color: str) -> None:
    """Refuses what training never saw, where training took the images as they were."""
    try:
        with Image.open(file) as image:
            found, grey = [image.height, image.width], image.mode in _GREY
            coloured = not grey and _has_colour(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return  # the reader says what is wrong with it
    if found != size:
        raise DataError(
            f"{file} has {found[0]} × {found[1]} pixels, but the model was trained on {size[0]} × "
            f"{size[1]}; resample the image."
        )
    if (color == "rgb" and grey) or (color == "grey" and coloured):
        is_, was = ("grey", "coloured") if grey else ("coloured", "grey")
        raise DataError(f"{file} is {is_}, but the model was trained on {was} images.")


def _has_colour(image: Image.Image) -> bool:
    pixels = np.asarray(image.convert("RGB"))
    return bool((pixels != pixels[..., :1]).any())


def _array(file: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{file} cannot be read as an array ({first_line(error)}); write it again."
        ) from error
    if array.shape != shape or array.dtype != np.uint8:
        raise DataError(
            f"{file} is {array.dtype} {array.shape}, but the model takes uint8 {shape}."
        )
    return np.asarray(array, dtype=np.uint8)
