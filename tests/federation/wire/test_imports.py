"""Compiled code is imported on first use: a run in fp32 never waits for it."""

from tests.processes import with_torch

CODE = """
import pkgutil, sys, torch
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.wire import codecs
from medfed.federation.wire.channel import CER
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.channel import Link
from medfed.federation.wire.packet import Message
for module in pkgutil.iter_modules(codecs.__path__, codecs.__name__ + "."):
    if not module.name.endswith("kernels"):
        __import__(module.name)
channel = Channel(Link(cer=CER(gamma=0.0)))
packet, _ = channel.encode(Message(parts={"shared": {"w": torch.ones(3)}}), "up")
channel.decode(packet, "up")
assert "numba" not in sys.modules
"""


def test_fp32_needs_no_compiled_code(tmp_path):
    (tmp_path / "script.py").write_text(CODE)
    done = with_torch().run(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
