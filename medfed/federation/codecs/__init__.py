"""What turns tensors into the bytes that travel."""

from medfed.federation.codecs.base import Codec
from medfed.federation.codecs.dense import Dense
from medfed.federation.codecs.reader import CodecError
from medfed.federation.codecs.stc import STC

__all__ = ["STC", "Codec", "CodecError", "Dense"]
