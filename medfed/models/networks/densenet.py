"""DenseNets by the names that configurations give them: :mod:`medfed.standalone.densenet`."""

from medfed.standalone.densenet import densenet_bc

__all__ = ["densenet_bc"]
