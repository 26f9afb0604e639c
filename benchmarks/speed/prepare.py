"""What preparing LUNA16 costs beside reading its bytes, and what a cache of volumes gains.

    python benchmarks/speed/prepare.py scans     # writes 1 GB to a temporary folder
    python benchmarks/speed/prepare.py volumes

*scans*: a handful of scans of full size, 512 x 512 x 300 voxels of int16 noise, in LUNA16's format,
with as many candidates as a scan of LUNA16 has on average: 17 where ten non-nodules are kept per
nodule, 620 where all are. One side makes the cache: headers, rows, patches, checksums, shards, the
joined arrays, the manifest. The other opens the same files, seeks and reads the same rows, and does
nothing with them. They alternate, and before each the kernel is told to forget the scans
(POSIX_FADV_DONTNEED). Wall time, because a disk is waited for. Memory is the peak of a process of
its own (VmHWM) above its resident memory just before, in scans.

*volumes*: beside MONAI's ``PersistentDataset``, which keeps tensors as files. Generated heads (four
contrasts) and abdomens (CT), prepared alike; the page cache is warm. Measured are bytes on disk per
case, the time to read a case whole, as evaluation does, and the time to cut 16 patches of 64 x 64
out of as many cases, as a training batch does. What is read is compared bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import PersistentDataset
from monai.transforms import Compose, Transform

from medfed.datamodules.cache.store import Item, Recipe, build
from medfed.datamodules.cache.volumes import cached_volume, read_case
from medfed.datamodules.fresh_patches import volume_of_cache
from medfed.datamodules.generated.brats import BratsCohort
from medfed.datamodules.generated.luna16 import write_scan
from medfed.datamodules.generated.organs import OrgansCohort
from medfed.datamodules.patches import PatchRows
from medfed.datamodules.readers.datalist import DatalistReader
from medfed.standalone.ct import Candidates, PatchSpec, centre_voxels, read_patches
from medfed.standalone.normalization import rules_of
from medfed.standalone.preparation import Preparation
from medfed.standalone.volumes import read_geometry

SIZE = 64
SPACING, ORIGIN = (0.7, 0.7, 1.0), (-180.0, -180.0, -300.0)
CASES = {
    "2-D, 17 candidates per scan": (PatchSpec(), 17, 20),
    "2-D, 620 candidates per scan": (PatchSpec(), 620, 1),
    "3-D, 17 candidates per scan": (PatchSpec(size=(32, 32, 32)), 17, 4),
}


@dataclass(frozen=True)
class Read:
    """Equally long pieces of a file."""

    file: Path
    offsets: tuple[int, ...]
    length: int


def write_scans(folder: Path, scans: int, size: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    nx, ny, nz = size
    for i in range(scans):
        voxels = rng.integers(-1000, 400, (nz, ny, nx), dtype=np.int16)
        write_scan(folder, f"1.2.{i}", voxels, SPACING, ORIGIN, np.eye(3).ravel().tolist())
    os.sync()  # dirty pages cannot be forgotten


def candidates(seed: int, count: int, size: Sequence[int]) -> Candidates:
    """Points anywhere in a scan."""
    rng = np.random.default_rng(seed)
    voxels = rng.integers(0, size, (count, 3))
    world = voxels * np.array(SPACING) + np.array(ORIGIN)
    label = (rng.random(count) < 0.1).astype(np.int64)
    return Candidates(world, label, np.arange(1, count + 1))


def recipe(folder: Path, case: str, size: Sequence[int]) -> Recipe:
    """Each scan stands for several of other candidates, as many files of 157 MB would be too much.

    So the costs of a cache are shared by about as many scans as its patches would come from.
    """
    spec, count, times = CASES[case]
    items = []
    for i, header in enumerate(times * sorted(folder.glob("*.mhd"))):
        raw = header.with_suffix(".raw")
        args = (header, candidates(i, count, size), spec)
        items.append(Item(f"{header.stem}.{i}", (header, raw), (header,), args))
    return Recipe("benchmark", {"case": case}, tuple(items), read_patches)


def needed(made: Recipe) -> list[Read]:
    """The headers and rows that the preparation reads, each row once."""
    found = []
    for header, points, spec in (item.args for item in made.items):
        grid = read_geometry(header, "LPS")
        nx, ny, nz = grid.shape
        wanted = np.zeros((nz, ny), dtype=bool)
        _, h, d = spec.grid.tolist()
        for _, y, z in centre_voxels(header, grid, points).tolist():
            first = max(z - d // 2, 0), max(y - h // 2, 0)
            wanted[first[0] : z - d // 2 + d, first[1] : y - h // 2 + h] = True
        runs = np.flatnonzero(np.diff(np.pad(wanted.ravel(), 1).astype(np.int8))).reshape(-1, 2)
        found.append(Read(header, (0,), header.stat().st_size))
        for begin, end in runs.tolist():
            found.append(
                Read(header.with_suffix(".raw"), (2 * nx * begin,), 2 * nx * (end - begin))
            )
    return found


def merely_read(reads: Sequence[Read]) -> int:
    """Reads into memory and drops; returns the bytes."""
    total = 0
    for read in reads:
        with read.file.open("rb", buffering=0) as file:
            for offset in read.offsets:
                file.seek(offset)
                total += len(file.read(read.length))
    return total


def forget(made: Recipe) -> None:
    """Drops the scans from the page cache, so that they come from the disk."""
    for path in (path for item in made.items for path in item.files):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def throughput(made: Recipe, folder: Path, repeats: int) -> tuple[int, list[tuple[float, float]]]:
    """Bytes that are needed, and seconds of reading and of preparing them, several times."""
    reads, pairs = needed(made), []
    total = merely_read(reads)
    for _ in range(repeats):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        forget(made)
        begin = time.perf_counter()
        merely_read(reads)
        middle = time.perf_counter()
        forget(made)
        start = time.perf_counter()
        build(made, folder / "cache", workers=1)
        pairs.append((middle - begin, time.perf_counter() - start))
    return total, pairs


def status(key: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def peak(folder: Path, cache: Path, size: Sequence[int], case: str) -> float:
    """Returns the peak memory of this process above what it had before, in scans."""
    made = recipe(folder, case, size)
    read_patches(made.items[0].args[0], candidates(0, 1, size), CASES[case][0])  # loads libraries
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    build(made, cache, workers=1)
    return (status("VmHWM") - before) / (2 * float(np.prod(size)))


def scans(args: argparse.Namespace, folder: Path) -> None:
    """Prints throughput and memory."""
    write_scans(folder, args.scans, args.size)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tasks = [(folder, folder / "peaks", args.size, case) for case in CASES]
        peaks = pool.starmap(peak, tasks)
    print(f"{args.scans} scans of {' x '.join(map(str, args.size))} int16, page cache dropped")
    print("ms and MB per scan; peak memory in scans; quartiles of the ratio in brackets")
    print(f"{'':30}{'MB':>7}{'read':>8}{'prepare':>9}{'ratio':>7}{'':14}{'peak':>6}")
    for case, most in zip(CASES, peaks, strict=True):
        made = recipe(folder, case, args.size)
        count = len(made.items)
        total, pairs = throughput(made, folder, args.repeats)
        reading, making = (1e3 * statistics.median(p) / count for p in zip(*pairs, strict=True))
        each = sorted(b / a for a, b in pairs)
        spread = f" ({each[len(each) // 4]:.2f}, {each[-1 - len(each) // 4]:.2f})"
        print(
            f"{case:30}{total / 1e6 / count:7.1f}{reading:8.1f}{making:9.1f}"
            f"{statistics.median(each):7.2f}{spread:14}{most:6.2f}",
            flush=True,
        )


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def compare(path: Path, folder: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """MONAI's number and ours, by what is measured."""
    reader = DatalistReader(path)
    preparation = Preparation(rules_of(None, reader.channels))
    cases = reader.patients()

    class Prepare(Transform):  # of a plain function, MONAI would keep nothing
        def __call__(self, number: int) -> dict[str, torch.Tensor]:
            return reader.prepared(cases[number], preparation)

    theirs = PersistentDataset(list(range(len(cases))), Compose([Prepare()]), folder / "monai")
    items = tuple(Item(c.id, tuple(c.files.values()), args=(reader, c, preparation)) for c in cases)
    recipe = Recipe("benchmark", {}, items, read_case, joined=False)
    ours = build(recipe, folder, workers=1)
    for number, case in enumerate(cases):  # also fills theirs
        one, two = theirs[number], cached_volume(ours, case.id)
        assert all(one[key].equal(two[key]) for key in ("image", "label"))
    rng = np.random.default_rng(0)
    volumes = []
    for case in cases:
        label = cached_volume(ours, case.id)["label"]
        inside = label.any(dim=0)
        has = torch.ones(len(reader.channels), dtype=torch.bool)
        volumes.append(volume_of_cache(ours.arrays(case.id), label, inside, has, rng))
    room = [np.maximum(np.array(v.shape) - (SIZE, SIZE, 1), 0) for v in volumes]
    at = [[n % len(cases), *rng.integers(0, room[n % len(cases)] + 1)] for n in range(16)]
    rows = PatchRows(volumes, np.array(at), (SIZE, SIZE, 1), slices=1)

    def their_patches() -> torch.Tensor:
        return torch.stack(
            [theirs[n]["image"][:, x : x + SIZE, y : y + SIZE, z] for n, x, y, z in at]
        )

    def our_patches() -> torch.Tensor:
        return rows.take(torch.arange(16))

    assert their_patches().equal(our_patches())
    size = sum(f.stat().st_size for f in (folder / "monai").iterdir())
    return {
        "MB per case": (size / 1e6 / len(cases), ours.num_bytes / 1e6 / len(cases)),
        "ms, a case": (
            median_ms(lambda: theirs[0], repeats),
            median_ms(lambda: cached_volume(ours, cases[0].id), repeats),
        ),
        "ms, 16 patches": (median_ms(their_patches, repeats), median_ms(our_patches, repeats)),
    }


def volumes(args: argparse.Namespace, folder: Path) -> None:
    """Prints MONAI's numbers and ours."""
    torch.set_num_threads(1)
    cohorts = {
        "heads, 4 x 128 x 128 x 64": BratsCohort(1, args.cases, (128, 128, 64)),
        "CT, 160 x 128 x 48": OrgansCohort(1, args.cases, (160, 128, 48)),
    }
    print(f"{args.cases} cases, one thread, page cache warm; medians of {args.repeats}")
    print(f"{'':28}{'':16}{'MONAI':>9}{'ours':>9}{'ratio':>8}")
    for n, (name, cohort) in enumerate(cohorts.items()):
        path, _ = cohort.ensure(folder / str(n))
        for what, (one, two) in compare(path, folder / str(n), args.repeats).items():
            print(f"{name:28}{what:16}{one:9.1f}{two:9.1f}{one / two:8.1f}", flush=True)


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("of", choices=["scans", "volumes"])
    parser.add_argument("--scans", type=int, default=6)
    parser.add_argument("--size", type=int, nargs=3, default=(512, 512, 300), help="x y z")
    parser.add_argument("--cases", type=int, default=2, help="of volumes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        (scans if args.of == "scans" else volumes)(args, Path(folder))


if __name__ == "__main__":
    main()
