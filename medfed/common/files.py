"""Files, whole or not at all. Bundles write them, too: see :mod:`medfed.standalone.files`."""

from medfed.standalone.files import *
