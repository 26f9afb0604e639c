"""The detector by the name that configurations give it: :mod:`medfed.standalone.detector`."""

from medfed.standalone.detector import Detector

__all__ = ["Detector"]
