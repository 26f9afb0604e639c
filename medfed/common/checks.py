"""Checks of values. Bundles need them, too: see :mod:`medfed.standalone.checks`."""

from medfed.standalone.checks import *
