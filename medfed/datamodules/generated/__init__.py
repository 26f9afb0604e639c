"""Generated cohorts, written to disk in the formats of the real data."""

from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.generated.luna16 import LunaCohort

__all__ = ["BratsCohort", "LunaCohort"]
