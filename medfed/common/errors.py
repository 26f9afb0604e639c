"""The address at which code of others finds :mod:`medfed.standalone.errors`."""

from medfed.standalone.errors import *  # noqa: F403
