"""The coordinator's line to FLARE's server."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import NoConnection, new_secure_session

from medfed.sites.flare import LOST
from medfed.standalone.errors import ConfigError, SiteError, first_line


def _not_flare(record: logging.LogRecord) -> bool:
    """Silences FLARE's logs of connections, whose names have no common prefix."""
    return "nvflare" not in Path(record.pathname).parts


class NoServerError(SiteError):
    """FLARE's server does not answer."""


class Console:
    """Submits jobs with an admin's kit, and watches them; a context manager."""

    def __init__(self, kit: Path) -> None:
        self.kit = kit
        try:
            about = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]
            self.name, self.server = str(about["username"]), f"{about['host']}:{about['port']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"kit={kit} is not a coordinator's kit of FLARE (it has no "
                "startup/fed_admin.json); name the folder of the coordinator's kit."
            ) from error
        self._session: Any = None

    def __enter__(self) -> Console:
        for handler in filter(None, [*logging.getLogger().handlers, logging.lastResort]):
            handler.addFilter(_not_flare)
        with self._one_sentence(), redirect_stdout(io.StringIO()):
            self._session = new_secure_session(self.name, str(self.kit.resolve()), timeout=20.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            with suppress(Exception):
                self._session.close()

    @contextmanager
    def _one_sentence(self) -> Iterator[None]:
        """FLARE's errors have no common base, and their text is the server's."""
        try:
            yield
        except NoConnection as error:
            raise NoServerError(
                f"FLARE's server at {self.server} does not answer; start it by startup/start.sh "
                "of its kit, and see that its port can be reached from here."
            ) from error
        except Exception as error:
            why = f"FLARE's server at {self.server} refuses: {first_line(error)}."
            raise SiteError(why) from error

    def _call(self, name: str, *args: str) -> Any:
        with self._one_sentence():
            return getattr(self._session, name)(*args)

    def connected(self) -> set[str]:
        """Returns the sites whose kit is started and has reached the server."""
        return {client.name for client in self._call("get_system_info").client_info}

    def submit(self, job: Path) -> str:
        """Submits a job; returns its number."""
        return str(self._call("submit_job", str(job.resolve())))

    def status(self, number: str) -> str:
        """Returns a job's status in FLARE's words, or :data:`LOST`."""
        status = str(self._call("get_job_status", number))
        if status == "RUNNING":  # FLARE reports this for ever if the job's server was killed
            running = {job.job_id for job in self._call("get_system_info").job_info}
            if number not in running:  # or it has ended in between
                status = str(self._call("get_job_status", number))
                return LOST if status == "RUNNING" else status
        return status

    def reason(self, number: str) -> str:
        """Returns FLARE's reason why a job has not run: the sites' replies to the job."""
        about = self._call("get_job_meta", number)
        words = [s for s in about.get("job_deploy_detail", ()) if not s.endswith(": OK")]
        words = words or [
            s for s in about.get("schedule_history", ()) if not s.endswith("scheduled")
        ]
        return "; ".join(words[-5:]).replace("NVFLARE_ERROR: ", "")

    def has_restarted(self, site: str) -> bool:
        """Returns whether a site answers and runs no process of a job."""
        try:
            about = self._session.get_client_job_status([site])
        except Exception:  # for a site that is down the server waits and then gives up
            return False
        return any(one.get("status") == "no_jobs" for one in about or ())

    def abort(self, number: str) -> None:
        """Ends a job, unless it has ended."""
        self._call("abort_job", number)
