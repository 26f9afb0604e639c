"""Reading one patient from NIfTI: RAS, z-scored over non-zero voxels, regions from label values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medfed.datamodules.readers.base import Patient
from medfed.datamodules.readers.volumes import check_geometry, load_ras, read_header, zscore
from medfed.errors import DataError


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
        image = self._load_images(images)
        self._check_finite(image, images)
        return {"image": zscore(image), "label": self._to_regions(load_ras(mask), mask)}

    def shape(self, patient: Patient) -> tuple[int, ...]:
        """Reads the three sizes from a header alone; `read` may return them in another order."""
        return read_header(patient.files["label"])[0]

    def layout(self) -> dict[str, object]:
        """See `readers.base.Reader.layout`."""
        regions = {name: list(values) for name, values in self._region_labels.items()}
        return {"files": None, "file_channels": list(self.channels), "regions": regions}

    def record(self) -> dict[str, object]:
        """Returns all that decides what `read` makes of a patient's files, for JSON."""
        return {
            "channels": list(self.channels),
            "regions": {name: list(values) for name, values in self._region_labels.items()},
        }

    def _load_images(self, paths: Sequence[Path]) -> Tensor:
        """(C, H, W, D) float32, the chosen channels."""
        if self._select is not None:
            return load_ras(paths[0], self._select)
        loaded = [load_ras(path) for path in paths]
        for path, image in zip(paths, loaded, strict=True):
            if len(image) > 1:
                raise DataError(
                    f"{path} has {len(image)} channels, but 1 is needed; use the layout of MSD for "
                    "files that hold all modalities."
                )
        return torch.cat(loaded) if len(loaded) > 1 else loaded[0]

    def _check_finite(self, image: Tensor, paths: Sequence[Path]) -> None:
        for channel, (name, voxels) in enumerate(zip(self.channels, image, strict=True)):
            # One pass without a mask; NumPy sums in float64 seven times faster than PyTorch.
            if not np.isfinite(voxels.numpy().sum(dtype=np.float64)):
                path = paths[channel] if len(paths) > 1 else paths[0]
                raise DataError(
                    f"{path}: channel {name} has NaN or infinite voxels; repair the file or leave "
                    "the patient out."
                )

    def _to_regions(self, label: Tensor, path: Path) -> Tensor:
        """(1, H, W, D) label values to (R, H, W, D) uint8."""
        if len(label) > 1:
            raise DataError(f"{path} holds {len(label)} masks; a patient has one, of label values.")
        values = label[0]
        codes = values.to(torch.uint8)
        strange = (codes != values) | ~_is_one_of(codes, self._known_labels)
        if strange.any():
            raise DataError(
                f"{path}: unknown label value {values[strange][0].item():g}; known: "
                f"{', '.join(map(str, self._known_labels))}. Check the mask, or name the values in "
                "data.reader."
            )
        masks = [_is_one_of(codes, values) for values in self._region_labels.values()]
        return torch.stack(masks).to(torch.uint8)


def _is_one_of(codes: Tensor, values: Sequence[int]) -> Tensor:
    """As torch.isin, several times faster for a few values of uint8."""
    return torch.stack([codes == value for value in values]).any(dim=0)
