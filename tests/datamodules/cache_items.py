"""Small sources for tests of the cache, in a module that worker processes and scripts can import.

``python -m tests.datamodules.cache_items FOLDER WORKERS PAUSE`` makes the cache of the sources in a
folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from medfed.datamodules.cache.store import Item, Recipe, Store, build
from medfed.standalone.errors import DataError, MedfedError

COUNT = 8


def read(path: Path, pause: float = 0.0) -> dict[str, np.ndarray]:
    """One item: rows of numbers that only its file determines; notes in a log that it was read."""
    text = path.read_text()
    with (path.parent / "log").open("a") as log:
        log.write(f"{path.stem}\n")
    time.sleep(pause)
    while path.with_suffix(".closed").exists():  # the test says when it goes on
        time.sleep(0.002)
    if text == "bad":
        raise DataError(f"{path} is bad.")
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    rng = np.random.default_rng(int(text))
    rows = int(rng.integers(1, 6))
    image = rng.integers(-1000, 400, (rows, 1, 3, 4), dtype=np.int16)
    return {"image": image, "label": rng.integers(0, 2, rows)}


def write_sources(folder: Path, count: int = COUNT) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"scan.{i}.txt").write_text(str(i + 100))


def recipe(folder: Path, pause: float = 0.0, joined: bool = True, size: int = 3) -> Recipe:
    paths = sorted(folder.glob("*.txt"))
    items = tuple(Item(p.stem, (p,), (p,), (p, pause)) for p in paths)
    return Recipe("demo", {"size": size}, items, read, joined)


def were_read(folder: Path) -> list[str]:
    """Which items have been read, in order, since the last call."""
    log = folder / "log"
    found = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def contents(store: Store) -> dict[str, bytes]:
    return {name: (store.folder / name).read_bytes() for name in store.files}


if __name__ == "__main__":
    source, workers, wait = sys.argv[1:]
    try:
        print(build(recipe(Path(source), float(wait)), Path(source) / "cache", int(workers)).folder)
    except MedfedError as error:
        sys.exit(str(error))
