"""Uneven clients on two ranks: dealt by cost or by count, replies sent at once or at the end.

A client's steps are waited for, as if each rank's device were busy, so that the times are those of
the assignment and the exchange and not of a shared machine. Sides alternate within one pair of
processes.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from medfed.federation.client import Batch
from medfed.federation.lightning import module as runtime
from medfed.federation.lightning.callbacks import FederatedRounds
from medfed.federation.lightning.collect import Gathering, rank
from medfed.federation.lightning.module import FederatedModule, assign
from medfed.federation.lightning.strategy import ClientSharding
from medfed.federation.reference import ArrayClient, assemble
from medfed.personalize.fedavg import FedAvg

# Samples, as unequal as hospitals are: drawn once from a log-normal distribution.
SIZES = (19, 48, 7, 160, 30, 86, 12, 33, 240, 21, 64, 15, 9, 120, 27, 40)
STEP = 0.004  # seconds per sample


class Waiting(ArrayClient):
    """A client whose samples take a while; hidden from the budget, as a slow reader would be."""

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """Yields an epoch, waiting for each batch."""
        for batch in super().train_batches(seed):
            time.sleep(STEP * len(batch["image"]))
            yield batch


class AtTheEnd(Gathering):
    """Sends all replies when the last one is there."""

    def put(self, items: Mapping[str, bytes]) -> None:
        """Keeps them until then."""
        self.kept = [*getattr(self, "kept", []), items]

    def finish(self) -> dict[str, bytes]:
        """Sends them."""
        self.put = super().put  # type: ignore[method-assign]
        for items in getattr(self, "kept", []):
            self.put(items)
        return super().finish()


def by_count(work: dict[str, float], ranks: int, owners: object = None) -> dict[str, int]:
    """Deals clients in turn."""
    return {client: n % ranks for n, client in enumerate(work)}


def seconds(width: int, rounds: int, dealt: object, gathering: type[Gathering]) -> float:
    """Returns the median seconds per round; the first two are left out."""
    clients: list[Any] = [
        Waiting(f"c{n}", torch.ones(size, 4), torch.ones(size, 1), batch_size=4)
        for n, size in enumerate(SIZES)
    ]
    torch.manual_seed(0)
    network = nn.Linear(4, width)
    vars(runtime).update(assign=dealt, Gathering=gathering)
    federation, local = assemble(
        FedAvg(),
        network,
        lambda batch: network(batch["image"]).mean(),
        clients,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    task = nn.Module()
    task.network = network
    module = FederatedModule(task, federation, local)  # type: ignore[arg-type]
    ends: list[float] = []
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ClientSharding(process_group_backend="gloo"),
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[
            FederatedRounds(),
            pl.callbacks.LambdaCallback(
                on_train_epoch_end=lambda *_: ends.append(time.perf_counter())
            ),
        ],
    ).fit(module)
    return median(b - a for a, b in pairwise(ends[1:]))


def main() -> None:
    """Starts both ranks and prints the first one's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--width", type=int, nargs="+", default=[1, 200_000])
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        told = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**told, "LOCAL_RANK": str(n)})
            for n in range(2)
        ]
        sys.exit(max(p.wait() for p in ranks))
    torch.set_num_threads(1)
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    sides = {
        "by count, replies at the end": (by_count, AtTheEnd),
        "by cost, replies at the end": (assign, AtTheEnd),
        "by cost, replies at once": (assign, Gathering),
    }
    for width in options.width:
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.repeat):
            for name, (how, gathering) in sides.items():
                found[name].append(seconds(width, options.rounds, how, gathering))
        if rank() == 0:
            half, size = STEP * sum(SIZES) / 2, 20 * width / 1e6
            print(f"{len(SIZES)} clients, replies of {size:.1f} MB, half the work: {half:.2f} s")
            for name, times in found.items():
                print(f"  {name:<30} {min(times):.2f} to {max(times):.2f} s a round", flush=True)


if __name__ == "__main__":
    main()
