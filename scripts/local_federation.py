"""A federation on one machine: server and sites are processes with their own kits.

It serves for rehearsals, for the demonstration and for the tests. The processes start as at a
hospital, by their kit's script, and communicate over mutual TLS.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from medfed.config.description import as_yaml
from medfed.sites.flare import PREFIXES, SITE_FILE
from medfed.sites.flare.kits import ADMIN, allow, provision
from medfed.standalone.files import write_text

SERVER = "localhost"


class LocalFederation:
    """Starts and stops the processes that stand for machines; all files are in one folder.

    Args:
        folder: For kits, jobs and logs.
        sites: Names.
        prefixes: Classes that jobs may name.

    Example:
        with LocalFederation(folder, ["hospital_1", "hospital_2"]) as federation:
            ...
    """

    def __init__(
        self, folder: Path, sites: Sequence[str], prefixes: Sequence[str] = PREFIXES
    ) -> None:
        self.folder, self.sites = folder.resolve(), tuple(sites)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kits = provision(self.folder, sites, SERVER, free_port())
        for name in (SERVER, *sites):
            allow(self.kits / name, prefixes)

    def kit(self, name: str) -> Path:
        """Returns the folder of a site's, the server's or the admin's kit."""
        return self.kits / name

    @property
    def admin(self) -> Path:
        """The kit by which jobs are submitted."""
        return self.kits / ADMIN

    def write_site(self, name: str, **own: Any) -> None:
        """Writes a site's file; by default the site's folder is next to the kits."""
        content = {"site": name, "folder": str(self.folder / name), **own}
        write_text(self.kit(name) / "local" / SITE_FILE, as_yaml(content))

    def start(self, *names: str) -> None:
        """Starts the server or sites, by default all."""
        for name in names or (SERVER, *self.sites):
            with (self.folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    ["bash", str(self.kit(name) / "startup" / "sub_start.sh"), "--once"],
                    cwd=self.kit(name),
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def processes(self, name: str) -> list[psutil.Process]:
        """Returns the processes of the server or a site: its main process first, then its jobs'.

        A job's process has a separate session and may outlive its parent, so processes are
        identified by the kit in their command line.
        """
        kit = str(self.kit(name))
        found = psutil.process_iter(["cmdline", "create_time"])
        ours = [
            p for p in found if any(f"{a}/".startswith(f"{kit}/") for a in p.info["cmdline"] or ())
        ]
        return sorted(ours, key=lambda p: p.info["create_time"])

    def kill(self, *names: str) -> None:
        """Kills the server or sites (SIGKILL) with the processes of their jobs, by default all."""
        for name in names or tuple(self._processes):
            for process in self.processes(name):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if name in self._processes:
                self._processes.pop(name).wait()

    def __enter__(self) -> LocalFederation:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _environment() -> dict[str, str]:
    """Kits call ``python3`` from PATH: it must be this one, with this package."""
    here = Path(__file__).resolve().parents[1]
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
    }
