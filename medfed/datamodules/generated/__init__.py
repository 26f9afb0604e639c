"""Generated cohorts, written to disk in the formats of the real data."""

from medfed.datamodules.generated.brats import BratsCohort

__all__ = ["BratsCohort"]
