"""What ``medfed look`` and ``medfed site describe`` write of hospitals: ``look.json``."""

from __future__ import annotations

from typing import TypedDict

Cells = dict[str, float | None]
LABELS, MISSING, MEANS, DEVIATIONS = "Labels", "Missing", "Means", "Standard deviations"


class Description(TypedDict):
    """A hospital's numbers; None stands for a number that is withheld."""

    hospital: str  # its name
    least: int  # the fewest patients behind a number; 0: nothing is withheld
    tables: dict[str, Cells]  # by title, then by name


class LookFile(TypedDict):
    """The content of ``look.json``."""

    hospitals: list[Description]
