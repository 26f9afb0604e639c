"""What a client costs where there are very many, and a round on models of millions of parameters.

    python benchmarks/speed/scale.py clients                    # 100, 1,000 and 10,000
    python benchmarks/speed/scale.py models --millions 1 10     # parameters
    python benchmarks/speed/scale.py sweep --runs 4 --workers 2

Each row is a process of its own, whose peak of memory is its own. Times are CPU time.

*clients*: generated tables of 20 rows and 20 features (``data=mixture``), a tenth of the clients in
each round with 5 steps each, three rounds, all clients evaluated after the last one and tested.
Whole runs as ``medfed train`` does them; ``cohort.memory_gb=0`` puts states of absent clients on
disk. Times are of a client's training in a round with all that the round does (server, ledger,
checkpoint); of one evaluation; and of the whole run per client, reading and pictures included. The
share of checkpoints is that of the whole run.

*models*: perceptrons of three layers, two clients with four steps of eight samples each; the last
layer is the personal part, where a method has one. Memory is the peak above what was there before
the network and after a run of a tiny one, in sizes of the network (fp32), time that of a round (the
second of two), as a multiple
of the same gradient steps in a bare loop.

*sweep*: ``medfed train -m`` over seeds of a small table, one after another and by
``sweep.workers``. The CPU time of all processes of the second as a multiple of the first's does not
depend on what else the machine does; divided by the workers it is the wall-clock time of a quiet
machine with so many cores. The wall-clock time is printed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, SHARE = 3, 0.1
METHODS = ("fedavg", "fedper", "scaffold", "ditto", "apfl", "fedamp", "pfednet", "qupel")
CLIENTS, STEPS, BATCH, LAYERS = 2, 4, 8, 3
MAIN = "import sys; from medfed.commands.main import main; main(sys.argv[1:])"
SWEEP = ("experiment=synthetic_ppfl", "evaluation.every=1", "logger=none", "progress=false")


def many_clients(method: str, clients: int) -> dict[str, float]:
    """Measures one run in this process."""
    import pytorch_lightning as pl

    from medfed.config.compose import described
    from medfed.federation.lightning.checkpoint import RoundCheckpoint
    from medfed.federation.lightning.module import FederatedModule
    from medfed.run.train import train

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    spent: dict[str, list[float]] = {"fit": [], "evaluate": [], "save": []}
    fit, evaluate = pl.Trainer.fit, FederatedModule.evaluate_client

    def timed(function: Any, key: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[key].append(time.process_time() - begin)

        return wrapped

    pl.Trainer.fit = timed(fit, "fit")  # type: ignore[method-assign]
    FederatedModule.evaluate_client = timed(evaluate, "evaluate")  # type: ignore[method-assign]
    save = RoundCheckpoint.on_train_epoch_end
    RoundCheckpoint.on_train_epoch_end = timed(save, "save")  # type: ignore[method-assign]
    canonical = ["canonical.count=3"] if method == "ppfl" else ["canonical=none"]
    begun = _peak()
    with tempfile.TemporaryDirectory() as folder:
        config = described(
            [
                *("experiment=synthetic_ppfl", f"algorithm={method}", *canonical),
                *(f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}", "local.steps=5"),
                *(f"data.clients={clients}", "data.samples=20", "data.features=20"),
                *(f"cohort.fraction={SHARE}", "cohort.memory_gb=0", "logger=none"),
                *("progress=false", f"folder={folder}/run"),
            ]
        )
        begin = time.process_time()
        with contextlib.redirect_stdout(None):
            train(config)
        whole = time.process_time() - begin
    in_fit = sum(spent["evaluate"][:clients])
    return {
        "round": 1000 * (spent["fit"][0] - in_fit) / (ROUNDS * max(1, round(SHARE * clients))),
        "evaluate": 1000 * sum(spent["evaluate"]) / len(spent["evaluate"]),
        "whole": 1000 * whole / clients,
        "saving": 100 * sum(spent["save"]) / whole,
        "peak": _peak(),
        "grown": 1000 * (_peak() - begun) / clients,
    }


def large_model(method: str, millions: int) -> dict[str, float]:
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

    def perceptron(hidden: int) -> nn.Module:
        layers = [
            m for n in range(LAYERS) for m in (nn.Linear(hidden if n else width, hidden), nn.ReLU())
        ]
        return nn.Sequential(*layers, nn.Linear(hidden, 2))

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch["image"]), batch["label"])

    marks = [time.process_time()]

    def run(model: nn.Module) -> None:
        medfed.federate(
            method,
            model,
            loss,
            hospitals,
            rounds=2,
            lr=0.01,
            steps=STEPS,
            personal=f"{2 * LAYERS}.*",
            after_round=lambda *_: marks.append(time.process_time()),
        )

    run(perceptron(8))  # loads the code, which is not the network's memory
    begun = _peak()
    network = perceptron(width)
    size = sum(p.numel() for p in network.parameters()) * 4e-6
    run(network)
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


def sweep(runs: int, workers: int, rounds: int) -> None:
    """Prints the times of a sweep, one run after another and by some workers."""
    # Workers are children of a server, whose parent ends before it: they become this process's
    # (Linux), which else would not know their time.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    seeds = ",".join(map(str, range(runs)))
    times = []
    for engine in ([], [f"sweep.workers={workers}"]):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", MAIN, "train", "-m", *SWEEP]
            command += [f"seed={seeds}", f"rounds={rounds}", *engine]
            with Path(folder, "output").open("w") as output:
                subprocess.run(command, check=True, cwd=folder, stdout=output)
            with contextlib.suppress(ChildProcessError):  # none is left
                while True:
                    os.wait()
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        times.append((spent, wall))
        print(f"{' '.join(engine) or 'one by one':<18}{spent:>8.1f} s of CPU time,{wall:>8.1f} s")
    (alone, _), (pooled, _) = times
    print(f"CPU time of {workers} workers / that of one: {pooled / alone:.2f}")


def _peak() -> float:
    """Megabytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Prints a row per method and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="of", required=True)
    of = commands.add_parser("clients")
    of.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10000])
    of.add_argument("--methods", nargs="+", default=("fedavg", "ditto", "scaffold", "ppfl"))
    of = commands.add_parser("models")
    of.add_argument("--millions", type=int, nargs="+", default=[1, 10, 100])
    of.add_argument("--methods", nargs="+", default=METHODS)
    of = commands.add_parser("sweep")
    of.add_argument("--runs", type=int, default=8)
    of.add_argument("--workers", type=int, default=2)
    of.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if args.of == "sweep":
        sweep(args.runs, args.workers, args.rounds)
        return
    measure: Callable[[str, int], dict[str, float]]
    if args.of == "clients":
        measure, sizes, start = many_clients, args.clients, "fork"
        print("ms of CPU: of a client in a round, of an evaluation, of a client in the whole run;")
        print("% of it for checkpoints; MB at most; kB per client beyond what was there before")
        heads = ["clients", "round", "evaluate", "whole", "saving", "peak", "kB"]
    else:
        measure, sizes, start = large_model, args.millions, "spawn"
        heads = ["million", "time / bare", "memory / model"]
    print(f"{'method':<10}" + "".join(f"{head:>16}" for head in heads))
    for method in args.methods:
        for size in sizes:
            with multiprocessing.get_context(start).Pool(1) as pool:
                row = pool.apply(measure, (method, size))
            cells = "".join(f"{value:>16.2f}" for value in row.values())
            print(f"{method:<10}{size:>16}{cells}", flush=True)


if __name__ == "__main__":
    main()
