"""Partitions: which patients, labels and channels every client has."""

from medfed.datamodules.partitions.base import Partition
from medfed.datamodules.partitions.centre import ByCentre
from medfed.datamodules.partitions.channel_missing import ChannelMissing
from medfed.datamodules.partitions.label_imbalance import LabelImbalance
from medfed.datamodules.partitions.round_robin import RoundRobin

__all__ = ["ByCentre", "ChannelMissing", "LabelImbalance", "Partition", "RoundRobin"]
