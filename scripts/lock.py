"""Locks what a hospital installs: every package of medfed[sites] with the hashes of its files.

``python scripts/lock.py`` writes ``medfed/sites/templates/requirements.txt``, for all systems and
versions of Python. It runs at each release, and needs uv and an index. ``--check`` compares only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from medfed.sites.installed import LOCK, PACKED, TEMPLATES

ROOT = Path(__file__).resolve().parents[1]
HEAD = (
    "# Written by scripts/lock.py: what a hospital installs. What has no wheel comes in its kit.\n"
)


def locked(index: str) -> str:
    """Asks uv for the lock.

    Args:
        index: The address of the package index.

    Returns:
        Its text.
    """
    apart = [word for name in PACKED[1:] for word in ("--no-emit-package", name)]
    how = ["--extra", "sites", "--universal", "--python-version", "3.11", "--generate-hashes"]
    plain = ["--no-annotate", "--no-header", "--no-config", "--default-index", index]
    # Folders of wheels on this disk have other builds than the index.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    uv = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml"]
    done = subprocess.run(
        [*uv, *how, *apart, *plain], cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE
    )
    return HEAD + done.stdout.decode()


def versions(text: str) -> set[str]:
    """Returns the packages of a lock with their versions."""
    return set(re.findall(r"^[\w.-]+==[^\s;]+", text, re.MULTILINE))


def main() -> None:
    """Writes the lock, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default="https://pypi.org/simple")
    parser.add_argument("--check", action="store_true", help="whether newer versions are there")
    options = parser.parse_args()
    text, path = locked(options.index), TEMPLATES / LOCK
    if not options.check:
        path.write_text(text, encoding="utf-8")
    elif new := sorted(versions(text) - versions(path.read_text(encoding="utf-8"))):
        sys.exit(f"The lock is older than {', '.join(new)}; run scripts/lock.py.")


if __name__ == "__main__":
    main()
