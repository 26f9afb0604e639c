"""Where the CPU time of training goes: of a step, of its batches, and of a whole run.

    python benchmarks/speed/training.py layouts            # a step by memory layout and precision
    python benchmarks/speed/training.py layouts --compile  # minutes of compiling
    python benchmarks/speed/training.py loading            # batches beside the training on them
    python benchmarks/speed/training.py run                # of a whole run, part by part
    python benchmarks/speed/training.py run experiment=clinical_pfednet

All on one thread, in CPU time of the process; medians.

*layouts*: forward, backward and SGD of the default networks, beside the step in ordinary layout and
single precision; sides alternate. "Off" is how far the gradient of all weights at the start is from
that of double precision, as a share of its norm: PyTorch's channels-last normalisation adds up with
less care. ``--compile`` also gives the CPU seconds of compiling, and the ratio when they are spread
over 5 and 50 rounds of 100 steps.

*loading*: epochs of loading alone alternate with epochs of loading and training. ``cache`` is CT
patches (1, 32, 32) in a cache as `medfed prepare data=luna16` makes it, batches of 32, and a
DenseNet-BC of ``--layers`` in each block (16 in pFedNet's experiment; fewer are harder to hide
behind). ``2-D`` and ``3-D`` are patches (4, 64, 64), batches of 16, and (4, 48, 48, 48), batches of
2, cut anew in every epoch by the recipes of ``configs/augment``; a U-Net of 16 to 128 channels.

*run*: one of the demo's runs, or that of the keys that follow; data are made beforehand. A timer
interrupts the process after every 2 ms of its CPU time, which counts for the part of which the
innermost function on its stack is one. "Beside training" is what no training needs.
"""
# ruff: noqa: E402  the sampler sees the imports

from __future__ import annotations

import argparse
import copy
import io
import logging
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

EVERY = 0.002
# Parts by the ends of files, and of functions in them where the file does several things. The
# first that fits a frame counts, and frames are asked from the innermost.
PARTS = (
    (
        "imports",
        ("importlib._bootstrap>", "importlib._bootstrap_external>", "commands/command_line"),
    ),
    ("pictures", ("run/pictures", "common/figures", "matplotlib/", "models/contours")),
    ("evaluation", ("models/meters", "models/inference", "functional/scores", "evaluate_client")),
    ("evaluation", ("models/segmentation_meter", "run/intervals", "evaluated", "run/results")),
    ("checkpoints", ("lightning/checkpoint", "connectors/checkpoint_connector")),
    ("files", ("records/", "standalone/files", "loggers/csv_logs", "wire/ledger", "run/printed")),
    ("gradient steps", ("federation/engine/",)),
    ("data", ("medfed/datamodules/",)),
    ("messages and server", ("federation/wire/", "medfed/personalize/", "medfed/functional/")),
    ("messages and server", ("federation/federation", "federation/aggregation", "local_client")),
    ("configuration", ("medfed/config/", "/hydra/", "/omegaconf/")),
    ("Lightning", ("/pytorch_lightning/", "/lightning_fabric/", "federation/lightning/")),
    ("building, and all else", ("medfed/run/", "medfed/commands/", "speed/training")),
)
BESIDE = ("evaluation", "checkpoints", "files", "pictures")


class Sampler:
    """Adds the CPU time of this process to the part that it is in."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.mark = time.process_time()
        signal.signal(signal.SIGPROF, self.sample)

    def start(self) -> None:
        """Counts from here on."""
        self.mark = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)

    def stop(self) -> None:
        """Counts no more."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def sample(self, _: int, frame: FrameType | None) -> None:
        """Handles the signal."""
        now = time.process_time()
        self.seconds[part_of(frame)] += now - self.mark
        self.mark = now


def part_of(frame: FrameType | None) -> str:
    """Returns the part of the innermost function that belongs to one."""
    while frame is not None:
        place = frame.f_code.co_filename.removesuffix(".py").replace("<frozen ", "")
        for part, ends in PARTS:
            for end in ends:
                if end in place if "/" in end or ">" in end else frame.f_code.co_name == end:
                    return part
        frame = frame.f_back
    return "building, and all else"


SAMPLER = Sampler()
if sys.argv[1:2] == ["run"]:
    SAMPLER.start()

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from medfed.config import compose
from medfed.datamodules.cache.store import Item, Recipe, Store, build
from medfed.datamodules.client_data import ArrayRows, Block, ClientData
from medfed.datamodules.fresh_patches import FreshPatches, volume_of
from medfed.federation.engine.working_network import lay_out
from medfed.models.networks.densenet import densenet_bc
from medfed.models.networks.small import SmallCNN
from medfed.models.networks.unet import unet
from medfed.run import assembly, train
from medfed.standalone.ct import to_unit

SAMPLER.stop()

LEVELS: dict[str, Any] = {"channels": [8, 16, 32, 64, 128], "strides": [2, 2, 2, 2]}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "densenet_bc_small_stem": (lambda: densenet_bc(2, 1, 2, stem="small"), (16, 1, 32, 32)),
    "densenet_bc": (lambda: densenet_bc(2, 1, 2), (16, 1, 64, 64)),
    "small_cnn": (lambda: SmallCNN(2, 1, 2), (32, 1, 32, 32)),
    "unet_2d": (lambda: unet(2, 4, 4, num_res_units=1, **LEVELS), (16, 4, 64, 64)),
    "unet_3d": (lambda: unet(3, 4, 4, num_res_units=1, **LEVELS), (2, 4, 32, 32, 32)),
}


class Side:
    """One way to take a step."""

    def __init__(self, network: nn.Module, way: str) -> None:
        self.kind = torch.float64 if way == "double" else torch.float32
        self.network: Any = copy.deepcopy(network).to(self.kind)
        lay_out(self.network, way not in ("double", "ordinary"))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01)
        self.half, self.seconds = way == "bf16", list[float]()
        self.loss: Any = self._loss
        if way == "compiled":
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.network(image), label)

    def gradient(self, image: Tensor, label: Tensor) -> Tensor:
        """Returns the gradient of all weights as one vector."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            loss = self.loss(image.to(self.kind), label)
        loss.backward()
        found = [p.grad for p in self.network.parameters()]
        return torch.cat([g.reshape(-1) for g in found if g is not None])

    def step(self, image: Tensor, label: Tensor) -> None:
        """Takes a step and keeps its CPU seconds."""
        begin = time.process_time()
        self.gradient(image, label)
        self.optimizer.step()
        self.seconds.append(time.process_time() - begin)


def used() -> float:
    """CPU seconds of this process and of compilers that it has started."""
    own, others = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def layouts(args: argparse.Namespace) -> None:
    """Prints a row per network."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose time is taken
    ways = ["ordinary", "channels last", "bf16", *(["compiled"] if args.compile else [])]
    heads = ["network", "images", "ordinary, ms", "off"]
    print("| " + " | ".join([*heads, *(f"{w} | off" for w in ways[1:])]) + " |")
    for name in args.networks:
        make, shape = NETWORKS[name]
        torch.manual_seed(0)
        network, image = make().train(), torch.randn(*shape)
        classes = 4 if "unet" in name else 2
        label = torch.randint(classes, (shape[0], *(shape[2:] if "unet" in name else ())))
        sides = {way: Side(network, way) for way in ways}
        true = Side(network, "double").gradient(image, label)
        off = {}
        for way, side in sides.items():
            begin = used()
            gap = (side.gradient(image, label) - true).norm() / true.norm()
            off[way], first = f"{float(gap):.0e}", used() - begin
        for _ in range(args.steps + 2):
            for side in sides.values():
                side.step(image, label)
        took = {way: statistics.median(side.seconds[2:]) for way, side in sides.items()}
        plain = took["ordinary"]
        cells = [name, "×".join(map(str, shape)), f"{1e3 * plain:.1f}", off["ordinary"]]
        for way in ways[1:]:
            cells += [f"{took[way] / plain:.2f}", off[way]]
        print("| " + " | ".join(cells) + " |", flush=True)
        if args.compile:  # the last way
            spread = [(first + n * took["compiled"]) / (n * plain) for n in (500, 5000)]
            told = (f"compiling {first:.0f} s", *(f"{ratio:.2f}" for ratio in spread))
            print(f"{name}, 5 and 50 rounds of 100 steps: {', '.join(told)}", flush=True)


WINDOW = (-1000, 400)
BATCH, SCANS = 32, 20
WIDTHS = (16, 32, 64, 128)
RECIPES = ("none", "light", "nnunet")
BUDGETS = {"none": (2, 2), "light": (12, 12), "nnunet": (35, 20)}  # percent, in 2-D and 3-D
Loss = Callable[[Tensor, Tensor], Tensor]


def read(seed: int, patches: int, size: int) -> Mapping[str, NDArray[Any]]:
    """One scan's patches: noise, as only their number and size count here."""
    rng = np.random.default_rng(seed)
    image = rng.integers(*WINDOW, (patches, 1, size, size), dtype=np.int16)
    return {"image": image, "label": rng.integers(0, 2, patches)}


def make(folder: Path, patches: int, size: int) -> Store:
    items = tuple(Item(f"scan_{i}", (), (), (i, patches // SCANS, size)) for i in range(SCANS))
    return build(Recipe("loading", {"size": size}, items, read), folder, workers=1)


def mapped(store: Store) -> ClientData:
    """One client with all rows, mapped from the cache."""
    labels = torch.from_numpy(np.array(store.array("label")))
    one = torch.ones(1, dtype=torch.bool)
    convert = partial(to_unit, window=WINDOW, present=one.numpy())
    images = ArrayRows(store.path("image"), np.arange(len(labels), dtype=np.int64), convert)
    block: Block = {"image": images, "label": labels, "case": torch.zeros_like(labels)}
    return ClientData("client", block, {}, one, labels.bincount().float(), {}, BATCH)


def fresh_patches(dims: int, recipe: str, patches: int) -> ClientData:
    """One client with three noisy heads in air, of which patches are cut."""
    size, shape = ((64, 64, 1), (160, 192, 40)) if dims == 2 else ((48, 48, 48), (96, 112, 80))
    generator = torch.Generator().manual_seed(0)
    axes = torch.meshgrid(*[torch.linspace(-1, 1, n) for n in shape], indexing="ij")
    radius = sum((a**2 for a in axes), torch.zeros(shape)).sqrt()
    label = (radius < 0.4)[None].to(torch.uint8)
    heads = []
    for _ in range(3):
        image = torch.randn(4, *shape, generator=generator) * (radius < 0.9)
        heads.append([volume_of(image, label, radius < 0.9, np.random.default_rng(0))])
    fresh = FreshPatches(heads, patches, 0.25, size, 1 if dims == 2 else None)
    train, four = fresh.block(0), torch.ones(4, dtype=torch.bool)
    counts, batch = torch.ones(2), 16 if dims == 2 else 2
    augmentation = compose.build(compose.load([f"augment={recipe}"]).augment)
    augment = augmentation.build(size[:dims], (0, 1, 2), True) if augmentation.alters else None
    return ClientData("client", train, {}, four, counts, {}, batch, augment=augment, fresh=fresh)


def load(data: ClientData, seed: int, batches: int) -> float:
    """CPU seconds of loading some batches."""
    begin = time.process_time()
    for _ in islice(data.train_batches(seed), batches):
        pass
    return time.process_time() - begin


def loaded_and_trained(
    data: ClientData, seed: int, batches: int, network: nn.Module, loss: Loss
) -> float:
    """CPU seconds of loading and training."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    begin = time.process_time()
    for batch in islice(data.train_batches(seed), batches):
        optimizer.zero_grad()
        loss(network(batch["image"]), batch["label"]).backward()
        optimizer.step()
    return time.process_time() - begin


def measure(name: str, data: ClientData, network: nn.Module, loss: Loss, epochs: int) -> float:
    """Prints and returns the share of loading, in percent."""
    batches = -(-data.num_samples // data.batch_size)
    load(data, 0, batches)
    pairs = [
        (load(data, s, batches), loaded_and_trained(data, s, batches, network, loss))
        for s in range(epochs)
    ]
    shares = sorted(100 * a / b for a, b in pairs)
    loading, both = (1e3 * statistics.median(t) / batches for t in zip(*pairs, strict=True))
    print(
        f"{name:12} {loading:8.2f} ms of {both:8.2f} ms per batch, share of loading: median "
        f"{statistics.median(shares):.2f} %, {shares[0]:.2f} to {shares[-1]:.2f} %",
        flush=True,
    )
    return statistics.median(shares)


def loading(args: argparse.Namespace) -> None:
    """Prints a line per cohort and recipe."""
    torch.manual_seed(0)
    network: nn.Module = densenet_bc(2, 1, 2, block_config=[args.layers] * 3)
    with tempfile.TemporaryDirectory() as folder:
        data = mapped(make(Path(folder), args.patches, args.size))
        measure("cache", data, network, cross_entropy, args.epochs)
    for dims in args.dims:
        network = unet(
            dims, 4, 1, channels=WIDTHS, strides=[2] * 3, num_res_units=2, norm="instance"
        )
        per_head = args.per_head if dims == 2 else max(args.per_head // 4, 1)
        for recipe in RECIPES:
            data = fresh_patches(dims, recipe, per_head)
            name = f"{dims}-D {recipe}"
            share = measure(name, data, network, binary_cross_entropy_with_logits, args.epochs)
            budget = BUDGETS[recipe][dims - 2]
            print(f"{'':12} budget {budget} %: {'kept' if share <= budget else 'exceeded'}")


def run(args: argparse.Namespace) -> None:
    """Prints the CPU seconds of every part of a run."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        keys = args.overrides
        if not any(key.startswith("experiment=") for key in keys):
            keys = ["experiment=brats_pfednet", f"data.root={folder}", *keys]
        keys = [*keys, "progress=false", f"folder={folder}/run"]
        with redirect_stdout(io.StringIO()):
            assembly.read_data(compose.described(keys))
            SAMPLER.start()
            train.train(compose.described(keys))
            SAMPLER.stop()
    report(SAMPLER.seconds)


def report(seconds: dict[str, float]) -> None:
    """Prints every part's share of the whole."""
    whole = sum(seconds.values())
    for part, spent in sorted(seconds.items(), key=lambda row: -row[1]):
        print(f"{part:<30}{spent:8.2f} s{spent / whole:8.1%}")
    beside = sum(seconds[part] for part in BESIDE)
    without = whole - seconds["imports"]
    print(f"{'whole':<30}{whole:8.2f} s")
    print(
        f"beside training ({', '.join(BESIDE)}): {beside:.2f} s,\n"
        f"{beside / whole:.1%} of the whole, {beside / without:.1%} of the whole without imports"
    )


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    of = commands.add_parser("layouts")
    of.set_defaults(run=layouts)
    of.add_argument("--steps", type=int, default=30)
    of.add_argument("--compile", action="store_true")
    of.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    of = commands.add_parser("loading")
    of.set_defaults(run=loading)
    of.add_argument("--patches", type=int, default=2000)
    of.add_argument("--size", type=int, default=32)
    of.add_argument("--layers", type=int, default=4, help="in each of three blocks")
    of.add_argument("--epochs", type=int, default=5)
    of.add_argument("--per-head", type=int, default=32, help="patches of each of three heads")
    of.add_argument("--dims", type=int, nargs="*", default=[2, 3])
    of = commands.add_parser("run")
    of.set_defaults(run=run)
    of.add_argument("overrides", nargs="*", default=[], help="as of medfed train")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()
