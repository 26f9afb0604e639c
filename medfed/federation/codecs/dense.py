"""Every element as it is: the reference against which all savings are stated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from medfed.errors import ConfigError
from medfed.federation.codecs.base import HEADER_BYTES, Codec, CodecError

_TYPES = {"float32": torch.float32, "float64": torch.float64}
_CODES = {"float32": 1, "float64": 2}


class Dense(Codec):
    """Little-endian IEEE numbers, 4 bytes each by default.

    Args:
        dtype: ``float32``, or ``float64`` for runs in double precision.

    Raises:
        ConfigError: If the dtype is another.

    Example:
        >>> codec = Dense()
        >>> data = codec.encode(torch.tensor([1.0, 2.0]))
        >>> len(data), codec.decode(data)
        (20, tensor([1., 2.]))
    """

    def __init__(self, dtype: str = "float32") -> None:
        if dtype not in _TYPES:
            raise ConfigError(f"codec dtype={dtype!r} is unknown; choose {' or '.join(_TYPES)}.")
        self.dtype = _TYPES[dtype]
        self.code = _CODES[dtype]
        self.lossless = True

    def encode(self, flat: Tensor) -> bytes:
        """Returns header and elements."""
        values = flat.detach().to("cpu", self.dtype).contiguous().numpy()
        return b"".join((self.header(values.size), values.data))

    def decode(self, data: bytes) -> Tensor:
        """Returns the elements as a CPU tensor of shape (d,).

        Raises:
            CodecError: If the bytes are foreign, truncated or too many.
        """
        length = self.read_header(data)
        width = self.dtype.itemsize
        if len(data) != HEADER_BYTES + width * length:
            raise CodecError(
                f"A dense message of {length} elements has {HEADER_BYTES + width * length} bytes, "
                f"not {len(data)}."
            )
        values = np.frombuffer(data, dtype=f"<f{width}", offset=HEADER_BYTES)
        return torch.from_numpy(values.copy())
