"""Sums under masks: CPU seconds and bytes of one round, at a site and at the coordinator.

A message of ``--million`` million parameters at ``--sites`` sites, of which none or a third are
lost after they have sent their keys. Bytes are those of all requests and replies of the sum, over
those of the same numbers in fp32. Keys are not signed.

Run with ``python benchmarks/trust/masks.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch

from medfed.federation.wire.fixed_point import FixedPoint
from medfed.federation.wire.packet import EncodedPart, Packet, dense_bytes
from medfed.sites.masks import Half, context_of, unmasked
from medfed.sites.wire import Keys

T = TypeVar("T")


def timed(spent: dict[str, float], who: str, work: Callable[[], T]) -> T:
    """Adds the CPU seconds of some work."""
    begun = time.process_time()
    done = work()
    spent[who] = spent.get(who, 0.0) + time.process_time() - begun
    return done


def measured(sites: int, lost: int, elements: int) -> tuple[float, float, float, float]:
    """Returns seconds at one site and at the coordinator, bytes over fp32, and the error."""
    names, spent = [f"site {n}" for n in range(sites)], dict[str, float]()
    sums, asked = FixedPoint(("shared",)), Keys(names[0], "session", 0, 0, 0, cohort=names)
    layout, rng = (("w", (elements,), "float32"),), np.random.default_rng(0)
    halves = {c: Half(c, asked, names, None) for c in names}
    keys = {c: timed(spent, "site", half.announced) for c, half in halves.items()}
    boxes = {c: timed(spent, "site", partial(half.boxes, keys)) for c, half in halves.items()}
    there, packets, exact = names[lost:], {}, torch.zeros(elements, dtype=torch.float64)
    for c in there:
        update = torch.from_numpy(rng.normal(scale=0.01, size=elements)).float()
        exact += update / sites
        to = {other: given[c] for other, given in boxes.items() if other != c}

        def sent(c: str = c, update: torch.Tensor = update, to: dict[str, str] = to) -> Packet:
            data = sums.encode({"w": update}, 1 / sites)[0]
            packet = Packet("fit", {}, {"shared": EncodedPart("update", data, layout)})
            return halves[c].masked(sums, packet, to)

        packets[c] = timed(spent, "site", sent)
    shares = {c: timed(spent, "site", partial(halves[c].shares, there)) for c in there}

    def summed() -> torch.Tensor:
        context = context_of(asked, names)
        rest = unmasked(context, keys, there, shares, elements)
        first = sums.added(packets[there[0]], rest)
        parts = [first.parts["shared"], *(packets[c].parts["shared"] for c in there[1:])]
        return sums.mean(parts, len(there) / sites)["w"]

    mean = timed(spent, "coordinator", summed)
    error = float((mean - exact * sites / len(there)).abs().max())
    texts = [keys, boxes, shares, *(keys for _ in names), boxes]  # to the coordinator and back
    bytes_up = sum(e.size for p in packets.values() for e in p.parts.values())
    bytes_up += sum(len(msgspec.json.encode(t)) for t in texts)
    return (
        spent["site"] / sites,
        spent["coordinator"],
        bytes_up / (len(there) * dense_bytes(layout)),
        error,
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 20])
    parser.add_argument("--million", type=float, default=1.0)
    args = parser.parse_args()
    print("| sites | lost | s per site | s at the coordinator | bytes / fp32 | largest error |")
    print("|---|---|---|---|---|---|")
    for sites in args.sites:
        for lost in (0, (sites - 1) // 3):
            site, server, size, error = measured(sites, lost, int(1e6 * args.million))
            print(f"| {sites} | {lost} | {site:.2f} | {server:.2f} | {size:.4f} | {error:.1e} |")


if __name__ == "__main__":
    main()
