"""Reading NIfTI volumes through MONAI: RAS, z-scored over non-zero voxels, regions from labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    NormalizeIntensity,
    Orientationd,
)
from torch import Tensor

from medfed.datamodules.readers.base import Patient
from medfed.errors import DataError

_KEYS = ("image", "label")
# labels=None: the axis names come from the file's own space.
_LOAD = Compose(
    [
        LoadImaged(_KEYS, image_only=True),
        EnsureChannelFirstd(_KEYS),
        Orientationd(_KEYS, axcodes="RAS", labels=None),
    ]
)
_NORMALIZE = NormalizeIntensity(nonzero=True, channel_wise=True)


class NiftiReader:
    """Reads one patient from NIfTI files; base of the readers that find these files.

    A patient's files are its images in channel order (one 4-D file, or one 3-D file each), and
    its mask under the role ``"label"``.

    Args:
        channels: Channel names.
        regions: Label values of every region, by region name, in the order of the output.
        known_labels: Label values that may occur beside 0; another one stops the run.
    """

    def __init__(
        self,
        channels: Sequence[str],
        regions: Mapping[str, Sequence[int]],
        known_labels: Sequence[int],
    ) -> None:
        self.channels = tuple(channels)
        self.regions = tuple(regions)
        self._region_labels = {name: tuple(values) for name, values in regions.items()}
        self._known_labels = (0, *known_labels)
        self._select: list[int] | None = None  # which of the file's channels, where not all

    def read(self, patient: Patient) -> dict[str, Tensor]:
        """See `readers.base.Reader.read`.

        Returns:
            ``image`` (C, H, W, D) float32 in RAS, each channel z-scored over its non-zero voxels
            (0 stays 0); ``label`` (R, H, W, D) uint8.

        Raises:
            DataError: For a file that is missing, torn, of another shape or affine, or that holds
                NaN, infinity or an unknown label value.
        """
        images = [path for role, path in patient.files.items() if role != "label"]
        mask = patient.files["label"]
        check_geometry([*images, mask])
        with naming(patient.id, [*images, mask]):
            data = _LOAD({"image": images if len(images) > 1 else images[0], "label": mask})
        image, label = data["image"].as_tensor(), data["label"].as_tensor()
        if self._select is not None:
            image = image[self._select]
        self._check_finite(image, images)
        return {
            "image": _NORMALIZE(image).as_tensor().contiguous(),  # MetaTensor is slow
            "label": self._to_regions(label[0], mask),
        }

    def _check_finite(self, image: Tensor, paths: Sequence[Path]) -> None:
        for channel, (name, voxels) in enumerate(zip(self.channels, image, strict=True)):
            if not voxels.sum(dtype=torch.float64).isfinite():  # one pass, without a mask
                path = paths[channel] if len(paths) > 1 else paths[0]
                raise DataError(
                    f"{path}: channel {name} has NaN or infinite voxels; repair the file or leave "
                    "the patient out."
                )

    def _to_regions(self, label: Tensor, path: Path) -> Tensor:
        """(H, W, D) label values to (R, H, W, D) uint8."""
        codes = label.to(torch.uint8)
        strange = (codes != label) | ~_is_one_of(codes, self._known_labels)
        if strange.any():
            raise DataError(
                f"{path}: unknown label value {label[strange][0].item():g}; known: "
                f"{', '.join(map(str, self._known_labels))}. Check the mask, or name the values in "
                "data.reader."
            )
        masks = [_is_one_of(codes, values) for values in self._region_labels.values()]
        return torch.stack(masks).to(torch.uint8)


def _is_one_of(codes: Tensor, values: Sequence[int]) -> Tensor:
    """As torch.isin, several times faster for a few values of uint8."""
    return torch.stack([codes == value for value in values]).any(dim=0)


@contextmanager
def naming(patient: str, paths: Sequence[Path]) -> Iterator[None]:
    """Turns whatever a library raises on bad bytes into one sentence that names the file.

    Args:
        patient: The patient's id.
        paths: Its files; the first one that cannot be read is named.

    Raises:
        DataError: In place of the library's exception.
    """
    try:
        yield
    except Exception as error:
        for path in paths:
            try:
                np.asanyarray(nib.load(path).dataobj)
            except Exception as cause:
                raise DataError(
                    f"{path} is truncated or corrupt ({cause}); copy it again or leave the "
                    "patient out."
                ) from error
        raise DataError(f"Patient {patient} cannot be read ({error}).") from error


def check_geometry(paths: Sequence[Path]) -> None:
    """Checks, from the headers alone, that all files of a patient lie on one grid.

    Args:
        paths: Images and mask.

    Raises:
        DataError: Naming the first file that is missing, unreadable, or on another grid.
    """
    first: tuple[Path, tuple[int, ...], np.ndarray] | None = None
    for path in paths:
        shape, affine = _header(path)
        if first is None:
            first = path, shape, affine
        elif shape != first[1]:
            raise DataError(
                f"{path} has shape {shape}, but {first[0]} has {first[1]}; images and mask of a "
                "patient must agree."
            )
        elif not np.allclose(affine, first[2], atol=1e-3):
            raise DataError(
                f"{path} has another affine than {first[0]}; resample images and mask of the "
                "patient to one grid."
            )


def _header(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    try:
        image = nib.load(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; copy it there or leave the patient out.") from None
    except Exception as error:
        raise DataError(
            f"{path} is truncated or corrupt ({error}); copy it again or leave the patient out."
        ) from error
    if len(image.shape) < 3:
        raise DataError(f"{path} has shape {image.shape}; a volume needs three dimensions.")
    return tuple(image.shape[:3]), image.affine
