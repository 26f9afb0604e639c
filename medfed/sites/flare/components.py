"""What runs at the server: a component that a job names, and its calls to the sites."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted

from medfed.sites.wire import Silent


class CollabTransport:
    """Calls sites over mutual TLS, in whose own process ``answer`` runs.

    Args:
        proxies: What FLARE calls the sites by, each with its name.
    """

    def __init__(self, proxies: Sequence[Any]) -> None:
        self._proxies = {proxy.name: proxy for proxy in proxies}

    @property
    def sites(self) -> tuple[str, ...]:
        """Those that this job has started on."""
        return tuple(self._proxies)

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Has a site answer; several threads may call at once.

        Args:
            site: Its name.
            request: The bytes.
            timeout: Seconds; a dead site is not noticed before.

        Raises:
            Silent: If there is no answer by then, or the job has not started there.
            SystemExit: If FLARE ends the job.
        """
        try:
            return bytes(self._proxies[site](timeout=timeout).answer(request))
        except RunAborted as error:
            raise SystemExit("FLARE ends the job") from error
        except (KeyError, CollabCallError) as error:
            raise Silent from error


class Coordinator:
    """The component at the server: carries out an experiment, and writes what it says to a file.

    Args:
        deployment: See :meth:`medfed.sites.flare_processes.Deployment.text`.
    """

    def __init__(self, deployment: str) -> None:
        self.deployment = deployment

    @collab.main
    def run(self) -> None:
        """Runs or resumes the experiment; the deployment's output says what stopped it."""
        from medfed.sites.flare_processes import run_coordinator  # late: it imports PyTorch

        with suppress(SystemExit):
            run_coordinator(self.deployment, CollabTransport(collab.clients))
