"""U-Nets by the names that configurations give them: :mod:`medfed.standalone.unet`."""

from medfed.standalone.unet import basic_unet, planned_unet, unet

__all__ = ["basic_unet", "planned_unet", "unet"]
