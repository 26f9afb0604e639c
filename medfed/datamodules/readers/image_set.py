"""What the readers of small images return: all of them, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medfed.datamodules.samples import Samples
from medfed.errors import ConfigError, DataError


@dataclass(frozen=True)
class ImageSet:
    """Images with one class each, in memory.

    Attributes:
        images: (N, C, *spatial) uint8; a float32 copy would take four times the memory.
        channels: (C) channel names.
        classes: (K) class names.
        samples: Class, patient, and where known centre, split and file of every image.
        source: Where they come from, for people.
        peak: The value of white, which becomes 1; 0 becomes -1.
        converted: Whether images of any size and colour were converted to one.
    """

    images: NDArray[np.uint8]
    channels: tuple[str, ...]
    classes: tuple[str, ...]
    samples: Samples
    source: str
    peak: int = 255
    converted: bool = False


def channel_names(count: int) -> tuple[str, ...]:
    """Names the channels of a grey or colour image.

    Args:
        count: 1 or 3.

    Example:
        >>> channel_names(3)
        ('red', 'green', 'blue')
    """
    return ("grey",) if count == 1 else ("red", "green", "blue")


def given_path(path: Path | None) -> Path:
    """Returns the path, or says that it is not set.

    Args:
        path: From the configuration.

    Raises:
        ConfigError: If it is None.

    Example:
        >>> given_path(Path("a")).name
        'a'
    """
    if path is None:
        raise ConfigError("data.path is not set and data.generated is empty; set data.path.")
    return path


def check_classes(where: Path, labels: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Refuses a data set in which there is nothing to tell apart.

    Args:
        where: File or folder, for the message.
        labels: (N,) class indices.
        classes: Class names.

    Raises:
        DataError: If fewer than two classes occur.

    Example:
        >>> check_classes(Path("a.npz"), np.array([0, 1]), ["benign", "malignant"])
    """
    found = np.unique(labels)
    if len(found) < 2:
        only = f"only the class {classes[found[0]]}" if len(found) else "no images"
        raise DataError(f"{where} has {only}; a classification needs images of two classes.")
