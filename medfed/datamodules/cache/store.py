"""What a cache is made of, and what a finished one holds; nothing half-written is ever opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from medfed.common.errors import DataError
from medfed.common.files import digest, write_json
from medfed.datamodules.cache.arrays import Arrays, checksum, map_array

# Raise when the layout of a cache changes, or what is found wrong: 1 took some damaged scans.
FORMAT = 2

MANIFEST = "manifest.json"
ITEMS = "items"


@dataclass(frozen=True)
class Item:
    """One source, such as a scan.

    Attributes:
        id: Unique in the recipe.
        files: The files that it is read from. Their sizes and times of change are recorded: an item
            whose files have changed since is stale.
        hashed: Those among them that are small enough to be hashed whole, such as headers.
        args: The arguments of `Recipe.read`; picklable, and small.
    """

    id: str
    files: tuple[Path, ...]
    hashed: tuple[Path, ...] = ()
    args: tuple[Any, ...] = ()

    def sources(self) -> list[list[Any]]:
        """Returns name, size and time of change (ns) of every file, for JSON.

        Raises:
            DataError: If a file is gone.
        """
        found = []
        for path in self.files:
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(
                    f"{path} of {self.id} cannot be read ({error.strerror})."
                ) from error
            found.append([path.name, stat.st_size, stat.st_mtime_ns])
        return found


@dataclass(frozen=True)
class Recipe:
    """How to make a cache.

    Attributes:
        kind: The first part of the folder's name, such as ``"luna16"``.
        settings: Everything that determines the content beside the sources, as JSON. Two data sets
            with equal settings and ids share a folder, so put in what tells them apart.
        items: The sources, in the order that they shall have.
        read: Reads one item: a module-level function (worker processes import it) called with
            `Item.args`; returns arrays by name. Equal arguments must give equal bytes, on any
            number of threads.
        joined: Whether the items' arrays are joined along their first axis to one file per name
            (samples); otherwise every item keeps files of its own (volumes).
        command: What to run to make the cache again, for error sentences.
    """

    kind: str
    settings: Mapping[str, Any]
    items: tuple[Item, ...]
    read: Callable[..., Arrays]
    joined: bool = True
    command: str = "medfed prepare"

    @property
    def name(self) -> str:
        """The folder's name, with a hash of what determines the content.

        Example:
            >>> one = Recipe("demo", {"size": 32}, (Item("a", ()),), dict)
            >>> two = Recipe("demo", {"size": 16}, (Item("a", ()),), dict)
            >>> one.name == two.name, one.name.startswith("demo_")
            (False, True)
        """
        ids = [item.id for item in self.items]
        return f"{self.kind}_{digest([FORMAT, self.joined, dict(self.settings), ids])[:12]}"


@dataclass(frozen=True)
class Entry:
    """One item of a cache, as JSON on the disk.

    Attributes:
        id: The item's.
        fields: Names of its arrays.
        count: Length of their first axis.
        checksum: SHA-256 of its arrays.
        sources: Name, size and time of change of the files that it was read from.
        hashes: SHA-256 of the small ones among them, by name.
    """

    id: str
    fields: list[str]
    count: int
    checksum: str
    sources: list[list[Any]]
    hashes: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """What a cache holds; it is written last, so a cache without one is unfinished.

    Attributes:
        name: The recipe's.
        settings: The recipe's.
        joined: The recipe's.
        entries: In the recipe's order.
        files: Size in bytes of every file, by its path below the folder.
        format: Version of the layout.
    """

    name: str
    settings: Mapping[str, Any]
    joined: bool
    entries: list[Entry]
    files: dict[str, int]
    format: int = FORMAT

    @property
    def checksum(self) -> str:
        """SHA-256 over the checksums of all items: equal for equal contents."""
        return digest([[e.id, e.checksum] for e in self.entries])

    def write(self, folder: Path) -> None:
        """Writes the manifest, sealed by its own hash."""
        content = {**asdict(self), "checksum": self.checksum}
        write_json(folder / MANIFEST, {**content, "seal": digest(content)}, sync=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads a manifest.

        Raises:
            ValueError: If it is torn, changed, or of another format.
        """
        content = json.loads((folder / MANIFEST).read_text())
        seal = content.pop("seal", None) if isinstance(content, dict) else None
        if seal != digest(content) or content["format"] != FORMAT:
            raise ValueError("it is torn or of another version")
        del content["checksum"]
        entries = [Entry(**e) for e in content.pop("entries")]
        return cls(entries=entries, **content)


@dataclass
class Store:
    """An opened cache.

    Attributes:
        folder: Where it lies.
        manifest: What it holds.
        command: What to run to make it again, for error sentences.
        new: Whether it was made, or completed, just now.
    """

    folder: Path
    manifest: Manifest
    command: str
    new: bool = False
    _rows: dict[str, range] = field(init=False, repr=False)
    _index: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        entries = self.manifest.entries
        self._index = {e.id: i for i, e in enumerate(entries)}
        self._rows, start = {}, 0
        for entry in entries:
            self._rows[entry.id] = range(start, start + entry.count)
            start += entry.count

    @property
    def num_bytes(self) -> int:
        """Size of its arrays on the disk."""
        return sum(self.manifest.files.values())

    def entry(self, item: str) -> Entry:
        """What is known of one item."""
        return self.manifest.entries[self._index[item]]

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
        if not self.manifest.joined:
            return {n: map_array(self.path(n, item)) for n in names}
        rows = self.rows(item)
        return {n: self.array(n)[rows.start : rows.stop] for n in names}

    def verify(self) -> None:
        """Reads everything and compares it with the checksums.

        Raises:
            DataError: Naming the first item whose bytes are not those that were written.
        """
        for entry in self.manifest.entries:
            if checksum(self.arrays(entry.id)) != entry.checksum:
                raise DataError(
                    f"The cache {self.folder} is damaged at {entry.id}; run {self.command} again."
                )


def shard(index: int, name: str) -> str:
    """The path of one item's array below the cache's folder.

    Args:
        index: The item's position in the recipe; ids may not do as file names.
        name: The array's name.

    Returns:
        A relative path.

    Example:
        >>> shard(3, "image")
        'items/00003.image.npy'
    """
    return f"{ITEMS}/{index:05d}.{name}.npy"


def find(recipe: Recipe, root: Path) -> Store | None:
    """Opens the cache of a recipe, if it is finished.

    Sizes of all files, and the sources' sizes and times of change, are compared with the manifest;
    checksums are left to `Store.verify`, because they need all bytes.

    Args:
        recipe: What the cache is made of.
        root: The folder of caches.

    Returns:
        The cache, or None where there is none yet, or an unfinished one.

    Raises:
        DataError: If it is damaged, or a source has changed since it was made.
    """
    folder = root / recipe.name
    try:
        manifest = Manifest.read(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / MANIFEST} cannot be used ({error}); run {recipe.command} again."
        ) from error
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise DataError(
                f"{path} is missing or not of the {size} bytes that were written; run "
                f"{recipe.command} again."
            )
    for item, entry in zip(recipe.items, manifest.entries, strict=True):
        if (now := item.sources()) != entry.sources:
            changed = next(n for n, old in zip(now, entry.sources, strict=True) if n != old)
            raise DataError(
                f"{changed[0]} of {item.id} has changed since {folder} was made from it; run "
                f"{recipe.command} again."
            )
    return Store(folder, manifest, recipe.command)
