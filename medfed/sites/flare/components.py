"""The component that runs at the server, named by a job, and its calls to the sites."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted

from medfed.sites.wire import Silent


class CollabTransport:
    """Calls sites over mutual TLS; ``answer`` runs in each site's process."""

    def __init__(self, proxies: Sequence[Any]) -> None:
        self._proxies = {proxy.name: proxy for proxy in proxies}

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites on which this job has started."""
        return tuple(self._proxies)

    def call(self, site: str, request: bytes, timeout: float) -> bytes:
        """Sends a request to a site; several threads may call in parallel."""
        try:
            return bytes(self._proxies[site](timeout=timeout).answer(request))
        except RunAborted as error:
            raise SystemExit("FLARE ends the job") from error
        except (KeyError, CollabCallError) as error:
            raise Silent from error


class Coordinator:
    """The component at the server: runs an experiment, and writes its output to a file."""

    def __init__(self, deployment: str) -> None:
        self.deployment = deployment

    @collab.main
    def run(self) -> None:
        """Runs or resumes the experiment; the deployment's output names the reason for a stop."""
        from medfed.sites.deploying import run_coordinator  # imported here: it imports PyTorch

        with suppress(SystemExit):
            run_coordinator(self.deployment, CollabTransport(collab.clients))
