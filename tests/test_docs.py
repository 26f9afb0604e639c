"""Every command that the documents show is composed as a user would type it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from medfed.config import check_overrides

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            match = re.match(r"\s*(?:\$ )?python (\S+\.py.*?)(?:\s+#.*)?$", line)
            if match:
                found.append((page.name, match[1]))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_command_composes(page, command):
    script, *arguments = shlex.split(command)
    assert (ROOT / script).is_file()
    if script.startswith("scripts/"):
        placed = [a for a in arguments if "_FOLDER" not in a]  # of a run that a reader has
        check_overrides(placed, name=Path(script).stem)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", (ROOT / "README.md").read_text())):
        assert f"\n{target}:" in makefile
