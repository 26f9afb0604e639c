"""The pages of the documentation and the files that they show."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write_files(page: Path, folder: Path) -> Path:
    """Writes the titled code blocks of a page as the files that their titles name."""
    for title, text in TITLED.findall(page.read_text()):
        file = folder / title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def write_clinics(folder: Path) -> Path:
    """Writes the CSV files that the example of a reader reads, one of each of three clinics."""
    table = load_breast_cancer()
    folder.mkdir()
    for start, clinic in enumerate(["north", "south", "west"]):
        rows = zip(table.data[start::3].tolist(), table.target[start::3], strict=True)
        with (folder / f"{clinic}.csv").open("w", newline="") as file:
            csv.writer(file).writerow([*table.feature_names, "outcome"])
            csv.writer(file).writerows([*x, y] for x, y in rows)
    return folder


def hovers(figure: Figure) -> list[str]:
    """Returns the hover texts of the markers of a picture, in order."""
    lines = [line for axes in figure.axes for line in axes.lines if line.get_marker() != "None"]
    return [line.get_gid().removeprefix("hover ") for line in lines]
