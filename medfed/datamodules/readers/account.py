"""What a reader took of the files, rows or cells that it saw, and why not the others."""

from __future__ import annotations

import os

from medfed.datamodules.extending import *


@dataclass(frozen=True)
class Account:
    """What was seen, taken and left out."""

    where: str  # the file or folder
    what: str  # what is counted: files, rows, cells
    taken: int  # how many were taken
    # By reason, how many were left out, and the first of them.
    left_out: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many there were."""
        return self.taken + sum(count for count, _ in self.left_out.values())

    def sentence(self) -> str:
        """Returns the account as a sentence.

        Example:
            >>> Account("t.csv", "rows", 40, {"no label": (2, "data row 3")}).sentence()
            't.csv: 40 of 42 rows are taken; left out: 2 no label (data row 3).'
        """
        if not self.left_out:
            return f"{self.where}: all {self.taken} {self.what} are taken."
        reasons = [(f"{n} {why}", f" ({x})" * bool(x)) for why, (n, x) in self.left_out.items()]
        taken = f"{self.taken} of {self.total} {self.what} are taken"
        return f"{self.where}: {taken}; left out: {few([*map(''.join, reasons)], 6)}."

    def record(self) -> dict[str, Any]:
        """Returns the account as JSON."""
        left_out = {why: {"count": n, "first": x} for why, (n, x) in self.left_out.items()}
        counts = {"seen": self.total, "taken": self.taken, "left_out": left_out}
        return {"where": self.where, "what": self.what, **counts}


def account_of(
    path: Path, taken: Iterable[Path], endings: Collection[str], reasons: Mapping[Path, str]
) -> Account:
    """Counts the files of a folder, or beside a table, and says why some are left out."""
    used = {*taken}
    if path.is_dir():
        files = visible_files(path)
    else:
        beside = {file.parent for file in used} - {path.parent}
        files = sorted({f for folder in beside for f in folder.glob("*") if f.is_file()} | {path})
        files = [file for file in files if is_visible(file.name)]
        used.add(path)
    whole, base = {os.path.normpath(file) for file in used}, path if path.is_dir() else path.parent
    groups: dict[str, tuple[int, str]] = {}
    for file in files:
        if os.path.normpath(file) not in whole:
            name = file.name.lower()
            ending = next((e for e in endings if name.endswith(e)), None)
            usual = "another kind of file" if ending is None else "the data set does not name it"
            ending = ending or file.suffix.lower() or "without ending"
            reason = f"{ending}: {reasons.get(file, usual)}"
            count, first = groups.get(reason, (0, os.path.relpath(file, base)))
            groups[reason] = count + 1, first
    most = sorted(groups.items(), key=lambda of: (-of[1][0], of[0]))
    taken_here = len(files) - sum(count for count, _ in groups.values())
    return Account(str(path), "files", taken_here, dict(most))
