"""What all generated cohorts share: a folder named by its parameters, written once and whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from medfed.common.errors import ConfigError
from medfed.common.files import digest, writing
from medfed.common.replacing import made_once
from medfed.datamodules.generated.hospitals import Hospital

AnyHospital = TypeVar("AnyHospital", bound=Hospital)


@dataclass(frozen=True)
class Cohort(ABC):
    """Base of the cohorts; the fields of a subclass are its parameters.

    Attributes:
        kind: First part of the folder's name.
        version: Raised when the files change, so that an old cohort is not taken for the new one.
        index: A file that a whole cohort has.
        instead: The overrides that take real data in its place.
    """

    kind: ClassVar[str]
    version: ClassVar[int]
    index: ClassVar[str]
    instead: ClassVar[str]

    @property
    def name(self) -> str:
        """Folder name, with a hash of the parameters."""
        return f"{self.kind}_{digest({'version': self.version, **asdict(self)})[:10]}"

    @property
    @abstractmethod
    def what(self) -> str:
        """What it is, such as ``"a BraTS-like cohort of 40 patients"``."""

    def provide(self, root: Path) -> tuple[Path, str]:
        """Generates the cohort unless it is there, and says so.

        Args:
            root: Data folder.

        Returns:
            The cohort's path, and one line about it.
        """
        path, new = self.ensure(root)
        began = "Generated" if new else "Data:"
        return path, f"{began} {self.what} in {path} (real data: {self.instead})."

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
        with writing(target, "set data.root to another folder"), made_once(target) as part:
            if part is None:  # another process has finished first; its files are the same
                return target, False
            self.write(part)
        return target, True

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Writes all files.

        Args:
            folder: An existing, empty folder.
        """


@dataclass(frozen=True)
class ScanCohort(Cohort):
    """Base of the cohorts of scans from several hospitals.

    Attributes:
        hospitals: Number of hospitals.
        patients: Patients per hospital.
        shape: Voxels of a scan.
        least: The least that each of its sizes may be.
    """

    least: ClassVar[int]

    hospitals: int = 5
    patients: int = 12
    shape: tuple[int, int, int] = (80, 80, 20)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        sizes = (*self.shape, self.least)
        if self.hospitals < 1 or self.patients < 1 or len(sizes) != 4 or min(sizes) < self.least:
            raise ConfigError(
                "data.generated needs at least 1 hospital and patient, and 3 sizes of "
                f"{self.least} or more: {self}."
            )

    def owners(self, kind: type[AnyHospital], seed: int) -> list[AnyHospital]:
        """Returns the hospital of every patient."""
        drawn = kind.draw(self.hospitals, seed)
        return [hospital for hospital in drawn for _ in range(self.patients)]
