"""The scans of a section ``data.scan``, by its name there: :mod:`medfed.standalone.ct`."""

from medfed.standalone.ct import ScanSpec

__all__ = ["ScanSpec"]
