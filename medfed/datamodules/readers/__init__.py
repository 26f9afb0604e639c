"""Readers: one class per format on disk, all with the interface of `readers.base.Reader`."""

from medfed.datamodules.readers.base import Patient, Reader
from medfed.datamodules.readers.brats_challenge import BratsChallengeReader
from medfed.datamodules.readers.folder import FolderReader
from medfed.datamodules.readers.msd import MSDReader

__all__ = ["BratsChallengeReader", "FolderReader", "MSDReader", "Patient", "Reader"]
