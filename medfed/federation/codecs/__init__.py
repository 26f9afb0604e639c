"""What turns tensors into the bytes that travel."""

from medfed.federation.codecs.base import Codec, CodecError
from medfed.federation.codecs.dense import Dense

__all__ = ["Codec", "CodecError", "Dense"]
