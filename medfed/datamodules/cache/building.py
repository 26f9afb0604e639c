"""Makes a cache: items in parallel, each whole or not there; then joined; the manifest last.

A process may be killed at any moment. What it leaves is either a finished cache, or an unfinished
one without a manifest, of which the next one keeps every item whose files match their checksum.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from medfed.common.errors import DataError, MedfedError
from medfed.common.files import atomic, locked, remove_partial, sha256, write_json, writing
from medfed.common.interrupts import held
from medfed.common.pools import WatchedPool, start_worker
from medfed.common.progress import Steps
from medfed.datamodules.cache.arrays import Arrays, checksum, map_array
from medfed.datamodules.cache.store import (
    ITEMS,
    MANIFEST,
    Entry,
    Item,
    Manifest,
    Recipe,
    Store,
    find,
    shard,
)

ELSEWHERE = "set data.cache to another folder"
SMALL = 256 * 2**20  # bytes of sources that are read before worker processes have started


def build(recipe: Recipe, root: Path, workers: int | None = None, quiet: bool = False) -> Store:
    """Makes a cache, completes an unfinished one, or verifies a finished one.

    Another process that makes the same cache is waited for. What is damaged, or was read from
    files that have changed since, is made again.

    Args:
        recipe: What it is made of.
        root: The folder of caches.
        workers: Worker processes; 1 works in this process; None takes as many as there are cores,
            or 1 where the sources are so small that starting processes would take longer.
        quiet: Whether to show no progress.

    Returns:
        The finished cache.

    Raises:
        DataError: If a source is bad, or the folder cannot be written. The finished items stay.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker reads its parent's script again; it would wait for its parent, and that for it.
        raise DataError(
            "This script starts processes, each of which reads it again: put what it does under "
            'if __name__ == "__main__":'
        )
    folder = root / recipe.name
    with writing(folder, ELSEWHERE):
        (folder / ITEMS).mkdir(parents=True, exist_ok=True)
        with locked(folder):
            store = _whole(recipe, root)
            if store is None:
                (folder / MANIFEST).unlink(missing_ok=True)
                remove_partial(folder)
                remove_partial(folder / ITEMS)
                entries = _make_all(recipe, folder, workers, quiet)
                store = _finish(recipe, folder, entries)
            if recipe.joined:
                shutil.rmtree(folder / ITEMS, ignore_errors=True)
    return store


def _whole(recipe: Recipe, root: Path) -> Store | None:
    """The finished cache, if every byte of it is as it was written."""
    try:
        store = find(recipe, root)
        if store is not None:
            store.verify()
    except DataError:
        return None
    return store


def _make_all(recipe: Recipe, folder: Path, workers: int | None, quiet: bool) -> list[Entry]:
    # What will be joined is compared with its checksum when it is resumed; only the joined file has
    # to wait for the disk.
    sync = not recipe.joined
    tasks = [(recipe.read, item, i, folder, sync) for i, item in enumerate(recipe.items)]
    if workers is None:
        size = sum(source[1] for item in recipe.items for source in item.sources())
        workers = len(os.sched_getaffinity(0)) if size > SMALL else 1
    workers = max(1, min(workers, len(tasks)))
    entries: dict[str, Entry] = {}
    with Steps(len(tasks), quiet) as steps:
        made = _in_processes(tasks, workers) if workers > 1 else (make_item(*t) for t in tasks)
        with closing(made):
            for entry in made:
                entries[entry.id] = entry
                steps.advance(entry.id)
    return [entries[item.id] for item in recipe.items]


def _in_processes(tasks: Sequence[tuple[Any, ...]], workers: int) -> Generator[Entry, None, None]:
    """Makes items in worker processes, in any order; the first error stops the others."""
    # Spawned, because forking a process in which PyTorch's threads run may hang.
    context = multiprocessing.get_context("spawn")
    with WatchedPool(workers, context, initializer=start_worker) as pool:
        with held(signal.SIGINT):  # also while a worker is still starting
            futures: list[Future[Entry]] = [pool.submit(make_item, *task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process was killed (out of memory?); run it again with fewer, such as "
                f"workers={max(1, workers // 2)}; the finished items are kept."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def make_item(
    read: Callable[..., Arrays], item: Item, index: int, folder: Path, sync: bool = True
) -> Entry:
    """Makes one item, or keeps it where it is whole and its sources have not changed.

    The arrays are written first, each atomically, and sealed by a JSON file with their checksum.

    Args:
        read: See `Recipe.read`.
        item: The item.
        index: Its position in the recipe.
        folder: The cache's folder.
        sync: Whether to wait for the disk.

    Returns:
        The item's entry for the manifest.

    Raises:
        DataError: If the item cannot be read or written.
    """
    seal = folder / ITEMS / f"{index:05d}.json"
    sources = item.sources()
    if (kept := _kept(seal, index, item, sources)) is not None:
        return kept
    try:
        hashes = {path.name: sha256(path) for path in item.hashed}
        arrays = read(*item.args)
    except MedfedError:
        raise
    except Exception as error:
        names = ", ".join(str(path) for path in item.files)
        raise DataError(f"{item.id} cannot be prepared from {names}: {error}") from error
    count = len(next(iter(arrays.values())))
    entry = Entry(item.id, sorted(arrays), count, checksum(arrays), sources, hashes)
    with writing(folder, ELSEWHERE):
        seal.unlink(missing_ok=True)
        for name, array in arrays.items():
            with atomic(folder / shard(index, name), sync) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        write_json(seal, asdict(entry), sync)
    return entry


def _kept(seal: Path, index: int, item: Item, sources: list[list[Any]]) -> Entry | None:
    """The entry of an item that an earlier process has finished."""
    try:
        entry = Entry(**json.loads(seal.read_text()))
        if entry.id != item.id or entry.sources != sources:
            return None
        folder = seal.parent.parent
        arrays = {name: map_array(folder / shard(index, name)) for name in entry.fields}
        return entry if checksum(arrays) == entry.checksum else None
    except (OSError, ValueError, TypeError, DataError):
        return None


def _finish(recipe: Recipe, folder: Path, entries: list[Entry]) -> Store:
    """Joins the items where that is wanted, and writes the manifest."""
    names = entries[0].fields
    if recipe.joined:
        for name in names:
            _join(folder, name, [entry.count for entry in entries])
        paths = [f"{name}.npy" for name in names]
    else:
        paths = [shard(i, name) for i, entry in enumerate(entries) for name in entry.fields]
    sizes = {path: (folder / path).stat().st_size for path in paths}
    manifest = Manifest(recipe.name, dict(recipe.settings), recipe.joined, entries, sizes)
    manifest.write(folder)
    return Store(folder, manifest, recipe.command, new=True)


def _join(folder: Path, name: str, counts: Sequence[int]) -> None:
    """Writes the items' arrays one after the other into one file."""
    parts = (map_array(folder / shard(i, name), whole=True) for i in range(len(counts)))
    first = next(parts)
    header = {
        "descr": np.lib.format.dtype_to_descr(first.dtype),
        "fortran_order": False,
        "shape": (sum(counts), *first.shape[1:]),
    }
    with atomic(folder / f"{name}.npy") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part, count in zip(chain([first], parts), counts, strict=True):
            if (part.dtype, part.shape) != (first.dtype, (count, *first.shape[1:])):
                raise DataError(f"The {name} of the items of {folder} cannot be joined.")
            file.write(np.ascontiguousarray(part).data)
