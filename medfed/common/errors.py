"""Errors that a user can cause. Bundles raise them, too: see :mod:`medfed.standalone.errors`."""

from medfed.standalone.errors import *
