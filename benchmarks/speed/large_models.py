"""What a round costs on models of millions of parameters: CPU time and peak memory, per method.

Perceptrons of 1, 10 and 100 million parameters, two clients with four steps of eight samples each.
The last layer is the personal part, where a method has one. Each cell is a process of its own:
memory is the peak above what was there before the network, in sizes of the network (fp32). Time is
CPU time of a round (the second of two), as a multiple of the same gradient steps in a bare loop,
which is timed in the same process.

Run with ``python benchmarks/speed/large_models.py``; ``--millions 1 10`` takes the smaller ones.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import time

METHODS = ("fedavg", "fedper", "scaffold", "ditto", "apfl", "fedamp", "pfednet", "qupel")
CLIENTS, STEPS, BATCH, LAYERS = 2, 4, 8, 3


def one(method: str, millions: int) -> dict[str, float]:
    """Measures a method in this process."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset

    import medfed

    torch.set_num_threads(1)
    logging.getLogger("medfed").setLevel(logging.ERROR)
    torch.manual_seed(0)
    width = round((millions * 1e6 / LAYERS) ** 0.5)
    data = [
        TensorDataset(torch.randn(STEPS * BATCH, width), torch.arange(STEPS * BATCH) % 2)
        for _ in range(CLIENTS)
    ]
    hospitals = [medfed.Hospital(str(n), d, batch_size=BATCH) for n, d in enumerate(data)]
    begun = _peak()
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Linear(width, 2))
    size = sum(p.numel() for p in network.parameters()) * 4e-6

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch["image"]), batch["label"])

    marks = [time.process_time()]
    medfed.federate(
        method,
        network,
        loss,
        hospitals,
        rounds=2,
        lr=0.01,
        steps=STEPS,
        personal=f"{2 * LAYERS}.*",
        after_round=lambda *_: marks.append(time.process_time()),
    )
    peak = _peak()
    bare, optimizer = [], torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(2):
        begin = time.process_time()
        for samples in data:
            for at in range(0, STEPS * BATCH, BATCH):
                images, labels = samples[at : at + BATCH]
                optimizer.zero_grad()
                cross_entropy(network(images), labels).backward()
                optimizer.step()
        bare.append(time.process_time() - begin)
    return {"time": (marks[-1] - marks[-2]) / min(bare), "memory": (peak - begun) / size}


def _peak() -> float:
    """Megabytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Prints a row per method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| method | " + " | ".join(f"{m}M: time / bare | memory / model" for m in given.millions))
    for method in given.methods:
        cells = []
        for millions in given.millions:
            with context.Pool(1) as pool:
                row = pool.apply(one, (method, millions))
            cells.append(f"{row['time']:.2f} | {row['memory']:.1f}")
        print(f"| {method} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
