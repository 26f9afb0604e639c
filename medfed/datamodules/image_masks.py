"""Segmentation of pictures: patches for training, whole pictures for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from medfed.common.errors import ConfigError
from medfed.datamodules.base import FederatedDataModule
from medfed.datamodules.client_data import Batch
from medfed.datamodules.plans import ClientPlan
from medfed.datamodules.segmentation import SegmentationDataModule


@dataclass(eq=False, repr=False)
class ImageMasksDataModule(SegmentationDataModule):
    """Pictures with masks, of which a patient may have several.

    To all else they are volumes whose slices are a patient's pictures, see
    `readers.image_masks.ImageMasksReader`. How large their pixels are is not known: distances in mm
    are undefined. The reader prepares pictures by itself.
    """

    normalize: Any = field(default=None, init=False)
    spacing: Sequence[float] | None = field(default=None, init=False)
    crop_foreground: bool = field(default=False, init=False)
    slices: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spatial_dims != 2 or self.eval_every != 1:
            raise ConfigError(
                f"data.spatial_dims={self.spatial_dims} and data.eval_every={self.eval_every} are "
                "for volumes; of pictures, every one counts: leave them at 2 and 1."
            )

    @property
    def millimetres(self) -> bool:
        """See the base class: nobody knows."""
        return False

    @property
    def window(self) -> tuple[int, ...]:
        """See the base class: pictures are of any size, which few networks take."""
        return self.size[:2]

    def settings(self) -> dict[str, Any]:
        """See the base class."""
        return {**super().settings(), "eval_slices": "every picture, whole"}

    def preprocessing(self, client: str) -> dict[str, Any]:
        """See the base class: what else a picture needs than a volume."""
        # Not the base class's own: of pictures, neither spacing nor orientation is known.
        return {
            **FederatedDataModule.preprocessing(self, client),
            "normalization": {"name": self.scans.record()["normalization"]},
            "input": {"kind": "pictures", **self.scans.layout()},
        }

    def evaluation_block(self, patient: str, case: int, plan: ClientPlan) -> Batch:
        """See the base class; without a spacing, which nobody knows."""
        block = super().evaluation_block(patient, case, plan)
        return {name: values for name, values in block.items() if name != "spacing"}
