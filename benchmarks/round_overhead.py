"""What a round costs beyond its gradient steps.

FedAvg with 20 clients of 128 patches (1, 32, 32), batches of 16, so 8 steps per client and 160 per
round, on a DenseNet-BC of growth 6 with three blocks of 4 layers (169 entries, 27 thousand
parameters). One side is a `pl.Trainer.fit` with the callback `FederatedRounds`, dense fp32 messages
and the ledger; evaluation, checkpoints, logger and progress bar are off. The other is a bare loop
over the same network, the same batches and the same optimizer, that does nothing but index_select,
zero_grad, forward, backward and step.

Method: one long fit. A callback that is called last stops the clock (CPU time of the process)
after every client, lets the bare loop repeat that client's steps, and starts the clock again; at
the end of the epoch it closes the pair. So nothing that Lightning does within a round or between
two rounds is left out; only start-up, and the first rounds as a warm-up, are. Of the bare loop
only the steps count: that each client starts from the server's weights and with an empty optimizer
is arranged while no clock runs, as is the order of the patches. After each round the bare loop's
weights are averaged and must equal the server's new weights bit for bit. As the sides alternate a
few times per second, a slow moment of the machine meets both. Two ratios are given: the median
over rounds with its spread, and that of typical rounds, in which each client takes its median over
the rounds; on a busy machine the second is the steadier.

The parts of the overhead are measured in further rounds, as the clocks around them cost something.

Run with ``python benchmarks/round_overhead.py``; ``--blocks 2`` makes a step half as long.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medfed.common.seeding import torch_rng
from medfed.common.tensors import Tensors, add, subtract, weighted_mean
from medfed.datamodules.client_data import Batch, ClientData
from medfed.federation.algorithm import ClientInfo
from medfed.federation.federation import Federation
from medfed.federation.lightning.callbacks import FederatedRounds
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.local_client import LocalClient
from medfed.federation.split import float_entries
from medfed.federation.training import LocalTrainer
from medfed.models.classification import ClassificationTask
from medfed.models.networks.densenet import densenet_bc
from medfed.personalize.fedavg import FedAvg

CLIENTS, PATCHES, BATCH, SIZE = 20, 128, 16, 32
WARM_UP = 2
OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Patches(ClientData):
    """Random patches that remember the seed of the last epoch, for the bare loop to repeat it."""

    seed = 0

    def train_batches(self, seed: int) -> Iterator[Batch]:
        """See :class:`ClientData`."""
        self.seed = seed
        return super().train_batches(seed)

    def order(self) -> Tensor:
        """Returns the order of the last epoch."""
        return torch.randperm(self.num_samples, generator=torch_rng(self.seed, "order"))


def patches(index: int) -> Patches:
    rng = torch.Generator().manual_seed(index)
    block = {
        "image": torch.randn(PATCHES, 1, SIZE, SIZE, generator=rng),
        "label": torch.randint(0, 2, (PATCHES,), generator=rng),
    }
    ones, counts = torch.ones(1, dtype=torch.bool), block["label"].bincount().float()
    return Patches(f"client_{index}", block, {}, ones, counts, {}, BATCH)


def federated(clients: int, blocks: int) -> FederatedModule:
    """FedAvg as a run builds it."""
    torch.manual_seed(0)
    task = ClassificationTask(densenet_bc(2, 1, 2, block_config=[blocks] * 3), OPTIMIZER)
    algorithm, data = FedAvg(), [patches(i) for i in range(clients)]
    split = algorithm.split(task.network, task.personal, "averaged")
    local = LocalTrainer(task.network, task.loss, split, OPTIMIZER)
    weights = local.initial()
    infos = [ClientInfo(d.id, d.num_samples) for d in data]
    server, state = algorithm.init(weights, split, infos)
    members = {d.id: LocalClient(d, local, weights, state) for d in data}
    return FederatedModule(task, Federation(algorithm, server, members, infos), local)


class Bare:
    """The gradient steps of a round and nothing else."""

    def __init__(self, network: nn.Module) -> None:
        self.network: Any = copy.deepcopy(network)
        self.optimizer = OPTIMIZER(self.network.parameters())
        self.entries = float_entries(self.network)

    @torch.no_grad()
    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Puts a client's start in place."""
        for name, tensor in self.entries.items():
            tensor.copy_(weights[name])
        self.optimizer.state.clear()

    def steps(self, images: Tensor, labels: Tensor, order: Tensor) -> None:
        """Runs one client's steps, which is all that is timed."""
        for rows in order.split(BATCH):
            image, label = images.index_select(0, rows), labels.index_select(0, rows)
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(image), label).backward()
            self.optimizer.step()

    def client(self, data: Any, weights: Tensors) -> tuple[float, Tensors]:
        """Returns the CPU seconds of one client's steps, and the displacement of the weights."""
        order, images, labels = data.order(), data.train["image"], data.train["label"]
        self.start(weights)
        begin = time.process_time()
        self.steps(images, labels, order)
        seconds = time.process_time() - begin
        with torch.no_grad():
            return seconds, subtract(self.entries, weights)


class Alternate(pl.Callback):
    """Follows every client's training by the bare loop's and keeps both times of each round."""

    def __init__(self, federation: Federation, network: nn.Module) -> None:
        self.federation = federation
        self.bare = Bare(network)
        self.shared = federation.server["shared"]
        self.updates: dict[str, Tensors] = {}
        self.rounds: list[tuple[list[float], list[float]]] = []
        self.whole: list[float] = []
        self.steps: list[float] = []
        self.mark = 0.0

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """A client is done: now the bare loop."""
        self.whole.append(time.process_time() - self.mark)
        (client,) = batch.clients
        data = self.federation.clients[client].data
        seconds, self.updates[client] = self.bare.client(data, self.shared)
        self.steps.append(seconds)
        self.mark = time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A round is done: both sides must have come to the same weights."""
        self.whole.append(time.process_time() - self.mark)
        self.rounds.append((self.whole, self.steps))
        sizes = [float(self.federation.clients[c].num_samples) for c in self.updates]
        expected = add(self.shared, weighted_mean(list(self.updates.values()), sizes))
        self.shared = self.federation.server["shared"]
        if not all(torch.equal(t, expected[n]) for n, t in self.shared.items()):
            raise AssertionError("The bare loop took other steps than the federation.")
        self.whole, self.steps = [], []
        self.mark = time.process_time()


class Clock(pl.Callback):
    """CPU time of the parts of each round, by exclusive time: what is called within is deducted."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.rounds: list[dict[str, float]] = []
        self.inner = [0.0]
        self.mark = 0.0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Closes a round; what no clock saw is the Lightning loop's."""
        now = time.process_time()
        self.seconds["Lightning loop"] = now - self.mark - sum(self.seconds.values())
        self.rounds.append(self.seconds)
        self.seconds, self.mark = defaultdict(float), now

    def timed(self, owner: Any, name: str, part: str) -> None:
        """Puts a clock around a method of one object."""
        method: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            self.inner.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                total = time.process_time() - begin
                self.seconds[part] += total - self.inner.pop()
                self.inner[-1] += total

        setattr(owner, name, wrapped)


def fit(module: FederatedModule, rounds: int, last: pl.Callback) -> None:
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        callbacks=[FederatedRounds(), last],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module)


def measure(clients: int, blocks: int, rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """CPU seconds of each client in each round, federated (and what closes the round) and bare."""
    module = federated(clients, blocks)
    alternate = Alternate(module.federation, module.task.network)
    fit(module, WARM_UP + rounds, alternate)
    whole, steps = zip(*alternate.rounds[WARM_UP:], strict=True)
    return list(whole), list(steps)


def typical(rounds: list[list[float]]) -> float:
    """CPU seconds of a round of which every client takes its median over the rounds."""
    return sum(float(statistics.median(places)) for places in zip(*rounds, strict=True))


def breakdown(clients: int, blocks: int, rounds: int) -> dict[str, float]:
    """Median CPU seconds per round of each part."""
    module, clock = federated(clients, blocks), Clock()
    channel, local = module.federation.channel, module.local
    clock.timed(channel, "encode", "encode")
    clock.timed(channel, "decode", "decode")
    clock.timed(module.federation, "open", "open the round")
    clock.timed(module, "exchange", "ledger and aggregation")
    clock.timed(module, "training_step", "client, outside training")
    clock.timed(local, "run", "training, beyond the steps")
    clock.timed(local, "load", "load weights")
    clock.timed(local, "_prepare", "prepare optimizer")
    clock.timed(local, "loss", "forward")
    clock.timed(local, "backward", "backward")
    make: Callable[..., torch.optim.Optimizer] = local.make_optimizer

    def make_timed(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        clock.timed(optimizer, "step", "optimizer step")
        clock.timed(optimizer, "zero_grad", "optimizer zero_grad")
        return optimizer

    local.make_optimizer = make_timed
    fit(module, WARM_UP + rounds, clock)
    parts = clock.rounds[WARM_UP:]
    medians = {n: statistics.median(r[n] for r in parts) for n in parts[0]}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def copies(clients: int, blocks: int) -> float:
    """Model copies that all clients together keep after a round, beside server and scratch."""
    module = federated(clients, blocks)
    fit(module, 1, pl.Callback())
    federation = module.federation
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for c in federation.clients.values()
        for group in [*c.state.values(), c.weights, *c._optimizers.values()]
        for t in group.values()
    }
    model = sum(t.nbytes for t in federation.server["shared"].values())
    return sum(held.values()) / model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--blocks", type=int, default=4, help="layers in each of three blocks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    federation, bare = measure(args.clients, args.blocks, args.rounds)
    each = sorted(sum(a) / sum(b) for a, b in zip(federation, bare, strict=True))
    times = [typical(federation), typical(bare)]
    steps = args.clients * PATCHES // BATCH
    print(f"{args.clients} clients, {steps} steps per round, {len(each)} pairs of rounds")
    print("ms per step: federated {:.2f}, bare {:.2f}".format(*(1e3 * t / steps for t in times)))
    low, high = each[len(each) // 4], each[-1 - len(each) // 4]
    print(
        f"ratio: median {statistics.median(each):.4f}, quartiles {low:.4f} {high:.4f}, "
        f"range {each[0]:.4f} {each[-1]:.4f}"
    )
    print(f"ratio of typical rounds: {times[0] / times[1]:.4f}")
    print("\nms per client and round (median), by part")
    for part, seconds in breakdown(args.clients, args.blocks, max(3, args.rounds // 3)).items():
        print(f"{1e3 * seconds / args.clients:9.3f}  {part}")
    kept = copies(args.clients, args.blocks)
    print(f"\nmodel copies kept by all {args.clients} clients together: {kept:.2f}")


if __name__ == "__main__":
    main()
