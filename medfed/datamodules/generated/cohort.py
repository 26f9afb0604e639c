"""What all generated cohorts share: a folder named by its parameters, written once and whole."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from medfed.datamodules.seeding import numpy_rng
from medfed.errors import DataError


@dataclass(frozen=True)
class Cohort(ABC):
    """Base of the cohorts; the fields of a subclass are its parameters.

    Attributes:
        kind: First part of the folder's name.
        version: Raised when the files change, so that an old cohort is not taken for the new one.
        index: A file that a whole cohort has.
    """

    kind: ClassVar[str]
    version: ClassVar[int]
    index: ClassVar[str]

    @property
    def name(self) -> str:
        """Folder name, with a hash of the parameters."""
        text = json.dumps({"version": self.version, **asdict(self)}, sort_keys=True)
        return f"{self.kind}_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def provide(self, root: Path, what: str, instead: str) -> tuple[Path, str]:
        """Generates the cohort unless it is there, and says so.

        Args:
            root: Data folder.
            what: What it is, such as ``"a BraTS-like cohort of 40 patients"``.
            instead: The overrides that take real data in its place.

        Returns:
            The cohort's folder, and one line about it.
        """
        path, new = self.ensure(root)
        return path, f"{'Generated' if new else 'Data:'} {what} in {path} (real data: {instead})."

    def ensure(self, root: Path) -> tuple[Path, bool]:
        """Generates the cohort unless it is there.

        Args:
            root: Data folder; the cohort lies in ``generated/`` below it.

        Returns:
            The cohort's folder, and whether it was generated now.

        Raises:
            DataError: If the folder cannot be written; nothing half-written is left.
        """
        target = root / "generated" / self.name
        if target.exists():
            return target, False
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{self.name}.", dir=target.parent))
        except OSError as error:
            raise DataError(f"Cannot write to {root} ({error}); set data.root.") from error
        try:
            self.write(part)
            part.chmod(0o755)
            part.rename(target)
        except OSError as error:
            # Another process may have finished first; its files are the same.
            if not (target / self.index).exists():
                raise DataError(f"Cannot write {target} ({error}); set data.root.") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return target, True

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Writes all files.

        Args:
            folder: An existing, empty folder.
        """


def spread_traits(
    traits: Mapping[str, tuple[float, float]], count: int, seed: int
) -> list[dict[str, float]]:
    """Gives hospitals traits that are spread evenly, each trait in an order of its own.

    Args:
        traits: Lowest and highest value of every trait.
        count: Number of hospitals.
        seed: Seed of the orders.

    Returns:
        The traits of every hospital: any two hospitals differ in most of them.

    Example:
        >>> sorted(round(t["bias"], 3) for t in spread_traits({"bias": (0.0, 0.4)}, 3, seed=0))
        [0.0, 0.2, 0.4]
    """
    values: dict[str, list[float]] = {}
    for name, (low, high) in traits.items():
        steps = [i / max(count - 1, 1) for i in range(count)]
        order = numpy_rng(seed, "trait", name).permutation(count)
        values[name] = [low + (high - low) * steps[i] for i in order]
    return [{name: column[n] for name, column in values.items()} for n in range(count)]
