"""Samples per second of a training step, from a bare loop to a federation.

The sides, each on the same network, batch size, optimizer (SGD with momentum; on a GPU fused) and
data:

| side | what runs |
|---|---|
| bare | an eager loop over batches that are on the device already |
| indexed | the same, each batch by `index_select` from all samples, which are on the device |
| graph | forward, loss, backward and step in one CUDA graph, its batches as those of indexed |
| compiled | the bare loop, the network compiled (`torch.compile`) |
| overhead | the same, `torch.compile(mode="reduce-overhead")`, PyTorch's own CUDA graphs |
| medfed | a round of FedAvg as a run takes it: samples are on the device, as those of indexed |
| copied | the same, batches made in main memory and copied (`local.resident_gib=0`) |
| graphs | medfed, its steps as CUDA graphs (`local.graphs=true`), beside the side graph |
| unfused | medfed by SGD of several kernels (`fused=False`) |
| kept | medfed, whose clients keep their momentum between rounds, in main memory |
| states | the same on the device (`local.resident_states=true`) |

Compare medfed with indexed, graphs with graph and states with kept, whose steps and data are equal.
On the CPU the switch of medfed's tests keeps samples where they are on a GPU.

A round of FedAvg has every client take `--steps` steps, with aggregation, messages and ledger; the
bare sides take as many steps in one go. Each side runs in turn, `--repeats` times after one run to
warm up, and the median counts. Of a GPU the share of time in which it computes is read from NVML
(`pip install nvidia-ml-py`), or else summed over the profiler's kernels.

    python benchmarks/speed/gpu.py                          # on a GPU
    python benchmarks/speed/gpu.py --networks unet_3d --clients 1 20 --sides bare medfed
    python benchmarks/speed/gpu.py --processes 1 2 4        # federations at a time on one GPU
    python benchmarks/speed/gpu.py --device cpu --size tiny # tries it; no figures of a GPU
    python benchmarks/speed/gpu.py --hashes                 # one rank and two: equal weights?
    python benchmarks/speed/gpu.py --bits                   # twice, unfused, in a graph: equal?
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from medfed.common.tensors import Tensors, digest
from medfed.common.untrusted import read_checkpoint
from medfed.datamodules.client_data import ClientData
from medfed.federation.assemble import assemble
from medfed.federation.budget import LocalBudget
from medfed.federation.engine import batches
from medfed.federation.federation import Federation
from medfed.federation.round import Round
from medfed.models.classification import ClassificationTask
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.unet import unet
from medfed.models.segmentation import SegmentationTask
from medfed.models.task import TaskModule
from medfed.personalize.fedavg import FedAvg

ROOT = Path(__file__).resolve().parents[2]
LR, MOMENTUM = 0.01, 0.9
BARE = ("bare", "indexed", "graph", "compiled", "overhead")
MEDFED = {
    "medfed": LocalBudget(),
    "copied": LocalBudget(resident_gib=0),
    "graphs": LocalBudget(graphs=True),
    "unfused": LocalBudget(),
    "kept": LocalBudget(optimizer_state="kept"),
    "states": LocalBudget(optimizer_state="kept", resident_states=True),
}
SIDES = (*BARE, *MEDFED)


class Shape(NamedTuple):
    """What a network trains on."""

    channels: int
    sides: tuple[int, ...]
    batch: int


SHAPES = {
    "perceptron": {"full": Shape(30, (), 16), "tiny": Shape(30, (), 4)},
    "densenet_bc": {"full": Shape(1, (32, 32), 32), "tiny": Shape(1, (16, 16), 2)},
    "unet_2d": {"full": Shape(4, (64, 64), 16), "tiny": Shape(4, (16, 16), 2)},
    "unet_3d": {"full": Shape(4, (48, 48, 48), 2), "tiny": Shape(4, (16, 16, 16), 2)},
    "swin_unetr": {"full": Shape(4, (96, 96, 96), 1), "tiny": Shape(4, (64, 64), 1)},
}


def task_of(name: str, size: str) -> TaskModule:
    """Builds a task from the same random weights each time."""
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    channels, sides, _ = SHAPES[name][size]
    full = size == "full"
    if name == "perceptron":
        layers = nn.Linear(channels, 64), nn.ReLU(), nn.Linear(64, 2)
        return ClassificationTask(nn.Sequential(*layers), optimizer)
    if name == "densenet_bc":
        blocks = [16, 16, 16] if full else [1, 1]
        network: nn.Module = densenet_bc(2, channels, 2, block_config=blocks, stem="small")
        return ClassificationTask(network, optimizer)
    if name == "swin_unetr":
        from monai.networks.nets import SwinUNETR

        network = SwinUNETR(channels, 3, feature_size=24 if full else 12, spatial_dims=len(sides))
    else:
        widths = (16, 32, 64, 128) if full else (4, 8)
        dims: Literal[2, 3] = 2 if len(sides) == 2 else 3
        network = unet(dims, channels, 3, channels=widths, strides=(2,) * (len(widths) - 1))
    return SegmentationTask(network, optimizer, regions=["whole", "core", "enhancing"])


def client(name: str, size: str, index: int, steps: int) -> ClientData:
    """Random images, so many batches."""
    channels, sides, batch = SHAPES[name][size]
    rng, samples = torch.Generator().manual_seed(index), steps * batch
    image = torch.randn(samples, channels, *sides, generator=rng)
    if name in ("perceptron", "densenet_bc"):
        label = torch.randint(0, 2, (samples,), generator=rng)
    else:
        label = (torch.rand(samples, 3, *sides, generator=rng) > 0.8).to(torch.uint8)
    block = {"image": image, "label": label}
    ones, counts = torch.ones(channels, dtype=torch.bool), torch.ones(2)
    return ClientData(f"client_{index}", block, {}, ones, counts, {}, batch)


class GraphedStep:
    """A step as one CUDA graph, captured after a warm-up on another stream that leaves no trace."""

    def __init__(self, task: TaskModule, optimizer: torch.optim.Optimizer, batch: Tensors) -> None:
        self.inputs = {n: t.clone() for n, t in batch.items()}
        state = {n: t.clone() for n, t in task.network.state_dict().items()}
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            for _ in range(3):
                optimizer.zero_grad()
                task.loss(self.inputs).backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(other)
        optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            task.loss(self.inputs).backward()
            optimizer.step()
        with torch.no_grad():
            for n, tensor in task.network.state_dict().items():
                tensor.copy_(state[n])
            for kept in optimizer.state.values():
                for value in kept.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def __call__(self, block: Tensors, rows: Tensor) -> None:
        """Steps on some rows of a block."""
        for name, tensor in self.inputs.items():
            torch.index_select(block[name], 0, rows, out=tensor)
        self.graph.replay()


def bare(
    side: str, name: str, size: str, steps: int, device: torch.device
) -> tuple[Callable[[], object], nn.Module]:
    """Returns a loop that does nothing but steps, and its network."""
    task = task_of(name, size).to(device).train()
    data = client(name, size, 0, min(steps, 8))
    parameters, fused = task.network.parameters(), device.type == "cuda"
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=fused)
    everything = torch.arange(data.num_samples)
    block = {n: t.contiguous().to(device) for n, t in data.samples(everything).items()}
    order = torch.randperm(data.num_samples, generator=torch.Generator().manual_seed(0))
    places = order.to(device).split(data.batch_size)
    batches = [{n: t[rows] for n, t in block.items()} for rows in places]
    graphed = GraphedStep(task, optimizer, batches[0]) if side == "graph" else None
    if side in ("compiled", "overhead"):
        task.network.compile(mode="reduce-overhead" if side == "overhead" else None)

    def run() -> None:
        for number in range(steps):
            rows = places[number % len(places)]
            if graphed is not None:
                graphed(block, rows)
                continue
            batch = batches[number % len(places)]
            if side == "indexed":
                batch = {n: t.index_select(0, rows) for n, t in block.items()}
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()

    return run, task.network


def federated(
    side: str, name: str, size: str, clients: int, steps: int, device: torch.device
) -> tuple[Callable[[], object], Federation]:
    """Returns a round of FedAvg, and its federation."""
    task = task_of(name, size).to(device)
    members = [client(name, size, index, steps) for index in range(clients)]
    federation, _ = assemble(
        FedAvg(),
        task.network,
        task.loss,
        members,
        optimizer=partial(task.optimizer, fused=False) if side == "unfused" else task.optimizer,
        budget=replace(MEDFED[side], steps=steps),
    )
    federation.to(device)
    rounds = count()

    def run() -> None:
        current, is_open = Round(federation, next(rounds)), True
        while is_open:
            for client in current.recipients:
                current.receive(client, current.fit(client))
            is_open = current.close_phase()

    return run, federation


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def watched(device: torch.device, busy: list[float]) -> Iterator[None]:
    """Samples the share of time in which the GPU computes, by NVML."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.1):
            busy.append(torch.cuda.utilization(device) / 100)

    thread = threading.Thread(target=look, daemon=True)
    try:
        import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        yield
        return
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def kernel_share(run: Callable[[], object], device: torch.device) -> float:
    """The share of one run's time in which a kernel runs, by the profiler; on one stream."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        begin = time.perf_counter()
        run()
        finish(device)
        seconds = time.perf_counter() - begin
    busy: float = sum(event.self_device_time_total for event in seen.key_averages())
    return busy / 1e6 / seconds


def measure(
    run: Callable[[], object], samples: int, repeats: int, device: torch.device
) -> tuple[float, float | None]:
    """Samples per second, and of a GPU the share of time in which it computes."""
    run()
    finish(device)
    rates, busy = [], list[float]()
    with watched(device, busy) if device.type == "cuda" else tempfile.TemporaryDirectory():
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            finish(device)
            rates.append(samples / (time.perf_counter() - begin))
    share = None
    if device.type == "cuda":
        share = statistics.fmean(busy) if busy else kernel_share(run, device)
    return statistics.median(rates), share


def table(args: argparse.Namespace, device: torch.device) -> None:
    """Prints a row for each network, number of clients and side."""
    print("| network | clients | side | samples per second | of bare | GPU computes |")
    print("|---|---:|---|---:|---:|---:|", flush=True)
    for name in args.networks:
        batch, floor = SHAPES[name][args.size].batch, None
        for clients in args.clients:
            for side in args.sides:
                if side in BARE and clients != args.clients[0]:
                    continue  # one network trains, whoever's data it are
                many = 1 if side in BARE else clients
                if side in BARE:
                    run, _ = bare(side, name, args.size, args.steps, device)
                else:
                    run, _ = federated(side, name, args.size, clients, args.steps, device)
                rate, share = measure(run, many * args.steps * batch, args.repeats, device)
                floor = rate if side == "bare" else floor
                ratio = "–" if floor is None else f"{rate / floor:.2f}"
                busy = "–" if share is None else f"{100 * share:.0f} %"
                who = "–" if side in BARE else str(clients)
                print(f"| {name} | {who} | {side} | {rate:,.1f} | {ratio} | {busy} |", flush=True)
                del run


def one_of_many(
    ready: threading.Barrier, seconds: SimpleQueue[float], name: str, args: argparse.Namespace
) -> None:
    """Trains in a process of its own; puts the seconds that its rounds took."""
    torch.set_num_threads(1)
    device = torch.device(args.device)
    run, _ = federated("medfed", name, args.size, args.clients[0], args.steps, device)
    run()
    finish(device)
    ready.wait(600)
    begin = time.perf_counter()
    for _ in range(args.repeats):
        run()
    finish(device)
    seconds.put(time.perf_counter() - begin)


def together(args: argparse.Namespace) -> None:
    """Prints samples per second of several federations that train at a time on one device."""
    print("| network | processes | samples per second, all | of one |\n|---|---:|---:|---:|")
    context = multiprocessing.get_context("spawn")
    for name in args.networks:
        first = None
        for many in args.processes:
            ready, seconds = context.Barrier(many), context.SimpleQueue()
            working = [
                context.Process(target=one_of_many, args=(ready, seconds, name, args), daemon=True)
                for _ in range(many)
            ]
            for process in working:
                process.start()
            for process in working:
                process.join()
            if any(process.exitcode for process in working):
                sys.exit(1)
            longest = max(seconds.get() for _ in working)
            samples = many * args.repeats * args.clients[0] * args.steps
            rate = samples * SHAPES[name][args.size].batch / longest
            first = first or rate
            print(f"| {name} | {many} | {rate:,.1f} | {rate / first:.2f} |", flush=True)


def weights_of(folder: Path, ranks: int, device: torch.device) -> str:
    """Trains a small run on so many ranks; returns a hash of what its server keeps."""
    trainer = "gpu" if device.type == "cuda" else "cpu" if ranks == 1 else "ddp"
    words: tuple[str, ...] = (
        *("experiment=digits_pfednet", "algorithm=fedavg", "rounds=2"),
        *("logger=none", "progress=false", f"trainer={trainer}", f"folder={folder}"),
    )
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        words = (*words, f"trainer.strategy.ranks_per_device={ranks}")
    elif ranks > 1:
        words = (*words, f"trainer.devices={ranks}")
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    last = max((folder / "checkpoints").glob("round_*.ckpt"))
    saved = read_checkpoint(last, map_location="cpu")
    server = saved["federation"]["server"]
    return digest({f"{g}/{n}": t for g, named in server.items() for n, t in named.items()})


def hashes(device: torch.device) -> None:
    """Says whether one rank and two leave equal bits; of one GPU two ranks share it."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = (weights_of(Path(folder) / str(n), n, device) for n in (1, 2))
    print(f"server on one rank {one[:16]}, on two {two[:16]}: equal {one == two}")


def bits(args: argparse.Namespace, device: torch.device) -> None:
    """Prints hashes after two rounds of two clients, a graph's distance from eager, and rates.

    The rates are samples per second of one client's rounds in medfed.
    """
    others = [side for side in MEDFED if side != "medfed"]
    heads = ("network", "kernels", "medfed", "again", *others, "graph − eager", "per second")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in args.networks:
        for exact in (False, True):
            torch.use_deterministic_algorithms(exact, warn_only=True)
            cells = [name, "deterministic" if exact else "plain"]
            for side in ("medfed", *MEDFED):
                run, federation = federated(side, name, args.size, 2, args.steps, device)
                run()
                run()
                cells.append(digest(federation.server["shared"])[:12])
            states = []
            for side in ("indexed", "graph") if device.type == "cuda" else ():
                run, network = bare(side, name, args.size, args.steps, device)
                run()
                states.append([t.double() for t in network.state_dict().values()])
            gaps = [float((a - b).abs().max()) for a, b in zip(*states, strict=True)]
            cells.append(f"{max(gaps):.1e}" if gaps else "–")
            run, _ = federated("medfed", name, args.size, 1, args.steps, device)
            samples = args.steps * SHAPES[name][args.size].batch
            cells.append(f"{measure(run, samples, args.repeats, device)[0]:,.1f}")
            print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--networks", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 5, 20, 100])
    parser.add_argument("--steps", type=int, default=16, help="per client and round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", default="full", choices=["full", "tiny"])
    parser.add_argument("--processes", nargs="+", type=int, help="federations at a time")
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--bits", action="store_true")
    args = parser.parse_args()
    if args.bits:  # before CUDA begins, for deterministic kernels
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is here; --device cpu --size tiny tries the benchmark without one")
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}")
    else:
        print("On the CPU, to try the benchmark: these are no figures of a GPU.")
        batches.DEVICES.add("cpu")
        for left in {"graph", "graphs"}.intersection(args.sides):
            print(f"The side {left} is left out: CUDA graphs need a GPU.")
        MEDFED.pop("graphs")
        args.sides = [side for side in args.sides if side not in ("graph", "graphs")]
    if args.hashes:
        hashes(device)
    elif args.bits:
        bits(args, device)
    elif args.processes:
        together(args)
    else:
        table(args, device)


if __name__ == "__main__":
    main()
