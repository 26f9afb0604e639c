"""What turns tensors into the bytes that travel."""

from medfed.federation.codecs.base import Codec
from medfed.federation.codecs.dense import Dense
from medfed.federation.codecs.qsgd import QSGD
from medfed.federation.codecs.reader import CodecError
from medfed.federation.codecs.runlength import RunLength
from medfed.federation.codecs.signsgd import SignSGD
from medfed.federation.codecs.sparse import RandomK, TopK
from medfed.federation.codecs.stc import STC
from medfed.federation.codecs.terngrad import TernGrad

__all__ = [
    "QSGD",
    "STC",
    "Codec",
    "CodecError",
    "Dense",
    "RandomK",
    "RunLength",
    "SignSGD",
    "TernGrad",
    "TopK",
]
