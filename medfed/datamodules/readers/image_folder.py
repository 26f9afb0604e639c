"""Class-named folders of PNG, JPEG, TIFF or BMP images: a user's own 2-D data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from medfed.common.checks import checked
from medfed.common.errors import ConfigError, DataError
from medfed.datamodules.readers.base import given_path
from medfed.datamodules.readers.pictures import SUFFIXES, Color, read_image
from medfed.datamodules.readers.samples import ImageSet, Samples, channel_names


@checked("data.reader")
def read_image_folder(
    path: Path | None,
    size: Sequence[int] = (64, 64),
    color: Color = "grey",
    patient_pattern: str | None = None,
    centre_pattern: str | None = None,
    classes: Sequence[str] | None = None,
) -> ImageSet:
    """Reads ``path/CLASS/**/*.png`` and its like into memory, at one size.

    Args:
        path: The folder that holds one folder per class.
        size: Height and width; resizing does not keep the aspect ratio.
        color: ``"grey"`` or ``"rgb"``; all images are converted.
        patient_pattern: Regular expression with one group that finds the patient's id in the file's
            name. None makes every image a patient.
        centre_pattern: Regular expression with one group that finds the hospital in the path below
            `path`.
        classes: Folders to read, in the order of the labels; None reads all, sorted.

    Returns:
        Images (N, C, height, width). Grey images of 16 bits are scaled to 8.

    Raises:
        DataError: If a folder is missing or empty, an image cannot be read, or a pattern finds
            nothing in a name.
        ConfigError: If a setting cannot be used.
    """
    path = given_path(path)
    if len(size) != 2 or min(size) < 1:
        raise ConfigError(
            f"data.reader.size={list(size)} must be a height and a width of at least 1."
        )
    names = tuple(classes) if classes is not None else _class_folders(path)
    if len(names) < 2:
        existing = ", ".join(names) or "none"
        raise DataError(
            f"{path} must hold a folder for each of two classes or more; found: {existing}."
        )
    folders = {name: _images_in(path / name) for name in names}
    files = [file for files_of_class in folders.values() for file in files_of_class]
    with ThreadPoolExecutor(max_workers=4) as pool:  # decoding releases the interpreter's lock
        images = list(pool.map(partial(read_image, size=size, color=color), files))
    patients = [search_name("patient", patient_pattern, f.name, f) for f in files]
    below = [f.relative_to(path).as_posix() for f in files]
    where = zip(below, files, strict=True)
    centres = [search_name("centre", centre_pattern, name, f) for name, f in where]
    samples = Samples(
        labels=np.repeat(
            np.arange(len(names)), [len(files_of_class) for files_of_class in folders.values()]
        ),
        num_classes=len(names),
        patients=patients if patient_pattern else below,
        centres=centres if centre_pattern else (),
        files=files,
    )
    stacked = np.stack(images)
    channels = channel_names(stacked.shape[1])
    return ImageSet(stacked, channels, names, samples, str(path), converted=True)


def _class_folders(path: Path) -> tuple[str, ...]:
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; set data.path to the folder of class folders.")
    return tuple(sorted(f.name for f in path.iterdir() if f.is_dir() and f.name[0] != "."))


def _images_in(folder: Path) -> list[Path]:
    files = [f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.name[0] != "."]
    if not files:
        what = "has no images" if folder.is_dir() else "is not a folder"
        raise DataError(
            f"{folder} {what}; add images ({', '.join(SUFFIXES)}), or choose the class folders by "
            "data.reader.classes."
        )
    return sorted(files)


def search_name(what: str, pattern: str | None, text: str, file: Path) -> str:
    """Finds the one group of a pattern in a name.

    Args:
        what: ``"patient"`` or ``"centre"``, for sentences.
        pattern: A regular expression; None finds nothing.
        text: The name.
        file: The file, for error sentences.

    Returns:
        The group; empty without a pattern.

    Raises:
        ConfigError: If the pattern is invalid.
        DataError: If the pattern finds nothing.

    Example:
        >>> search_name("patient", "^(p[0-9]+)_", "p12_left.png", Path("p12_left.png"))
        'p12'
    """
    if pattern is None:
        return ""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"data.reader.{what}_pattern={pattern} is no regular expression ({error})."
        ) from error
    if expression.groups != 1:
        raise ConfigError(
            f"data.reader.{what}_pattern={pattern} has {expression.groups} groups; it needs one, "
            "such as ^(p[0-9]+)_."
        )
    match = expression.search(text)
    if match is None or not match[1]:
        raise DataError(
            f"{file}: data.reader.{what}_pattern={pattern} finds no {what} in {text}; mend the "
            "pattern or the name."
        )
    return str(match[1])
