"""A small CNN under medfed with one client, against a bare PyTorch loop with the same budget.

The loop is written as a tutorial would: its own initial weights, a shuffled `DataLoader`, SGD and
cross-entropy, and scikit-learn's metrics. It shares with medfed nothing but the pixels, the splits
and the network's layers. Both are measured after the last epoch.

    python benchmarks/evidence/bare_loop.py --seeds 3 --epochs 12
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from medfed.config.compose import described
from medfed.datamodules.base import FederatedDataModule
from medfed.models.networks.small import SmallCNN
from medfed.run.train import train

LR, MOMENTUM = 0.05, 0.9
ONE_CLIENT = (
    *("experiment=digits_pfednet", "algorithm=fedavg", "partition=round_robin"),
    *("partition.num_clients=1", "local.steps=null", "local.epochs=1", f"optimizer.lr={LR}"),
    *(f"optimizer.momentum={MOMENTUM}", "logger=none", "progress=false"),
)


def federated(folder: Path, seed: int, epochs: int) -> tuple[list[float], FederatedDataModule]:
    """Trains under medfed, an epoch a round; returns accuracy and AUROC, and the data."""
    # The optimizer's state is kept over rounds, as a loop keeps it.
    more = (f"seed={seed}", f"rounds={epochs}", f"evaluation.every={epochs}")
    kept = ("local.optimizer_state=kept", f"folder={folder}")
    summary, experiment = train(described([*ONE_CLIENT, *more, *kept]))
    (metrics,) = summary["clients"].values()
    return [metrics["accuracy"], metrics["auroc"]], experiment.data


def bare(data: FederatedDataModule, seed: int, epochs: int) -> list[float]:
    """Trains by a plain loop on the same pixels; returns accuracy and AUROC."""
    (client,) = data.clients.values()
    torch.manual_seed(1000 + seed)
    everything = client.samples(torch.arange(client.num_samples))
    samples = TensorDataset(everything["image"], everything["label"])
    loader = DataLoader(samples, batch_size=client.batch_size, shuffle=True)
    network = SmallCNN(2, data.in_channels, data.num_classes)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM)
    loss = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for image, label in loader:
            optimizer.zero_grad()
            loss(network(image), label).backward()
            optimizer.step()
    network.eval()
    batches = list(client.eval_batches("test"))
    with torch.no_grad():
        probs = torch.cat([network(b["image"]).double().softmax(1) for b in batches]).numpy()
    label = np.concatenate([b["label"].numpy() for b in batches])
    auroc = roc_auc_score(label, probs, multi_class="ovr", average="macro")
    return [accuracy_score(label, probs.argmax(1)), float(auroc)]


def main() -> None:
    """Prints accuracy and AUROC of both, by seed, and the difference of their means in points."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--epochs", type=int, default=12, help="rounds of an epoch each")
    options = parser.parse_args()
    table = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            ours, data = federated(Path(folder) / "run", seed, options.epochs)
        table.append((ours, bare(data, seed, options.epochs)))
    for seed, (ours, theirs) in enumerate(table):
        print(
            f"seed {seed}: accuracy {ours[0]:.4f} (bare {theirs[0]:.4f}), "
            f"AUROC {ours[1]:.4f} (bare {theirs[1]:.4f})"
        )
    gap = 100 * np.diff(np.mean(table, axis=0), axis=0)[0]
    print(f"bare less medfed: accuracy {gap[0]:+.2f} points, AUROC {gap[1]:+.2f} points")
    print(f"within one point: {'yes' if np.abs(gap).max() <= 1 else 'no'}")


if __name__ == "__main__":
    main()
