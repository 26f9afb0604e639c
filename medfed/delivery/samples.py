"""Probabilities of images, and probabilities or outcomes of rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from medfed.datamodules.images import ByteRows
from medfed.datamodules.readers.image_folder import SUFFIXES, read_image
from medfed.datamodules.readers.table import read_features
from medfed.datamodules.tabular import fit_scaler, scale
from medfed.delivery.outputs import (
    check_folder,
    check_targets,
    csv_path,
    write_csv,
)
from medfed.delivery.predictor import Predictor
from medfed.delivery.request import Request, attempt
from medfed.errors import DataError

_GREY = ("1", "L", "LA", "I", "I;16", "F")


def predict_images(predictor: Predictor, request: Request) -> Path:
    """Classifies an image, or all images of a folder and its subfolders, into one CSV file.

    Args:
        predictor: A model of images.
        request: What is wanted.

    Returns:
        The CSV file: ``image``, the path below the input, and a probability per class.

    Raises:
        MedfedError: If nothing can be done, or some images could not be used.
    """
    output, source = csv_path(Path(request.output)), Path(request.input)
    check_folder(output.parent)
    check_targets([output], request.overwrite, [source])
    files = _images_in(source)
    root = source if source.is_dir() else source.parent
    rows: list[list[object]] = []

    def one(file: Path) -> None:
        chances = predictor.classify(read_pixels(file, predictor), file)
        rows.append([file.relative_to(root).as_posix(), *chances[0].tolist()])

    def save() -> None:
        if rows:
            write_csv(output, ["image", *predictor.columns], rows)

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
    size, low_high = list(facts["size"]), predictor.facts["normalization"]["range"]
    if file.suffix.lower() == ".npy":
        pixels = _array(file, (len(predictor.channels), *size))
    else:
        if len(size) == 3:
            raise DataError(f"{file} is flat, but the model takes volumes of {size}; give .npy.")
        if not facts.get("converted", False):
            _check_image(file, size, facts["color"])
        pixels = read_image(file, size, facts["color"])
    if pixels.max() > low_high[1]:
        raise DataError(
            f"{file} has values up to {pixels.max()}, but white was {low_high[1]} in training; "
            "scale the image."
        )
    rows = ByteRows(pixels[None], np.zeros(1, np.int64), predictor.present.numpy(), low_high[1])
    return rows.take(torch.zeros(1, dtype=torch.int64))


def predict_table(predictor: Predictor, request: Request) -> Path:
    """Classifies the rows of a CSV file, or predicts their outcome.

    Args:
        predictor: A model of features.
        request: What is wanted.

    Returns:
        The CSV file: ``row``, counted from 1, the cells of all columns that are no features, and a
        probability per class, or of a regression ``prediction`` in the outcome's unit.

    Raises:
        MedfedError: If a column is missing, a cell is no number, or nothing can be written.
    """
    output, source = csv_path(Path(request.output)), Path(request.input)
    check_folder(output.parent)
    check_targets([output], request.overwrite, [source])
    if source.is_dir():
        raise DataError(f"{source} is a folder; name one CSV file in input.")
    features, others = read_features(source, predictor.facts["input"]["features"])
    image = torch.from_numpy(_scaled(features, predictor.facts)) * predictor.present
    chances = predictor.classify(image, source).tolist()
    header = ["row", *others, *predictor.columns]
    cells = zip(range(1, len(features) + 1), *others.values(), strict=True)
    write_csv(output, header, ([*a, *b] for a, b in zip(cells, chances, strict=True)))
    return output


def _scaled(features: NDArray[np.float64], facts: Mapping[str, Any]) -> NDArray[np.float32]:
    """Features as in training; minimum and maximum alone give the same scaler again."""
    scaling = facts["normalization"]
    if scaling is None:
        return features.astype(np.float32)
    scaler = fit_scaler(np.array([scaling["minimum"], scaling["maximum"]], dtype=np.float64))
    return scale(features, scaler, bool(facts["input"].get("missing_indicator")))


def _images_in(path: Path) -> list[Path]:
    wanted = (*SUFFIXES, ".npy")
    if path.is_dir():
        files = [f for f in path.rglob("*") if f.suffix.lower() in wanted and f.name[0] != "."]
        if not files:
            raise DataError(f"{path} has no images ({', '.join(wanted)}); name their folder.")
        return sorted(files)
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
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DataError(f"{file} cannot be read as an array ({reason}); write it again.") from error
    if array.shape != shape or array.dtype != np.uint8:
        raise DataError(
            f"{file} is {array.dtype} {array.shape}, but the model takes uint8 {shape}."
        )
    return np.asarray(array, dtype=np.uint8)
