"""What a cache is made of: the settings that determine its content, and one item per source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfed.datamodules.cache.files import Arrays, digest
from medfed.errors import DataError

FORMAT = 1  # raise when the layout of a cache changes, so that an old one is not misread


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
    command: str = "python scripts/prepare.py"

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
