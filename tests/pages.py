"""The pages of the documentation and the files that they show."""

from __future__ import annotations

import re
from pathlib import Path

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
