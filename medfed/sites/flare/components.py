"""What a job names: a component at the server, one at each site, and the calls between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted

from medfed.sites.wire import Answers, Silent

OWN_FILE = "medfed.yaml"
"""A site's own file, in the ``local`` folder of its kit."""


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
        order: See :meth:`medfed.sites.order.Order.text`.
    """

    def __init__(self, order: str) -> None:
        self.order = order

    @collab.main
    def run(self) -> None:
        """Runs or resumes the experiment; whatever stops it is told to who follows."""
        from medfed.sites.order import carry_out  # late: it imports PyTorch

        with suppress(SystemExit):
            carry_out(self.order, CollabTransport(collab.clients))


class Hospital:
    """The component at a site; its file is ``local/medfed.yaml`` of its kit.

    Args:
        agreed: What all sites have agreed on, as :func:`medfed.sites.order.sealed` has it.
    """

    def __init__(self, agreed: str) -> None:
        self.agreed = agreed
        self._lock = threading.Lock()
        self._site: Answers | None = None

    @collab.publish
    def answer(self, request: bytes) -> bytes:
        """Answers as :class:`medfed.sites.site.Site` does.

        Of an exception FLARE would send text and traceback to the server, so none may pass.
        """
        from medfed.sites.order import start_site  # late: it imports PyTorch

        with self._lock:
            if self._site is None:
                own = Path(collab.workspace.get_site_config_dir()) / OWN_FILE
                self._site = start_site(own, self.agreed, collab.site_name)
        return self._site.answer(request)
