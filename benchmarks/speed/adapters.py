"""What travels in a round when adapters and the output layer train, and all else is frozen.

By the shapes of MONAI's SwinUNETR alone, of no device; a packet of the ledger's own is counted.

    python benchmarks/speed/adapters.py --ranks 1 2 4 8 --width 48
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from monai.networks.nets import SwinUNETR
from torch import nn

from medfed.common.tensors import layout_of, select
from medfed.federation.split import ParameterSplit, float_entries
from medfed.federation.wire.packet import dense_bytes
from medfed.models.networks.adapters import Adapters, attach


def swin_unetr(width: int) -> nn.Module:
    """Builds the network of four channels and three regions without memory for its weights."""
    numbers = torch.linspace
    # It reads numbers of a tensor while it is built, which has none on this device.
    torch.linspace = lambda *a, **k: numbers(*a, **{**k, "device": "cpu"})  # type: ignore[assignment]
    try:
        with torch.device("meta"):
            network: nn.Module = SwinUNETR(in_channels=4, out_channels=3, feature_size=width)
            return network
    finally:
        torch.linspace = numbers


def shared_bytes(network: nn.Module) -> int:
    """Returns the bytes of one message with all that is shared, in fp32."""
    entries = float_entries(network)
    return dense_bytes(layout_of(select(entries, ParameterSplit.of(network).shared)))


def main(ranks: Sequence[int], width: int) -> None:
    """Prints a line per rank: linear layers alone, and with convolutions."""
    plain = swin_unetr(width)
    whole = shared_bytes(plain)
    linear = [n for n, m in plain.named_modules() if isinstance(m, nn.Linear)]
    print(f"SwinUNETR, feature_size {width}: {whole:,} bytes, once for the frozen base")
    print(
        "rank   linear layers          with convolutions      bytes each way per round and client"
    )
    for rank in ranks:
        cells = []
        for layers in (linear, ["*"]):
            network = copy.deepcopy(plain)
            attach(network, Adapters(rank=rank, layers=layers, train=["out.*"]))
            size = shared_bytes(network)
            cells.append(f"{size:>12,} ({size / whole:6.2%})")
        print(f"{rank:>4}  {'  '.join(cells)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--width", type=int, default=48)
    given = parser.parse_args()
    main(given.ranks, given.width)
