"""The codecs that every test of codecs is run with: the configured ones and their own examples."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from medfed.config.compose import build
from medfed.federation.wire.codecs.base import Codec
from tests.contract.names import codec_yamls

CASES: dict[str, Codec] = {
    name: build(OmegaConf.create({"codec": OmegaConf.load(path)}).codec)
    for name, path in codec_yamls().items()
}
for kind in dict.fromkeys(map(type, list(CASES.values()))):
    CASES |= {f"{kind.__name__}_{i}": codec for i, codec in enumerate(kind.examples())}

EVERY = pytest.mark.parametrize("codec", CASES.values(), ids=CASES)
