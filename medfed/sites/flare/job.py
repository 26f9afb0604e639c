"""A job for FLARE: configuration only.

So each site's list of allowed classes stays in force; a recipe or a ``FedJob`` would copy code into
the job, which bypasses that list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medfed.common.files import write_json

RUNTIME = "nvflare.collab.runtime"
SITE = "medfed.commands.hospital"
PREFIXES = ("medfed.sites.flare", SITE, RUNTIME)
"""What each site adds to the classes that a job may name, and nothing else."""
LOST = "its processes are gone"
"""How a job is of which the server says for ever that it runs."""
START = 600
"""Seconds in which a site's process must have started: it imports PyTorch."""


def write_job(
    folder: Path,
    sites: Sequence[str],
    least: int,
    server: tuple[str, Mapping[str, Any]],
    site: tuple[str, Mapping[str, Any]],
) -> None:
    """Writes a job that names classes and holds no code.

    Args:
        folder: The job's folder; its name is the job's name.
        sites: The sites that take part, if they are online when it starts.
        least: How many of them must be online.
        server: The class that runs at the server, and its arguments.
        site: The class that runs at each site, and its arguments.
    """
    server_class, server_args = server
    site_class, site_args = site
    controller = {
        "id": "controller",
        "path": f"{RUNTIME}.controller.CollabController",
        "args": {"server_obj_id": "main", "sync_task_timeout": START},
    }
    executor = {"path": f"{RUNTIME}.executor.CollabExecutor", "args": {"client_obj_id": "own"}}
    filters: dict[str, Any] = {"task_data_filters": [], "task_result_filters": []}
    files = {
        "meta.json": {
            "name": folder.name,
            "resource_spec": {},
            "min_clients": least,
            "deploy_map": {"coordinator": ["server"], "site": list(sites)},
        },
        "coordinator/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [controller],
            "components": [{"id": "main", "path": server_class, "args": dict(server_args)}],
            **filters,
        },
        "site/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "own", "path": site_class, "args": dict(site_args)}],
            **filters,
        },
    }
    for name, content in files.items():
        write_json(folder / name, content)
