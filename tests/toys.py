"""Small federations whose numbers can be checked by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache, partial

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from medfed.common.streams import own_stream
from medfed.federation.algorithm import Algorithm, ClientInfo, Cohort
from medfed.federation.budget import LocalBudget
from medfed.federation.engine.loop import LocalTrainer
from medfed.federation.federation import Federation
from medfed.federation.local_client import LocalClient
from medfed.federation.wire.channel import Channel
from medfed.federation.wire.codecs.dense import Dense
from medfed.models.networks.canonical import Canonical


def assert_alike(found: Tensor, expected: Tensor, share: float = 1e-5) -> None:
    """Computed in other orders: equal to a share of the largest magnitude, or of 1.

    How far sums of single precision differ goes with the magnitudes that are added, and which of
    them are depends on the processor.
    """
    limit = share * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


class ToyData:
    """Regression data of one client; one batch is the whole set unless a size is given."""

    def __init__(self, id: str, x: Tensor, y: Tensor, batch_size: int | None = None):
        self.id, self.x, self.y = id, x, y
        self.batch_size = batch_size or len(x)
        self.num_samples = len(x)
        self.label_counts = torch.tensor([(y <= 0).sum(), (y > 0).sum()])
        self.channels = torch.ones(x.shape[1], dtype=torch.bool)

    def train_batches(self, seed: int) -> Iterator[dict]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        if self.batch_size == len(self.x):
            order = torch.arange(len(self.x))
        for rows in order.split(self.batch_size):
            yield {"image": self.x[rows], "label": self.y[rows]}

    def train_inputs(self, limit: int) -> Tensor:
        return self.x[:limit]

    def eval_batches(self, split: str) -> Iterator[dict]:
        yield {"image": self.x, "label": self.y}


class ToyTask(pl.LightningModule):
    """Two linear layers (body, head) with optional normalisation between them."""

    personal = ("head.*",)

    def __init__(
        self,
        features: int = 3,
        norm: bool = True,
        dtype: torch.dtype = torch.float32,
        classes: int = 1,
    ):
        super().__init__()
        with own_stream(0):  # threads build networks at once
            layers = {"body": nn.Linear(features, 4)}
            if norm:
                layers["norm"] = nn.BatchNorm1d(4)
            layers["head"] = nn.Linear(4, classes)
        self.network = nn.Sequential()
        for name, layer in layers.items():
            self.network.add_module(name, layer.to(dtype))

    def loss(self, batch: dict) -> Tensor:
        """Of classes their cross-entropy, else half the mean square."""
        if not batch["label"].is_floating_point():
            return nn.functional.cross_entropy(self.network(batch["image"]), batch["label"])
        return (self.network(batch["image"]).squeeze(-1) - batch["label"]).square().mean() / 2

    def evaluate(self, batches: Iterable[dict], *, test: bool = False) -> dict[str, float]:
        self.network.eval()
        with torch.no_grad():
            losses = [float(self.loss(b)) for b in batches]
        self.network.train()
        return {"loss": float(np.mean(losses))}


def canonical_toy(
    count: int = 3, mix: str = "outputs", dtype: torch.dtype = torch.float64, norm: bool = False
) -> ToyTask:
    """A toy of which the head exists several times."""
    task = ToyTask(norm=norm, dtype=dtype)
    networks = [task.network, *(copy.deepcopy(task.network) for _ in range(1, count))]
    for k, network in enumerate(networks[1:], start=1):
        with own_stream(k):
            network.head.reset_parameters()
    task.network = Canonical(networks, ["head.*"], mix, "identity")
    task.personal = ("membership",)
    return task


def toy_data(
    clients: int = 3,
    features: int = 3,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> list[ToyData]:
    """Clients of unequal size whose targets differ."""
    rng = np.random.default_rng(1)
    data = []
    for i in range(clients):
        n = 6 + 2 * i
        x = rng.normal(size=(n, features))
        y = x @ rng.normal(size=features) + i
        data.append(
            ToyData(f"c{i}", torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype), batch)
        )
    return data


def in_classes(data: ToyData) -> ToyData:
    """The client with a class, the sign, in place of each outcome."""
    data = copy.copy(data)
    data.y = (data.y > 0).long() if data.y.is_floating_point() else data.y
    return data


@cache  # one object for equal settings, as what its steps come to is remembered by object
def sgd(lr: float, momentum: float) -> partial[torch.optim.SGD]:
    return partial(torch.optim.SGD, lr=lr, momentum=momentum)


def toy_federation(
    algorithm: Algorithm,
    task: pl.LightningModule | None = None,
    data: list[ToyData] | None = None,
    *,
    rounds: int = 3,
    steps: int = 2,
    lr: float = 0.05,
    momentum: float = 0.0,
    buffers: str = "averaged",
    cohort: Cohort | None = None,
    channel: Channel | None = None,
    kept: bool | str = False,
    clip: float | None = None,
    accumulate: int = 1,
) -> tuple[pl.LightningModule, Federation, LocalTrainer]:
    """Builds task, federation and trainer as a real run does."""
    task = task or ToyTask()
    data = data or toy_data(batch=4)
    data = [in_classes(client) for client in data] if algorithm.by_class else data
    split = algorithm.split(task.network, task.personal, buffers)
    algorithm = algorithm.adapted(split, task.network)
    local = LocalTrainer(
        task.network,
        task.loss,
        split,
        sgd(lr, momentum),
        rounds=rounds,
        budget=LocalBudget(
            steps,
            accumulate=accumulate,
            clip=clip,
            optimizer_state=kept if isinstance(kept, str) else "kept" if kept else "fresh",
        ),
    )
    weights = local.model.initial()
    infos = [ClientInfo(d.id, d.num_samples) for d in data]
    server, state = algorithm.init(weights, split, infos)
    clients = {d.id: LocalClient(d, local, weights, state) for d in data}
    if channel is None and next(iter(weights.values())).dtype == torch.float64:
        channel = Channel(Dense("float64"), Dense("float64"))
    return task, Federation(algorithm, server, clients, infos, local, channel, cohort), local
