"""What preparing LUNA16 costs beside merely reading the bytes that it needs.

A handful of scans of full size, 512 x 512 x 300 voxels of int16 noise, 157 MB each, in LUNA16's
format, with as many candidates as a scan of LUNA16 has on average: 17 where ten non-nodules are
kept per nodule, 620 where all are.

1. *Throughput.* One side makes the cache (`medfed.datamodules.cache.store`): headers, rows,
   patches, checksums, shards, the joined arrays, the manifest. The other side opens the same
   files, seeks and reads the same rows into memory, and does nothing with them. Both work in this
   process; they alternate, and before each the kernel is told to forget the scans
   (POSIX_FADV_DONTNEED), as 120 GB would not have stayed in memory. Wall time, because a disk is
   waited for.
2. *Memory.* The peak of a process of its own (VmHWM) while it prepares the scans, above its
   resident memory just before, in scans.
3. *Kills.* The preparation is started again and again, in one process and by two workers in turn,
   and its process group killed (SIGKILL) at a random moment between the first scan and the end, as
   an uninterrupted preparation took them, ten times; then it is let finish. The cache's checksum
   must be that of the uninterrupted one. One that finishes before its kill starts anew.

Run with ``python benchmarks/prepare.py``; it writes 1 GB to a temporary folder (``--folder``).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medfed.datamodules.cache.store import ITEMS, Item, Recipe, build
from medfed.datamodules.generated.luna16 import write_scan
from medfed.standalone.ct_patches import Candidates, PatchSpec, centre_voxels, read_patches
from medfed.standalone.volumes import read_geometry

Process = subprocess.Popen[str]
SEALS = f"*/{ITEMS}/*.json"
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
        build(made, folder / "cache", workers=1, quiet=True)
        pairs.append((middle - begin, time.perf_counter() - start))
    return total, pairs


def status(key: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def peaks(folder: Path, cache: Path, size: Sequence[int]) -> None:
    """Prints the peak memory of this process in each case, above what it had before, in scans."""
    for case, (spec, *_) in CASES.items():
        made = recipe(folder, case, size)
        read_patches(made.items[0].args[0], candidates(0, 1, size), spec)  # first use of libraries
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        build(made, cache, workers=1, quiet=True)
        print((status("VmHWM") - before) / (2 * float(np.prod(size))))


def again(mode: str, args: argparse.Namespace, cache: Path, workers: int = 1) -> Process:
    """This script in a process, and process group, of its own."""
    size = [str(n) for n in args.size]
    command = [sys.executable, __file__, "--mode", mode, "--cache", str(cache)]
    return subprocess.Popen(
        [*command, "--workers", str(workers), "--folder", str(args.folder), "--size", *size],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def preparing(args: argparse.Namespace, cache: Path, workers: int) -> Process:
    """A preparation that has just begun."""
    process = again("build", args, cache, workers)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def uninterrupted(args: argparse.Namespace, cache: Path, workers: int) -> tuple[str, float, float]:
    """The cache's checksum, and the seconds to the first scan and to the end."""
    process = preparing(args, cache, workers)
    begin = time.perf_counter()
    while process.poll() is None and not any(cache.glob(SEALS)):
        time.sleep(0.002)
    first = time.perf_counter() - begin
    assert process.stdout is not None
    checksum = process.stdout.readline().strip()
    end = time.perf_counter() - begin
    process.communicate()
    return checksum, first, end


def killed(
    args: argparse.Namespace, cache: Path, spans: Sequence[tuple[float, float]]
) -> list[int]:
    """Kills the preparation at random; returns how many scans were finished at each kill."""
    moments = random.Random(0)
    kept: list[int] = []
    while len(kept) < args.kills:
        workers = 1 + len(kept) % 2
        process = preparing(args, cache, workers)
        time.sleep(moments.uniform(*spans[workers - 1]))
        os.killpg(process.pid, signal.SIGKILL)
        if process.communicate()[0].strip():
            shutil.rmtree(cache)  # it was faster: from the start
        else:
            kept.append(len(list(cache.glob(SEALS))))
    return kept


def interrupted(args: argparse.Namespace) -> None:
    """Prints what the kills did to the cache."""
    spans, cache = [], args.folder / "killed"
    for workers in (1, 2):
        straight, first, end = uninterrupted(args, args.folder / f"straight{workers}", workers)
        spans.append((0.7 * first, end))
    kept = killed(args, cache, spans)
    checksum, *_ = uninterrupted(args, cache, 2)
    print(f"\n{len(kept)} kills; scans finished by then: {', '.join(map(str, kept))}")
    print(f"checksum straight:  {straight}\nchecksum resumed:   {checksum}")
    if checksum != straight:
        raise AssertionError("The resumed cache differs from the uninterrupted one.")


def compare(args: argparse.Namespace) -> None:
    """Prints throughput and memory."""
    out, _ = again("peaks", args, args.folder / "peaks").communicate()
    print(f"{args.scans} scans of {' x '.join(map(str, args.size))} int16, page cache dropped")
    print("ms and MB per scan; peak memory in scans; quartiles of the ratio in brackets")
    print(f"{'':30}{'MB':>7}{'read':>8}{'prepare':>9}{'ratio':>7}{'':14}{'peak':>6}")
    for case, scans in zip(CASES, map(float, out.split()), strict=True):
        made = recipe(args.folder, case, args.size)
        count = len(made.items)
        total, pairs = throughput(made, args.folder, args.repeats)
        reading, making = (1e3 * statistics.median(p) / count for p in zip(*pairs, strict=True))
        each = sorted(b / a for a, b in pairs)
        spread = f" ({each[len(each) // 4]:.2f}, {each[-1 - len(each) // 4]:.2f})"
        print(
            f"{case:30}{total / 1e6 / count:7.1f}{reading:8.1f}{making:9.1f}"
            f"{statistics.median(each):7.2f}{spread:14}{scans:6.2f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scans", type=int, default=6)
    parser.add_argument("--size", type=int, nargs=3, default=(512, 512, 300), help="x y z")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the scans")
    parser.add_argument("--mode", default="all", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.mode == "peaks":
        peaks(args.folder, args.cache, args.size)
    elif args.mode == "build":
        made = recipe(args.folder, list(CASES)[-1], args.size)
        print("begun", flush=True)
        print(build(made, args.cache, args.workers, quiet=True).checksum)
    else:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            args.folder = Path(folder)
            write_scans(args.folder, args.scans, args.size)
            compare(args)
            if args.kills:
                interrupted(args)


if __name__ == "__main__":
    main()
