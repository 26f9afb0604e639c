"""Partitions: which patients, labels and channels every client has, and which scanner."""

from medfed.datamodules.partitions.base import Partition
from medfed.datamodules.partitions.centre import ByCentre
from medfed.datamodules.partitions.channel_missing import ChannelMissing
from medfed.datamodules.partitions.dirichlet import Dirichlet
from medfed.datamodules.partitions.label_groups import LabelGroups
from medfed.datamodules.partitions.label_imbalance import LabelImbalance
from medfed.datamodules.partitions.quantity_skew import QuantitySkew
from medfed.datamodules.partitions.round_robin import RoundRobin
from medfed.datamodules.partitions.saved import Saved
from medfed.datamodules.partitions.shards import Shards
from medfed.datamodules.partitions.site_effect import SiteEffect
from medfed.datamodules.partitions.site_groups import SiteGroups

__all__ = [
    "ByCentre",
    "ChannelMissing",
    "Dirichlet",
    "LabelGroups",
    "LabelImbalance",
    "Partition",
    "QuantitySkew",
    "RoundRobin",
    "Saved",
    "Shards",
    "SiteEffect",
    "SiteGroups",
]
