"""NVIDIA FLARE, tested with 2.9; no other code of medfed depends on it.

:mod:`~medfed.sites.flare.components` runs at the server, over the Collab API;
:mod:`~medfed.sites.flare.console` submits and watches a job, and
:mod:`~medfed.sites.flare.kits` makes kits. All need the extra ``sites``.

This file writes a job. It is configuration only, so that each site's list of allowed classes stays
in force; a recipe or a ``FedJob`` would copy code into the job, which bypasses that list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from medfed.standalone import errors, files

SITE_FILE = "medfed.yaml"
"""A site's file, in the ``local`` folder of its kit."""
SITE = "medfed.commands.hospital"
PREFIXES = ("medfed.sites.flare", SITE, "nvflare.collab.runtime")
"""What each site adds to the classes that a job may name, and nothing else."""
LOST = "its processes are gone"
"""How a job is of which the server says for ever that it runs."""


Component = tuple[str, Mapping[str, Any]]
"""A class that a job names, and its arguments."""


def check_flare() -> None:
    """Raises an error that says how to install NVIDIA FLARE, if it is missing."""
    if not all(map(find_spec, ("nvflare", "psutil"))):
        raise errors.ConfigError(
            "Runs across hospitals need NVIDIA FLARE, which is not installed: a hospital runs "
            "install.sh of its invitation; in a clone of medfed it is pip install '.[sites]'."
        )


def write_job(folder: Path, sites: Sequence[str], server: Component, site: Component) -> None:
    """Writes a job that names classes and holds no code."""
    template = Path(__file__).parents[1] / "templates" / "job.yml"
    text = files.filled(template, name=folder.name, sites=list(sites), server=server, site=site)
    for name, content in yaml.safe_load(text).items():
        files.write_json(folder / name, content)
