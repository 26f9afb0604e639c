"""What a round costs beyond its gradient steps, and what the loops of plain peers cost.

FedAvg with 20 clients on five networks: a perceptron on rows of a table (4 steps of 16 samples per
client), a small CNN, DenseNet-BC and a 2-D U-Net on patches, and a 3-D ResNet on cubes (8 steps of
16, 16, 4 and 2). ``--blocks`` takes DenseNet-BCs with three blocks of so many layers instead, for
steps of about 6 to 40 ms. Four sides:

medfed  a `pl.Trainer.fit` with the callback `FederatedRounds`, dense fp32 messages and the ledger;
        evaluation, checkpoints, logger and progress bar are off
bare    the same network, batches and optimizer, and nothing but index_select, zero_grad, forward,
        backward and step
peer    the plain loop of research code, as PFLlib has it: per client a deep copy of the model, its
        own optimizer and a DataLoader over a list of samples; parameters are cloned one by one into
        the client's copy, and averaged one by one by the server
lean    what a federation needs at the least: one network for all clients, one copy of the server's
        weights into it per client, the same steps, and one weighted sum of the results

Then a line says what messages and the server cost per client, where no client trains. Of medfed
these are all of a round: encoding and decoding both ways, checks, ledger and mean. Of a lean loop
they are a clone of the server's weights and a weighted sum.

With `--settings equal` medfed trains in ordinary layout, with `defaults` in channels-last layout.
After each round its weights must equal, bit for bit, those of a bare loop in the same layout. The
loop that is timed has the ordinary layout. How far its weights are is printed and not judged: other
kernels round otherwise, and how much the steps magnify it depends on the processor.

Method: one long fit. A callback that hears of every client stops the clock (CPU time of the
process) after it, lets the bare loop repeat that client's steps and the peer train its own client,
and starts the clock again; at the end of the epoch it closes the round. So nothing that Lightning
does within a round or between two rounds is left out; only start-up, and the first rounds as a
warm-up, are. Of the bare loop only the steps count: that each client starts from the server's
weights and with an empty optimizer is arranged while no clock runs, as is the order of the patches.
As the sides alternate a few times per second, a slow moment of the machine meets all. Ratios are
medians over rounds with quartiles, and (typical) of rounds in which each client takes its median
over the rounds; on a busy machine these are the steadier.

    python benchmarks/speed/round_overhead.py
    python benchmarks/speed/round_overhead.py --blocks 2 4 8 12
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from monai.networks.nets import resnet10
from torch import Tensor, nn
from torch.utils.data import DataLoader

from medfed.common.seeding import torch_rng
from medfed.common.tensors import Tensors, add, flatten, select, subtract, weighted_mean
from medfed.datamodules.client_data import Batch, ClientData
from medfed.federation.algorithm import ClientInfo
from medfed.federation.budget import LocalBudget
from medfed.federation.client import Client
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.engine.working_network import lay_out
from medfed.federation.federation import Federation
from medfed.federation.lightning.callbacks import FederatedRounds
from medfed.federation.lightning.module import FederatedModule
from medfed.federation.local_client import LocalClient
from medfed.federation.reference import run_reference
from medfed.federation.split import float_entries
from medfed.federation.wire.packet import Message
from medfed.models.classification import ClassificationTask
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet
from medfed.personalize.fedavg import FedAvg

CLIENTS, WARM_UP = 20, 2
LEVELS: dict[str, Any] = {"channels": [8, 16, 32, 64], "strides": [2, 2, 2], "num_res_units": 1}


@dataclass(frozen=True)
class Net:
    """A network, and what each client trains it on."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int = 128
    batch: int = 16


def blocks(layers: int) -> Net:
    """A DenseNet-BC with three blocks of some layers."""
    return Net(lambda: densenet_bc(2, 1, 2, block_config=[layers] * 3), (1, 32, 32))


def pooled_unet() -> nn.Module:
    """A U-Net whose outputs are averaged over the image, so that all networks have one task."""
    return nn.Sequential(unet(2, 4, 2, **LEVELS), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def perceptron() -> nn.Module:
    """One hidden layer, as on a table."""
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))


NETS = {
    "perceptron": Net(perceptron, (30,), samples=64),
    "small_cnn": Net(lambda: SmallCNN(2, 1, 2), (1, 28, 28)),
    "densenet_bc": blocks(4),
    "unet_2d": Net(pooled_unet, (4, 64, 64), samples=32, batch=4),
    "resnet10_3d": Net(
        lambda: resnet10(spatial_dims=3, n_input_channels=1, num_classes=2, widen_factor=0.25),
        (1, 32, 32, 32),
        samples=16,
        batch=2,
    ),
}


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


def patches(index: int, net: Net) -> Patches:
    rng = torch.Generator().manual_seed(index)
    block = {
        "image": torch.randn(net.samples, *net.shape, generator=rng),
        "label": torch.randint(0, 2, (net.samples,), generator=rng),
    }
    ones = torch.ones(net.shape[0], dtype=torch.bool)
    counts = block["label"].bincount(minlength=2).float()
    return Patches(f"client_{index}", block, {}, ones, counts, {}, net.batch)


@dataclass(frozen=True)
class Setting:
    """What all sides share, and whether medfed keeps to ordinary layout."""

    clients: int
    net: Net
    momentum: float
    equal: bool

    @property
    def layout(self) -> Literal["auto", False]:
        """The layout in which medfed trains."""
        return False if self.equal else "auto"

    @property
    def optimizer(self) -> Any:
        """Makes an optimizer of parameters."""
        return partial(torch.optim.SGD, lr=0.01, momentum=self.momentum)


@dataclass(frozen=True)
class Untrained(FedAvg):
    """FedAvg whose clients send back what they have received, without training."""

    def fit(self, client: Client, message: Message) -> Message:
        """Replies at once."""
        return Message("fit", message.parts, kinds={"shared": "update"})


def federated(setting: Setting, algorithm: FedAvg) -> FederatedModule:
    """A federation as a run builds it."""
    torch.manual_seed(0)
    task = ClassificationTask(setting.net.make(), setting.optimizer)
    data = [patches(i, setting.net) for i in range(setting.clients)]
    budget = LocalBudget(channels_last=setting.layout)
    split = algorithm.split(task.network, task.personal, "averaged")
    local = LocalTrainer(task.network, task.loss, split, setting.optimizer, budget=budget)
    weights = local.model.initial()
    infos = [ClientInfo(d.id, d.num_samples) for d in data]
    server, state = algorithm.init(weights, split, infos)
    members = {d.id: LocalClient(d, local, weights, state) for d in data}
    return FederatedModule(task, Federation(algorithm, server, members, infos, local), local)


class Bare:
    """The gradient steps of a round and nothing else."""

    def __init__(
        self, network: nn.Module, setting: Setting, layout: Literal["auto", False] = False
    ) -> None:
        self.network: Any = copy.deepcopy(network)
        self.optimizer = setting.optimizer(self.network.parameters())
        self.batch = setting.net.batch
        lay_out(self.network, layout)
        self.entries = float_entries(self.network)

    @torch.no_grad()
    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Puts a client's start in place."""
        for name, tensor in self.entries.items():
            tensor.copy_(weights[name])
        self.optimizer.state.clear()

    def steps(self, images: Tensor, labels: Tensor, order: Tensor) -> None:
        """Runs one client's steps, which is all that is timed."""
        for rows in order.split(self.batch):
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


class Peer:
    """Research code's plain loop: every client has a model, an optimizer and a list of samples."""

    def __init__(self, network: nn.Module, data: Mapping[str, Any], setting: Setting) -> None:
        self.server: Any = copy.deepcopy(network)
        self.batch = setting.net.batch
        lay_out(self.server, False)
        self.clients: dict[str, tuple[Any, Any, list[tuple[Tensor, Tensor]]]] = {}
        for name, one in data.items():
            model: Any = copy.deepcopy(self.server)
            samples = list(zip(one.train["image"], one.train["label"], strict=True))
            self.clients[name] = model, setting.optimizer(model.parameters()), samples

    def client(self, name: str) -> float:
        """Returns the CPU seconds of one client's part of a round."""
        begin = time.process_time()
        model, optimizer, samples = self.clients[name]
        for new, old in zip(self.server.parameters(), model.parameters(), strict=True):
            old.data = new.data.clone()
        model.train()
        for image, label in DataLoader(samples, self.batch, shuffle=True):  # type: ignore[arg-type]
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.process_time() - begin

    def close(self) -> float:
        """Returns the CPU seconds in which the server averages the clients' parameters."""
        begin = time.process_time()
        share = 1 / len(self.clients)
        for parameter in self.server.parameters():
            parameter.data.zero_()
        for model, _, _ in self.clients.values():
            for mean, own in zip(self.server.parameters(), model.parameters(), strict=True):
                mean.data += own.data.clone() * share
        return time.process_time() - begin


class Lean(Bare):
    """The least that a federation does: one network, weights in, steps, one weighted sum."""

    def __init__(self, network: nn.Module, data: Mapping[str, Any], setting: Setting) -> None:
        super().__init__(network, setting)
        self.data, self.share = data, 1 / len(data)
        self.server = {n: t.detach().clone() for n, t in self.entries.items()}
        self.sum = {n: torch.zeros_like(t) for n, t in self.server.items()}

    def train(self, name: str) -> float:
        """Returns the CPU seconds of one client's part of a round."""
        begin, data = time.process_time(), self.data[name]
        with torch.no_grad():
            torch._foreach_copy_(list(self.entries.values()), list(self.server.values()))
        self.optimizer.state.clear()
        self.steps(data.train["image"], data.train["label"], torch.randperm(data.num_samples))
        with torch.no_grad():
            sums, ends = list(self.sum.values()), list(self.entries.values())
            torch._foreach_add_(sums, ends, alpha=self.share)
        return time.process_time() - begin

    def close(self) -> float:
        """Returns the CPU seconds in which the mean becomes the server's weights."""
        begin = time.process_time()
        torch._foreach_copy_(list(self.server.values()), list(self.sum.values()))
        torch._foreach_zero_(list(self.sum.values()))
        return time.process_time() - begin


class Alternate(pl.Callback):
    """Follows every client's training by the other sides', and keeps all times of each round."""

    def __init__(self, federation: Federation, network: nn.Module, setting: Setting) -> None:
        self.federation = federation
        self.bare = Bare(network, setting)
        self.same = Bare(network, setting, setting.layout)
        data = {name: client.data for name, client in federation.clients.items()}
        self.peer, self.lean = Peer(network, data, setting), Lean(network, data, setting)
        self.apart = 0.0  # largest distance of the weights after a round, as a share of their norm
        self.shared = federation.server["shared"]
        self.updates: dict[str, Tensors] = {}
        self.updates_of_same: dict[str, Tensors] = {}
        self.rounds: list[tuple[list[float], ...]] = []
        self.whole: list[float] = []
        self.steps: list[float] = []
        self.plain: list[float] = []
        self.least: list[float] = []
        self.mark = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Asks to hear when a client is done."""
        assert isinstance(pl_module, FederatedModule)
        pl_module.listeners.append(self._heard)

    def _heard(self, phase: str, client: str, done: bool) -> None:
        """A client is done: now the other sides."""
        if not done:
            return
        self.whole.append(time.process_time() - self.mark)
        data = self.federation.clients[client].data
        seconds, self.updates[client] = self.bare.client(data, self.shared)
        self.steps.append(seconds)
        self.updates_of_same[client] = self.same.client(data, self.shared)[1]
        self.plain.append(self.peer.client(client))
        self.least.append(self.lean.train(client))
        self.mark = time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A round is done: medfed and the bare loop must have come to the same weights."""
        self.whole.append(time.process_time() - self.mark)
        self.plain.append(self.peer.close())
        self.least.append(self.lean.close())
        self.rounds.append((self.whole, self.steps, self.plain, self.least))
        before, self.shared = self.shared, self.federation.server["shared"]
        apart, same = (self._apart(before, u) for u in (self.updates, self.updates_of_same))
        if same:
            raise AssertionError(f"medfed's weights are {same:.1e} of their norm from the loop's.")
        self.apart = max(self.apart, apart)
        self.whole, self.steps, self.plain, self.least = [], [], [], []
        self.mark = time.process_time()

    def _apart(self, before: Tensors, updates: dict[str, Tensors]) -> float:
        """How far medfed's weights are from those after a loop's updates, by norms."""
        sizes = [float(self.federation.clients[c].num_samples) for c in updates]
        expected = add(before, weighted_mean(list(updates.values()), sizes))
        # medfed's averaged variances are of all patients together, not means.
        names = [n for n in self.shared if not n.endswith("running_var")]
        ours, theirs = flatten(select(self.shared, names)), flatten(select(expected, names))
        return float((ours - theirs).norm() / theirs.norm())


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


def measure(setting: Setting, rounds: int) -> tuple[list[list[list[float]]], float]:
    """CPU seconds of medfed and the other sides, by client and round, and of what closes it.

    Also how far medfed's weights were from the bare loop's at most.
    """
    module = federated(setting, FedAvg())
    alternate = Alternate(module.federation, module.task.network, setting)
    fit(module, WARM_UP + rounds, alternate)
    sides = [list(side) for side in zip(*alternate.rounds[WARM_UP:], strict=True)]
    return sides, alternate.apart


def messages(setting: Setting, rounds: int) -> list[list[list[float]]]:
    """CPU seconds of medfed's messages and server in each round, and of a lean loop's."""
    federation = federated(setting, Untrained()).federation
    ours, theirs, share = [], [], 1 / setting.clients
    for number in range(WARM_UP + rounds):
        server = federation.server["shared"]
        begin = time.process_time()
        run_reference(federation, number + 1, start=number)
        ours.append([time.process_time() - begin])
        begin = time.process_time()
        total = [torch.zeros_like(t) for t in server.values()]
        for _ in range(setting.clients):
            copies = {n: t.clone() for n, t in server.items()}
            torch._foreach_add_(total, list(copies.values()), alpha=share)
        theirs.append([time.process_time() - begin])
        federation.server["shared"] = server  # adding it to itself would overflow
    return [ours[WARM_UP:], theirs[WARM_UP:]]


def typical(rounds: list[list[float]]) -> float:
    """CPU seconds of a round of which every client takes its median over the rounds."""
    return sum(float(statistics.median(places)) for places in zip(*rounds, strict=True))


def ratio(ours: list[list[float]], theirs: list[list[float]]) -> str:
    """The median over rounds with its quartiles, and that of typical rounds."""
    each = sorted(sum(a) / sum(b) for a, b in zip(ours, theirs, strict=True))
    low, high = each[len(each) // 4], each[-1 - len(each) // 4]
    median = statistics.median(each)
    whole = typical(ours) / typical(theirs)
    return f"{median:.3f} ({low:.3f} to {high:.3f}), typical {whole:.3f}"


def show(name: str, setting: Setting, rounds: int) -> None:
    """Measures the four sides and prints their ratios."""
    sides, apart = measure(setting, rounds)
    medfed, bare, peer, lean = sides
    steps = setting.clients * setting.net.samples // setting.net.batch
    how = "equal settings" if setting.equal else "defaults"
    each = [1e3 * typical(side) / steps for side in sides]
    print(f"\n{how}, {name}, {rounds} rounds of {steps} steps")
    print("ms per step: medfed {:.2f}, bare {:.2f}, peer {:.2f}, lean {:.2f}".format(*each))
    print(f"medfed / bare: {ratio(medfed, bare)}")
    print(f"peer / bare:   {ratio(peer, bare)}")
    print(f"lean / bare:   {ratio(lean, bare)}")
    print(f"medfed / peer: {ratio(medfed, peer)}")
    print(f"weights after a round: {apart:.1e} of their norm apart")
    ours, theirs = messages(setting, 10 * rounds)
    each = [1e6 * typical(side) / setting.clients for side in (ours, theirs)]
    print("messages and server, µs per client: medfed {:.0f}, lean {:.0f}".format(*each))
    print(f"medfed / lean: {ratio(ours, theirs)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument(
        "--blocks", type=int, nargs="+", help="DenseNet-BCs with so many layers in each block"
    )
    parser.add_argument(
        "--settings", nargs="+", choices=["equal", "defaults"], default=["equal", "defaults"]
    )
    parser.add_argument("--momentum", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    nets = {name: NETS[name] for name in args.nets}
    if args.blocks:
        nets = {
            f"densenet_bc of {layers} layers per block": blocks(layers) for layers in args.blocks
        }
    for name, net in nets.items():
        for how in args.settings:
            setting = Setting(args.clients, net, args.momentum, how == "equal")
            show(name, setting, args.rounds)


if __name__ == "__main__":
    main()
