"""The cache on disk: its sources, how it is built, and its content.

Workers make items in parallel, each whole or absent, and can join them. The manifest is written
last; a cache without one is never opened. A process may be killed at any moment: the next one keeps
every item whose files match their checksums. Arrays are memory-mapped, without pickle.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from concurrent.futures.process import BrokenProcessPool
from itertools import accumulate, chain

from medfed.common.console import Steps
from medfed.common.processes import Here, WatchedPool, finished, start_worker
from medfed.datamodules.extending import *
from medfed.standalone import files
from medfed.standalone.errors import MedfedError

Arrays = Mapping[str, NDArray[Any]]
Read = Callable[..., Arrays]


def map_array(path: Path, whole: bool = False) -> NDArray[Any]:
    """Maps a ``.npy`` file, read-only and without pickle."""
    with files.reading(path, "an array", again := "prepare the data again", again):
        mapped = np.load(path, mmap_mode=None if whole else "r", allow_pickle=False)
    return np.asarray(mapped)  # not the memmap class, whose indexing is slow


def checksum(arrays: Arrays) -> str:
    """Hashes arrays with their names, types and shapes.

    Example:
        >>> one = checksum({"image": np.zeros((1, 2), np.int16)})
        >>> one == checksum({"image": np.zeros((1, 2), np.int16)})
        True
        >>> one == checksum({"image": np.zeros((2, 1), np.int16)})
        False
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        digest.update(array.data)
    return digest.hexdigest()


# Raise it when the layout or the checks of a cache change: 2 had frames of DICOM out of order.
FORMAT = 4

MANIFEST = "manifest.json"
ITEMS = "items"


@dataclass(frozen=True)
class Item:
    """One source, such as a scan."""

    id: str  # unique in the recipe
    # Its source files. The cache records their sizes and modification times: an item whose files
    # have changed is stale.
    files: tuple[Path, ...]
    hashed: tuple[Path, ...] = ()  # those of them to hash, such as headers
    args: tuple[Any, ...] = ()  # the arguments of `Recipe.read`; picklable, and small.

    def sources(self) -> list[list[Any]]:
        """Returns name, size and time of change (ns) of every file, for JSON."""
        rows = []
        for path in self.files:
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(f"{path} of {self.id} is unreadable ({error.strerror}).") from error
            rows.append([path.name, stat.st_size, stat.st_mtime_ns])
        return rows


@dataclass(frozen=True)
class Recipe:
    """How to make a cache."""

    kind: str  # the first part of the folder's name, such as ``"luna16"``
    # Everything other than the sources that determines the content, as JSON. Data sets with equal
    # settings and ids share a folder, so include what distinguishes them.
    settings: Mapping[str, Any]
    items: tuple[Item, ...]  # the sources, in order
    # Reads one item: a module-level function (worker processes import it) called with `Item.args`;
    # returns arrays by name. Equal arguments must give equal bytes, on any number of threads.
    read: Read
    # Whether the items' arrays are joined along their first axis to one file per name (samples);
    # otherwise every item has separate files (volumes).
    joined: bool = True
    command: str = "medfed prepare"  # what to run to make the cache again, for error sentences

    @property
    def name(self) -> str:
        """The folder's name, with a hash of what determines the content.

        Example:
            >>> one = Recipe("demo", {"size": 32}, (Item("a", ()),), dict)
            >>> two = Recipe("demo", {"size": 16}, (Item("a", ()),), dict)
            >>> one.name == two.name, one.name.startswith("demo_")
            (False, True)
        """
        # Without the sources' times: a changed scan is an error (see `find`), never a second cache.
        ids = [item.id for item in self.items]
        return f"{self.kind}_{files.digest([FORMAT, self.joined, dict(self.settings), ids])[:12]}"


@dataclass(frozen=True)
class Entry:
    """One item of a cache, as JSON on disk."""

    id: str  # the item's id
    fields: list[str]  # names of its arrays
    count: int  # length of their first axis
    checksum: str  # SHA-256 of its arrays
    sources: list[list[Any]]  # name, size and modification time of its source files
    hashes: list[str]  # SHA-256 of the source files that are hashed


@dataclass
class Store:
    """An opened cache; its manifest is written last, so a cache without one is unfinished."""

    folder: Path
    recipe: Recipe  # what it is made of
    entries: list[Entry]  # its items, in the recipe's order
    files: dict[str, int]  # size in bytes of every file, by its path below the folder
    new: bool = False  # whether this process made or completed it

    def __post_init__(self) -> None:
        self._index = {entry.id: at for at, entry in enumerate(self.entries)}
        ends = accumulate(entry.count for entry in self.entries)
        self._rows = {e.id: range(n - e.count, n) for e, n in zip(self.entries, ends, strict=True)}

    @property
    def checksum(self) -> str:
        """SHA-256 over the checksums of all items: equal for equal contents."""
        return files.digest([[e.id, e.checksum] for e in self.entries])

    def write(self) -> None:
        """Writes the manifest, sealed by its own hash."""
        content = {
            "name": self.recipe.name,
            "settings": dict(self.recipe.settings),
            "joined": self.recipe.joined,
            "entries": [asdict(entry) for entry in self.entries],
            "files": self.files,
            "format": FORMAT,
            "checksum": self.checksum,
        }
        content["seal"] = files.digest(content)
        files.write_json(self.folder / MANIFEST, content, sync=True)

    @property
    def num_bytes(self) -> int:
        """Size of its arrays on disk."""
        return sum(self.files.values())

    def entry(self, item: str) -> Entry:
        """The entry of one item."""
        return self.entries[self._index[item]]

    def hashes(self, item: str) -> dict[str, str]:
        """The SHA-256 of each source file when it was read, by path; else that of the arrays."""
        entry, source = self.entry(item), self.recipe.items[self._index[item]]
        known = dict(zip(source.hashed, entry.hashes, strict=True))
        return {str(file): known.get(file, entry.checksum) for file in source.files}

    def rows(self, item: str) -> range:
        """The rows of one item in the joined arrays."""
        return self._rows[item]

    def path(self, name: str, item: str | None = None) -> Path:
        """The file of an array: of one item, or joined."""
        if item is None:
            return self.folder / f"{name}.npy"
        return self.folder / shard(self._index[item], name)

    def array(self, name: str) -> NDArray[Any]:
        """Maps a joined array, (N, ...), read-only."""
        return map_array(self.path(name))

    def arrays(self, item: str) -> dict[str, NDArray[Any]]:
        """Maps all arrays of one item, read-only."""
        names = self.entry(item).fields
        if not self.recipe.joined:
            return {n: map_array(self.path(n, item)) for n in names}
        rows = self.rows(item)
        return {n: self.array(n)[rows.start : rows.stop] for n in names}

    def verify(self) -> None:
        """Reads everything and checks the checksums."""
        for entry in self.entries:
            if checksum(self.arrays(entry.id)) != entry.checksum:
                what = f"The cache {self.folder} is damaged at {entry.id}"
                raise DataError(f"{what}; run {self.recipe.command} again.")


def shard(index: int, name: str) -> str:
    """The path of one item's array below the cache's folder.

    Example:
        >>> shard(3, "image")
        'items/00003.image.npy'
    """
    return f"{ITEMS}/{index:05d}.{name}.npy"


def find(recipe: Recipe, root: Path) -> Store | None:
    """Opens the cache of a recipe, if it is finished and its files have the sizes on record."""
    folder = root / recipe.name
    try:
        content = json.loads((folder / MANIFEST).read_text())
        if content.pop("seal") != files.digest(content) or content["format"] != FORMAT:
            raise ValueError("it is incomplete or of another version")
        store = Store(folder, recipe, [Entry(**e) for e in content["entries"]], content["files"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"cannot be used ({error}); run {recipe.command} again"
        raise DataError(f"{folder / MANIFEST} {why}.") from error
    for name, size in store.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            what = f"{path} is missing or not of the {size} bytes that were written"
            raise DataError(f"{what}; run {recipe.command} again.")
    for item, entry in zip(recipe.items, store.entries, strict=True):
        if (now := item.sources()) != entry.sources:
            changed = next(n for n, old in zip(now, entry.sources, strict=True) if n != old)
            what = f"{changed[0]} of {item.id} has changed since {folder} was made from it"
            raise DataError(f"{what}; run {recipe.command} again.")
    return store


ELSEWHERE = "set data.cache to another folder"
SMALL = 256 * 2**20  # bytes of sources that are read faster than worker processes start


def build(recipe: Recipe, root: Path, workers: int | None = None) -> Store:
    """Makes a cache, completes an unfinished one, or verifies a finished one; others wait."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker runs its parent's script again: the two would wait for each other.
        raise DataError(
            "This script starts processes, each of which reads it again: put what it does under "
            'if __name__ == "__main__":'
        )
    folder = root / recipe.name
    with files.writing(folder, ELSEWHERE):
        (folder / ITEMS).mkdir(parents=True, exist_ok=True)
        with files.locked(folder):
            store = _whole(recipe, root)
            if store is None:
                (folder / MANIFEST).unlink(missing_ok=True)
                files.remove_partial(folder)
                files.remove_partial(folder / ITEMS)
                store = _finish(recipe, folder, _make_all(recipe, folder, workers))
            if recipe.joined:
                shutil.rmtree(folder / ITEMS, ignore_errors=True)
    return store


def _whole(recipe: Recipe, root: Path) -> Store | None:
    """Returns the finished cache if all its bytes are unchanged."""
    try:
        if (store := find(recipe, root)) is not None:
            store.verify()
        return store
    except DataError:
        return None


def _make_all(recipe: Recipe, folder: Path, workers: int | None) -> list[Entry]:
    """Makes the items, in any order; the first error stops the others."""
    # A resumed run checks the checksums of items before joining, so only the joined file has to
    # wait for the disk.
    sync, entries = not recipe.joined, dict[str, Entry]()
    if workers is None:
        size = sum(source[1] for item in recipe.items for source in item.sources())
        workers = len(os.sched_getaffinity(0)) if size > SMALL else 1
    workers = max(1, min(workers, len(recipe.items)))
    # Spawned, because forking a process in which PyTorch's threads run may hang.
    context = multiprocessing.get_context("spawn")
    pool = WatchedPool(workers, context, initializer=start_worker) if workers > 1 else Here()
    numbered = enumerate(recipe.items)
    calls = ((item, (_make_item, recipe.read, item, n, folder, sync)) for n, item in numbered)
    with Steps(len(recipe.items)) as steps, pool:
        try:
            for item, future in finished(pool, calls, workers):
                entries[item.id] = future.result()
                steps.advance(item.id)
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process was killed (out of memory?); run again with fewer, such as "
                f"workers={max(1, workers // 2)}; the finished items are kept."
            ) from error
    return [entries[item.id] for item in recipe.items]


def _make_item(read: Read, item: Item, index: int, folder: Path, sync: bool = True) -> Entry:
    """Makes one item, sealed last, or keeps it if it is whole and its sources have not changed."""
    seal = folder / ITEMS / f"{index:05d}.json"
    sources = item.sources()
    if (old_entry := _valid_entry(seal, index, item, sources)) is not None:
        return old_entry
    try:
        hashes = [files.sha256(path) for path in item.hashed]
        arrays = read(*item.args)
    except MedfedError:
        raise
    except Exception as error:
        names = ", ".join(str(path) for path in item.files)
        raise DataError(f"{item.id} cannot be prepared from {names}: {error}") from error
    count = len(next(iter(arrays.values())))
    entry = Entry(item.id, sorted(arrays), count, checksum(arrays), sources, hashes)
    with files.writing(folder, ELSEWHERE):
        seal.unlink(missing_ok=True)
        for name, array in arrays.items():
            with files.atomic(folder / shard(index, name), sync) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        files.write_json(seal, asdict(entry), sync)
    return entry


def _valid_entry(seal: Path, index: int, item: Item, sources: list[list[Any]]) -> Entry | None:
    """Returns the entry of an item that an earlier process has finished."""
    try:
        entry = Entry(**json.loads(seal.read_text()))
        if entry.id != item.id or entry.sources != sources:
            return None
        arrays = {name: map_array(seal.parent.parent / shard(index, name)) for name in entry.fields}
        return entry if checksum(arrays) == entry.checksum else None
    except (OSError, ValueError, TypeError, DataError):
        return None


def _finish(recipe: Recipe, folder: Path, entries: list[Entry]) -> Store:
    """Joins the items if the recipe says so, and writes the manifest."""
    names = entries[0].fields
    if recipe.joined:
        for name in names:
            _join(folder, name, [entry.count for entry in entries])
        paths = [f"{name}.npy" for name in names]
    else:
        paths = [shard(i, name) for i, entry in enumerate(entries) for name in entry.fields]
    sizes = {path: (folder / path).stat().st_size for path in paths}
    store = Store(folder, recipe, entries, sizes, new=True)
    store.write()
    return store


def _join(folder: Path, name: str, counts: Sequence[int]) -> None:
    """Writes the items' arrays one after the other into one file."""
    parts = (map_array(folder / shard(i, name), whole=True) for i in range(len(counts)))
    first = next(parts)
    descr, shape = np.lib.format.dtype_to_descr(first.dtype), (sum(counts), *first.shape[1:])
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    with files.atomic(folder / f"{name}.npy") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part, count in zip(chain([first], parts), counts, strict=True):
            if (part.dtype, part.shape) != (first.dtype, (count, *first.shape[1:])):
                raise DataError(f"The {name} of the items of {folder} cannot be joined.")
            file.write(np.ascontiguousarray(part).data)
