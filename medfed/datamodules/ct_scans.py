"""The scans of a section ``data.scan``, by its name there: :mod:`medfed.standalone.ct_scans`."""

from medfed.standalone.ct_scans import ScanSpec

__all__ = ["ScanSpec"]
